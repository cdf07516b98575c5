// What a kernel is to the executor: operands with fixed addresses in, one call a step by every thread.
//
// A kernel is built once from its operands and attributes; there it checks dtypes and shapes and throws
// std::invalid_argument when they do not fit (operands.h has the helpers). run() is called by all threads of
// the pool at once and never allocates, throws, or blocks except in Worker::sync(). The executor puts a
// barrier after every kernel.
//
// How to write one: a header `x.h` with a `template <class S> class X final : public Kernel` in
// `namespace enginewright { namespace {`, and one line in table.h. S is the instruction set (simd_portable.h
// says what it offers). Everything in such a header stays in the anonymous namespace: each isa_*.cpp compiles
// its own copy, and the linker must never merge code compiled for different machines. For the same reason a
// kernel header includes no std header that isa_*.cpp has not included before its target pragma: add it
// there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "dtype.h"

namespace enginewright {

class Adapters;

// The sizes that every step has, by their positions (enginewright/plan.py: COMMON_DIMS). A plan may have
// others after them: a kernel finds these in the rows of its operands.
constexpr size_t kTokens = 0, kSequences = 1, kLogitRows = 2, kMaxDims = 8;

// Sizes of one step, or their limits, by the positions of the plan's dims; 0 after the last one.
using Sizes = std::array<int64_t, kMaxDims>;

// constant + sum of factor * size.
struct Linear {
  int64_t constant = 0;
  std::array<int64_t, kMaxDims> factors{};

  int64_t at(const Sizes& sizes) const {
    int64_t sum = constant;
    for (size_t dim = 0; dim < kMaxDims; ++dim) sum += factors[dim] * sizes[dim];
    return sum;
  }
  bool operator==(const Linear& o) const { return constant == o.constant && factors == o.factors; }
};

// How a weight lies in the engine file. K is padded with zeros to a multiple of 64 elements (K_pad).
//   plain      row-major [rows, columns], no padding.
//   r16        blocks of 16 rows (the last one padded with zero rows); in a block, 64-byte lines of
//              4 bytes of K for each of the 16 rows. bf16: element (n, k) is at line
//              (n / 16) * (K_pad / 2) + k / 2, position (n % 16) * 2 + k % 2. i8 and e4m3: the same with 4
//              for 2. u4 and e2m1: byte (n % 16) * 4 + k % 4 of a line has (n, k) in its low half and (n, k +
//              4) in its high half, for k = 8 line + 0 … 3.
//   r16_pairs  two matrices of rows / 2 rows each, stored as r16 with their blocks interleaved:
//              first[0:16], second[0:16], first[16:32], … (gate and up of a gated MLP).
//   r16_columns, r16_columns_pairs   what belongs to groups of K, in the same blocks of 16 rows, column by
//              column: element (n, g) is at (n / 16 * columns + g) * 16 + n % 16. K is not padded.
enum class Layout : uint8_t { plain, r16, r16_pairs, r16_columns, r16_columns_pairs };

inline bool in_pairs(Layout layout) {
  return layout == Layout::r16_pairs || layout == Layout::r16_columns_pairs;
}
inline bool by_columns(Layout layout) {
  return layout == Layout::r16_columns || layout == Layout::r16_columns_pairs;
}

// A plane of a paged cache in one layer. dim is padded with zeros to a multiple of 32 (dim_pad). Block b and
// head h have a tile of tile_bytes, b * block_stride + h * tile_bytes bytes after `data`: the numbers of all
// its tokens, and after them, where these are codes, their scales. How both lie is what the kernels say that
// write them; kv.h does of attention's planes. A slot is block * block_size + position in the block. A plane
// is 64-byte aligned, and a block of zero bytes holds zeros.
struct CachePlane {
  std::byte* data;
  DType dtype;
  int64_t num_blocks, block_size, heads, dim, dim_pad;
  int64_t number_bytes, scale_bytes;  // of a token in a head: dim_pad numbers, and what scales them
  int64_t tile_bytes, block_stride;   // bytes

  bool scaled() const { return scale_bytes != 0; }
  // Of a tile, without scales; and of a token in all heads.
  int64_t code_bytes() const { return block_size * number_bytes; }
  int64_t token_bytes() const { return heads * tile_bytes / block_size; }
};

// A tensor of a recurrent state in one layer: `elements` numbers a sequence. Those of a slot start
// slot * slot_stride bytes after `data`; how they lie is what the kernel says that writes them.
struct StateTensor {
  std::byte* data;
  DType dtype;
  int64_t num_slots, elements;
  int64_t slot_stride;  // bytes

  float* of(int64_t slot) const { return reinterpret_cast<float*>(data + slot * slot_stride); }
  int64_t bytes() const { return elements * 4; }
};

// A matrix with a fixed address. A row starts every `stride` elements; in arena buffers the stride is a
// multiple of 64, and a kernel that writes bf16 or i8 to a whole buffer (pad > 0) also writes zeros to the
// `pad` columns after `columns`, so that GEMMs may read K_pad columns of it. Step inputs are i32; where
// their columns depend on the step (block tables) `columns` and `stride` are those at the limits, and only
// the step's own columns hold values.
struct Operand {
  // In operands.cpp: a copy is some hundred bytes of code, and each kernel keeps several, in six instruction
  // sets.
  Operand();
  Operand(const Operand&);
  Operand(Operand&&) noexcept;
  Operand& operator=(const Operand&);
  Operand& operator=(Operand&&) noexcept;
  ~Operand();

  std::byte* data = nullptr;
  DType dtype = DType::f32;
  Layout layout = Layout::plain;
  Linear rows{};
  int64_t columns = 0;
  int64_t stride = 0;
  int64_t pad = 0;
  int64_t max_rows = 0;          // rows at the limits
  int64_t bytes = 0;             // of a weight, as it is stored
  int64_t matrices = 1;          // of a weight: so many of these rows and columns, one after the other
  Linear width{};                // of a step input alone: its columns in a step
  CachePlane plane{};            // of a cache operand alone
  StateTensor state{};           // of a state operand alone
  Adapters* adapters = nullptr;  // of an adapters operand alone: those that are loaded,
  int64_t site = 0;              // and the index of a linear layer among them
  enum class Kind : uint8_t { weight, arena, step, cache, state, adapters } kind = Kind::arena;
  std::string label;  // for messages: the operand's name, or the step input's

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

using Attribute = std::variant<int64_t, double, std::string>;
using Operands = std::map<std::string, Operand>;
using Attributes = std::map<std::string, Attribute>;

// What kernels need of the step's inputs, beyond what the executor always checks (see step_checks.h): checked
// before every step, on one thread, before anything is written. Equal checks of many layers are made once.
struct IndexCheck {  // every value of `values` (an i32 step input) is in [0, limit)
  Operand values;
  Linear limit;
};
struct BlockTableCheck {  // blocks that hold a position some query of the step sees are in [0, num_blocks)
  Operand query_start, kv_len, block_table;
  Operand partials;  // has a row for each split of the longest sequence
  int64_t block_size, num_blocks, window;
};
struct StepChecks {
  std::vector<Operand> query_starts;  // each is the input 'query_start', which is always checked
  std::vector<IndexCheck> indices;
  std::vector<BlockTableCheck> block_tables;
  Adapters* adapters = nullptr;  // whose slots are checked, and rows grouped; null: none
};

// One thread's view of a step.
class Worker {
 public:
  const int index;  // 0 … count - 1
  const int count;
  std::byte* const scratch;  // 64-byte aligned, this thread's own, as large as any Kernel::scratch_bytes()
  virtual void sync() = 0;   // barrier over all threads of the pool

 protected:
  Worker(int index, int count, std::byte* scratch) : index(index), count(count), scratch(scratch) {}
  ~Worker() = default;
};

// What a kernel has to do in a step, for profiles. Every byte counts once, however often the kernel comes
// back to it, and of weights and KV with the padding that is stored. Operations are those of the formula
// without any padding, by what they multiply: two for a product that is added to a sum, one for a function (a
// root, a cosine). The epilogues of GEMMs are not counted.
struct Work {
  int64_t weight_bytes = 0, activation_bytes = 0, kv_bytes = 0;
  int64_t int8_ops = 0, bf16_ops = 0, fp32_ops = 0;
  int64_t weight_passes = 0;  // how often a GEMM has weights come from memory, rather than from a cache
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void run(const Sizes& sizes, Worker& worker) const = 0;
  virtual bool is_idle() const { return false; }  // true if run() would do nothing in this step
  // false: each thread of the next kernel reads only what the same thread of this one has written.
  virtual bool needs_barrier_after() const { return true; }
  virtual Work work(const Sizes& sizes) const = 0;     // of run(); step inputs have been staged
  virtual int64_t scratch_bytes() const { return 0; }  // what run() wants in Worker::scratch, a thread
  virtual void add_checks(StepChecks&) const {}
};

template <class K>
std::unique_ptr<Kernel> make_kernel(const Operands& operands, const Attributes& attributes) {
  return std::make_unique<K>(operands, attributes);
}

using KernelFactory = std::unique_ptr<Kernel> (*)(const Operands&, const Attributes&);
// Versioned name ("gemm_bf16@1") -> factory. One table an instruction set; see dispatch.h and table.h.
using KernelTable = std::map<std::string, KernelFactory>;

}  // namespace enginewright
