// Sampling as Python sees it: `sample`, the dtypes of its arguments, and `_cpu.philox4x32`.
// clang-format off
#include "for_size.h"  // before all others
// clang-format on

#include "sampling_binding.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "philox.h"

namespace enginewright {
namespace {

void require_row(bool holds, int64_t row, const char* sentence) {
  if (!holds) throw std::invalid_argument("row " + std::to_string(row) + ": " + sentence);
}

template <class Entry>
void check_entries(const Entry* entries, int64_t begin, int64_t end, int64_t size, int64_t vocab,
                   int64_t row) {
  require_row(begin <= end && end <= size, row, "its entries end outside of the array");
  for (int64_t i = begin; i < end; ++i) {
    require_row(0 <= entries[i].token && entries[i].token < vocab, row,
                "a token is outside of the vocabulary");
  }
}

void check_row(const SamplingRow& row, int64_t index, int64_t vocab) {
  require_row(row.temperature >= 0 && std::isfinite(row.temperature), index,
              "temperature must be finite and >= 0");
  require_row(row.top_k >= 0, index, "top_k must be >= 0");
  require_row(row.top_p > 0 && row.top_p <= 1, index, "top_p must be in (0, 1]");
  require_row(row.min_p >= 0 && row.min_p <= 1, index, "min_p must be in [0, 1]");
  require_row(row.repetition_penalty > 0 && std::isfinite(row.repetition_penalty), index,
              "repetition_penalty must be finite and > 0");
  require_row(std::isfinite(row.frequency_penalty) && std::isfinite(row.presence_penalty), index,
              "penalties must be finite");
  require_row(row.top_logprobs >= 0 && row.top_logprobs <= vocab, index,
              "top_logprobs must be in 0 … vocabulary");
  require_row(row.top_logprobs == 0 || row.logprobs != 0, index, "top_logprobs without logprobs");
}

// What sample_row() gave for one row, in the order of Python's SampledToken.
py::tuple sampled_token(const SamplingRow& row, const SampledRow& sampled, const int32_t* top_tokens,
                        const float* top_logprobs) {
  if (sampled.status != RowStatus::ok) return py::make_tuple(0, py::none(), py::tuple(), true);
  if (row.logprobs == 0) return py::make_tuple(sampled.token, py::none(), py::tuple(), false);
  py::tuple top(row.top_logprobs);
  for (int32_t i = 0; i < row.top_logprobs; ++i) {
    top[static_cast<size_t>(i)] = py::make_tuple(top_tokens[i], top_logprobs[i]);
  }
  return py::make_tuple(sampled.token, sampled.logprob, top, false);
}

// A row each, thread after thread. No row depends on which thread it is sampled by.
class SampleJob final : public Job {
 public:
  struct Row {
    const float* logits;
    const SamplingRow* parameters;
    Span<TokenCount> history;
    Span<TokenBias> biases;
    const uint32_t* allowed;
    int32_t* top_tokens;
    float* top_logprobs;
    SampledRow sampled;
  };
  SampleJob(std::vector<Row>& rows, int64_t vocab, std::vector<SamplingScratch>& scratch)
      : rows_(rows), vocab_(vocab), scratch_(scratch) {}

  void run(Worker& worker) override { run(worker.index, worker.count); }
  void run(int index, int count) {
    for (size_t i = static_cast<size_t>(index); i < rows_.size(); i += static_cast<size_t>(count)) {
      Row& row = rows_[i];
      row.sampled = sample_row(row.logits, vocab_, *row.parameters, row.history, row.biases, row.allowed,
                               scratch_[static_cast<size_t>(index)], row.top_tokens, row.top_logprobs);
    }
  }

 private:
  std::vector<Row>& rows_;
  const int64_t vocab_;
  std::vector<SamplingScratch>& scratch_;
};

}  // namespace

py::list sample(const RowArray<float>& logits, const Array<SamplingRow>& rows,
                const Array<TokenCount>& history, const Array<TokenBias>& biases, const Masks& allowed,
                SamplingMemory& memory, Executor* executor) {
  if (logits.ndim() != 2 || rows.ndim() != 1 || history.ndim() != 1 || biases.ndim() != 1) {
    throw std::invalid_argument("logits must have two dimensions, rows, history and biases one");
  }
  const int64_t n = logits.shape(0), vocab = logits.shape(1);
  const int64_t stride = logits.strides(0) / static_cast<int64_t>(sizeof(float));  // rows may be padded
  if (vocab > 1 && logits.strides(1) != static_cast<int64_t>(sizeof(float))) {
    throw std::invalid_argument("a row of logits must be contiguous");
  }
  if (rows.shape(0) != n) throw std::invalid_argument("logits and rows differ in their number");
  if (vocab < 1 || vocab >= int64_t{1} << 31) throw std::invalid_argument("the vocabulary has no size");
  const int64_t words = mask_words(vocab);
  if (allowed && (allowed->ndim() != 2 || allowed->shape(0) != n || allowed->shape(1) != words)) {
    throw std::invalid_argument("allowed must have a bit a token, " + std::to_string(words) + " words a row");
  }

  int64_t history_begin = 0, bias_begin = 0, top_width = 0;
  for (int64_t i = 0; i < n; ++i) {
    const SamplingRow& row = rows.data()[i];
    check_row(row, i, vocab);
    top_width = std::max<int64_t>(top_width, row.top_logprobs);
    check_entries(history.data(), history_begin, row.history_end, history.shape(0), vocab, i);
    check_entries(biases.data(), bias_begin, row.bias_end, biases.shape(0), vocab, i);
    history_begin = row.history_end;
    bias_begin = row.bias_end;
  }

  std::vector<int32_t> top_tokens(static_cast<size_t>(n * top_width));
  std::vector<float> top_logprobs(static_cast<size_t>(n * top_width));
  std::vector<SampleJob::Row> jobs;
  history_begin = bias_begin = 0;
  for (int64_t i = 0; i < n; ++i) {
    const SamplingRow& row = rows.data()[i];
    jobs.push_back({logits.data() + i * stride,
                    &row,
                    {history.data() + history_begin, row.history_end - history_begin},
                    {biases.data() + bias_begin, row.bias_end - bias_begin},
                    allowed ? allowed->data() + i * words : nullptr,
                    top_tokens.data() + i * top_width,
                    top_logprobs.data() + i * top_width,
                    {}});
    history_begin = row.history_end;
    bias_begin = row.bias_end;
  }
  {
    const py::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(memory.mutex);
    for (SamplingScratch& one : memory.scratch) one.reserve(vocab);  // a job must not throw
    SampleJob job(jobs, vocab, memory.scratch);
    if (executor != nullptr && n > 1) {
      executor->run(job);
    } else {
      job.run(0, 1);
    }
  }
  py::list result(n);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const SampleJob::Row& row = jobs[i];
    result[i] = sampled_token(*row.parameters, row.sampled, row.top_tokens, row.top_logprobs);
  }
  return result;
}

void bind_sampling(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(SamplingRow, seed, position, choice, top_k, temperature, top_p, min_p,
                       repetition_penalty, frequency_penalty, presence_penalty, logprobs, top_logprobs,
                       history_end, bias_end);
  PYBIND11_NUMPY_DTYPE(TokenCount, token, count);
  PYBIND11_NUMPY_DTYPE(TokenBias, token, bias);
  module.attr("SAMPLING_ROW") = py::dtype::of<SamplingRow>();
  module.attr("TOKEN_COUNT") = py::dtype::of<TokenCount>();
  module.attr("TOKEN_BIAS") = py::dtype::of<TokenBias>();
  module.def(
      "sample",
      [](const RowArray<float>& logits, const Array<SamplingRow>& rows, const Array<TokenCount>& history,
         const Array<TokenBias>& biases, const Masks& allowed) {
        SamplingMemory memory(1);
        return sample(logits, rows, history, biases, allowed, memory, nullptr);
      },
      py::arg("logits").noconvert(), py::arg("rows").noconvert(), py::arg("history").noconvert(),
      py::arg("biases").noconvert(), py::arg("allowed").noconvert() = py::none());
  module.def(
      "philox4x32", [](PhiloxCounter counter, PhiloxKey key) { return philox4x32(counter, key); },
      py::arg("counter"), py::arg("key"));
}

}  // namespace enginewright
