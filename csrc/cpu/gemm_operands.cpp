#include "gemm_operands.h"

#include "operands.h"

namespace enginewright {

namespace {

constexpr int64_t kMostK = int64_t{1} << 17;  // 127 * 127 * 2^17 < 2^31

Epilogue epilogue_of(const Attributes& attributes) {
  const std::string name = text(attributes, "epilogue");
  if (name == "none") return Epilogue::none;
  if (name == "swiglu") return Epilogue::swiglu;
  require(name == "geglu", "there is no epilogue '" + name + "'; known: none, swiglu, geglu");
  return Epilogue::geglu;
}

}  // namespace

GemmOperands::GemmOperands(const Operands& operands, const Attributes& attributes, DType x_dtype,
                           DType weight_dtype)
    : x(matrix(operands, "x", x_dtype)),
      weight(operand(operands, "weight")),
      out(float_matrix(operands, "out")),
      epilogue(epilogue_of(attributes)) {
  require(weight.kind == Operand::Kind::weight && weight.dtype == weight_dtype,
          std::string("'weight' must be a weight of ") + name_of(weight_dtype));
  const bool gated = epilogue != Epilogue::none;
  require(weight.layout == (gated ? Layout::r16_pairs : Layout::r16),
          gated ? "'weight' must have the layout r16_pairs, since the epilogue is gated"
                : "'weight' must have the layout r16");
  unit_blocks = gated ? 2 : 1;
  outputs = weight.max_rows / unit_blocks;
  units = (outputs + 15) / 16;
  k_pad = weight.stride;
  block_bytes = 16 * k_pad * bytes_of(weight.dtype);
  require_columns(x, weight.columns);
  require(x.columns + x.pad >= k_pad, "'x' has no zeros behind its columns up to a multiple of 64");
  require(x.kind == Operand::Kind::arena && out.kind == Operand::Kind::arena,
          "'x' and 'out' must be buffers");
  require_columns(out, outputs);
  require_same_rows(x, out);
  if (x_dtype == DType::i8) {
    require_known(operands, attributes, {"x", "x_scale", "weight", "scale", "bias", "out"}, {"epilogue"});
    require(k_pad <= kMostK, "'weight' has more columns than sums in int32 allow");
    const Operand& factors = matrix(operands, "x_scale", DType::f32);
    require_same_rows(x, factors);
    require_columns(factors, 1);
    x_scale = factors.as<const float>();
    x_scale_stride = factors.stride;
  } else if (weight_dtype != DType::bf16) {
    require_known(operands, attributes, {"x", "weight", "scale", "bias", "out"}, {"epilogue"});
  } else {
    require_known(operands, attributes, {"x", "weight", "bias", "out"}, {"epilogue"});
  }
  if (weight_dtype != DType::bf16) {
    scale = vector_weight(operands, "scale", weight.max_rows).as<const float>();
  }
  if (operands.count("bias") != 0) bias = vector_weight(operands, "bias", weight.max_rows).as<const float>();
}

Work GemmOperands::work(const Sizes& sizes, int64_t Work::* operations) const {
  Work work = touched({&x, &weight, &out}, sizes);
  for (const float* vector : {scale, bias}) work.weight_bytes += vector != nullptr ? weight.max_rows * 4 : 0;
  work.*operations = 2 * x.rows.at(sizes) * weight.max_rows * weight.columns;
  return work;
}

}  // namespace enginewright
