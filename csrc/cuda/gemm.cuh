// What GEMMs share (plugins/gemm/gemm.py): out = epilogue(x weightᵀ · scales + bias).
//
// Weights lie in GPU memory as in the engine file, R16 (csrc/cpu/kernel.h): blocks of 16 rows, and in a block
// lines of 64 bytes, 4 bytes of K for each row. They are the A of m16n8 products, tokens are the columns of
// B. A warp takes a unit of 2 blocks: its lane (g, t) loads the 16 bytes of rows 4i … 4i + 3, i = g % 4, of
// block g / 4 in line t of four. The first two of these rows are rows g and g + 8 of a first A, the others of
// a second one. So every load has 16 bytes and takes whole lines, nothing is shuffled, and a lane ends with
// the sums of 4 features that are neighbours for each of its tokens. Which k a line's bytes are does not
// matter, as long as x is taken alike: see x_fragments.
#pragma once

#include "adapters.cuh"
#include "rows.cuh"

namespace enginewright {

enum class Format { bf16, w8a16, fp8a16, w4a16, mxfp4a16, w8a8, fp8a8 };
enum class Epilogue { none, swiglu, geglu, swiglu_clamped };

// Whether mma_e4m3 is what tensor cores do. Hopper's and Blackwell's for data centers multiply E4M3 in wgmma
// and tcgen05 alone; for mma.sync the compiler widens it, and adds as many sums as there are products.
constexpr bool E4M3_CORES = SM == 89 || SM == 120;

// features: rows of the weight; with a gated epilogue, gates and then ups, whose blocks alternate. columns:
// K. group: columns that share a scale, of the weight, of x (w8a8), or of both (fp8a8); 0 is the whole row.
// padded: columns of out that are written, zeros after its own. What follows is the shape of a block of
// threads: gemm_small.cuh and gemm_large.cuh say what of it they take. split_chunks: where gemm_large is to
// add as gemm_small does, the chunks of one of its splits. experts: matrices in the weight of gemm_experts.
// zeros_behind: columns of out after gemm_heads' last head that are written.
struct Gemm {
  Format format;
  Epilogue epilogue;
  int rows;  // of the matrix, in a step: the position of their dim
  Type type;
  int features, columns, x_stride, x_scale_stride, out_stride, padded, group;
  bool zeros, bias;
  int feature_warps, token_warps, k_warps, turns, units, tiles, splits, stages, shared_bytes;
  int split_chunks = 0;
  int experts = 0;
  int zeros_behind = 0;

  constexpr bool gated() const { return epilogue != Epilogue::none; }
  constexpr int outputs() const { return gated() ? features / 2 : features; }
  constexpr int blocks() const { return gated() ? 2 * ceil_div(outputs(), 16) : ceil_div(features, 16); }
  constexpr bool four_bits() const { return format == Format::w4a16 || format == Format::mxfp4a16; }
  constexpr bool weight_groups() const { return group != 0 && format != Format::w8a8; }
  constexpr bool x_groups() const { return group != 0 && x_codes(); }
  constexpr bool grouped() const { return group != 0; }
  constexpr bool x_codes() const { return format == Format::w8a8 || format == Format::fp8a8; }
  constexpr bool in_runs() const { return grouped() || (format == Format::fp8a8 && E4M3_CORES); }
  constexpr bool row_scales() const { return format != Format::bf16 && !weight_groups(); }
};

// K is taken in chunks of 64, to which weights and x are padded with zeros.
constexpr int CHUNK = 64;
constexpr int LINE_BYTES = 64;

template <Gemm S>
struct Shape {
  static constexpr int CHUNKS = ceil_div(S.columns, CHUNK);
  static constexpr int THREADS = S.feature_warps * S.token_warps * S.k_warps * WARP;
  static constexpr int FEATURES = S.feature_warps * S.units * 32;  // of a block of threads
  static constexpr int TOKENS = S.token_warps * S.tiles * 8;

  // Of a block of weights, in a chunk. A lane's load takes a line of four.
  static constexpr int LINES = S.format == Format::bf16 ? 32 : S.four_bits() ? 8 : 16;
  static constexpr int LOADS = LINES / 4;
  static constexpr int64_t BLOCK_BYTES = int64_t{CHUNKS} * LINES * LINE_BYTES;

  // Products of a tile are made by pairs of MMA steps: 64 bytes of each token.
  static constexpr int X_ROW_BYTES = CHUNK * (S.x_codes() ? 1 : 2);
  static constexpr int PAIRS = X_ROW_BYTES / 64;
  static constexpr int PAIR_LOADS = LOADS / PAIRS;

  // Products that are summed by themselves: a group, or its part in a chunk, since it is scaled; and those of
  // E4M3 in any case, whose sums have few bits in tensor cores (https://arxiv.org/abs/2412.19437, 3.3.2).
  // gemm_wgmma.cuh has longer ones of E4M3, up to 128 as in that paper.
  static constexpr int RUN = !S.in_runs() ? 0 : S.group % CHUNK ? 32 : CHUNK;
  static constexpr int RUNS = S.in_runs() ? CHUNK / RUN : 1;       // in a chunk
  static constexpr int GROUP_SCALE_BYTES = S.four_bits() ? 2 : 4;  // of the weight: bf16 or f32
  static constexpr int GROUPS = S.grouped() ? ceil_div(S.columns, S.group) : 1;

  static DEVICE int group_of([[maybe_unused]] int chunk, [[maybe_unused]] int run) {
    if constexpr (S.grouped()) {
      int group = static_cast<int>(static_cast<uint32_t>(chunk * CHUNK + run * RUN) / S.group);
      // After the last column everything is zero.
      return CHUNKS * CHUNK - RUN < S.columns || group < GROUPS ? group : GROUPS - 1;
    }
    return 0;
  }
};

template <bool INTEGER>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<true> {
  using type = int32_t;
};
// Sums of products: of a run that is yet to be scaled, and over all of K.
template <Gemm S>
using part_t = typename SumOf<S.format == Format::w8a8>::type;
template <Gemm S>
using sum_t = typename SumOf<S.format == Format::w8a8 && !S.grouped()>::type;

template <class Number>
DEVICE Words4 words_of(const Number (&x)[4]) {
  auto bits = [](Number value) { return __builtin_bit_cast(uint32_t, value); };
  return {bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3])};
}

// Where 16 bytes of a token are in a chunk of x in shared memory, [tokens][X_ROW_BYTES]: so that neither the
// copies nor any of the loads of x_fragments meet in a bank. It is the same for all tokens 8 apart.
template <Gemm S>
DEVICE int x_place(int token, int granule) {
  if constexpr (S.x_codes()) return token * 64 + (granule ^ (token / 2 & 3)) * 16;
  int mixed = (token & 1) << 2 | (token & 2) | (token >> 2 & 1);
  return token * 128 + (granule ^ mixed) * 16;
}

// B of two MMA steps, r[2 * step + register], for 8 tokens from x on. Lanes have the k of the lines that they
// load of weights: as ldmatrix has it where a line is 4 bytes of x, 8 or 16 bytes in a row where it is more.
template <Gemm S>
DEVICE void x_fragments(uint32_t (&r)[4], const uint8_t* x, int pair) {
  int g = lane() / 4, t = lane() % 4;
  if constexpr (S.four_bits()) {
    Words4 w = load16(x + x_place<S>(g, 4 * pair ^ t));
    r[0] = w.x, r[1] = w.y, r[2] = w.z, r[3] = w.w;
  } else if constexpr (Shape<S>::PAIR_LOADS == 2) {
    UNROLL
    for (int step = 0; step < 2; ++step) {
      const uint8_t* from = x + x_place<S>(g, 4 * pair ^ 2 * step ^ t / 2) + t % 2 * 8;
      Words2 w = *reinterpret_cast<const Words2*>(from);
      r[2 * step] = w.x, r[2 * step + 1] = w.y;
    }
  } else {
    load_matrices(r, x + x_place<S>(lane() % 8, 4 * pair ^ lane() / 8));
  }
}

// A thread's part in copying COUNT chunks of x into shared memory, [COUNT][tokens][X_ROW_BYTES]: 16 bytes of
// each APARTth row, to where PLACE says; zeros for tokens and chunks that are not there.
template <Gemm S, int COUNT, int (*PLACE)(int token, int granule) = x_place<S>>
class CopyX {
  using Of = Shape<S>;
  static constexpr int GRANULES = Of::X_ROW_BYTES / 16, ROWS = COUNT * Of::TOKENS;
  static constexpr int APART = Of::THREADS / GRANULES, COPIES = ceil_div(ROWS, APART);
  static constexpr int64_t STRIDE = int64_t{S.x_stride} * (S.x_codes() ? 1 : 2);
  static_assert(Of::TOKENS % APART == 0 || APART % Of::TOKENS == 0);  // so that rows are a constant way apart

 public:
  DEVICE CopyX(const uint8_t* x, int first_token, int tokens) {
    int row = thread_index() / GRANULES, granule = thread_index() % GRANULES, token = row % Of::TOKENS;
    chunk_ = row / Of::TOKENS;
    tokens_ = tokens - first_token - token;
    from_ = x + (first_token + token) * STRIDE + chunk_ * Of::X_ROW_BYTES + granule * 16;
    to_ = chunk_ * Of::TOKENS * Of::X_ROW_BYTES + PLACE(token, granule);
  }

  DEVICE void copy(uint8_t* stage, int chunk, bool exists = true) const {  // or zeros
    const uint8_t* from = from_ + int64_t{chunk} * Of::X_ROW_BYTES;
    UNROLL
    for (int i = 0; i < COPIES; ++i) {
      int token = i * APART % Of::TOKENS, after = i * APART / Of::TOKENS;
      if (i * APART + APART > ROWS && chunk_ + after >= COUNT) break;  // more threads than granules
      bool there = exists && token < tokens_;
      if (Of::CHUNKS % COUNT) there = there && chunk + chunk_ + after < Of::CHUNKS;
      copy_async(stage + to_ + i * APART * Of::X_ROW_BYTES, from + token * STRIDE + after * Of::X_ROW_BYTES,
                 there);
    }
  }

 private:
  const uint8_t* from_;
  int to_, chunk_,
      tokens_;  // where a row's copies are; its chunk of COUNT; how many tokens are left from its on
};

// This thread's of COUNT things that all do together.
template <int COUNT, int THREADS, class Each>
DEVICE void shared_out(Each each) {
  UNROLL
  for (int first = 0; first < COUNT; first += THREADS) {
    int i = first + thread_index();
    if (first + THREADS <= COUNT || i < COUNT) each(i);
  }
}

// The scales of the runs of COUNT chunks of x, [COUNT][RUNS][tokens].
template <Gemm S, int COUNT>
DEVICE void copy_x_scales(float* to, const float* x_scale, int first_token, int tokens, int chunk) {
  constexpr int TOKENS = Shape<S>::TOKENS, RUNS = Shape<S>::RUNS;
  shared_out<COUNT * RUNS * TOKENS, Shape<S>::THREADS>([&](int i) {
    int token = i % TOKENS, run = i / TOKENS % RUNS, c = i / TOKENS / RUNS;
    bool there = first_token + token < tokens && chunk + c < Shape<S>::CHUNKS;
    int64_t at = int64_t{first_token + token} * S.x_scale_stride + Shape<S>::group_of(chunk + c, run);
    copy_async<4>(to + i, there ? x_scale + at : x_scale, there);
  });
}

// Stages in shared memory, each read once the copies into it are there, and then filled again.
template <Gemm S, int BYTES>
class Stages {
 public:
  DEVICE explicit Stages(uint8_t* first)
      : first_(first), now_(first), before_(first + (S.stages - 1) * BYTES) {}
  DEVICE uint8_t* now() const { return now_; }
  DEVICE uint8_t* before() const { return before_; }
  DEVICE void next() {
    before_ = now_;
    now_ = now_ == first_ + (S.stages - 1) * BYTES ? first_ : now_ + BYTES;
  }

 private:
  uint8_t *first_, *now_, *before_;
};

DEVICE float silu(float x) { return divide(x, 1.0f + exp2_fast(-x * LOG2E)); }
DEVICE float gelu_tanh(float x) {
  float inner = 0.7978845608028654f * fma(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + tanh_of(inner));
}

// (up + 1) g sigmoid(1.702 g), g at most 7 and up in ±7; NaN stays NaN.
DEVICE float clamped_swiglu(float gate, float up) {
  float g = gate > 7.0f ? 7.0f : gate, u = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
  return (u + 1.0f) * divide(g, 1.0f + exp2_fast(-1.702f * LOG2E * g));
}

// Finish::affine of a step in which rows have adapters, from y = sums · scales: y · gain + bias + delta. Out
// of line, since it would double the code of a kernel for many tokens.
template <bool BIAS, int OUTPUTS>
COLD Words4 adapt(AdaptedRows adapted, int token, int n, int first, const float* bias, Words4 words) {
  float y[4] = {float_of_bits(words.x), float_of_bits(words.y), float_of_bits(words.z),
                float_of_bits(words.w)};
  const AdaptedRows::Row added = adapted.row(token);
  UNROLL
  for (int i = 0; i < 4; ++i) {
    const int feature = first + (n + i < OUTPUTS ? n + i : OUTPUTS - 1);
    if (added.gain != nullptr) y[i] *= added.gain[feature];
    if constexpr (BIAS) y[i] += bias[feature];
    if (added.delta != nullptr) y[i] += added.delta[feature];
  }
  return words_of(y);
}

// What becomes of sums on their way to memory. scale, bias: [features].
template <Gemm S>
struct Finish {
  const float *x_scale, *scale, *bias;
  stored_t<S.type>* out;
  AdaptedRows adapted;

  // Outputs n … n + 3 of a token; ups: the second sums of a gated epilogue.
  DEVICE void put(int token, int n, const sum_t<S> (&sums)[4], const sum_t<S> (&ups)[4]) const {
    if (n >= S.outputs()) return;
    float y[4], up_of[4];
    affine(y, token, n, 0, sums);
    if constexpr (S.gated()) {
      affine(up_of, token, n, S.outputs(), ups);
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const float up = up_of[i];
        if constexpr (S.epilogue == Epilogue::swiglu_clamped)
          y[i] = clamped_swiglu(y[i], up);
        else
          y[i] = (S.epilogue == Epilogue::swiglu ? silu(y[i]) : gelu_tanh(y[i])) * up;
      }
    }
    stored_t<S.type>* to = out + int64_t{token} * S.out_stride + n;
    if (n + 4 <= S.outputs()) {
      if constexpr (S.type == Type::bf16)
        *reinterpret_cast<Words2*>(to) = {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])};
      else
        store16(to, words_of(y));
    } else {
      UNROLL
      for (int i = 0; i < 3; ++i)
        if (n + i < S.outputs()) to[i] = from_float<stored_t<S.type>>(y[i]);
    }
    if (S.padded > S.outputs() && n + 4 >= S.outputs())  // zeros that the next GEMM reads
      for (int i = S.outputs() - n; i < S.padded - n; ++i) to[i] = from_float<stored_t<S.type>>(0.0f);
  }

 private:
  // y of features first + n …; for those after the last output, of any that is there.
  DEVICE void affine(float (&y)[4], int token, int n, int first, const sum_t<S> (&sums)[4]) const {
    int features[4];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      features[i] = first + (n + i < S.outputs() ? n + i : S.outputs() - 1);
      y[i] = static_cast<float>(sums[i]);
      if constexpr (S.x_codes() && !S.grouped()) y[i] *= x_scale[int64_t{token} * S.x_scale_stride];
      if constexpr (S.row_scales()) y[i] *= scale[features[i]];
    }
    if (adapted.at != nullptr) {
      const Words4 changed = adapt<S.bias, S.outputs()>(adapted, token, n, first, bias, words_of(y));
      y[0] = float_of_bits(changed.x), y[1] = float_of_bits(changed.y);
      y[2] = float_of_bits(changed.z), y[3] = float_of_bits(changed.w);
      return;
    }
    if constexpr (S.bias) {
      UNROLL
      for (int i = 0; i < 4; ++i) y[i] += bias[features[i]];
    }
  }
};

}  // namespace enginewright
