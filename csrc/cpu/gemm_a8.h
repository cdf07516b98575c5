// GEMM with int8 activations, weights i8, u4 or e2m1, for any instruction set (gemm_operands.h has the
// shapes).
//
// The sum of products of a run of K is an integer, exact in any order, so that every way through the weights
// gives the same bits, on every instruction set with one FMA; what follows it is fp32 in one order.
//
//   few tokens   weights pass once, as they come from memory
//   many tokens  a piece of K of a few blocks of weights after the other: the first tokens that pass it leave
//                it where it stays in L1, as dots want it (4 bits become a byte), for the others of a panel,
//                while their sums wait in scratch
//
// Where dots want more of x than its bytes (S::KeptI8, S::KeptU4), each thread makes that of a panel once:
// the tokens of a tile side by side, as they meet a line of weights, which also spares L1 rows a power of 2
// apart.
//
// The dots of a run sum to more than they should by its excess, which depends on x alone: codes of u4 are
// larger than their numbers by their zero, those that e2m1 becomes by 12, and S::dot_i8 has an excess of its
// own. A sum therefore begins with -excess.
#pragma once

#include <type_traits>
#include <utility>

#include "gemm_epilogue.h"
#include "gemm_operands.h"
#include "memory.h"
#include "operands.h"

namespace enginewright {
namespace {

// How weights lie in memory: `lines` lines of 16 rows x 4 of K in every 64 bytes.
template <class S>
struct I8Codes {
  using Line = typename S::Line;
  using Kept = typename S::KeptI8;
  using Pairs = void;
  static constexpr auto& streams = S::i8_streams;
  static constexpr DType dtype = DType::i8;
  static constexpr int lines = 1;
  static constexpr bool scaled = false;  // by runs
  static ENGINEWRIGHT_INLINE void load(const std::byte* p, Line (&w)[lines]) { w[0] = S::load_i8(p); }
  static ENGINEWRIGHT_INLINE typename S::I dot(typename S::I acc, Line w, typename S::Bytes4 x) {
    return S::dot_i8(acc, w, x);
  }
  static ENGINEWRIGHT_INLINE int32_t excess(const int8_t* x, int64_t n) { return S::excess_i8(x, n); }
};

template <class S>
struct U4Codes {
  using Line = typename S::Line;
  using Kept = typename S::KeptU4;
  using Pairs = typename S::Pairs;
  static constexpr auto& streams = S::u4_streams;
  static constexpr DType dtype = DType::u4;
  static constexpr int lines = 2;
  static constexpr bool scaled = true;
  static constexpr int32_t zero = 8, largest = 15;
  static ENGINEWRIGHT_INLINE void load(const std::byte* p, Line (&w)[lines]) { S::expand_u4(p, w[0], w[1]); }
  template <class Sums>
  static ENGINEWRIGHT_INLINE Sums dot(Sums sums, Line w, typename S::Bytes4 x) {
    return S::dot_u4(sums, w, x);
  }
  static ENGINEWRIGHT_INLINE int32_t excess(const int8_t* x, int64_t n) { return zero * S::sum_i8(x, n); }
};

template <class S>
struct E2m1Codes {
  using Line = typename S::Line;
  using Kept = typename S::KeptU4;
  using Pairs = typename S::Pairs;
  static constexpr auto& streams = S::u4_streams;
  static constexpr DType dtype = DType::e2m1;
  static constexpr int lines = 2;
  static constexpr bool scaled = true;
  static constexpr int32_t zero = 12, largest = 24;
  // Twice the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, and 12 more.
  alignas(16) static constexpr uint8_t doubled[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                      12, 11, 10, 9,  8,  6,  4,  0};
  static ENGINEWRIGHT_INLINE void load(const std::byte* p, Line (&w)[lines]) {
    S::expand_u4(p, w[0], w[1]);
    ENGINEWRIGHT_UNROLL
    for (int i = 0; i < lines; ++i) w[i] = S::lookup16(doubled, w[i]);
  }
  template <class Sums>
  static ENGINEWRIGHT_INLINE Sums dot(Sums sums, Line w, typename S::Bytes4 x) {
    return S::dot_u4(sums, w, x);
  }
  static ENGINEWRIGHT_INLINE int32_t excess(const int8_t* x, int64_t n) { return zero * S::sum_i8(x, n); }
};

template <class S, class Codes>
class GemmA8 {
 public:
  static constexpr DType x_dtype = DType::i8, weight_dtype = Codes::dtype;
  static constexpr int64_t Work::* operations = &Work::int8_ops;
  explicit GemmA8(const GemmOperands& g)
      : g_(g),
        finish_(g_),
        k_end_(g_.groups * g_.group < g_.k_pad ? g_.groups * g_.group : g_.k_pad),
        piece_bytes_(l1_bytes() / 256 * 192),
        piece_k_(g_.groups == 1 ? piece_of(64, piece_bytes_ / 16 / kBlocks)
                                : piece_of(g_.group, piece_bytes_ / 16 / kRunBlocks)) {}

  int64_t scratch_bytes() const {
    const int64_t tokens = panel_tokens(), kept = kKeeps ? kFourBytes * g_.k_pad / 4 : 0;
    return piece_bytes_ + tokens * (kMaxBlocks * 64 + kept) +
           tokens / tile_tokens() * g_.groups * int64_t{sizeof(Run)};
  }
  int64_t passes(int64_t tokens) const { return (tokens + panel_tokens() - 1) / panel_tokens(); }

  void run(int64_t tokens, Range mine, std::byte* scratch) const {
    const int64_t max_tokens = panel_tokens();
    const int64_t begin = mine.begin * g_.unit_blocks, end = mine.end * g_.unit_blocks;
    for (int64_t row = 0; row < tokens; row += max_tokens) {
      const Panel panel = panel_at(row, tokens - row < max_tokens ? tokens - row : max_tokens, scratch);
      if (panel.tokens <= kDirect) {
        few<kDirect>(panel, begin, end);
      } else if (g_.groups == 1) {
        pass_groups<kTokens, kBlocks>(panel, begin, end);
      } else {
        pass_groups<kRunTokens, kRunBlocks>(panel, begin, end);
      }
    }
  }

 private:
  using I = typename S::I;
  using F = typename S::F;
  using Line = typename S::Line;
  static constexpr int kTokens = S::tile_tokens, kBlocks = S::tile_blocks, kLines = Codes::lines;
  static constexpr int64_t kLineK = 4 * kLines;                                 // of K, in 64 bytes
  static constexpr int kRunTokens = S::run_tokens, kRunBlocks = S::run_blocks;  // of several runs
  static constexpr int kDirect = std::size(Codes::streams),
                       kMaxTokens = kDirect > kRunTokens ? kDirect : kRunTokens;
  static constexpr int kMaxBlocks = kBlocks > 2 ? kBlocks : 2;  // whose sums wait
  static constexpr int64_t kPanelBytes = 1 << 19;               // of x: a part of L2
  static constexpr int64_t kPanelTokens = 64;       // at least, though a long K has x come from L3 then
  static constexpr int64_t kPrefetchStream = 4096;  // ahead in the only stream
  static constexpr int64_t kPrefetchBytes = 2048;   // ahead in each of several
  static constexpr int64_t kPrefetchAgain = 256;    // since a core with many lines on their way drops some
  static constexpr int64_t kPrefetchScales = 32;    // runs ahead
  static_assert(kMinL1Bytes / 256 * 192 / 16 / kRunBlocks >= GemmOperands::kLongestGroup);
  static_assert(kRunTokens >= kTokens && kRunBlocks <= kBlocks);

  using Kept = typename Codes::Kept;
  static constexpr bool kKeeps = !std::is_void_v<Kept>;
  static constexpr int64_t four_bytes() {
    if constexpr (kKeeps) return Kept::bytes;
    return 4;
  }
  static constexpr int64_t kFourBytes = four_bytes();  // of x, that meet a line of weights
  // From what a line of a tile of M tokens meets to what the next one does.
  static constexpr int64_t fours(int tokens) { return kKeeps ? tokens * kFourBytes : 4; }

  // Pieces of K of nearly the same length, whole `unit`s, and no longer than `max_piece`.
  int64_t piece_of(int64_t unit, int64_t max_piece) const {
    max_piece = max_piece / unit * unit;
    const int64_t pieces = (k_end_ + max_piece - 1) / max_piece;
    return round_up((k_end_ + pieces - 1) / pieces, unit);
  }

  int64_t tile_tokens() const { return g_.groups == 1 ? kTokens : kRunTokens; }
  // Of a panel: whole tiles.
  int64_t panel_tokens() const {
    const int64_t fit = kPanelBytes / g_.k_pad, rows = fit < kPanelTokens ? kPanelTokens : fit;
    return round_up(g_.x.max_rows < rows ? g_.x.max_rows : rows, tile_tokens());
  }

  // What a tile's tokens have of their own in a run of K.
  struct Run {
    int32_t first[kMaxTokens];  // what sums begin with, or are to be multiplied by zero
    float scale[kMaxTokens];
  };

  struct Panel {
    int64_t row, tokens;
    std::byte* weights;  // (piece_k_ / 4, blocks, 64)
    float* sums;         // of tile after tile, (blocks, tokens of the tile, 16); of a run cut in two, int32
    std::byte* kept;     // of x, of tile after tile, (k_pad / 4, tokens of the tile, kFourBytes)
    Run* runs;           // (tiles, groups)
  };

  Panel panel_at(int64_t row, int64_t tokens, std::byte* scratch) const {
    auto* sums = reinterpret_cast<float*>(scratch + piece_bytes_);
    auto* kept = reinterpret_cast<std::byte*>(sums + tokens * kMaxBlocks * 16);
    std::byte* const runs = kept + (kKeeps ? tokens * g_.k_pad / 4 * kFourBytes : 0);
    const Panel panel{row, tokens, scratch, sums, kept, reinterpret_cast<Run*>(runs)};
    const int64_t tile = tokens <= kDirect ? kDirect : tile_tokens();
    for (int64_t m = 0; m < tokens; ++m) {
      if constexpr (kKeeps) {
        const int64_t first = m / tile * tile, together = tokens - first < tile ? tokens - first : tile;
        Kept::keep(x(row + m), k_end_, kept_at(panel, first, together, 0) + m % tile * kFourBytes,
                   together * kFourBytes);
      }
      const float* scales = g_.x_scale + (row + m) * g_.x_scale_stride;
      for (int64_t g = 0; g < g_.groups; ++g) {
        Run& run = panel.runs[m / tile * g_.groups + g];
        const int8_t* begin = x(row + m) + g * g_.group;
        const int64_t n = depth(g * g_.group, k_end_);
        run.first[m % tile] = g_.group_zero != nullptr ? -S::sum_i8(begin, n) : -Codes::excess(begin, n);
        run.scale[m % tile] = scales[g];
      }
    }
    return panel;
  }

  // What a tile of `tokens` tokens meets from k on.
  std::byte* kept_at(const Panel& panel, int64_t first, int64_t tokens, int64_t k) const {
    return panel.kept + (first * g_.k_pad + k * tokens) / 4 * kFourBytes;
  }
  const std::byte* x_at(const Panel& panel, int64_t first, int64_t tokens, int64_t k) const {
    if constexpr (kKeeps) return kept_at(panel, first, tokens, k);
    return reinterpret_cast<const std::byte*>(x(panel.row + first) + k);
  }
  const int8_t* x(int64_t row) const { return g_.x.as<const int8_t>() + row * g_.x.stride; }
  // Of a run that begins at k, up to `end`.
  int64_t depth(int64_t k, int64_t end) const { return end - k < g_.group ? end - k : g_.group; }

  template <int M>
  static constexpr int kStreams = Codes::streams[M - 1];

  // Lines whose dots Pairs hold, of x from -128 on.
  using Pairs = typename Codes::Pairs;
  static constexpr bool kPairs = !std::is_void_v<Pairs>;
  static constexpr int64_t pair_lines() {
    if constexpr (kPairs) return 32767 / (2 * Codes::largest * 128) / kLines * kLines;
    return 0;
  }

  // acc += the dots of the next `lines` lines of each block, where step(sums) adds those of `at_once`.
  template <int at_once, int M, int N, class Step>
  static ENGINEWRIGHT_INLINE void sum_in_pairs(int64_t lines, I (&acc)[M][N], const Step& step) {
    constexpr int64_t max_lines = pair_lines();
    Pairs pairs[M][N];
    for (; lines >= max_lines; lines -= max_lines) {
      each<M, N>([&](int m, int n) { pairs[m][n] = S::no_pairs(); });
      ENGINEWRIGHT_UNROLL
      for (int i = 0; i < max_lines; i += at_once) step(pairs);
      each<M, N>([&](int m, int n) { acc[m][n] = S::add_pairs(acc[m][n], pairs[m][n]); });
    }
    if (lines == 0) return;
    each<M, N>([&](int m, int n) { pairs[m][n] = S::no_pairs(); });
    for (; lines > 0; lines -= at_once) step(pairs);
    each<M, N>([&](int m, int n) { acc[m][n] = S::add_pairs(acc[m][n], pairs[m][n]); });
  }

  // At least 2 blocks together while there are 2, so that the pairs of a gated epilogue are never divided.
  template <int M>
  void few(const Panel& panel, int64_t block, int64_t end) const {
    if constexpr (M > 1) {
      if (panel.tokens < M) return few<M - 1>(panel, block, end);
    }
    constexpr int blocks = kStreams<M> > 2 ? kStreams<M> : 2;
    if (panel.tokens == M) pass_blocks<M, blocks>(panel, block, end);
  }

  template <int M, int N>
  void pass_blocks(const Panel& panel, int64_t block, int64_t end) const {
    for (; block + N <= end; block += N) direct_tile<M, N>(panel, block);
    if constexpr (N > 1) {
      if (block < end) pass_blocks<M, N / 2>(panel, block, end);
    }
  }

  // The M tokens of a panel past N blocks: past one after the other, or past all at once, as memory is read
  // faster.
  template <int M, int N>
  void direct_tile(const Panel& panel, int64_t block) const {
    float out[N][M][16];
    if constexpr (N <= kStreams<M>) {
      if (!reads_one_stream()) {
        pass<M, N>(panel, block, out);
        return finish_.blocks(panel.row, M, block, N, out[0][0], M * 16);
      }
    }
    for (int n = 0; n < N; ++n) pass<M, 1>(panel, block + n, out + n);
    finish_.blocks(panel.row, M, block, N, out[0][0], M * 16);
  }

  // out = x · weightᵀ of M tokens and N blocks, which come from memory in N streams.
  template <int M, int N>
  ENGINEWRIGHT_INLINE void pass(const Panel& panel, int64_t block, float (*out)[M][16]) const {
    F sums[M][N];
    each<M, N>([&](int m, int n) { sums[m][n] = S::zero(); });
    const std::byte* line = g_.block(block);
    const std::byte* four = x_at(panel, 0, M, 0);
    const std::byte *ahead = line + kPrefetchBytes, *block_end = line + g_.block_bytes;
    for (int64_t g = 0; g < g_.groups; ++g) {
      const Run& run = panel.runs[g];
      I acc[M][N];
      begin(run, block, g, acc);
      const int64_t run_k = depth(g * g_.group, k_end_);
      const auto step = [&](auto& dots_of) __attribute__((always_inline)) {
        if (N > 1 && ahead == block_end) ahead += (N - 1) * g_.block_bytes;  // the next N
        Line w[N][kLines];
        ENGINEWRIGHT_UNROLL
        for (int n = 0; n < N; ++n) {
          if constexpr (N == 1) {
            S::prefetch(line + kPrefetchStream);
          } else {
            S::prefetch_l2(ahead + n * g_.block_bytes);
            S::prefetch(line + n * g_.block_bytes + kPrefetchAgain);
          }
          Codes::load(line + n * g_.block_bytes, w[n]);
        }
        ENGINEWRIGHT_UNROLL
        for (int i = 0; i < kLines; ++i) dots<true>(four + i * fours(M), w, i, dots_of);
        line += 64;
        four += kLines * fours(M);
        ahead += 64;
      };
      if constexpr (kPairs) {
        sum_in_pairs<kLines>(run_k / 4, acc, step);
      } else {
        const std::byte* end = line + run_k / kLineK * 64;
        while (line < end) step(acc);
      }
      fold(acc, run, block, g, sums);
    }
    each<M, N>([&](int m, int n) { S::store(out[n][m], sums[m][n]); });
  }

  // What the sums of run g begin with, of M tokens of a tile and N blocks.
  template <int M, int N>
  ENGINEWRIGHT_INLINE void begin(const Run& run, int64_t block, int64_t g, I (&acc)[M][N]) const {
    ENGINEWRIGHT_UNROLL
    for (int n = 0; n < N; ++n) {
      ENGINEWRIGHT_UNROLL
      for (int m = 0; m < M; ++m) acc[m][n] = S::set1_i(run.first[m]);
      if (!Codes::scaled || g_.group_zero == nullptr) continue;
      const I zero = S::widen_i8(g_.group_zero + ((block + n) * g_.groups + g) * 16);
      ENGINEWRIGHT_UNROLL
      for (int m = 0; m < M; ++m) acc[m][n] = S::mul_i(acc[m][n], zero);
    }
  }

  template <bool hold, int M, int N, int L, class Sums>
  ENGINEWRIGHT_INLINE void dots(const std::byte* fours, const Line (&w)[N][L], int line,
                                Sums (&acc)[M][N]) const {
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      const typename S::Bytes4 four = load_four(fours, m);
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) acc[m][n] = Codes::dot(acc[m][n], w[n][line], four);
      if constexpr (hold) {
        ENGINEWRIGHT_UNROLL
        for (int n = 0; n < N; ++n) S::hold(acc[m][n]);
      }
    }
  }

  ENGINEWRIGHT_INLINE typename S::Bytes4 load_four(const std::byte* fours, int m) const {
    if constexpr (kKeeps) {
      return Kept::load(fours + m * kFourBytes);
    } else {
      return S::load_bytes4(reinterpret_cast<const int8_t*>(fours) + m * g_.x.stride);
    }
  }

  // sums += those of run g, scaled
  template <int M, int N>
  ENGINEWRIGHT_INLINE void fold(const I (&acc)[M][N], const Run& run, int64_t block, int64_t g,
                                F (&sums)[M][N]) const {
    ENGINEWRIGHT_UNROLL
    for (int n = 0; n < N; ++n) {
      F scale{};
      if (Codes::scaled) {
        const uint16_t* scales = g_.group_scale + ((block + n) * g_.groups + g) * 16;
        S::prefetch_l2(scales + kPrefetchScales * 16);
        scale = S::load_bf16(scales);
      }
      ENGINEWRIGHT_UNROLL
      for (int m = 0; m < M; ++m) {
        F sum = S::to_float(acc[m][n]);
        if (Codes::scaled) sum = S::mul(sum, scale);
        sums[m][n] = S::fma(sum, S::set1(run.scale[m]), sums[m][n]);
      }
    }
  }

  // Blocks whose sums are finished together, so that the pairs of a gated epilogue are never divided: a tile
  // has N of them, from `at` on.
  struct Blocks {
    int64_t first;
    int count, at;
    int64_t begin() const { return first + at; }
  };

  // All tokens of a panel, M at least, past the blocks [block, end), M x N at once, then fewer.
  template <int M, int N>
  void pass_groups(const Panel& panel, int64_t block, int64_t end) const {
    constexpr int together = N < 2 ? 2 : N;
    for (; block + together <= end; block += together) {
      for (int at = 0; at < together; at += N) {
        pass_pieces<M, N>(panel, {block, together, at}, block + together < end);
      }
    }
    if constexpr (N > 1) {
      if (block < end) pass_groups<M, N / 2>(panel, block, end);
    } else {
      if (block < end) pass_pieces<M, 1>(panel, {block, 1, 0}, false);
    }
  }

  template <int M, int N>
  void pass_pieces(const Panel& panel, const Blocks& blocks, bool more) const {
    for (int64_t k = 0; k < k_end_; k += piece_k_) {
      const int64_t k_end = k_end_ - k < piece_k_ ? k_end_ : k + piece_k_;
      // The first tiles prefetch a block of the next piece each.
      const std::byte* next =
          k_end < k_end_ ? g_.block(blocks.begin()) + k_end / kLineK * 64 : g_.block(blocks.begin() + N);
      int nexts = k_end < k_end_ || blocks.at + N < blocks.count || more ? N : 0;
      const auto ahead = [&] {
        if (nexts == 0) return static_cast<const std::byte*>(panel.weights);  // is there
        --nexts;
        return std::exchange(next, next + g_.block_bytes);
      };
      tile<M, N, true>(panel, 0, blocks, k, k_end, ahead());
      int64_t m = M;
      for (; m + M <= panel.tokens; m += M) tile<M, N, false>(panel, m, blocks, k, k_end, ahead());
      rest<M - 1, N>(panel, m, blocks, k, k_end, ahead());
    }
  }

  template <int M, int N>
  void rest(const Panel& panel, int64_t m, const Blocks& blocks, int64_t k, int64_t k_end,
            const std::byte* ahead) const {
    if constexpr (M > 0) {
      if (panel.tokens - m < M) return rest<M - 1, N>(panel, m, blocks, k, k_end, ahead);
      tile<M, N, false>(panel, m, blocks, k, k_end, ahead);
    }
  }

  // The next bytes that a tile reads and writes.
  struct Cursor {
    const std::byte* four;   // of x
    const std::byte* from;   // of weights in memory, of the first block
    std::byte* line;         // of weights in L1, of all blocks
    const std::byte* ahead;  // to prefetch
  };

  // Tokens [first, first + M) of the panel, [k, k_end) of K: some runs, or a piece of the only one. A `fresh`
  // tile reads weights from memory, and leaves them to the others. As much of a block is prefetched from
  // `ahead` on.
  template <int M, int N, bool fresh>
  void tile(const Panel& panel, int64_t first, const Blocks& blocks, int64_t k, int64_t k_end,
            const std::byte* ahead) const {
    float* const all = panel.sums + first * blocks.count * 16;  // (count, M, 16)
    float* const waiting = all + blocks.at * M * 16;            // (N, M, 16)
    auto* const cut = reinterpret_cast<int32_t*>(waiting);
    const auto at = [](int m, int n) { return (n * M + m) * 16; };
    const int64_t block = blocks.begin();
    const bool whole = g_.groups > 1;
    Cursor cursor{x_at(panel, first, M, k), g_.block(block) + k / kLineK * 64, panel.weights, ahead};
    F sums[M][N];
    each<M, N>([&](int m, int n) { sums[m][n] = whole && k > 0 ? S::load(waiting + at(m, n)) : S::zero(); });
    int64_t g = k / g_.group;
    const Run* run = panel.runs + first / tile_tokens() * g_.groups + g;
    for (int64_t begin_k = k; begin_k < k_end; begin_k += g_.group, ++g, ++run) {
      I acc[M][N];
      if (whole || k == 0) {
        begin(*run, block, g, acc);
      } else {
        each<M, N>([&](int m, int n) { acc[m][n] = S::load_i(cut + at(m, n)); });
      }
      sum_run<M, N, fresh>(depth(begin_k, k_end), cursor, acc);
      if (!whole && k_end < k_end_) {
        each<M, N>([&](int m, int n) { S::store_i(cut + at(m, n), acc[m][n]); });
        return;
      }
      fold(acc, *run, block, g, sums);
    }
    each<M, N>([&](int m, int n) { S::store(waiting + at(m, n), sums[m][n]); });
    if (k_end == k_end_ && blocks.at + N == blocks.count) {
      finish_.blocks(panel.row + first, M, blocks.first, blocks.count, all, M * 16);
    }
  }

  // acc += the dots of the next `depth` of K of a tile, with which the cursor moves on.
  template <int M, int N, bool fresh>
  ENGINEWRIGHT_INLINE void sum_run(int64_t depth, Cursor& cursor, I (&acc)[M][N]) const {
    constexpr int lines = fresh ? kLines : 1;  // of a block at once
    const auto step = [&](auto& dots_of) __attribute__((always_inline)) {
      S::prefetch_l2(cursor.ahead);
      Line w[N][lines];
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) {
        if constexpr (fresh) {
          Codes::load(cursor.from + n * g_.block_bytes, w[n]);
          ENGINEWRIGHT_UNROLL
          for (int i = 0; i < lines; ++i) S::store_line(cursor.line + (i * N + n) * 64, w[n][i]);
        } else {
          w[n][0] = S::load_line(cursor.line + n * 64);
        }
      }
      ENGINEWRIGHT_UNROLL
      for (int i = 0; i < lines; ++i) dots<kPairs>(cursor.four + i * fours(M), w, i, dots_of);
      cursor.from += 64;
      cursor.line += lines * N * 64;
      cursor.four += lines * fours(M);
      cursor.ahead += lines * 64 / kLines;
    };
    if constexpr (kPairs) {
      sum_in_pairs<lines>(depth / 4, acc, step);
    } else {
      const std::byte* end = cursor.line + depth * N * 16;
      // By itself GCC moves sums from register to register in every pass.
      ENGINEWRIGHT_UNROLL_TWICE
      while (cursor.line < end) step(acc);
    }
  }

  template <int M, int N, class Function>
  static ENGINEWRIGHT_INLINE void each(const Function& f) {
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) f(m, n);
    }
  }

  const GemmOperands& g_;
  const Finish<S> finish_;
  const int64_t k_end_;        // of the last run, with zeros that it may need to be whole lines
  const int64_t piece_bytes_;  // of weights that stay in L1: three quarters of it
  const int64_t piece_k_;      // whole runs, or a piece of the only one
};

template <class S>
using GemmW8A8 = GemmA8<S, I8Codes<S>>;
template <class S>
using GemmW4A8 = GemmA8<S, U4Codes<S>>;
template <class S>
using GemmMxfp4A8 = GemmA8<S, E2m1Codes<S>>;

}  // namespace
}  // namespace enginewright
