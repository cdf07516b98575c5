// The sequences of a step, as kernels find their work in them.
#pragma once

#include "device.cuh"

namespace enginewright {

// A sequence of the step. blocks: its row of the block table. tokens: of this step, the last ones of
// `length`.
struct Sequence {
  const int32_t* blocks;
  int first_token, tokens, length;
};

// Where the sequences of a step are.
struct Step {
  const int32_t *query_start, *kv_len, *block_table;
  int table_width;

  DEVICE int tokens(int i) const { return query_start[i + 1] - query_start[i]; }
  DEVICE Sequence sequence(int i) const {
    return {block_table + int64_t{i} * table_width, query_start[i], tokens(i), kv_len[i]};
  }
};

// warp: the sequence that piece `index` belongs to, if sequence i has count(i) pieces, and its index there.
// -1 if there are not so many; `index` then is what is left.
template <class Count>
DEVICE int find_sequence(int& index, int sequences, Count count) {
  for (int base = 0; base < sequences; base += WARP) {
    int mine = base + lane() < sequences ? count(base + lane()) : 0, end = mine;
    for (int distance = 1; distance < WARP; distance *= 2) {
      int below = shuffle_up(end, distance);
      if (lane() >= distance) end += below;
    }
    if (uint32_t later = ballot(end > index)) {
      int found = first_bit(later);
      index -= shuffle(end - mine, found);
      return base + found;
    }
    index -= shuffle(end, WARP - 1);
  }
  return -1;
}

// A work item of a sequence, -1 if there are not so many. index: of the sequence's. before: items of other
// sequences that are taken apart, if this one is.
struct Item {
  int sequence, index, before;
  bool apart;
};

// warp: of sequences in whole, and then of those that are taken apart: what is short fills up the end.
template <class InWhole, class Apart>
DEVICE Item find_item(int index, int sequences, InWhole items_in_whole, Apart items_apart) {
  int found = find_sequence(index, sequences, items_in_whole), before = index;
  bool apart = found < 0;
  if (apart) found = find_sequence(index, sequences, items_apart);
  return {found, index, before - index, apart};
}

}  // namespace enginewright
