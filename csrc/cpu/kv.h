// How keys and values lie in the planes of a paged cache (kernel.h: CachePlane), and how a token's get there.
//
//   key    bf16  [block_size / 16][dim_pad / 2][16 tokens][2]   r16 blocks of 16 tokens x dim
//          i8    [block_size / 16][dim_pad / 4][16 tokens][4]   codes in [-127, 127]
//   value  bf16  [block_size / 2][dim_pad][2 tokens]
//          i8    [block_size / 4][dim_pad][4 tokens]
//          FP8   as i8, finite codes (codes.h)
//
// Scales of codes: f32 [block_size], of a token's head_dim numbers (quantize.h has the rule). Tokens of one
// line may be different threads' work: they write different bytes.
//
// Numbers of 4 bits (u4) are bf16(scale * code + zero), with a bf16 scale and zero for each 32 dims of a
// token and head (plugins/attention/kv_write.py has the rule). Two codes of a token share a byte, the first
// one in its lower half, and two tokens never do:
//
//   key    u4      [block_size / 16][dim_pad / 4][16 tokens][2]   byte i: dims i and i + 2 of the four
//          scales  [block_size / 16][dim_pad / 32][scale, zero][16 tokens]
//   value  u4      [block_size / 2][dim_pad / 16][8][2 tokens]    byte i: dims i and i + 8 of the sixteen
//          scales  [block_size / 2][dim_pad / 32][scale, zero][2 tokens]
//
// So 16 bytes become, by their lower halves and by their upper ones, 16 numbers each that lie together in
// planes of bf16. Keys of 4 bits, and the queries for them, are rotated by Hadamard matrices
// (arXiv:2404.00456), so that outliers spread.
#pragma once

#include "operands.h"
#include "quantize.h"
#include "rows.h"

namespace enginewright {
namespace {

constexpr int64_t kU4Group = 32;  // dims that share a scale and a zero

// Of the scales of a token's head; -1 of a dtype that planes do not hold.
inline int64_t kv_scale_bytes(DType dtype, int64_t dim_pad) {
  switch (dtype) {
    case DType::bf16:
      return 0;
    case DType::i8:
      return 4;
    case DType::u4:
      return dim_pad / kU4Group * 4;
    default:
      return with_fp8(dtype, [](auto) {}) ? 4 : -1;
  }
}

// A lane's sign in sums with what lies 1, 2, 4 and 8 lanes from it.
alignas(64) constexpr float kPairSigns[4][16] = {{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
                                                 {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
                                                 {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
                                                 {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}};

// Blocks of x, as long as the largest power of 2 that divides `count`, each times the normalized Hadamard
// matrix of that order: the fast Walsh-Hadamard transform, from the nearest pairs to the farthest.
template <class S>
void hadamard(float* x, int64_t count) {
  const int64_t order = count & -count;
  int64_t distance = 1;
  if (order >= 16) {  // four stages at once: lanes are sums of the same pairs with other signs
    for (int64_t i = 0; i < count; i += 16) {
      typename S::F sums[16];
      for (int j = 0; j < 16; ++j) sums[j] = S::set1(x[i + j]);
      ENGINEWRIGHT_UNROLL
      for (int stage = 0; stage < 4; ++stage) {
        const auto signs = S::load(kPairSigns[stage]);
        ENGINEWRIGHT_UNROLL
        for (int j = 0; j < 8 >> stage; ++j) sums[j] = S::fma(sums[2 * j + 1], signs, sums[2 * j]);
      }
      S::store(x + i, sums[0]);
    }
    for (distance = 16; distance < order; distance *= 2) {
      for (int64_t i = 0; i < count; i += 16) {
        if ((i & distance) != 0) continue;
        const auto a = S::load(x + i), b = S::load(x + i + distance);
        S::store(x + i, S::add(a, b));
        S::store(x + i + distance, S::sub(a, b));
      }
    }
  }
  for (; distance < order; distance *= 2) {
    for (int64_t i = 0; i < count; ++i) {
      if ((i & distance) != 0) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
  const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(order)));
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// A group of numbers to codes, and their scale and zero in bf16.
template <class S>
ENGINEWRIGHT_INLINE void quantize_u4(const float* x, int8_t* codes, uint16_t* scale, uint16_t* zero) {
  using F = typename S::F;
  const F a = S::load(x), b = S::load(x + 16), none = S::zero(), tiny = S::set1(0x1p-100f);
  const F minimum = S::set1(-S::reduce_max(S::sub(none, S::min(a, b)))),
          maximum = S::set1(S::reduce_max(S::max(a, b)));
  const F nan_or_zero = S::set1(S::reduce_add(S::fma(a, none, S::mul(b, none))));
  const auto rounded = [&](F number) {
    uint16_t lanes[16];
    S::store_bf16(lanes, number);
    return S::load_bf16(lanes);
  };
  const F first = rounded(minimum), step = rounded(S::div(S::sub(maximum, minimum), S::set1(15.0f)));
  const F min_step = S::max(S::mul(S::abs(first), S::set1(0x1p-14f)), tiny),
          min_first = S::max(S::mul(step, S::set1(0x1p-10f)), tiny);
  const F kept_step = S::where_less(step, min_step, none, step),
          kept_first = S::where_less(S::abs(first), min_first, none, first);
  const F inverse = S::where_less(none, kept_step, S::div(S::set1(1.0f), kept_step), none);
  const auto put = [&](F numbers, int8_t* to) {
    const F code = S::mul(S::sub(numbers, kept_first), inverse);
    S::store_i8(to, S::round(S::min(S::max(code, none), S::set1(15.0f))));
  };
  put(a, codes);
  put(b, codes + 16);
  S::store_bf16_first(scale, S::add(kept_step, nan_or_zero), 1);
  S::store_bf16_first(zero, kept_first, 1);
}

template <class S>
struct U4Scaling {
  typename S::F scale, zero;
};

// 64 bytes of codes to bf16: 16 bytes from 16 k on by scaling(k), their lower halves to low(k), the upper
// ones to high(k).
template <class S, class Of, class Low, class High>
ENGINEWRIGHT_INLINE void expand_u4(const uint8_t* codes, const Of& scaling, const Low& low,
                                   const High& high) {
  alignas(64) int8_t halves[2][64];
  typename S::Line lower, upper;
  S::expand_u4(codes, lower, upper);
  S::store_line(halves[0], lower);
  S::store_line(halves[1], upper);
  ENGINEWRIGHT_UNROLL
  for (int k = 0; k < 4; ++k) {
    const U4Scaling<S>& by = scaling(k);
    const auto numbers = [&](const int8_t* half) {
      return S::fma(S::to_float(S::widen_i8(half + 16 * k)), by.scale, by.zero);
    };
    S::store_bf16(low(k), numbers(halves[0]));
    S::store_bf16(high(k), numbers(halves[1]));
  }
}

// Sixteen positions of keys, or of values, `width` dims, as planes of bf16 have them.
template <class S>
void expand_u4_keys(const uint8_t* codes, const uint16_t* scales, int64_t width, uint16_t* out) {
  const auto spread = [&](const uint16_t* of_tokens, typename S::F& first, typename S::F& second) {
    uint32_t twice[16];
    for (int t = 0; t < 16; ++t) twice[t] = of_tokens[t] * 0x10001u;
    uint16_t lanes[32];
    std::memcpy(lanes, twice, 64);
    first = S::load_bf16(lanes);
    second = S::load_bf16(lanes + 16);
  };
  for (int64_t dim = 0; dim < width; dim += kU4Group, scales += 32) {
    U4Scaling<S> of_eight[2];  // tokens
    spread(scales, of_eight[0].scale, of_eight[1].scale);
    spread(scales + 16, of_eight[0].zero, of_eight[1].zero);
    for (int line = 0; line < 4; ++line, codes += 64, out += 128) {
      const auto low = [out](int k) { return out + k / 2 * 64 + k % 2 * 16; };
      expand_u4<S>(
          codes, [&](int k) -> const U4Scaling<S>& { return of_eight[k % 2]; }, low,
          [&](int k) { return low(k) + 32; });
    }
  }
}
template <class S>
void expand_u4_values(const uint8_t* codes, const uint16_t* scales, int64_t width, uint16_t* out) {
  const auto spread = [&](const uint16_t* of_tokens) {
    uint32_t both, pairs[8];
    std::memcpy(&both, of_tokens, 4);
    for (uint32_t& pair : pairs) pair = both;
    uint16_t lanes[16];
    std::memcpy(lanes, pairs, 32);
    return S::load_bf16(lanes);
  };
  for (int64_t i = 0; i < 8 * width; i += 64, codes += 64, scales += 8, out += 128) {
    const U4Scaling<S> of_groups[2] = {{spread(scales), spread(scales + 2)},
                                       {spread(scales + 4), spread(scales + 6)}};
    expand_u4<S>(
        codes, [&](int k) -> const U4Scaling<S>& { return of_groups[k / 2]; },
        [out](int k) { return out + k * 32; }, [out](int k) { return out + k * 32 + 16; });
  }
}

// Writes what attention reads of a head: queries, and keys and values to their planes.
template <class S>
class KvWriter {
 public:
  // Both planes are alike (require_planes).
  KvWriter(const CachePlane& keys, const CachePlane& values) : keys_(keys), values_(values) {}

  // What write() wants: two heads in bf16, or one in f32 and its codes.
  int64_t scratch_bytes() const { return keys_.dim_pad * (keys_.dtype == DType::u4 ? 5 : 4); }

  // A query, head_dim floats.
  void write_query(float* query, uint16_t* out) const {
    if (keys_.dtype == DType::u4) hadamard<S>(query, keys_.dim);
    round(query, keys_.dim, out);
  }

  // The key and the value of a slot and a head, head_dim floats each; after the key's is room for dim_pad.
  void write(float* key, const float* value, int64_t slot, int64_t head, std::byte* scratch) const {
    const int64_t at = slot % keys_.block_size;
    const int64_t tile = slot / keys_.block_size * keys_.block_stride + head * keys_.tile_bytes;
    switch (keys_.dtype) {
      case DType::bf16:
        return write_bf16(key, value, at, tile, reinterpret_cast<uint16_t*>(scratch));
      case DType::i8:
        return write_codes<I8>(key, value, at, tile, scratch);
      case DType::u4:
        return write_u4(key, value, at, tile, reinterpret_cast<float*>(scratch));
      default:
        with_fp8(keys_.dtype, [&](auto code) { write_codes<decltype(code)>(key, value, at, tile, scratch); });
    }
  }

 private:
  // n floats to bf16.
  static ENGINEWRIGHT_INLINE void round(const float* x, int64_t n, uint16_t* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) S::store_bf16(out + i, S::load(x + i));
    if (i < n) S::store_bf16_first(out + i, S::load_first(x + i, n - i), n - i);
  }

  // Position `at` of a tile, (head_dim) each. key: room for two heads.
  void write_bf16(const float* k, const float* v, int64_t at, int64_t tile, uint16_t* key) const {
    const int64_t width = keys_.dim_pad;
    uint16_t* value = key + width;
    round(k, keys_.dim, key);
    round(v, keys_.dim, value);
    for (int64_t i = keys_.dim; i < width; ++i) key[i] = value[i] = 0;
    auto* keys = reinterpret_cast<uint16_t*>(keys_.data + tile) + at / 16 * 16 * width + at % 16 * 2;
    for (int64_t i = 0; i < width; i += 2) std::memcpy(keys + i * 16, key + i, 4);
    auto* values = reinterpret_cast<uint16_t*>(values_.data + tile) + at / 2 * 2 * width + at % 2;
    for (int64_t i = 0; i < width; ++i) values[2 * i] = value[i];
  }
  template <class Code>
  void write_codes(const float* k, const float* v, int64_t at, int64_t tile, std::byte* scratch) const {
    using Element = typename Code::Element;
    const int64_t width = keys_.dim_pad;
    auto *key = reinterpret_cast<Element*>(scratch), *value = key + width;
    const float k_scale = quantize_run<S, Code>(RowReader<S>(k), 0, keys_.dim, key),
                v_scale = quantize_run<S, Code>(RowReader<S>(v), 0, keys_.dim, value);
    for (int64_t i = keys_.dim; i < width; ++i) key[i] = value[i] = 0;
    auto *keys = reinterpret_cast<Element*>(keys_.data + tile),
         *values = reinterpret_cast<Element*>(values_.data + tile);
    reinterpret_cast<float*>(keys + keys_.code_bytes())[at] = k_scale;
    reinterpret_cast<float*>(values + keys_.code_bytes())[at] = v_scale;
    keys += at / 16 * 16 * width + at % 16 * 4;
    for (int64_t i = 0; i < width; i += 4) std::memcpy(keys + i * 16, key + i, 4);
    values += at / 4 * 4 * width + at % 4;
    for (int64_t i = 0; i < width; ++i) values[4 * i] = value[i];
  }

  // value: room for a head, and for its codes after it.
  void write_u4(float* key, const float* v, int64_t at, int64_t tile, float* value) const {
    const int64_t width = keys_.dim_pad, dim = keys_.dim;
    hadamard<S>(key, dim);
    std::memcpy(value, v, static_cast<size_t>(dim) * sizeof(float));
    for (int64_t i = dim; i < width; ++i) key[i] = value[i] = 0.0f;
    auto* codes = reinterpret_cast<int8_t*>(value + width);
    const auto byte = [codes](int64_t low, int64_t high) {
      return static_cast<std::byte>(codes[low] | codes[high] << 4);
    };
    std::byte* to = keys_.data + tile + at / 16 * 16 * keys_.number_bytes + at % 16 * 2;
    auto* scales = reinterpret_cast<uint16_t*>(keys_.data + tile + keys_.code_bytes() +
                                               at / 16 * 16 * keys_.scale_bytes) +
                   at % 16;
    for (int64_t i = 0; i < width; i += kU4Group, scales += 2 * 16) {
      quantize_u4<S>(key + i, codes, scales, scales + 16);
      for (int64_t j = 0; j < kU4Group; j += 4, to += 2 * 16) {
        to[0] = byte(j, j + 2);
        to[1] = byte(j + 1, j + 3);
      }
    }
    to = values_.data + tile + at / 2 * 2 * values_.number_bytes + at % 2;
    scales = reinterpret_cast<uint16_t*>(values_.data + tile + values_.code_bytes() +
                                         at / 2 * 2 * values_.scale_bytes) +
             at % 2;
    for (int64_t i = 0; i < width; i += kU4Group, scales += 2 * 2) {
      quantize_u4<S>(value + i, codes, scales, scales + 2);
      for (int64_t j = 0; j < kU4Group; j += 16) {
        for (int64_t d = j; d < j + 8; ++d, to += 2) *to = byte(d, d + 8);
      }
    }
  }

  const CachePlane keys_, values_;
};

}  // namespace
}  // namespace enginewright
