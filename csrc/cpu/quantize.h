// Rows as int8 with a scale for each run of columns: symmetric, codes in [-127, 127]. KV may be FP8 instead.
//
//   quantize_rows@1  scale = largest / 127, q = round(x * (127 / largest)), where largest = max |x| of a run,
//                    or the same number for that run of all rows, beyond which codes are clipped
//
// x: f32 or bf16 [rows, K]; largest?: f32 [runs]; q: i8 [rows, K]; scale: f32 [rows, runs]. All in fp32, ties
// to even: the same bits on every instruction set. A largest below 2^-120 counts as 0, since 127 / largest
// must be finite: scale 0, codes 0. A NaN or an infinity makes the run's scale NaN, so that it is never lost;
// the codes mean nothing then. Of FP8 it is kLargest for 127, and below kTiny (codes.h).
#pragma once

#include <optional>
#include <type_traits>

#include "codes.h"
#include "operands.h"
#include "rows.h"

namespace enginewright {
namespace {

// Stores the first n lanes of x, which are in the codes' range, as the nearest codes.
template <class S, class Code>
ENGINEWRIGHT_INLINE void store_codes(typename Code::Element* codes, typename S::F x, int64_t n) {
  if constexpr (std::is_same_v<Code, I8>) {
    const typename S::F rounded = S::round(x);
    n < 16 ? S::store_i8_first(codes, rounded, n) : S::store_i8(codes, rounded);
  } else {
    float lanes[16];
    S::store(lanes, x);
    for (int64_t i = 0; i < n; ++i) codes[i] = Code::nearest(lanes[i]);
  }
}

// Codes of the columns [begin, end) of a row, and their scale. Row is what x is read from: at(column) gives
// 16 columns, first(column, n) n of them and zeros after. given: the largest, or null.
template <class S, class Code = I8, class Row>
ENGINEWRIGHT_INLINE float quantize_run(const Row& x, int64_t begin, int64_t end,
                                       typename Code::Element* codes, const float* given = nullptr) {
  using F = typename S::F;
  F maxima[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
  F lost[4] = {S::zero(), S::zero(), S::zero(), S::zero()};  // NaN where x is not finite
  int64_t i = begin;
  for (; i + 64 <= end; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const F v = x.at(i + 16 * j);
      maxima[j] = S::max(maxima[j], S::abs(v));
      lost[j] = S::fma(v, S::zero(), lost[j]);
    }
  }
  for (; i < end; i += 16) {
    const F v = end - i < 16 ? x.first(i, end - i) : x.at(i);
    maxima[0] = S::max(maxima[0], S::abs(v));
    lost[0] = S::fma(v, S::zero(), lost[0]);
  }
  const float largest =
      given != nullptr ? *given
                       : S::reduce_max(S::max(S::max(maxima[0], maxima[1]), S::max(maxima[2], maxima[3])));
  const float nan_or_zero = S::reduce_add(S::add(S::add(lost[0], lost[1]), S::add(lost[2], lost[3])));
  const bool zero = largest < Code::kTiny;
  const F factor = S::set1(zero ? 0.0f : Code::kLargest / largest);
  const auto code = [&](F v) {
    return S::min(S::max(S::mul(v, factor), S::set1(-Code::kLargest)), S::set1(Code::kLargest));
  };
  for (i = begin; i + 16 <= end; i += 16) store_codes<S, Code>(codes + i, code(x.at(i)), 16);
  if (const int64_t n = end - i; n > 0) store_codes<S, Code>(codes + i, code(x.first(i, n)), n);
  return (zero ? 0.0f : largest / Code::kLargest) + nan_or_zero;
}

// The runs of columns that share a scale: each of `group` columns, the last one perhaps shorter; 0 is the
// whole row.
inline int64_t run_of(const Attributes& attributes, int64_t columns) {
  const int64_t group = integer(attributes, "group", 0, int64_t{1} << 17);
  require(group % 32 == 0, "the attribute 'group' must be a multiple of 32");
  return group == 0 || group > columns ? columns : group;
}

// Where quantized rows go: checked, and written a row at a time.
class QuantizedRows {
 public:
  QuantizedRows(const Operands& operands, const Attributes& attributes, const std::string& name)
      : codes_(matrix(operands, name, DType::i8)),
        scale_(matrix(operands, "scale", DType::f32)),
        run_(run_of(attributes, codes_.columns)) {
    const int64_t runs = (codes_.columns + run_ - 1) / run_;
    require_same_rows(codes_, scale_);
    require_columns(scale_, runs);
    if (operands.count("largest") != 0) {
      largest_ = vector_weight(operands, "largest", runs).as<const float>();
    }
  }

  const Operand& scale() const { return scale_; }

  template <class S, class Row>
  ENGINEWRIGHT_INLINE void put(int64_t row, const Row& x) const {
    int8_t* codes = codes_.as<int8_t>() + row * codes_.stride;
    float* scale = scale_.as<float>() + row * scale_.stride;
    const float* largest = largest_;
    for (int64_t begin = 0; begin < codes_.columns; begin += run_) {
      const int64_t end = codes_.columns - begin < run_ ? codes_.columns : begin + run_;
      *scale++ = quantize_run<S>(x, begin, end, codes, largest);
      if (largest != nullptr) ++largest;
    }
    std::memset(codes + codes_.columns, 0, static_cast<size_t>(codes_.pad));
  }

 private:
  const Operand codes_, scale_;
  const int64_t run_;
  const float* largest_ = nullptr;  // of runs; null: of each as it comes
};

// What a kernel writes row by row: floats, or i8 with the operand 'scale'.
template <class S>
class RowsOut {
 public:
  // width: columns that are put at once.
  RowsOut(const Operands& operands, const Attributes& attributes, const std::string& name, const Operand& x,
          int64_t width)
      : out_(operand(operands, name)), columns_(x.columns), width_(width) {
    if (out_.dtype == DType::i8) {
      require(width_ == columns_, "a row is quantized as a whole, so 'weight' must be as wide as 'x'");
      quantized_.emplace(operands, attributes, name);
    } else {
      float_matrix(operands, name);
      for (const char* other : {"scale", "largest"}) {
        require(operands.count(other) == 0, std::string("'") + other + "' belongs to an output of i8");
      }
    }
    require_same_rows(x, out_);
    require_columns(out_, columns_);
  }

  const Operand& written() const { return out_; }

  // A row that was put, once more.
  void copy(int64_t from, int64_t to) const {
    copy_row(out_, from, to);
    if (quantized_) copy_row(quantized_->scale(), from, to);
  }

  // Columns [column, column + width) of a row; x is read as by quantize_run.
  template <class Row>
  ENGINEWRIGHT_INLINE void put(int64_t row, int64_t column, const Row& x) const {
    if (quantized_) return quantized_->template put<S>(row, x);
    const RowWriter<S> out(out_, row);
    int64_t i = 0;
    for (; i + 16 <= width_; i += 16) out.put(column + i, x.at(i));
    if (const int64_t n = width_ - i; n > 0) out.put_first(column + i, x.first(i, n), n);
    if (column + width_ == columns_) out.zero_pad(out_);
  }

 private:
  static void copy_row(const Operand& rows, int64_t from, int64_t to) {
    const int64_t row_bytes = rows.stride * bytes_of(rows.dtype);
    const int64_t used = rows.columns + (rows.dtype == DType::f32 ? 0 : rows.pad);
    std::memcpy(rows.data + to * row_bytes, rows.data + from * row_bytes,
                static_cast<size_t>(used * bytes_of(rows.dtype)));
  }

  const Operand out_;
  const int64_t columns_, width_;
  std::optional<QuantizedRows> quantized_;
};

template <class S>
class QuantizeRows final : public Kernel {
 public:
  QuantizeRows(const Operands& operands, const Attributes& attributes)
      : x_(float_matrix(operands, "x")),
        q_(matrix(operands, "q", DType::i8)),
        out_(operands, attributes, "q") {
    require_known(operands, attributes, {"x", "largest", "q", "scale"}, {"group"});
    require_same_rows(x_, q_);
    require_columns(q_, x_.columns);
  }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &q_}, sizes);
    work.fp32_ops = 4 * x_.rows.at(sizes) * x_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const Range mine = share(x_.rows.at(sizes), worker);
    for (int64_t row = mine.begin; row < mine.end; ++row) out_.put<S>(row, RowReader<S>(x_, row));
  }

 private:
  const Operand x_, q_;
  const QuantizedRows out_;
};

}  // namespace
}  // namespace enginewright
