// What adapters change (csrc/cpu/adapters.h has the mathematics), as the runtime lays it out in one piece of
// GPU memory (runtime/device/cuda/adapters.py): for each matrix product a SiteCall, then for each slot a
// SiteChange for each site, its pieces and their numbers. Places in this memory are bytes from its start, and
// 0, where a SiteCall is, stands for what is not there.
#pragma once

#include "dtype.cuh"

namespace enginewright {

// Rows [begin, begin + count) of a site's weight, to which B adds. B reads numbers [first_rank, first_rank +
// rank) of A x; rank 0: no B, only the bias.
struct AdapterPiece {
  int64_t b, b_scale;  // r16_columns [count, rank]: bf16, or i8 with a scale for each row, f32 [count]
  int32_t begin, count, rank, first_rank;
};

// What the adapter of a slot changes of a site.
struct SiteChange {
  int64_t a, a_scale;  // r16_columns [rank, columns of the site]: bf16, or i8 with f32 [rank]
  int64_t pieces;      // ascending, together all rows of the site
  int64_t bias, gain;  // f32 [rows of the site]
  int32_t rank;        // rows of A, a multiple of 16
  int32_t num_pieces;  // 0: nothing is changed
};

// Constants of a product at a site. Strides are elements from one row to the next.
struct SiteCall {
  int64_t self;                                      // place of this
  int64_t changes;                                   // place of the site's change in slot 0
  int64_t slot_bytes;                                // from one slot to the next
  int32_t columns, x_stride, x_scale_stride, group;  // group: columns that share a scale of x; 0: all
  int32_t max_rank;  // rows of A at most, a multiple of 16: numbers of a split in a row of shrunk
  int32_t shrunk_stride, delta_stride;
  int32_t unused;
};

// The changes at a site. at: its SiteCall.
struct Adapters {
  const uint8_t* at;

  DEVICE const SiteCall& call() const { return *reinterpret_cast<const SiteCall*>(at); }
  template <class T>
  DEVICE const T* place(int64_t bytes) const {
    return reinterpret_cast<const T*>(at - call().self + bytes);
  }
  DEVICE const SiteChange& change(int slot) const {
    return *place<SiteChange>(call().changes + slot * call().slot_bytes);
  }
};

// What a GEMM's epilogue adds to its rows. at: null if no row of the step has an adapter.
struct AdaptedRows {
  const uint8_t* at;
  const int32_t* slots;  // of each row; -1: it has no adapter
  const float* delta;    // [rows, N]

  // A row's.
  struct Row {
    const float *delta = nullptr, *gain = nullptr;  // [N]; null: 0, and 1
  };
  DEVICE Row row(int index) const {
    Row found;
    if (at == nullptr) return found;
    const int slot = slots[index];
    if (slot < 0) return found;
    const Adapters adapters{at};
    const SiteChange& change = adapters.change(slot);
    if (change.num_pieces == 0) return found;
    found.delta = delta + int64_t{index} * adapters.call().delta_stride;
    if (change.gain != 0) found.gain = adapters.place<float>(change.gain);
    return found;
  }
};

}  // namespace enginewright
