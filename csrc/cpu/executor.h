// A plan bound to memory: kernels with fixed addresses, run in order by one pool, one call a step.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernel.h"
#include "memory.h"
#include "step_checks.h"
#include "thread_pool.h"

namespace enginewright {

class Ranks;

// An int32 array given with each step.
struct InputSpec {
  std::string name;
  Linear rows, columns;
};

// One of them as the caller gives it: [rows, columns], contiguous.
struct InputArray {
  const int32_t* data;
  int64_t rows, columns;
};

// Columns [column_offset, column_offset + columns) of the arena buffer at offset_bytes.
struct ArenaSpec {
  int64_t offset_bytes;
  DType dtype;
  Linear rows;
  int64_t columns, stride, column_offset, pad;
};

// A packed weight of `bytes` bytes, alive as long as the executor.
struct WeightSpec {
  std::byte* data;
  int64_t bytes;
  DType dtype;
  Layout layout;
  int64_t rows, columns;
  int64_t matrices = 1;  // of so many rows and columns, one after the other
};

// A linear layer of adapters, which are alive as long as the executor.
struct AdaptersSpec {
  Adapters* adapters;
  int64_t site;
};

// One kernel in one step. nanoseconds: from the barrier before it to the one after it.
struct KernelProfile {
  int64_t nanoseconds;
  Work work;
};

struct BoundKernel {
  std::unique_ptr<Kernel> kernel;
  bool needs_barrier_before;  // even after a kernel that needs none after it
};

// Errors of all members: std::invalid_argument with a sentence.
class Executor {
 public:
  Executor(const std::string& isa, int threads, const Sizes& limits, const std::vector<InputSpec>& inputs,
           int64_t arena_bytes);

  Operand bind(const std::string& label, const ArenaSpec& spec) const;
  Operand bind(const std::string& label, const WeightSpec& spec) const;
  Operand bind(const std::string& label, const CachePlane& plane) const;
  Operand bind(const std::string& label, const StateTensor& state) const;
  Operand bind(const std::string& label, const AdaptersSpec& spec) const;
  Operand bind_step(const std::string& name) const;

  bool has_kernel(const std::string& name) const { return table_.count(name) != 0; }
  void add_kernel(const std::string& name, const Operands& operands, const Attributes& attributes);
  // See make_all_gather(). `ranks` has to outlive the executor's steps.
  void add_all_gather(const Operand& x, int64_t unit, int64_t root, Ranks& ranks, const Operand* starts);

  // One step. `arrays` in the order of the constructor's inputs. Everything is checked before anything is
  // computed; one step at a time (others wait).
  void run(const std::vector<InputArray>& arrays, const Sizes& sizes);
  // The same, and what it took: an entry a kernel.
  std::vector<KernelProfile> profile(const std::vector<InputArray>& arrays, const Sizes& sizes);
  void run(Job& job);  // something else, by the same threads

  int threads() const { return pool_.threads(); }
  std::byte* arena(int64_t offset_bytes, int64_t bytes) const;  // checked to lie inside

 private:
  struct Input {
    InputSpec spec;
    int64_t offset;  // into staging_, in elements
    int64_t max_rows, stride;
  };
  void append(std::unique_ptr<Kernel> kernel, bool needs_barrier_before);
  void prepare(const std::vector<InputArray>& arrays, const Sizes& sizes);
  void stage(const Input& input, const InputArray& array, const Sizes& sizes);

  const KernelTable& table_;
  const Sizes limits_;
  std::vector<Input> inputs_;
  std::unique_ptr<Memory> staging_, arena_;
  std::unique_ptr<InputChecks> checks_;
  std::vector<BoundKernel> kernels_;
  ThreadPool pool_;
  std::mutex mutex_;
};

}  // namespace enginewright
