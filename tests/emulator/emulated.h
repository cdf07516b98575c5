// device.cuh in plain C++: every thread of a block is a fiber. Blocks run one after another; in the random
// schedule a few take turns, and change over at atomic operations.
//
// What a GPU leaves open is chosen here to be hostile. A fiber runs until it has to wait, so that threads are
// as far apart as barriers let them be; who goes first is up to the schedule. Shared memory is full of NaN at
// first. copy_async moves nothing before its wait, and load_matrices takes nothing that was copied before a
// barrier. And a barrier or a wait can be left out at run time (disable_site), to see that tests notice.
// Misaligned addresses, lanes of a warp in different warp functions, and barriers that some threads never
// reach are errors. emulator.cpp has the fibers.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#define DEVICE inline
#define COLD inline
#define KERNEL(threads) void
#define KERNEL_OCCUPANCY(threads, blocks) void
#define UNROLL
#define NO_UNROLL
#define UNROLL_BY(count)

namespace enginewright {

namespace emulator {

struct Place {  // of a thread
  int thread, block[3], grid[3];
};
extern Place here;

unsigned char* shared_bytes();

// Where a barrier or a wait stands in the source.
struct Site {
  const char* file;
  int line;
};
bool left_out(Site site);
void sync_block(Site site);
void sync_lanes(Site site);
void begin_copy(void* shared, const void* global, int bytes, bool there);
void commit();
void wait(int pending, Site site);
void visible(const void* shared);  // or an error: other threads' copies are not, before a barrier
void fence_landed(Site site);
void visible_to_wgmma(const void* shared);  // or an error: copies are not, before a fence and then a barrier
void yield_block();                         // another block may go on
void require(bool holds, const char* what);

// What belongs to a thread, or to a block, from its start to its end. at_end: what is wrong with that, if
// anything is.
struct Attached {
  virtual ~Attached() = default;
  virtual const char* at_end() const { return nullptr; }
};
std::unique_ptr<Attached>& attached_to_thread();
std::unique_ptr<Attached>& attached_to_block();

// All lanes of the warp give theirs; gives what lane 0 gave, the others' SLOT_BYTES apart, until the lane's
// next exchange.
constexpr std::size_t SLOT_BYTES = 32;
const unsigned char* exchange(const char* what, const void* mine, std::size_t bytes);

template <class T>
class Lanes {
 public:
  Lanes(const char* what, const T& mine) : bytes_(exchange(what, &mine, sizeof(T))) {
    static_assert(sizeof(T) <= SLOT_BYTES);
  }
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, bytes_ + lane * SLOT_BYTES, sizeof(T));
    return value;
  }

 private:
  const unsigned char* bytes_;
};

inline void aligned(const void* address, std::size_t bytes) {
  require(reinterpret_cast<std::uintptr_t>(address) % bytes == 0,
          "an address is not aligned to what is moved");
}

struct AB {
  uint32_t a[4], b[2];
};
struct Rows {
  const unsigned char* row;
};
inline void matrices(uint32_t (&r)[4], const void* row, bool transposed) {
  aligned(row, 16);
  Lanes<Rows> rows("load_matrices", {static_cast<const unsigned char*>(row)});
  visible(row);
  int g = here.thread % 32 / 4, t = here.thread % 4;
  for (int i = 0; i < 4; ++i) {
    uint16_t low, high;
    if (transposed) {
      std::memcpy(&low, rows[i * 8 + 2 * t].row + 2 * g, 2);
      std::memcpy(&high, rows[i * 8 + 2 * t + 1].row + 2 * g, 2);
    } else {
      std::memcpy(&low, rows[i * 8 + g].row + 4 * t, 2);
      std::memcpy(&high, rows[i * 8 + g].row + 4 * t + 2, 2);
    }
    r[i] = low | static_cast<uint32_t>(high) << 16;
  }
  exchange("load_matrices", nullptr, 0);  // nobody overwrites a row before all have read
}

// Σ a b over k of a fragment product: element (row, k) of A and (k, column) of B by NUMBER, BYTES a number.
template <int BYTES, double (*NUMBER)(uint32_t)>
double product(const Lanes<AB>& lanes, int row, int column) {
  constexpr int IN_WORD = 4 / BYTES;
  double sum = 0;
  for (int half = 0; half < 2; ++half)
    for (int t = 0; t < 4; ++t) {
      uint32_t a = lanes[row % 8 * 4 + t].a[row / 8 + 2 * half], b = lanes[column * 4 + t].b[half];
      for (int e = 0; e < IN_WORD; ++e) sum += NUMBER(a >> (8 * BYTES * e)) * NUMBER(b >> (8 * BYTES * e));
    }
  return sum;
}
template <int BYTES, double (*NUMBER)(uint32_t), class Sum>
void multiply(const char* what, Sum (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Lanes<AB> lanes(what, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  int g = here.thread % 32 / 4, t = here.thread % 4;
  for (int i = 0; i < 4; ++i)
    d[i] = static_cast<Sum>(d[i] + product<BYTES, NUMBER>(lanes, g + i / 2 * 8, 2 * t + i % 2));
}

inline double bf16_number(uint32_t bits) { return __builtin_bit_cast(float, bits << 16); }
inline double f16_number(uint32_t bits) {
  int exponent = static_cast<int>(bits >> 10 & 31), mantissa = static_cast<int>(bits & 1023);
  double size = __builtin_ldexp(exponent ? 1024 + mantissa : mantissa, (exponent ? exponent : 1) - 25);
  if (exponent == 31) size = __builtin_nan("");
  return bits & 0x8000 ? -size : size;
}
inline double int8_number(uint32_t bits) { return static_cast<int8_t>(bits); }
inline double e4m3_number(uint32_t bits) {
  int exponent = static_cast<int>(bits >> 3 & 15), mantissa = static_cast<int>(bits & 7);
  double size = exponent ? __builtin_ldexp(8 + mantissa, exponent - 10) : __builtin_ldexp(mantissa, -9);
  if ((bits & 0x7f) == 0x7f) size = __builtin_nan("");
  return bits & 0x80 ? -size : size;
}

inline uint32_t f16_bits_of_e4m3(uint32_t code) {
  uint32_t sign = (code & 0x80) << 8, size = code & 0x7f, shift = 0;
  if (size == 0x7f) return 0x7fff;
  if (size >= 8) return sign | ((size << 7) + (8 << 10));
  for (; size && size < 8; size *= 2) ++shift;  // subnormals are none of f16
  return sign | (size ? (9 - shift) << 10 | (size & 7) << 7 : 0);
}

// Rounded to nearest even; a NaN stays one.
inline uint32_t bf16_bits(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace emulator

#ifdef ENGINEWRIGHT_EMULATED
constexpr int SM = ENGINEWRIGHT_EMULATED;  // what the kernels are compiled as
#endif

DEVICE int thread_index() { return emulator::here.thread; }
DEVICE int block_x() { return emulator::here.block[0]; }
DEVICE int block_y() { return emulator::here.block[1]; }
DEVICE int block_z() { return emulator::here.block[2]; }
DEVICE int grid_x() { return emulator::here.grid[0]; }
DEVICE int grid_y() { return emulator::here.grid[1]; }
DEVICE int grid_z() { return emulator::here.grid[2]; }

template <class T>
DEVICE T* shared_memory() {
  return reinterpret_cast<T*>(emulator::shared_bytes());
}

DEVICE void sync_threads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::sync_block({file, line});
}
DEVICE void sync_warp(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::sync_lanes({file, line});
}

DEVICE void keep_order() {}

template <class T>
DEVICE T shuffle(T value, int from) {
  static_assert(sizeof(T) == 4);
  return emulator::Lanes<T>("shuffle", value)[from & 31];
}
template <class T>
DEVICE T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) == 4);
  return emulator::Lanes<T>("shuffle_xor", value)[thread_index() % 32 ^ mask];
}
template <class T>
DEVICE T shuffle_up(T value, int distance) {
  static_assert(sizeof(T) == 4);
  emulator::Lanes<T> lanes("shuffle_up", value);
  int lane = thread_index() % 32;
  return lane < distance ? value : lanes[lane - distance];
}
DEVICE uint32_t ballot(bool value) {
  emulator::Lanes<bool> lanes("ballot", value);
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(lanes[lane]) << lane;
  return bits;
}

template <int BYTES = 16>
DEVICE void copy_async(void* shared, const void* global, bool there = true) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
  emulator::aligned(shared, BYTES);
  emulator::aligned(global, BYTES);
  emulator::begin_copy(shared, global, BYTES, there);
}
DEVICE void commit_copies() { emulator::commit(); }
template <int PENDING>
DEVICE void wait_copies(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::wait(PENDING, {file, line});
}

DEVICE void load_matrices(uint32_t (&r)[4], const void* row, int offset = 0) {
  emulator::matrices(r, static_cast<const unsigned char*>(row) + offset, false);
}
DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void* row, int offset = 0) {
  emulator::matrices(r, static_cast<const unsigned char*>(row) + offset, true);
}

DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::multiply<2, emulator::bf16_number>("mma_bf16", d, a, b);
}
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::multiply<2, emulator::f16_number>("mma_f16", d, a, b);
}
DEVICE void mma_int8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::multiply<1, emulator::int8_number>("mma_int8", d, a, b);
}
DEVICE void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::multiply<1, emulator::e4m3_number>("mma_e4m3", d, a, b);
}

DEVICE float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
DEVICE uint32_t bits_of_float(float value) { return __builtin_bit_cast(uint32_t, value); }
DEVICE uint32_t pack_bf16(float low, float high) {
  return emulator::bf16_bits(low) | emulator::bf16_bits(high) << 16;
}
DEVICE uint32_t f16_of_e4m3(uint32_t word, bool upper) {
  uint32_t bytes = upper ? word >> 16 : word;
  return emulator::f16_bits_of_e4m3(bytes & 0xff) | emulator::f16_bits_of_e4m3(bytes >> 8 & 0xff) << 16;
}
DEVICE uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
  // A product of two bf16 and its sum with a third, rounded to odd bits by double, then once to bf16: exact
  // but for sums that need more than 53 bits, which round alike.
  auto one = [](uint32_t x, uint32_t y, uint32_t z) {
    return static_cast<float>(emulator::bf16_number(x) * emulator::bf16_number(y) + emulator::bf16_number(z));
  };
  return pack_bf16(one(a & 0xffff, b & 0xffff, c & 0xffff), one(a >> 16, b >> 16, c >> 16));
}

DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float exp2_fast(float x) { return __builtin_exp2f(x); }
DEVICE float log2_fast(float x) { return __builtin_log2f(x); }
DEVICE float inverse_sqrt(float x) {
  return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x)));
}
DEVICE float square_root(float x) { return __builtin_sqrtf(x); }
DEVICE float divide(float a, float b) { return a / b; }
DEVICE float round_half_even(float x) { return __builtin_nearbyintf(x); }
DEVICE float tanh_of(float x) { return __builtin_tanhf(x); }
DEVICE float erfc_of(float x) { return __builtin_erfcf(x); }
DEVICE float log_of(float x) { return __builtin_logf(x); }
DEVICE double log_of(double x) { return __builtin_log(x); }
DEVICE float cos_of(float x) { return __builtin_cosf(x); }
DEVICE float sin_of(float x) { return __builtin_sinf(x); }
DEVICE float absolute(float x) { return __builtin_fabsf(x); }
DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
DEVICE int popc(uint32_t bits) { return __builtin_popcount(bits); }
DEVICE int first_bit(uint32_t bits) { return bits ? __builtin_ctz(bits) : -1; }

DEVICE uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i)
    picked |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return picked;
}

DEVICE uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) | bits; }

struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};
struct alignas(8) Words2 {
  uint32_t x, y;
};

DEVICE Words4 load16(const void* address) {
  emulator::aligned(address, 16);
  return *static_cast<const Words4*>(address);
}
DEVICE Words4 load_once(const void* address) { return load16(address); }
DEVICE void store16(void* address, Words4 words) {
  emulator::aligned(address, 16);
  *static_cast<Words4*>(address) = words;
}

DEVICE int32_t atomic_add(int32_t* address, int32_t value) {  // fibers are never interrupted
  int32_t before = *address;
  *address += value;
  emulator::yield_block();
  return before;
}
DEVICE uint32_t atomic_add(uint32_t* address, uint32_t value) {
  uint32_t before = *address;
  *address += value;
  emulator::yield_block();
  return before;
}
DEVICE uint32_t atomic_max(uint32_t* address, uint32_t value) {
  uint32_t before = *address;
  *address = before > value ? before : value;
  emulator::yield_block();
  return before;
}
DEVICE void fence() {}

}  // namespace enginewright
