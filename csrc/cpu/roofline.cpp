#include "roofline.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "dispatch.h"
#include "operands.h"
#include "thread_pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace enginewright {

namespace {

using Clock = std::chrono::steady_clock;

// --- Dot products -----------------------------------------------------------------------------------------

typedef float Quad __attribute__((vector_size(16)));
constexpr int kAccumulators = 12;  // more than latency x instructions a cycle, on every core there is

// What portable kernels are compiled to at best. A product of its own could leave the loop, hence a * x + b.
void portable_loop(int64_t rounds) {
  Quad sum[kAccumulators], a = {0.5f, 0.5f, 0.5f, 0.5f}, b = {1, 1, 1, 1};
  for (Quad& x : sum) x = b;
  for (int64_t i = 0; i < rounds; ++i) {
    for (Quad& x : sum) x = a * x + b;
  }
  Quad all = sum[0];
  for (const Quad& x : sum) all = all + x;
  volatile float kept = all[0];
  (void)kept;
}

#if defined(__x86_64__)

// Assembly, so that no line of this file is compiled for another machine than the rest of it. Register 12 and
// 13 hold ones (as fp32, as bf16 and, near enough, as int8), 0 … 11 accumulate, 14 is free.
#define ENGINEWRIGHT_TWELVE(DOT) \
  DOT(0) DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6) DOT(7) DOT(8) DOT(9) DOT(10) DOT(11)
#define ENGINEWRIGHT_LOOP(NAME, REGISTER, DOT)                                                           \
  void NAME(int64_t rounds) {                                                                            \
    asm volatile("vzeroall\n vmovd %1, %%xmm12\n vpbroadcastd %%xmm12, %%" REGISTER                      \
                 "12\n vpbroadcastd %%xmm12, %%" REGISTER                                                \
                 "13\n 1:\n" ENGINEWRIGHT_TWELVE(DOT) "dec %0\n jnz 1b\n vzeroupper\n"                   \
                 : "+r"(rounds)                                                                          \
                 : "r"(0x3f803f80)                                                                       \
                 : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
                   "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                \
  }
#define ENGINEWRIGHT_VPDPBUSD(n) "vpdpbusd %%zmm13, %%zmm12, %%zmm" #n "\n"
#define ENGINEWRIGHT_VPDPBUSD_YMM(n) "%{vex%} vpdpbusd %%ymm13, %%ymm12, %%ymm" #n "\n"
#define ENGINEWRIGHT_VDPBF16PS(n) "vdpbf16ps %%zmm13, %%zmm12, %%zmm" #n "\n"
#define ENGINEWRIGHT_FMA_ZMM(n) "vfmadd231ps %%zmm13, %%zmm12, %%zmm" #n "\n"
#define ENGINEWRIGHT_FMA_YMM(n) "vfmadd231ps %%ymm13, %%ymm12, %%ymm" #n "\n"
#define ENGINEWRIGHT_MADDUBS(n)            \
  "vpmaddubsw %%ymm13, %%ymm12, %%ymm14\n" \
  "vpmaddwd %%ymm13, %%ymm14, %%ymm14\n"   \
  "vpaddd %%ymm14, %%ymm" #n ", %%ymm" #n "\n"
ENGINEWRIGHT_LOOP(vnni_loop, "zmm", ENGINEWRIGHT_VPDPBUSD)
ENGINEWRIGHT_LOOP(avx2_vnni_loop, "ymm", ENGINEWRIGHT_VPDPBUSD_YMM)
ENGINEWRIGHT_LOOP(avx512_bf16_loop, "zmm", ENGINEWRIGHT_VDPBF16PS)
ENGINEWRIGHT_LOOP(avx512_fma_loop, "zmm", ENGINEWRIGHT_FMA_ZMM)
ENGINEWRIGHT_LOOP(avx2_fma_loop, "ymm", ENGINEWRIGHT_FMA_YMM)
ENGINEWRIGHT_LOOP(avx2_int8_loop, "ymm", ENGINEWRIGHT_MADDUBS)

// Tiles 0 … 5 accumulate, 6 and 7 hold ones; all of 16 rows x 64 bytes.
constexpr int kTileAccumulators = 6;
#define ENGINEWRIGHT_TILE_LOOP(NAME, INSTRUCTION)                                                          \
  void NAME(int64_t rounds) {                                                                              \
    alignas(64) uint8_t config[64] = {1};                                                                  \
    for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;               \
    alignas(64) uint32_t ones[16];                                                                         \
    std::fill(ones, ones + 16, 0x3f803f80u);                                                               \
    asm volatile(                                                                                          \
        "ldtilecfg %1\n tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n"           \
        "tilezero %%tmm4\n tilezero %%tmm5\n tileloadd (%2,%3,1), %%tmm6\n tileloadd (%2,%3,1), %%tmm7\n"  \
        "1:\n" INSTRUCTION " %%tmm7, %%tmm6, %%tmm0\n" INSTRUCTION " %%tmm7, %%tmm6, %%tmm1\n" INSTRUCTION \
        " %%tmm7, %%tmm6, %%tmm2\n" INSTRUCTION " %%tmm7, %%tmm6, %%tmm3\n" INSTRUCTION                    \
        " %%tmm7, %%tmm6, %%tmm4\n" INSTRUCTION                                                            \
        " %%tmm7, %%tmm6, %%tmm5\n"                                                                        \
        "dec %0\n jnz 1b\n tilerelease\n"                                                                  \
        : "+r"(rounds)                                                                                     \
        : "m"(config), "r"(ones), "r"(int64_t{0}), "m"(ones)                                               \
        : "cc");                                                                                           \
  }
ENGINEWRIGHT_TILE_LOOP(amx_int8_loop, "tdpbssd")
ENGINEWRIGHT_TILE_LOOP(amx_bf16_loop, "tdpbf16ps")

bool has_amx_int8() {  // Intel SDM vol. 2, CPUID leaf 7
  uint32_t a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 25 & 1) != 0;
}

#endif

bool has(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  const std::vector<std::string> names = isa_names();
  return std::find(names.begin(), names.end(), isa) != names.end();
}

// --- Reading ----------------------------------------------------------------------------------------------

constexpr int64_t kLine = 64;
typedef uint64_t Words __attribute__((vector_size(16)));

// `streams` lines at a time, each from another part of the memory: some machines read faster so, others in
// one stream.
template <int streams, int64_t ahead>
void read(const std::byte* data, int64_t size) {
  Words sum[4] = {};
  const int64_t part = size / streams / kLine * kLine;
  for (int64_t at = 0; at < part; at += kLine) {
    for (int s = 0; s < streams; ++s) {
      const std::byte* line = data + s * part + at;
      __builtin_prefetch(line + ahead);
      for (int i = 0; i < 4; ++i) {
        Words piece;
        std::memcpy(&piece, line + 16 * i, 16);
        sum[i] ^= piece;
      }
    }
  }
  const Words all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  volatile uint64_t kept = all[0] ^ all[1];
  (void)kept;
}

// --- Time -------------------------------------------------------------------------------------------------

template <class Work>
class Timed final : public Job {
 public:
  explicit Timed(const Work& work) : work_(work) {}
  void run(Worker& worker) override {
    worker.sync();
    const Clock::time_point start = Clock::now();
    work_(worker);
    worker.sync();
    if (worker.index == 0) seconds = std::chrono::duration<double>(Clock::now() - start).count();
  }
  double seconds = 0;

 private:
  const Work& work_;
};

template <class Work>
double seconds_of(ThreadPool& pool, const Work& work) {
  Timed<Work> timed(work);
  pool.run(timed);
  return timed.seconds;
}

void require_threads(int threads) {
  require(threads > 0 && threads <= 1024, "the number of threads must be in 1 … 1024");
}

}  // namespace

std::vector<DotLoop> dot_loops(const std::string& isa) {
  require(has(isa), "this machine has no instruction set '" + isa + "'");
  std::vector<DotLoop> loops;
#if defined(__x86_64__)
  constexpr int64_t kZmm = kAccumulators * 2 * 16, kYmm = kAccumulators * 2 * 8;
  constexpr int64_t kTile = kTileAccumulators * int64_t{2 * 16 * 16 * 16};
  const DotLoop fma_zmm{"fp32", "vfmadd231ps zmm", kZmm, avx512_fma_loop};
  const DotLoop fma_ymm{"fp32", "vfmadd231ps ymm", kYmm, avx2_fma_loop};
  if (isa == "amx") {
    if (has_amx_int8()) loops.push_back({"int8", "tdpbssd", 4 * kTile, amx_int8_loop});
    loops.push_back({"bf16", "tdpbf16ps", 2 * kTile, amx_bf16_loop});
    loops.push_back(fma_zmm);
  } else if (isa == "avx512") {
    loops.push_back({"int8", "vpdpbusd zmm", 4 * kZmm, vnni_loop});
    loops.push_back({"bf16", "vdpbf16ps zmm", 2 * kZmm, avx512_bf16_loop});
    loops.push_back(fma_zmm);
  } else if (isa == "avx512-vnni") {
    loops.push_back({"int8", "vpdpbusd zmm", 4 * kZmm, vnni_loop});
    loops.push_back(fma_zmm);
  } else if (isa == "avx2-vnni") {
    loops.push_back({"int8", "vpdpbusd ymm", 4 * kYmm, avx2_vnni_loop});
    loops.push_back(fma_ymm);
  } else if (isa == "avx2") {
    loops.push_back({"int8", "vpmaddubsw, vpmaddwd, vpaddd ymm", 4 * kYmm, avx2_int8_loop});
    loops.push_back(fma_ymm);
  }
#endif
  if (loops.empty()) loops.push_back({"fp32", "multiply, add", kAccumulators * 2 * 4, portable_loop});
  return loops;
}

double dot_rate(const DotLoop& loop, int threads, double seconds) {
  require_threads(threads);
  ThreadPool pool(threads);
  constexpr double kPass =
      2e-3;  // seconds: long compared with a barrier, short compared with an interruption
  const Clock::time_point start = Clock::now();
  double best = 0;
  int64_t rounds = 1000;
  do {
    const double took = seconds_of(pool, [&](Worker&) { loop.run(rounds); });
    best = std::max(best, static_cast<double>(rounds * loop.operations * threads) / took);
    if (took < kPass) rounds *= 2;
  } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds);
  return best;
}

double read_rate(const std::vector<Bytes>& memory, int threads, double seconds) {
  require_threads(threads);
  int64_t total = 0;
  for (const Bytes& piece : memory) total += piece.size;
  require(total > 0, "there is nothing to read");
  ThreadPool pool(threads);
  const auto pass = [&](void (*loop)(const std::byte*, int64_t)) {
    return seconds_of(pool, [&](Worker& worker) {
      for (const Bytes& piece : memory) {
        const Range lines = share(piece.size / kLine, worker);
        loop(piece.data + lines.begin * kLine, (lines.end - lines.begin) * kLine);
      }
    });
  };
  const Clock::time_point start = Clock::now();
  double best = 0;
  do {
    const double took = std::min(pass(read<1, 2048>), pass(read<4, 1024>));
    best = std::max(best, static_cast<double>(total) / took);
  } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds);
  return best;
}

}  // namespace enginewright
