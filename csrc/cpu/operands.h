// Checks that kernels make of their operands when they are built. Each failure is std::invalid_argument with
// a sentence (ValueError in Python). Names and sentences are views, since each string that is made of a
// literal is some 80 bytes of code, in six instruction sets.
#pragma once

#include <string>
#include <string_view>

#include "kernel.h"

namespace enginewright {

void require(bool holds, std::string_view sentence);
const char* name_of(DType dtype);
bool four_bits(DType dtype);
int64_t bytes_of(DType dtype, int64_t elements = 1);  // of 4 bits: of an even number of elements
int64_t round_up(int64_t value, int64_t multiple);

// The operand `name`, or std::invalid_argument.
const Operand& operand(const Operands& operands, std::string_view name);
// The same, also checked: a matrix (weight plain, arena or step) of this dtype.
const Operand& matrix(const Operands& operands, std::string_view name, DType dtype);
const Operand& float_matrix(const Operands& operands, std::string_view name);  // f32 or bf16
// f32 plain weight of `columns` values.
const Operand& vector_weight(const Operands& operands, std::string_view name, int64_t columns);
// An i32 step input.
const Operand& step_input(const Operands& operands, std::string_view name);
const CachePlane& cache_plane(const Operands& operands, std::string_view name);
// A tensor of a recurrent state, of so many f32 a sequence.
const StateTensor& state_tensor(const Operands& operands, std::string_view name, int64_t elements);
// Adapters, and a linear layer of theirs.
Adapters* adapters_of(const Operands& operands, std::string_view name);
// Planes of `heads` heads of `dim` numbers, that differ in nothing but their data.
void require_planes(const CachePlane& keys, const CachePlane& values, int64_t heads, int64_t dim);
void require_same_rows(const Operand& a, const Operand& b);
void require_columns(const Operand& a, int64_t columns);
// Of a kernel that touches all of these: weights as they are stored, of buffers the step's rows. Null is
// nothing.
Work touched(std::initializer_list<const Operand*> operands, const Sizes& sizes);
// Only these operands and attributes; anything else is a mistake of the plan.
void require_known(const Operands& operands, const Attributes& attributes,
                   std::initializer_list<const char*> operand_names,
                   std::initializer_list<const char*> attribute_names);

double number(const Attributes& attributes, std::string_view name);  // int or float; finite
int64_t integer(const Attributes& attributes, std::string_view name, int64_t low, int64_t high);
std::string text(const Attributes& attributes, std::string_view name);

// [begin, end) of `count` items for one of the threads: contiguous, sizes differ by at most one.
struct Range {
  int64_t begin, end;
};
inline Range share(int64_t count, const Worker& worker) {
  const int64_t each = count / worker.count, extra = count % worker.count;
  const int64_t begin = worker.index * each + (worker.index < extra ? worker.index : extra);
  return {begin, begin + each + (worker.index < extra ? 1 : 0)};
}

}  // namespace enginewright
