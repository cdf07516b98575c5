// What all GEMMs check and know of their operands.
//
//   gemm_bf16@1   x: bf16 [M, K], weight: bf16 r16 [N, K], out: f32 or bf16 [M, N]; bias?: f32 [N]
//   gemm_w8a16@1  the same with weight: i8, scale: f32 [N]
//   gemm_fp8a16@1 the same with weight: e4m3, scale: f32 [N], or of groups, f32 r16_columns [N, G]
//   gemm_w8a8@1   the same with x: i8 and weight: i8, x_scale: f32 [M, G], scale: f32 [N]
//   gemm_w4a8@1   the same with weight: u4, scale: bf16 r16_columns [N, G], zero?: i8 r16_columns [N, G]
//   gemm_mxfp4a8@1 the same with weight: e2m1, and no zero
//
// out = (x · weightᵀ) * scale + bias in fp32, from left to right. Products with bf16 x are summed in fp32;
// where scales are of groups (runs of K as below, up to 256), run by run: (x · weightᵀ) * scale = Σ run sums
// * scale.
//
// Where x is i8, K is cut into G runs of `group` columns, the last one perhaps shorter (group 0: one run is
// all of K), and the sum of products of a run is an integer, exact, since codes are in [-127, 127] and a run
// is at most 2^17 (runs of several: multiples of 32 up to 512). Then (x · weightᵀ) = Σ run sums * x_scale,
// one FMA a run, in ascending order; with weights of 4 bits each run's sum is multiplied by its scale before
// that. A code of u4 stands for code - zero, or code - 8 where there are no zeros; one of e2m1 for twice its
// number, an integer in [-12, 12].
//
// With a gated epilogue ("swiglu", "geglu", "swiglu_clamped") weight is r16_pairs [2F, K], gate rows and up
// rows, scale, zero and bias have 2F, and out [M, F] = act(gate) * up.
//
// With adapters and delta: f32 [M, N], rows that have an adapter get what adapters.h says, before the
// epilogue. With starts, too, adapter_rows@1 has grouped them.
//
// With starts: i32 [1, E + 1] the weight is E matrices, and scales, zeros and biases are E times as many, one
// after the other; rows [starts[e], starts[e + 1]) of x meet the e-th (experts.h).
#pragma once

#include "adapters.h"
#include "kernel.h"

namespace enginewright {

enum class Epilogue : uint8_t { none, swiglu, geglu, swiglu_clamped };

// What products need of an Operand: nothing that is allocated, since an expert's operands are made in a step.
struct GemmMatrix {
  explicit GemmMatrix(const Operand& operand)
      : data(operand.data),
        dtype(operand.dtype),
        columns(operand.columns),
        stride(operand.stride),
        pad(operand.pad),
        max_rows(operand.max_rows) {}

  std::byte* data;
  DType dtype;
  int64_t columns, stride, pad, max_rows;

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

struct GemmOperands {
  static constexpr int64_t kLongestGroup = 512;      // of several
  static constexpr int64_t kLongestBf16Group = 256;  // the same where x is bf16
  GemmOperands(const Operands& operands, const Attributes& attributes, DType x_dtype, DType weight_dtype);

  GemmMatrix x, weight, out;
  Linear rows;                      // of x and out
  const int32_t* starts = nullptr;  // of experts, where their rows start; null: there is one matrix
  int64_t experts = 1;
  Epilogue epilogue = Epilogue::none;
  const float* x_scale = nullptr;         // null: 1
  int64_t x_scale_stride = 0;             // from one token to the next
  const float* scale = nullptr;           // of rows; null: 1
  const uint16_t* group_scale = nullptr;  // bf16, 16 a group and block; null: 1
  const float* run_scale = nullptr;       // f32, the same where x is bf16
  const int8_t* group_zero = nullptr;     // the same; null: that of the codes
  const float* bias = nullptr;            // null: 0
  const Adapters* adapters = nullptr;     // null: none
  int64_t site = 0;                       // of the adapters
  bool has_logit_rows = false;            // rows are those of logits
  int64_t expert = 0, first_row = 0;      // of experts, one of them, and the first of its rows
  const float* delta = nullptr;           // of rows with an adapter
  int64_t delta_stride = 0;
  int64_t k_pad = 0;              // columns of x and weight that are read
  int64_t group = 0, groups = 1;  // runs of K
  int64_t outputs = 0;            // columns of out
  int64_t unit_blocks = 1;        // 16-row blocks of weight that make 16 columns of out: 2 if gated
  int64_t units = 0;              // those of out, the last one perhaps partly outside
  int64_t block_bytes = 0;        // of weight

  bool gated() const { return unit_blocks == 2; }
  // Of one expert, whose rows begin with `row`.
  GemmOperands of_expert(int64_t expert, int64_t row) const;
  // `operations`: those of Work that products of x and weight are.
  Work work(const Sizes& sizes, int64_t Work::* operations) const;
  const std::byte* block(int64_t index) const { return weight.data + index * block_bytes; }

 private:
  void bind_adapters(const Operands& operands);
  void bind_integers(const Operands& operands, const Attributes& attributes);
  int64_t bind_groups(const Attributes& attributes, int64_t longest);  // returns the attribute
  const Operand& of_groups(const Operands& operands, const std::string& name, DType dtype);

  int64_t weight_bytes_ = 0;  // with scales, zeros and biases
};

}  // namespace enginewright
