// clang-format off
#include "for_size.h"  // before all others
// clang-format on

#include "executor.h"

#include <chrono>
#include <cstring>

#include "dispatch.h"
#include "operands.h"
#include "poison.h"
#include "ranks.h"

namespace enginewright {

namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kStrideElements = 64;  // plan.py: COLUMN_ALIGN
constexpr int64_t kAlignBytes = 64;
constexpr int64_t kMaxColumns = int64_t{1} << 31;

int64_t checked_threads(int64_t threads) {
  require(1 <= threads && threads <= kMaxThreads, "the number of threads must be in 1 … 1024");
  return threads;
}

// linear.at(sizes), refusing negative terms and overflow.
int64_t checked_at(const Linear& linear, const Sizes& sizes) {
  int64_t sum = checked_add(linear.constant, 0);
  for (size_t dim = 0; dim < kMaxDims; ++dim) {
    sum = checked_add(sum, checked_mul(linear.factors[dim], sizes[dim]));
  }
  return sum;
}

const Sizes& checked_limits(const Sizes& s) {
  require(s[kTokens] > 0 && s[kSequences] > 0 && s[kLogitRows] > 0,
          "the limits must allow a token, a sequence and a row of logits");
  for (const int64_t limit : s) {  // indices are int32
    require(0 <= limit && limit < int64_t{1} << 31, "the limits must be below 2^31");
  }
  return s;
}

class StepJob final : public Job {
 public:
  StepJob(const std::vector<BoundKernel>& kernels, const Sizes& sizes) : kernels_(kernels), sizes_(sizes) {}

  void run(Worker& worker) override {
    bool needs_barrier = false;
    for (const auto& [kernel, needs_barrier_before] : kernels_) {
      if (kernel->is_idle()) continue;
      if (needs_barrier || needs_barrier_before) worker.sync();
      needs_barrier = kernel->needs_barrier_after();
      kernel->run(sizes_, worker);
    }
  }

 private:
  const std::vector<BoundKernel>& kernels_;
  const Sizes& sizes_;
};

// The same, timed on thread 0.
class ProfileJob final : public Job {
 public:
  ProfileJob(const std::vector<BoundKernel>& kernels, const Sizes& sizes, std::vector<KernelProfile>& profile)
      : kernels_(kernels), sizes_(sizes), profile_(profile) {}

  void run(Worker& worker) override {
    using Clock = std::chrono::steady_clock;
    worker.sync();  // every thread is awake
    Clock::time_point start = Clock::now();
    for (size_t i = 0; i < kernels_.size(); ++i) {
      const Kernel& kernel = *kernels_[i].kernel;
      if (!kernel.is_idle()) {
        kernel.run(sizes_, worker);
        worker.sync();
      }
      if (worker.index != 0) continue;
      const Clock::time_point end = Clock::now();
      profile_[i].nanoseconds = std::chrono::nanoseconds(end - start).count();
      start = end;
    }
  }

 private:
  const std::vector<BoundKernel>& kernels_;
  const Sizes& sizes_;
  std::vector<KernelProfile>& profile_;
};

}  // namespace

Executor::Executor(const std::string& isa, int threads, const Sizes& limits,
                   const std::vector<InputSpec>& inputs, int64_t arena_bytes)
    : table_(kernel_table(isa)),
      limits_(checked_limits(limits)),
      arena_(std::make_unique<Memory>(checked_add(arena_bytes, 0))),
      pool_(static_cast<int>(checked_threads(threads))) {
  int64_t elements = 0;
  for (const InputSpec& spec : inputs) {
    const int64_t rows = checked_at(spec.rows, limits_), columns = checked_at(spec.columns, limits_);
    for (const Input& other : inputs_) {
      require(other.spec.name != spec.name, "two inputs are called '" + spec.name + "'");
    }
    inputs_.push_back({spec, elements, rows, columns});
    const int64_t padded = round_up(checked_mul(rows, columns), kAlignBytes / 4);
    elements = checked_add(elements, padded);
  }
  staging_ = std::make_unique<Memory>(checked_mul(elements, 4));
  // Nobody's until it is bound.
  poison(arena_->data(), arena_->bytes());
  poison(staging_->data(), staging_->bytes());
  Operands bound;
  for (const InputSpec& spec : inputs) bound[spec.name] = bind_step(spec.name);
  checks_ = std::make_unique<InputChecks>(bound);
}

Operand Executor::bind(const std::string& label, const ArenaSpec& spec) const {
  Operand operand;
  const std::string the = "the buffer of '" + label + "' ";
  require(spec.offset_bytes >= 0 && spec.offset_bytes % kAlignBytes == 0, the + "starts at an odd address");
  require(spec.columns > 0 && spec.column_offset >= 0 && spec.pad >= 0 && spec.stride < kMaxColumns &&
              spec.stride % kStrideElements == 0,
          the + "has no proper columns");
  require(checked_add(checked_add(spec.column_offset, spec.columns), spec.pad) <= spec.stride,
          the + "is narrower than the columns used of it");
  require(!four_bits(spec.dtype), the + "cannot hold " + name_of(spec.dtype));
  operand.max_rows = checked_at(spec.rows, limits_);
  const int64_t row_bytes = spec.stride * bytes_of(spec.dtype);
  operand.data = arena(spec.offset_bytes, checked_mul(operand.max_rows, row_bytes)) +
                 spec.column_offset * bytes_of(spec.dtype);
  operand.dtype = spec.dtype;
  operand.rows = spec.rows;
  operand.columns = spec.columns;
  operand.stride = spec.stride;
  operand.pad = spec.pad;
  operand.kind = Operand::Kind::arena;
  operand.label = label;
  const int64_t used = spec.columns + (spec.dtype == DType::f32 ? 0 : spec.pad);  // see Operand
  for (int64_t row = 0; row < operand.max_rows; ++row) {
    unpoison(operand.data + row * row_bytes, used * bytes_of(spec.dtype));
  }
  return operand;
}

Operand Executor::bind(const std::string& label, const WeightSpec& spec) const {
  require(spec.rows > 0 && spec.columns > 0 && spec.columns < kMaxColumns,
          "the weight '" + label + "' is empty");
  int64_t rows = spec.rows, columns = spec.columns;
  if (spec.layout == Layout::plain) {
    require(!four_bits(spec.dtype),
            "the weight '" + label + "' of " + name_of(spec.dtype) + " cannot be plain");
  } else {
    require(spec.dtype != DType::i32 && (spec.dtype != DType::f32 || by_columns(spec.layout)),
            "the weight '" + label + "' has a layout of bf16, i8, e4m3, u4 and e2m1 weights, but is " +
                name_of(spec.dtype));
    require(!in_pairs(spec.layout) || rows % 2 == 0, "the weight '" + label + "' has no two halves");
    require(rows < (int64_t{1} << 40), "the weight '" + label + "' has too many rows");
    rows = in_pairs(spec.layout) ? 2 * round_up(rows / 2, 16) : round_up(rows, 16);
    if (!by_columns(spec.layout)) columns = round_up(columns, 64);
  }
  require(spec.matrices > 0, "the weight '" + label + "' is empty");
  const int64_t elements = checked_mul(checked_mul(rows, columns), spec.matrices);
  const int64_t bytes = bytes_of(spec.dtype, checked_mul(elements, 2)) / 2;
  require(bytes <= spec.bytes, "the weight '" + label + "' has " + std::to_string(spec.bytes) +
                                   " bytes, but its shape takes " + std::to_string(bytes));
  const uintptr_t align =
      spec.layout == Layout::plain ? static_cast<uintptr_t>(bytes_of(spec.dtype)) : kAlignBytes;
  require(reinterpret_cast<uintptr_t>(spec.data) % align == 0,
          "the weight '" + label + "' is not aligned to " + std::to_string(align) + " bytes");
  Operand operand;
  operand.data = spec.data;
  operand.bytes = bytes;
  operand.dtype = spec.dtype;
  operand.layout = spec.layout;
  operand.rows = {spec.rows, {}};
  operand.columns = spec.columns;
  operand.stride = columns;
  operand.max_rows = spec.rows;
  operand.matrices = spec.matrices;
  operand.kind = Operand::Kind::weight;
  operand.label = label;
  return operand;
}

Operand Executor::bind_step(const std::string& name) const {
  for (const Input& input : inputs_) {
    if (input.spec.name != name) continue;
    Operand operand;
    operand.data = staging_->data() + input.offset * 4;
    operand.dtype = DType::i32;
    operand.rows = input.spec.rows;
    operand.width = input.spec.columns;
    operand.columns = operand.stride = input.stride;
    operand.max_rows = input.max_rows;
    operand.kind = Operand::Kind::step;
    operand.label = name;
    unpoison(operand.data, input.max_rows * input.stride * 4);
    return operand;
  }
  throw std::invalid_argument("a step has no input '" + name + "'");
}

Operand Executor::bind(const std::string& label, const CachePlane& plane) const {
  Operand operand;
  operand.dtype = plane.dtype;
  operand.plane = plane;
  operand.kind = Operand::Kind::cache;
  operand.label = label;
  return operand;
}

Operand Executor::bind(const std::string& label, const AdaptersSpec& spec) const {
  Operand operand;
  operand.adapters = spec.adapters;
  operand.site = spec.site;
  operand.kind = Operand::Kind::adapters;
  operand.label = label;
  return operand;
}

Operand Executor::bind(const std::string& label, const StateTensor& state) const {
  Operand operand;
  operand.dtype = state.dtype;
  operand.state = state;
  operand.kind = Operand::Kind::state;
  operand.label = label;
  return operand;
}

void Executor::add_kernel(const std::string& name, const Operands& operands, const Attributes& attributes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto factory = table_.find(name);
  require(factory != table_.end(), "there is no kernel '" + name + "'");
  try {
    append(factory->second(operands, attributes), false);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(name + ": " + error.what());
  }
}

void Executor::add_all_gather(const Operand& x, int64_t unit, int64_t root, Ranks& ranks,
                              const Operand* starts) {
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    append(make_all_gather(x, unit, root, ranks, starts), true);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("all_gather@1: ") + error.what());
  }
}

void Executor::append(std::unique_ptr<Kernel> kernel, bool needs_barrier_before) {
  checks_->add(*kernel);
  pool_.reserve_scratch(kernel->scratch_bytes());
  kernels_.push_back({std::move(kernel), needs_barrier_before});
}

void Executor::run(const std::vector<InputArray>& arrays, const Sizes& sizes) {
  std::lock_guard<std::mutex> lock(mutex_);
  prepare(arrays, sizes);
  StepJob job(kernels_, sizes);
  pool_.run(job);
}

void Executor::run(Job& job) {
  std::lock_guard<std::mutex> lock(mutex_);
  pool_.run(job);
}

std::vector<KernelProfile> Executor::profile(const std::vector<InputArray>& arrays, const Sizes& sizes) {
  std::lock_guard<std::mutex> lock(mutex_);
  prepare(arrays, sizes);
  std::vector<KernelProfile> profile;
  for (const BoundKernel& bound : kernels_) profile.push_back({0, bound.kernel->work(sizes)});
  ProfileJob job(kernels_, sizes, profile);
  pool_.run(job);
  return profile;
}

void Executor::prepare(const std::vector<InputArray>& arrays, const Sizes& sizes) {
  for (size_t dim = 0; dim < kMaxDims; ++dim) {
    if (sizes[dim] < 0 || sizes[dim] > limits_[dim]) {
      throw std::invalid_argument("the step is larger than the limits");
    }
  }
  require(arrays.size() == inputs_.size(),
          "a step takes " + std::to_string(inputs_.size()) + " inputs, not " + std::to_string(arrays.size()));
  for (size_t i = 0; i < arrays.size(); ++i) stage(inputs_[i], arrays[i], sizes);
  checks_->check(sizes);
}

// Copied before it is checked: what is checked is what kernels read, whatever the caller's memory does.
void Executor::stage(const Input& input, const InputArray& array, const Sizes& sizes) {
  const int64_t rows = input.spec.rows.at(sizes), columns = input.spec.columns.at(sizes);
  if (array.rows != rows || array.columns != columns) {
    throw std::invalid_argument("the input '" + input.spec.name + "' must be [" + std::to_string(rows) +
                                ", " + std::to_string(columns) + "] in this step, not [" +
                                std::to_string(array.rows) + ", " + std::to_string(array.columns) + "]");
  }
  int32_t* staged = reinterpret_cast<int32_t*>(staging_->data()) + input.offset;
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(staged + r * input.stride, array.data + r * columns, static_cast<size_t>(columns) * 4);
  }
}

std::byte* Executor::arena(int64_t offset_bytes, int64_t bytes) const {
  require(checked_add(offset_bytes, bytes) <= arena_->bytes(), "a buffer ends after the arena");
  return arena_->data() + offset_bytes;
}

}  // namespace enginewright
