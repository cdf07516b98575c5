// Products of each head with its own weight.
//
//   head_gemm_bf16@1  x: bf16 [M, heads * K], weight: bf16 r16 [heads * N, K], N a multiple of 16, out: f32
//   or
//                     bf16 [M, heads * N]; head h of out = head h of x · rows h * N … of weightᵀ; with
//                     adapters and delta: f32 [M, heads * N], plus that (head_adapters.h)
//
// What multiplies is the instruction set's own product of gemm_bf16@1 (gemm_kernel.h), on the columns and
// rows of a head: gemm.h and its like say why a row of the result has the same bits in any batch. Threads
// share the blocks of all heads.
#pragma once

#include "gemm_operands.h"
#include "operands.h"

namespace enginewright {
namespace {

template <class Product>
class HeadGemm final : public Kernel {
 public:
  HeadGemm(const Operands& operands, const Attributes& attributes) {
    require_known(operands, attributes, {"x", "weight", "out", "adapters", "delta"}, {"heads"});
    const int64_t heads = integer(attributes, "heads", 1, 1 << 16);
    const Operand &x = matrix(operands, "x", DType::bf16), &weight = operand(operands, "weight"),
                  &out = float_matrix(operands, "out");
    const int64_t rows = weight.max_rows / heads;
    require(rows * heads == weight.max_rows && rows % 16 == 0,
            "the rows of 'weight' must be a multiple of 16 for each of 'heads'");
    require_columns(x, heads * weight.columns);
    require_columns(out, heads * rows);
    // A head's last line of x goes on into the next head, whose numbers meet the zeros after the weight's
    // columns.
    require((heads - 1) * weight.columns + weight.stride <= x.stride,
            "'x' ends before a line of its last head does");
    for (int64_t head = 0; head < heads; ++head) {
      Operand own_x = x, own_weight = weight, own_out = out;
      own_x.data += head * weight.columns * bytes_of(x.dtype);
      own_x.columns = weight.columns;
      own_x.pad = weight.stride - weight.columns;
      own_weight.data += bytes_of(weight.dtype, head * rows * weight.stride);
      own_weight.rows = Linear{rows, {}};
      own_weight.max_rows = rows;
      own_weight.bytes = weight.bytes / heads;
      own_out.data += head * rows * bytes_of(out.dtype);
      own_out.columns = rows;
      own_out.pad = head == heads - 1 ? out.pad : 0;
      heads_.emplace_back(Operands{{"x", own_x}, {"weight", own_weight}, {"out", own_out}},
                          Attributes{{"epilogue", "none"}}, Product::x_dtype, Product::weight_dtype);
      heads_.back().expert = head;
    }
    if (operands.count("adapters") != 0) bind_adapters(operands, {rows, weight.columns, heads});
  }

  int64_t scratch_bytes() const override { return Product(heads_.front()).scratch_bytes(); }

  Work work(const Sizes& sizes) const override {
    Work work = heads_.front().work(sizes, Product::operations);
    const auto heads = static_cast<int64_t>(heads_.size());
    work.weight_bytes *= heads;
    work.activation_bytes *= heads;
    work.*Product::operations *= heads;
    work.weight_passes = Product(heads_.front()).passes(heads_.front().rows.at(sizes));
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t rows = heads_.front().rows.at(sizes), units = heads_.front().units;
    const Range mine = share(static_cast<int64_t>(heads_.size()) * units, worker);
    for (int64_t unit = mine.begin; unit < mine.end;) {
      const int64_t first = unit % units, left = mine.end - unit;
      const int64_t count = units - first < left ? units - first : left;
      Product(heads_[unit / units]).run(rows, {first, first + count}, worker.scratch);
      unit += count;
    }
  }

 private:
  void bind_adapters(const Operands& operands, const AdapterSite& site) {
    const Operand& delta = matrix(operands, "delta", DType::f32);
    require_same_rows(operand(operands, "x"), delta);
    require_columns(delta, site.experts * site.rows);
    Adapters* const adapters = adapters_of(operands, "adapters");
    const int64_t index = operand(operands, "adapters").site;
    const AdapterSite& of = adapters->site(index);
    require(of.rows == site.rows && of.columns == site.columns && of.experts == site.experts,
            "'adapters' are for a weight of another size");
    for (GemmOperands& head : heads_) {
      head.adapters = adapters;
      head.site = index;
      head.has_logit_rows = head.rows.factors[kLogitRows] != 0;
      head.delta = delta.as<const float>() + head.expert * site.rows;
      head.delta_stride = delta.stride;
    }
  }

  std::vector<GemmOperands> heads_;
};

}  // namespace
}  // namespace enginewright
