// paged_attention@1: attention of a ragged batch over paged KV (attention_split.h has the arithmetic).
//
// q: bf16 [tokens, heads * head_dim]; key, value: planes (kv.h); query_start: i32
// [sequences + 1]; kv_len: i32 [sequences]; block_table: i32 [sequences, blocks]; out: f32 or bf16 [tokens,
// heads * head_dim]; partials: f32 [splits, heads * (dim_pad + 16)], this kernel's own memory, with a row for
// each split of the longest sequence. The query at position p sees max(0, p - window + 1) … p + lookahead, as
// far as there are keys; window 0 is all. Where lookahead is not 0, a sequence's tokens are all in the step.
// sinks?: f32 [heads], a logit of each head that belongs to no position and joins the softmax's sum, when all
// splits are combined: what a split gives does not depend on it.
//
// latent_attention@1: the same where all heads share one vector a position, the plane `latent`, which is the
// key, and whose first value_dim columns are the value; out: [tokens, heads * value_dim].
//
// Two schedules with the same bits. As a rule an item is a tile of a sequence, rows of its queries that share
// a KV head, with all splits; threads take the next item when they are done with one. Where a sequence with
// one new token is a large part of the step's work, threads share its splits instead, leave partial rows in
// `partials`, and combine them afterwards.
#pragma once

#include <optional>

#include "attention_i8.h"
#include "attention_latent.h"
#include "attention_tile.h"
#include "attention_u4.h"
#include "kv.h"
#include "operands.h"
#include "rows.h"

namespace enginewright {
namespace {

// Split: SplitAttention<S>, or another with the same members; its Element says what the planes hold.
template <class S, class Split>
class PagedAttention final : public Kernel {
  using Query = typename Split::Query;
  using Element = typename Split::Element;
  static constexpr bool scaled = sizeof(Element) == 1;

 public:
  PagedAttention(const Operands& operands, const Attributes& attributes)
      : q_(matrix(operands, "q", DType::bf16)),
        out_(float_matrix(operands, "out")),
        partials_(matrix(operands, "partials", DType::f32)),
        query_start_(step_input(operands, "query_start")),
        kv_len_(step_input(operands, "kv_len")),
        block_table_(step_input(operands, "block_table")),
        heads_(integer(attributes, "heads", 1, 1 << 16)),
        kv_heads_(Split::latent ? 1 : integer(attributes, "kv_heads", 1, 1 << 16)),
        head_dim_(integer(attributes, "head_dim", 1, 1 << 16)),
        value_dim_(Split::latent ? integer(attributes, "value_dim", 1, head_dim_) : head_dim_),
        keys_(cache_plane(operands, Split::latent ? "latent" : "key")),
        values_(cache_plane(operands, Split::latent ? "latent" : "value")),
        window_(Split::latent ? 0 : integer(attributes, "window", 0, int64_t{1} << 31)),
        lookahead_(attributes.count("lookahead") == 0  // as in engines of before there was one
                       ? 0
                       : integer(attributes, "lookahead", 0, int64_t{1} << 31)),
        group_(heads_ / kv_heads_),
        code_bytes_(keys_.code_bytes()),
        sinks_(operands.count("sinks") == 0 ? nullptr
                                            : vector_weight(operands, "sinks", heads_).as<const float>()),
        split_(head_dim_, keys_.dim_pad, static_cast<float>(number(attributes, "scale")),
               Split::latent ? 0.0f : static_cast<float>(number(attributes, "softcap"))) {
    if (Split::latent) {
      require_known(operands, attributes,
                    {"q", "latent", "query_start", "kv_len", "block_table", "partials", "out"},
                    {"heads", "head_dim", "value_dim", "scale"});
    } else {
      require_known(operands, attributes,
                    {"q", "key", "value", "query_start", "kv_len", "block_table", "sinks", "partials", "out"},
                    {"heads", "kv_heads", "head_dim", "scale", "window", "lookahead", "softcap"});
      require(number(attributes, "softcap") >= 0, "the attribute 'softcap' must not be negative");
    }
    require(heads_ % kv_heads_ == 0, "'kv_heads' does not divide 'heads'");
    require(head_dim_ % 2 == 0, "attention needs an even 'head_dim'");
    require_planes(keys_, values_, kv_heads_, head_dim_);
    require(number(attributes, "scale") > 0, "the attribute 'scale' must be positive");
    require(keys_.block_size % kStepPositions == 0 && kSplitPositions % keys_.block_size == 0,
            "KV blocks must hold 32, 64, 128 or 256 positions");
    while (int64_t{1} << block_shift_ < keys_.block_size) ++block_shift_;
    require_same_rows(q_, out_);
    require_columns(q_, heads_ * head_dim_);
    require_columns(out_, heads_ * value_dim_);
    require_columns(partials_, heads_ * row_floats());
  }

  void add_checks(StepChecks& checks) const override {
    checks.block_tables.push_back(
        {query_start_, kv_len_, block_table_, partials_, keys_.block_size, keys_.num_blocks, window_});
  }

  int64_t scratch_bytes() const override {
    return Split::tile_rows * (2 * row_floats() * 4 + kSplitPositions * 6) + q_rows() * q_bytes() +
           round_up(kv_heads_ * tiles_of(1) * static_cast<int64_t>(sizeof(Tile)), 64) +
           split_.scratch_bytes();
  }

  // KV that several queries of a sequence see counts once.
  Work work(const Sizes& sizes) const override {
    Work work = touched({&q_, &out_}, sizes);
    int64_t seen = 0;  // positions, by all queries
    for (int64_t s = 0; s < sizes[kSequences]; ++s) {
      for (int64_t p = kv_len(s) - tokens(s); p < kv_len(s); ++p) seen += last_seen(s, p) + 1 - first_seen(p);
      work.kv_bytes +=
          positions_seen(s) * (keys_.token_bytes() + (Split::latent ? 0 : values_.token_bytes()));
    }
    (sizeof(Query) == 1 ? work.int8_ops : work.bf16_ops) = 2 * seen * heads_ * (head_dim_ + value_dim_);
    work.fp32_ops = 5 * seen * heads_;  // the softmax: scale, maximum, difference, power, sum
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    int64_t work = 0;
    for (int64_t s = 0; s < sizes[kSequences]; ++s) work += kv_heads_ * tiles(s) * positions_seen(s);
    bool first = true;
    for (int64_t s = 0; s < sizes[kSequences]; ++s) {
      if (!is_shared(s, work, worker)) continue;
      if (!first) worker.sync();  // partials are free again
      first = false;
      run_shared(s, worker);
    }
    run_items(sizes, work, worker);
    split_.end();
  }

 private:
  // Items as large as a sequence's must be this many a thread, or its splits are shared.
  static constexpr int64_t kItemsPerThread = 8;

  using Tile = TileQueries<Query>;
  struct Scratch {
    TileScratch tile;
    float *total, *next;  // (tile_rows, row_floats)
    std::byte* q;         // (q_rows, q_bytes)
    Tile* tiles;          // all of one token
  };
  Scratch scratch(const Worker& worker) const {
    Scratch scratch{};
    scratch.total = reinterpret_cast<float*>(worker.scratch);
    scratch.next = scratch.total + Split::tile_rows * row_floats();
    scratch.tile.scores = scratch.next + Split::tile_rows * row_floats();
    scratch.tile.p = reinterpret_cast<uint16_t*>(scratch.tile.scores + Split::tile_rows * kSplitPositions);
    scratch.q = reinterpret_cast<std::byte*>(scratch.tile.p + Split::tile_rows * kSplitPositions);
    scratch.tiles = reinterpret_cast<Tile*>(scratch.q + q_rows() * q_bytes());
    scratch.tile.own = worker.scratch + scratch_bytes() - split_.scratch_bytes();
    return scratch;
  }

  int64_t q_rows() const { return heads_ < Split::tile_rows ? Split::tile_rows : heads_; }
  int64_t q_bytes() const { return 2 * keys_.dim_pad; }  // int8 has zeros in the second half
  int64_t row_floats() const { return partial_floats(keys_.dim_pad); }
  int64_t first_token(int64_t s) const { return query_start_.as<const int32_t>()[s * query_start_.stride]; }
  int64_t tokens(int64_t s) const { return first_token(s + 1) - first_token(s); }
  int64_t kv_len(int64_t s) const { return kv_len_.as<const int32_t>()[s * kv_len_.stride]; }
  int64_t first_seen(int64_t position) const {
    return window_ == 0 || position < window_ ? 0 : position - window_ + 1;
  }
  int64_t last_seen(int64_t s, int64_t position) const {
    return position + lookahead_ < kv_len(s) ? position + lookahead_ : kv_len(s) - 1;
  }
  int64_t positions_seen(int64_t s) const { return kv_len(s) - first_seen(kv_len(s) - tokens(s)); }

  // Tiles of a sequence and a KV head: rows are numbered token * group + head in the group.
  int64_t tiles_of(int64_t tokens) const {
    return (tokens * group_ + Split::tile_rows - 1) / Split::tile_rows;
  }
  int64_t tiles(int64_t s) const { return tiles_of(tokens(s)); }
  int64_t tile_begin(int64_t s, int64_t tile) const { return tokens(s) * group_ * tile / tiles(s); }

  bool is_shared(int64_t s, int64_t work, const Worker& worker) const {
    return worker.count > 1 && tokens(s) == 1 && positions_seen(s) > kSplitPositions &&
           positions_seen(s) * kItemsPerThread * worker.count > work;
  }

  void run_shared(int64_t s, Worker& worker) const {
    const Scratch mine = scratch(worker);
    const int64_t last = kv_len(s) - 1, low = first_seen(last), first_split = low / kSplitPositions;
    const int64_t splits = last / kSplitPositions + 1 - first_split;
    const int64_t parts = kv_heads_ * tiles(s);
    const Range items = share(splits * parts, worker);
    const auto first_head = [&](int64_t part) {  // of a part's rows
      return part / tiles(s) * group_ + tile_begin(s, part % tiles(s));
    };
    for (int64_t part = 0; part < parts; ++part) {
      mine.tiles[part] = queries(s, part / tiles(s), part % tiles(s), mine.q + first_head(part) * q_bytes());
    }
    const auto kv_of = [&](int64_t item) {
      return split_kv(s, item % parts / tiles(s), low, last, first_split + item / parts);
    };
    Ahead<S> ahead;
    for (int64_t item = items.begin; item < items.end; ++item) {
      const int64_t split = item / parts, part = item % parts;
      if (item == items.begin || part == 0) {  // this thread's heads of the next split
        const int64_t left = items.end - (split + 1) * parts;
        const int64_t heads = left < parts ? (left + tiles(s) - 1) / tiles(s) : kv_heads_;
        look_ahead(s, 0, heads, low, last, first_split + split + 1, ahead);
      }
      SplitKv<Element> kv = kv_of(item);
      kv.set_next(item + 1 < items.end ? kv_of(item + 1) : kv);
      split_.begin(mine.tiles[part].rows);
      split_.run(mine.tiles[part], kv, mine.tile, ahead, partial(split, first_head(part)));
    }
    worker.sync();
    const Range heads = share(heads_, worker);
    for (int64_t split = 1; split < splits; ++split) {  // in sweeps over heads, which wait for nothing
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        split_.combine(partial(0, head), partial(split, head));
      }
    }
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      write(first_token(s), head, partial(0, head));
    }
  }
  float* partial(int64_t split, int64_t head) const {
    return partials_.as<float>() + split * partials_.stride + head * row_floats();
  }

  // A tile of a sequence and a KV head, with all its splits.
  struct Item {
    int64_t s, kv_head, tile;
  };

  // Threads take the next item while they have one to work on, to fetch its KV in time.
  void run_items(const Sizes& sizes, int64_t work, Worker& worker) const {
    int64_t s = 0, begin = 0;  // item number of the sequence's first
    const auto take = [&]() -> std::optional<Item> {
      const int64_t number = __atomic_fetch_add(&next_item_, 1, __ATOMIC_RELAXED);
      for (; s < sizes[kSequences]; ++s) {
        const int64_t count = is_shared(s, work, worker) ? 0 : kv_heads_ * tiles(s);
        if (number < begin + count) break;
        begin += count;
      }
      if (s == sizes[kSequences]) return std::nullopt;
      // The last queries see the most: first.
      return Item{s, (number - begin) / tiles(s), tiles(s) - 1 - (number - begin) % tiles(s)};
    };
    const Scratch mine = scratch(worker);
    for (std::optional<Item> item = take(); item;) {
      const std::optional<Item> next = take();
      run_item(*item, next, mine);
      item = next;
    }
    // Who leaves last makes the counter ready for the next step: nobody takes items any more.
    if (__atomic_add_fetch(&threads_done_, 1, __ATOMIC_ACQ_REL) == worker.count) {
      __atomic_store_n(&next_item_, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&threads_done_, 0, __ATOMIC_RELAXED);
    }
  }

  // The positions that an item's queries see.
  Range seen(const Item& item) const {
    const int64_t past = kv_len(item.s) - tokens(item.s);
    const int64_t first = tile_begin(item.s, item.tile), last = tile_begin(item.s, item.tile + 1) - 1;
    return {first_seen(past + first / group_), last_seen(item.s, past + last / group_) + 1};
  }

  // `following` is worth fetching if its KV is not that of `item`.
  void run_item(const Item& item, const std::optional<Item>& following, const Scratch& mine) const {
    const auto [s, kv_head, tile_index] = item;
    const Tile tile = queries(s, kv_head, tile_index, mine.q);
    const int64_t low = tile.low[0], high = tile.high[tile.rows - 1];
    const int64_t first = low / kSplitPositions, last = high / kSplitPositions;
    const bool fetches = following && (following->s != s || following->kv_head != kv_head);
    SplitKv<Element> kv = split_kv(s, kv_head, low, high, first);
    Ahead<S> ahead;
    split_.begin(tile.rows);
    for (int64_t split = first; split <= last; ++split) {
      SplitKv<Element> next = kv;
      if (split < last) {
        next = split_kv(s, kv_head, low, high, split + 1);
        look_ahead(s, kv_head, 1, low, high, split + 1, ahead);
      } else if (fetches) {
        const Range theirs = seen(*following);
        look_ahead(following->s, following->kv_head, 1, theirs.begin, theirs.end - 1,
                   theirs.begin / kSplitPositions, ahead);
      } else {
        ahead.start(0);
      }
      kv.set_next(next);
      split_.run(tile, kv, mine.tile, ahead, split == first ? mine.total : mine.next);
      for (int64_t r = 0; split > first && r < tile.rows; ++r) {
        split_.combine(mine.total + r * row_floats(), mine.next + r * row_floats());
      }
      kv = next;
    }
    const int64_t begin = tile_begin(s, tile_index);
    int64_t token = first_token(s) + begin / group_, member = begin % group_;
    for (int64_t r = 0; r < tile.rows; ++r) {
      write(token, kv_head * group_ + member, mine.total + r * row_floats());
      if (++member == group_) member = 0, ++token;
    }
  }

  // A tile's queries, copied to `q`, zeros in the pad dims.
  Tile queries(int64_t s, int64_t kv_head, int64_t tile_index, std::byte* q) const {
    const int64_t begin = tile_begin(s, tile_index);
    Tile tile{};
    tile.q = reinterpret_cast<Query*>(q);
    tile.rows = tile_begin(s, tile_index + 1) - begin;
    int64_t token = begin / group_, member = begin % group_;
    for (int64_t r = 0; r < tile.rows; ++r) {
      const uint16_t* from = q_.as<const uint16_t>() + (first_token(s) + token) * q_.stride +
                             (kv_head * group_ + member) * head_dim_;
      split_.put_query(from, head_dim_, r, tile);
      const int64_t position = kv_len(s) - tokens(s) + token;
      tile.low[r] = first_seen(position);
      tile.high[r] = last_seen(s, position);
      if (++member == group_) member = 0, ++token;
    }
    return tile;
  }

  // The part of a split that a tile sees, whose queries see positions from low to high. Nothing is read of a
  // block outside of it, nor of its entry.
  SplitKv<Element> split_kv(int64_t s, int64_t kv_head, int64_t low, int64_t high, int64_t split) const {
    const int32_t* blocks = block_table_.as<const int32_t>() + s * block_table_.stride;
    SplitKv<Element> kv{};
    kv.begin = split * kSplitPositions;
    if (kv.begin < low) kv.begin = low / kStepPositions * kStepPositions;
    const int64_t split_end = (split + 1) * kSplitPositions;
    const int64_t end = high < split_end ? (high / kStepPositions + 1) * kStepPositions : split_end;
    const int64_t mask = keys_.block_size - 1;  // a power of two, which divides a split
    for (int64_t at = kv.begin; at < end; at += kGroup) {
      const int64_t start = blocks[at >> block_shift_] * keys_.block_stride + kv_head * keys_.tile_bytes;
      const std::byte *keys = keys_.data + start, *values = values_.data + start;
      const int64_t row = at & mask, numbers = row * keys_.number_bytes;
      kv.keys[kv.groups] = reinterpret_cast<const Element*>(keys + numbers);
      kv.values[kv.groups] = reinterpret_cast<const Element*>(values + numbers);
      if constexpr (scaled) {
        const int64_t scales = code_bytes_ + row * keys_.scale_bytes;
        kv.key_scales[kv.groups] = reinterpret_cast<const float*>(keys + scales);
        kv.value_scales[kv.groups] = reinterpret_cast<const float*>(values + scales);
      }
      ++kv.groups;
    }
    return kv;
  }

  // `heads` KV heads of what split_kv() leads to; none where `split` is after the sequence, or heads < 1.
  void look_ahead(int64_t s, int64_t kv_head, int64_t heads, int64_t low, int64_t high, int64_t split,
                  Ahead<S>& ahead) const {
    const int32_t* blocks = block_table_.as<const int32_t>() + s * block_table_.stride;
    const int64_t start = split * kSplitPositions, split_end = start + kSplitPositions;
    const int64_t begin = start < low ? low : start, end = high < split_end ? high + 1 : split_end;
    ahead.start(heads * keys_.tile_bytes);
    if (heads < 1 || begin >= end) return;
    for (int64_t block = begin >> block_shift_; block << block_shift_ < end; ++block) {
      const int64_t at = blocks[block] * keys_.block_stride + kv_head * keys_.tile_bytes;
      ahead.add(keys_.data + at);
      if (!Split::latent) ahead.add(values_.data + at);
    }
  }

  // out[token, head] = o / sum. The added zero turns -0 into 0: the sign of a zero is all that positions
  // after a query could change.
  void write(int64_t token, int64_t head, const float* partial) const {
    const RowWriter<S> row(out_, token);
    const auto inverse = sinks_ == nullptr ? S::set1(1.0f / partial[keys_.dim_pad + 1])
                                           : split_.inverse_with_sink(sinks_[head], partial);
    const auto value = [&](int64_t i) { return S::fma(S::load(partial + i), inverse, S::zero()); };
    int64_t i = 0;
    for (; i + 16 <= value_dim_; i += 16) row.put(head * value_dim_ + i, value(i));
    if (i < value_dim_) row.put_first(head * value_dim_ + i, value(i), value_dim_ - i);
    if (head == heads_ - 1) row.zero_pad(out_);
  }

  const Operand q_, out_, partials_, query_start_, kv_len_, block_table_;
  const int64_t heads_, kv_heads_, head_dim_, value_dim_;
  const CachePlane keys_, values_;
  const int64_t window_, lookahead_, group_, code_bytes_;
  const float* const sinks_;  // null: none
  int block_shift_ = 0;       // log2 of the block size
  const Split split_;
  mutable int64_t next_item_ = 0, threads_done_ = 0;  // of the step in progress
};

// The Split for each dtype of planes, by dot products of bf16. Fp8: for a code of codes.h.
template <class S>
struct DotSplits {
  using Bf16 = SplitAttention<S>;
  using I8 = SplitAttentionI8<S>;
  template <class Code>
  using Fp8 = SplitAttention<S, Fp8Lines<S, Code>>;
};

// The kernel for what the planes hold. Splits: DotSplits<S>, or another with the same members.
template <class S, class Splits = DotSplits<S>>
std::unique_ptr<Kernel> make_attention(const Operands& operands, const Attributes& attributes) {
  const DType dtype = operand(operands, "key").dtype;
  std::unique_ptr<Kernel> kernel;
  with_fp8(dtype, [&](auto code) {
    using Split = typename Splits::template Fp8<decltype(code)>;
    kernel = make_kernel<PagedAttention<S, Split>>(operands, attributes);
  });
  if (kernel != nullptr) return kernel;
  switch (dtype) {
    case DType::i8:
      return make_kernel<PagedAttention<S, typename Splits::I8>>(operands, attributes);
    case DType::u4:
      return make_kernel<PagedAttention<S, U4Split<S, typename Splits::Bf16>>>(operands, attributes);
    default:
      return make_kernel<PagedAttention<S, typename Splits::Bf16>>(operands, attributes);
  }
}

// The same where values are columns of keys.
template <class S, class Splits = DotSplits<S>>
std::unique_ptr<Kernel> make_latent_attention(const Operands& operands, const Attributes& attributes) {
  require(operand(operands, "latent").dtype == DType::bf16, "latent vectors are stored as bf16");
  return make_kernel<PagedAttention<S, LatentSplit<S, typename Splits::Bf16>>>(operands, attributes);
}

}  // namespace
}  // namespace enginewright
