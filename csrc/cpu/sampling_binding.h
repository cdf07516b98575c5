// Sampling from numpy arrays, for `_cpu.sample` and `_cpu.Executor.sample`.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <mutex>
#include <optional>
#include <vector>

#include "executor.h"
#include "sampling.h"

namespace enginewright {

namespace py = pybind11;

template <class T>
using Array = py::array_t<T, py::array::c_style>;
template <class T>
using RowArray = py::array_t<T, 0>;  // of any strides
using Masks = std::optional<Array<uint32_t>>;

// Kept from call to call; one call at a time.
struct SamplingMemory {
  explicit SamplingMemory(int threads) : scratch(static_cast<size_t>(threads)) {}
  std::vector<SamplingScratch> scratch;  // one a thread
  std::mutex mutex;
};

// Draws a token for each row of logits; see _cpu.pyi. Rows are shared by the executor's threads; without an
// executor, there is one thread. std::invalid_argument for what does not fit.
py::list sample(const RowArray<float>& logits, const Array<SamplingRow>& rows,
                const Array<TokenCount>& history, const Array<TokenBias>& biases, const Masks& allowed,
                SamplingMemory& memory, Executor* executor);

void bind_sampling(py::module_& module);

}  // namespace enginewright
