// The GEMM kernels: a product (gemm.h, gemm_a8.h, gemm_fma.h, gemm_amx.h) over all rows, or over those of one
// expert after the other.
//
// A product is a class over GemmOperands with `run(tokens, units, scratch)`: its first rows past some units
// of its weight, which come from memory `passes(tokens)` times. What it computes for a row depends on nothing
// else. So threads share what there is to do as
// it suits them: without experts, units; with experts, all experts' units one after the other, by what they
// cost, so that few threads meet in an expert, and weights of experts without rows are never touched.
#pragma once

#include "gemm_operands.h"
#include "operands.h"

namespace enginewright {
namespace {

// What weights cost that come from memory, in rows: an expert's unit takes the time of so many rows and of
// those that it has.
constexpr int64_t kRowsOfWeights = 16;

template <class Product>
class GemmKernel final : public Kernel {
 public:
  GemmKernel(const Operands& operands, const Attributes& attributes)
      : g_(operands, attributes, Product::x_dtype, Product::weight_dtype) {}

  int64_t scratch_bytes() const override { return Product(g_).scratch_bytes(); }

  Work work(const Sizes& sizes) const override {
    Work work = g_.work(sizes, Product::operations);
    const int64_t rows = g_.rows.at(sizes);
    // How many rows each expert has is known only when it runs: those that it has if all have as many.
    work.weight_passes =
        Product(g_).passes(g_.starts == nullptr ? rows : (rows + g_.experts - 1) / g_.experts);
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    if (g_.starts == nullptr) {
      Product(g_).run(g_.rows.at(sizes), share(g_.units, worker), worker.scratch);
    } else {
      run_experts(worker);
    }
  }

 private:
  // Units of all experts lie one after the other on a scale of costs; a thread has those that begin in its
  // part of it.
  void run_experts(Worker& worker) const {
    int64_t total = 0;
    for (int64_t e = 0; e < g_.experts; ++e) total += cost_of(e) * g_.units;
    const int64_t low = total * worker.index / worker.count, high = total * (worker.index + 1) / worker.count;
    int64_t begin = 0;
    for (int64_t e = 0; e < g_.experts && begin < high; ++e) {
      const int64_t each = cost_of(e), end = begin + each * g_.units;
      if (each != 0 && low < end) {
        const Range mine{first_from(low - begin, each), first_from(high - begin, each)};
        const GemmOperands one = g_.of_expert(e, g_.starts[e]);
        if (mine.begin < mine.end) Product(one).run(rows_of(e), mine, worker.scratch);
      }
      begin = end;
    }
  }

  int64_t rows_of(int64_t e) const { return g_.starts[e + 1] - g_.starts[e]; }
  int64_t cost_of(int64_t e) const { return rows_of(e) == 0 ? 0 : kRowsOfWeights + rows_of(e); }
  // The first unit that begins at `distance` or after it.
  int64_t first_from(int64_t distance, int64_t each) const {
    if (distance <= 0) return 0;
    const int64_t unit = (distance + each - 1) / each;
    return unit < g_.units ? unit : g_.units;
  }

  const GemmOperands g_;
};

template <class Product>
std::unique_ptr<Kernel> make_gemm(const Operands& operands, const Attributes& attributes) {
  return std::make_unique<GemmKernel<Product>>(operands, attributes);
}

}  // namespace
}  // namespace enginewright
