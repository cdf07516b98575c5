#include "gemm_operands.h"

#include "operands.h"

namespace enginewright {

namespace {

constexpr int64_t kMostK = int64_t{1} << 17;  // 127 * 127 * 2^17 < 2^31; of 4 bits, 24 * 127 * 2^17

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
  block_bytes = bytes_of(weight.dtype, 16 * k_pad);
  require_columns(x, weight.columns);
  require(x.columns + x.pad >= k_pad, "'x' has no zeros behind its columns up to a multiple of 64");
  require(x.kind == Operand::Kind::arena && out.kind == Operand::Kind::arena,
          "'x' and 'out' must be buffers");
  require_columns(out, outputs);
  require_same_rows(x, out);
  group = k_pad;
  if (x_dtype == DType::i8) {
    bind_integers(operands, attributes);
  } else if (weight_dtype == DType::e4m3) {
    require_known(operands, attributes, {"x", "weight", "scale", "bias", "out"}, {"epilogue", "group"});
    if (bind_groups(attributes, kLongestBf16Group) != 0) {
      run_scale = of_groups(operands, "scale", DType::f32).as<const float>();
    }
  } else if (weight_dtype != DType::bf16) {
    require_known(operands, attributes, {"x", "weight", "scale", "bias", "out"}, {"epilogue"});
  } else {
    require_known(operands, attributes, {"x", "weight", "bias", "out"}, {"epilogue"});
  }
  const auto vector = [&](const char* name) {
    scale_bytes_ += weight.max_rows * 4;
    return vector_weight(operands, name, weight.max_rows).as<const float>();
  };
  if (weight_dtype != DType::bf16 && !four_bits(weight_dtype) && run_scale == nullptr) {
    scale = vector("scale");
  }
  if (operands.count("bias") != 0) bias = vector("bias");
}

void GemmOperands::bind_integers(const Operands& operands, const Attributes& attributes) {
  if (weight.dtype == DType::u4) {
    require_known(operands, attributes, {"x", "x_scale", "weight", "scale", "zero", "bias", "out"},
                  {"epilogue", "group"});
  } else {
    require_known(operands, attributes, {"x", "x_scale", "weight", "scale", "bias", "out"},
                  {"epilogue", "group"});
  }
  bind_groups(attributes, kLongestGroup);
  require(k_pad <= kMostK, "'weight' has more columns than sums in int32 allow");
  const Operand& factors = matrix(operands, "x_scale", DType::f32);
  require_same_rows(x, factors);
  require_columns(factors, groups);
  x_scale = factors.as<const float>();
  x_scale_stride = factors.stride;
  if (four_bits(weight.dtype)) {
    group_scale = of_groups(operands, "scale", DType::bf16).as<const uint16_t>();
    if (operands.count("zero") != 0) group_zero = of_groups(operands, "zero", DType::i8).as<const int8_t>();
  }
}

int64_t GemmOperands::bind_groups(const Attributes& attributes, int64_t longest) {
  const int64_t run = integer(attributes, "group", 0, longest);
  require(run % 32 == 0, "the attribute 'group' must be a multiple of 32");
  if (run != 0 && run < weight.columns) group = run;
  groups = (weight.columns + group - 1) / group;
  return run;
}

const Operand& GemmOperands::of_groups(const Operands& operands, const std::string& name, DType dtype) {
  const Operand& values = operand(operands, name);
  const Layout layout = gated() ? Layout::r16_columns_pairs : Layout::r16_columns;
  require(values.kind == Operand::Kind::weight && values.dtype == dtype && values.layout == layout,
          "'" + name + "' must be a weight of " + name_of(dtype) + " with the layout " +
              (gated() ? "r16_columns_pairs" : "r16_columns"));
  require(values.max_rows == weight.max_rows, "'" + name + "' and 'weight' differ in their rows");
  require_columns(values, groups);
  scale_bytes_ += values.bytes;
  return values;
}

Work GemmOperands::work(const Sizes& sizes, int64_t Work::* operations) const {
  Work work = touched({&x, &weight, &out}, sizes);
  work.weight_bytes += scale_bytes_;
  work.*operations = 2 * x.rows.at(sizes) * weight.max_rows * weight.columns;
  return work;
}

}  // namespace enginewright
