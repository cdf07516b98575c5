#include "gemm_operands.h"

#include <cmath>

#include "operands.h"

namespace enginewright {

namespace {

constexpr int64_t kMaxK = int64_t{1} << 17;  // 127 * 127 * 2^17 < 2^31; of 4 bits, 24 * 127 * 2^17

Epilogue epilogue_of(const Attributes& attributes) {
  const std::string name = text(attributes, "epilogue");
  if (name == "none") return Epilogue::none;
  if (name == "swiglu") return Epilogue::swiglu;
  if (name == "geglu") return Epilogue::geglu;
  require(name == "swiglu_clamped",
          "there is no epilogue '" + name + "'; known: none, swiglu, geglu, swiglu_clamped");
  return Epilogue::swiglu_clamped;
}

}  // namespace

GemmOperands::GemmOperands(const Operands& operands, const Attributes& attributes, DType x_dtype,
                           DType weight_dtype)
    : x(matrix(operands, "x", x_dtype)),
      weight(operand(operands, "weight")),
      out(float_matrix(operands, "out")),
      rows(operand(operands, "x").rows),
      epilogue(epilogue_of(attributes)) {
  const Operand &x_operand = operand(operands, "x"), &out_operand = operand(operands, "out");
  const Operand& stored = operand(operands, "weight");
  require(stored.kind == Operand::Kind::weight && weight.dtype == weight_dtype,
          std::string("'weight' must be a weight of ") + name_of(weight_dtype));
  const bool gated = epilogue != Epilogue::none;
  require(stored.layout == (gated ? Layout::r16_pairs : Layout::r16),
          gated ? "'weight' must have the layout r16_pairs, since the epilogue is gated"
                : "'weight' must have the layout r16");
  experts = stored.matrices;
  weight_bytes_ = stored.bytes;
  if (operands.count("starts") != 0) {
    const Operand& first = matrix(operands, "starts", DType::i32);
    require(first.kind == Operand::Kind::arena && first.max_rows == 1,
            "'starts' must be a buffer of one row");
    require_columns(first, experts + 1);
    starts = first.as<const int32_t>();
  } else {
    require(experts == 1, "'weight' is several matrices, but 'starts' is missing");
  }
  unit_blocks = gated ? 2 : 1;
  outputs = weight.max_rows / unit_blocks;
  units = (outputs + 15) / 16;
  k_pad = weight.stride;
  block_bytes = bytes_of(weight.dtype, 16 * k_pad);
  require_columns(x_operand, weight.columns);
  require(x.columns + x.pad >= k_pad, "'x' has no zeros after its columns up to a multiple of 64");
  require(x_operand.kind == Operand::Kind::arena && out_operand.kind == Operand::Kind::arena,
          "'x' and 'out' must be buffers");
  require_columns(out_operand, outputs);
  require_same_rows(x_operand, out_operand);
  group = k_pad;
  if (x_dtype == DType::i8) {
    bind_integers(operands, attributes);
  } else if (weight_dtype == DType::e4m3) {
    require_known(operands, attributes,
                  {"x", "weight", "scale", "bias", "starts", "adapters", "delta", "out"},
                  {"epilogue", "group"});
    if (bind_groups(attributes, kLongestBf16Group) != 0) {
      run_scale = of_groups(operands, "scale", DType::f32).as<const float>();
    }
  } else if (weight_dtype != DType::bf16) {
    require_known(operands, attributes,
                  {"x", "weight", "scale", "bias", "starts", "adapters", "delta", "out"}, {"epilogue"});
  } else {
    require_known(operands, attributes, {"x", "weight", "bias", "starts", "adapters", "delta", "out"},
                  {"epilogue"});
  }
  const auto vector = [&](const char* name) {
    weight_bytes_ += experts * weight.max_rows * 4;
    return vector_weight(operands, name, experts * weight.max_rows).as<const float>();
  };
  if (weight_dtype != DType::bf16 && !four_bits(weight_dtype) && run_scale == nullptr) {
    scale = vector("scale");
  }
  if (operands.count("bias") != 0) bias = vector("bias");
  if (operands.count("adapters") != 0) bind_adapters(operands);
}

void GemmOperands::bind_adapters(const Operands& operands) {
  adapters = adapters_of(operands, "adapters");
  site = operand(operands, "adapters").site;
  const AdapterSite& of = adapters->site(site);
  require(of.rows == weight.max_rows && of.columns == weight.columns && !of.is_table &&
              of.experts == (starts == nullptr ? 0 : experts),
          "'adapters' are for a weight of another size");
  require(starts == nullptr || operand(operands, "x").max_rows <= adapters->expert_rows().max_rows(),
          "'x' has more rows than adapters have room for");
  has_logit_rows = rows.factors[kLogitRows] != 0;
  const Operand& added = matrix(operands, "delta", DType::f32);
  require_same_rows(operand(operands, "x"), added);
  require_columns(added, weight.max_rows);
  delta = added.as<const float>();
  delta_stride = added.stride;
}

void GemmOperands::bind_integers(const Operands& operands, const Attributes& attributes) {
  if (weight.dtype == DType::u4) {
    require_known(operands, attributes,
                  {"x", "x_scale", "weight", "scale", "zero", "bias", "starts", "adapters", "delta", "out"},
                  {"epilogue", "group"});
  } else {
    require_known(operands, attributes,
                  {"x", "x_scale", "weight", "scale", "bias", "starts", "adapters", "delta", "out"},
                  {"epilogue", "group"});
  }
  bind_groups(attributes, kLongestGroup);
  require(k_pad <= kMaxK, "'weight' has more columns than sums in int32 allow");
  const Operand& factors = matrix(operands, "x_scale", DType::f32);
  require_same_rows(operand(operands, "x"), factors);
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
  require(values.max_rows == weight.max_rows && values.matrices == experts,
          "'" + name + "' and 'weight' differ in their rows");
  require_columns(values, groups);
  weight_bytes_ += values.bytes;
  return values;
}

GemmOperands GemmOperands::of_expert(int64_t expert, int64_t row) const {
  const int64_t blocks = units * unit_blocks, of_groups = expert * blocks * groups * 16;
  GemmOperands one = *this;
  one.x.data += bytes_of(x.dtype, row * x.stride);
  one.out.data += bytes_of(out.dtype, row * out.stride);
  one.weight.data += expert * blocks * block_bytes;
  one.expert = expert;
  one.first_row = row;
  if (delta != nullptr) one.delta += row * delta_stride;
  if (x_scale != nullptr) one.x_scale += row * x_scale_stride;
  if (scale != nullptr) one.scale += expert * weight.max_rows;
  if (bias != nullptr) one.bias += expert * weight.max_rows;
  if (group_scale != nullptr) one.group_scale += of_groups;
  if (run_scale != nullptr) one.run_scale += of_groups;
  if (group_zero != nullptr) one.group_zero += of_groups;
  return one;
}

Work GemmOperands::work(const Sizes& sizes, int64_t Work::* operations) const {
  const int64_t count = rows.at(sizes);
  Work work;
  work.activation_bytes = count * (x.columns * bytes_of(x.dtype) + out.columns * bytes_of(out.dtype));
  work.weight_bytes = weight_bytes_;
  if (starts != nullptr) {
    // Of experts that are as likely as each other, those that some row meets: a token has different ones.
    int64_t top = 0;
    for (const int64_t factor : rows.factors) top += factor;
    const double each = static_cast<double>(top) / static_cast<double>(experts);
    const double missed = std::pow(1 - each, static_cast<double>(count) / static_cast<double>(top));
    work.weight_bytes = static_cast<int64_t>(static_cast<double>(weight_bytes_) * (1 - missed));
  }
  work.*operations = 2 * count * weight.max_rows * weight.columns;
  return work;
}

}  // namespace enginewright
