// clang-format off
#include "for_size.h"  // before all others
// clang-format on

#include "operands.h"

#include <cmath>

namespace enginewright {

namespace {

std::string quoted(std::string_view name) { return "'" + std::string(name) + "'"; }

}  // namespace

Operand::Operand() = default;
Operand::Operand(const Operand&) = default;
Operand::Operand(Operand&&) noexcept = default;
Operand& Operand::operator=(const Operand&) = default;
Operand& Operand::operator=(Operand&&) noexcept = default;
Operand::~Operand() = default;

void require(bool holds, std::string_view sentence) {
  if (!holds) throw std::invalid_argument(std::string(sentence));
}

const char* name_of(DType dtype) { return facts_of(dtype).name; }

bool four_bits(DType dtype) { return facts_of(dtype).bits == 4; }

int64_t bytes_of(DType dtype, int64_t elements) { return elements * facts_of(dtype).bits / 8; }

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

const Operand& operand(const Operands& operands, std::string_view name) {
  const auto found = operands.find(std::string(name));
  require(found != operands.end(), "the operand " + quoted(name) + " is missing");
  return found->second;
}

const Operand& matrix(const Operands& operands, std::string_view name, DType dtype) {
  const Operand& m = operand(operands, name);
  require(m.kind != Operand::Kind::cache && m.kind != Operand::Kind::state,
          quoted(name) + " must be a matrix, not a part of a cache");
  require(m.dtype == dtype, quoted(name) + " must be " + name_of(dtype) + ", not " + name_of(m.dtype));
  require(m.layout == Layout::plain && m.matrices == 1, quoted(name) + " must be one matrix of plain layout");
  return m;
}

const Operand& float_matrix(const Operands& operands, std::string_view name) {
  const Operand& m = operand(operands, name);
  return matrix(operands, name, m.dtype == DType::bf16 ? DType::bf16 : DType::f32);
}

const Operand& vector_weight(const Operands& operands, std::string_view name, int64_t columns) {
  const Operand& m = matrix(operands, name, DType::f32);
  require(m.kind == Operand::Kind::weight, quoted(name) + " must be a weight");
  require(m.max_rows == 1, quoted(name) + " must have one row, not " + std::to_string(m.max_rows));
  require_columns(m, columns);
  return m;
}

const Operand& step_input(const Operands& operands, std::string_view name) {
  const Operand& m = matrix(operands, name, DType::i32);
  require(m.kind == Operand::Kind::step, quoted(name) + " must be an input of the step");
  return m;
}

Adapters* adapters_of(const Operands& operands, std::string_view name) {
  const Operand& found = operand(operands, name);
  require(found.kind == Operand::Kind::adapters, quoted(name) + " must be adapters");
  return found.adapters;
}

const CachePlane& cache_plane(const Operands& operands, std::string_view name) {
  const Operand& m = operand(operands, name);
  require(m.kind == Operand::Kind::cache, quoted(name) + " must be a plane of a cache");
  return m.plane;
}

const StateTensor& state_tensor(const Operands& operands, std::string_view name, int64_t elements) {
  const Operand& m = operand(operands, name);
  require(m.kind == Operand::Kind::state, quoted(name) + " must be a tensor of a recurrent state");
  require(m.dtype == DType::f32 && m.state.elements == elements,
          quoted(name) + " must have " + std::to_string(elements) + " f32 a sequence, not " +
              std::to_string(m.state.elements) + " " + name_of(m.dtype));
  return m.state;
}

void require_planes(const CachePlane& keys, const CachePlane& values, int64_t heads, int64_t dim) {
  require(keys.heads == heads && keys.dim == dim, "'key' has heads of another shape");
  require(keys.dtype == values.dtype && keys.num_blocks == values.num_blocks &&
              keys.block_size == values.block_size && keys.heads == values.heads && keys.dim == values.dim &&
              keys.block_stride == values.block_stride,
          "'key' and 'value' are planes of different shapes");
}

void require_same_rows(const Operand& a, const Operand& b) {
  require(a.rows == b.rows, "'" + a.label + "' and '" + b.label + "' differ in their rows");
}

void require_columns(const Operand& a, int64_t columns) {
  require(a.columns == columns, "'" + a.label + "' must have " + std::to_string(columns) + " columns, not " +
                                    std::to_string(a.columns));
}

Work touched(std::initializer_list<const Operand*> operands, const Sizes& sizes) {
  Work work;
  for (const Operand* o : operands) {
    if (o == nullptr) continue;
    work.weight_bytes += o->bytes;
    if (o->kind == Operand::Kind::arena) {
      work.activation_bytes += o->rows.at(sizes) * o->columns * bytes_of(o->dtype);
    }
  }
  return work;
}

namespace {

void require_among(std::string_view name, std::initializer_list<const char*> names, const char* what) {
  for (const char* known : names) {
    if (name == known) return;
  }
  throw std::invalid_argument("there is no " + std::string(what) + " " + quoted(name));
}

}  // namespace

void require_known(const Operands& operands, const Attributes& attributes,
                   std::initializer_list<const char*> operand_names,
                   std::initializer_list<const char*> attribute_names) {
  for (const auto& [name, value] : operands) require_among(name, operand_names, "operand");
  for (const auto& [name, value] : attributes) require_among(name, attribute_names, "attribute");
}

namespace {

const Attribute& attribute(const Attributes& attributes, std::string_view name) {
  const auto found = attributes.find(std::string(name));
  require(found != attributes.end(), "the attribute " + quoted(name) + " is missing");
  return found->second;
}

}  // namespace

double number(const Attributes& attributes, std::string_view name) {
  const Attribute& value = attribute(attributes, name);
  require(!std::holds_alternative<std::string>(value), "the attribute " + quoted(name) + " must be a number");
  const double result = std::holds_alternative<double>(value) ? std::get<double>(value)
                                                              : static_cast<double>(std::get<int64_t>(value));
  require(std::isfinite(result), "the attribute " + quoted(name) + " must be finite");
  return result;
}

int64_t integer(const Attributes& attributes, std::string_view name, int64_t low, int64_t high) {
  const Attribute& value = attribute(attributes, name);
  require(std::holds_alternative<int64_t>(value), "the attribute " + quoted(name) + " must be an integer");
  const int64_t result = std::get<int64_t>(value);
  require(low <= result && result <= high, "the attribute " + quoted(name) + " must be in " +
                                               std::to_string(low) + " … " + std::to_string(high) + ", not " +
                                               std::to_string(result));
  return result;
}

std::string text(const Attributes& attributes, std::string_view name) {
  const Attribute& value = attribute(attributes, name);
  require(std::holds_alternative<std::string>(value), "the attribute " + quoted(name) + " must be text");
  return std::get<std::string>(value);
}

}  // namespace enginewright
