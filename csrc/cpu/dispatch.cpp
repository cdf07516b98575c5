#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace enginewright {

namespace {

#if defined(__x86_64__)

struct Machine {
  bool avx2 = false, avx2_vnni = false, avx512_vnni = false, avx512 = false, amx = false;
  bool slow_bf16 = false;  // VDPBF16PS
};

// Linux gives a process its tile registers on request (Documentation/arch/x86/xstate.rst).
bool amx_allowed() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// Intel SDM vol. 2, CPUID leaves 1 and 7; vol. 1, 13.3 (XCR0: the system saves these registers).
Machine detect() {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  const auto bit = [](uint32_t word, int n) { return (word >> n & 1) != 0; };
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return {};  // OSXSAVE
  const bool avx = bit(c, 28), fma = bit(c, 12), f16c = bit(c, 29);
  uint32_t xcr0 = 0, high = 0;
  __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
  const bool ymm_saved = (xcr0 & 6) == 6;
  const bool zmm_saved = (xcr0 & 0xe6) == 0xe6, tiles_saved = (xcr0 & 0x60000) == 0x60000;
  const bool avx2 = bit(b, 5), f = bit(b, 16), dq = bit(b, 17), bw = bit(b, 30), vl = bit(b, 31);
  const bool vbmi = bit(c, 1), vnni = bit(c, 11), amx_bf16 = bit(d, 22), amx_tile = bit(d, 24),
             amx_int8 = bit(d, 25);
  const bool more = a >= 1;  // leaf 7 has a second part; on the first machines with AVX2 it has none
  const bool second = more && __get_cpuid_count(7, 1, &a, &b, &c, &d);
  const bool avx_vnni = second && bit(a, 4), bf16 = second && bit(a, 5);
  Machine machine;
  machine.avx2 = ymm_saved && avx && fma && f16c && avx2;
  machine.avx2_vnni = machine.avx2 && avx_vnni;
  machine.avx512_vnni = machine.avx2 && zmm_saved && f && dq && bw && vl && vnni;
  machine.avx512 = machine.avx512_vnni && vbmi && bf16;
  machine.amx = machine.avx512 && tiles_saved && amx_bf16 && amx_int8 && amx_tile && amx_allowed();
  // On Emerald Rapids one takes the time of four FMAs and does the work of two, as the rates show that
  // `engine bench profile` prints; other cores of Intel's that have it are taken for the same.
  machine.slow_bf16 = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
  return machine;
}

const Machine& machine() {
  static const Machine found = detect();
  return found;
}

#endif

}  // namespace

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  if (machine().amx) names.push_back("amx");
  const bool fast_bf16 = machine().avx512 && !machine().slow_bf16;
  if (fast_bf16) names.push_back("avx512");
  if (machine().avx512_vnni) names.push_back("avx512-vnni");
  if (machine().avx512 && !fast_bf16) names.push_back("avx512");
  if (machine().avx2_vnni) names.push_back("avx2-vnni");
  if (machine().avx2) names.push_back("avx2");
#endif
  names.push_back("portable");
  return names;
}

const KernelTable& kernel_table(const std::string& isa) {
  std::string known;
  for (const std::string& name : isa_names()) {
    known += (known.empty() ? "" : ", ") + name;
    if (name != isa) continue;
#if defined(__x86_64__)
    static const KernelTable avx2 = machine().avx2 ? avx2_table() : KernelTable{};
    static const KernelTable avx2_vnni = machine().avx2_vnni ? avx2_vnni_table() : KernelTable{};
    static const KernelTable avx512_vnni = machine().avx512_vnni ? avx512_vnni_table() : KernelTable{};
    static const KernelTable avx512 = machine().avx512 ? avx512_table() : KernelTable{};
    static const KernelTable amx = machine().amx ? amx_table() : KernelTable{};
    if (isa == "avx2") return avx2;
    if (isa == "avx2-vnni") return avx2_vnni;
    if (isa == "avx512-vnni") return avx512_vnni;
    if (isa == "avx512") return avx512;
    if (isa == "amx") return amx;
#endif
    static const KernelTable portable = portable_table();
    return portable;
  }
  throw std::invalid_argument("this machine has no instruction set '" + isa + "'; it has " + known);
}

}  // namespace enginewright
