#include "ranks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "memory.h"
#include "sentence.h"

namespace enginewright {

namespace {

constexpr int64_t kLineBytes = 64;
constexpr double kMaxTimeoutS = 1e6;

// Calls copy(offset in `packed`, where it is in the matrix, bytes) for each part of a row in the thread's
// share.
template <class Copy>
void for_each_part(const Gather& gather, int rank, const Worker& worker, Copy copy) {
  const int64_t row_bytes = gather.row_bytes(rank), bytes = gather.bytes(rank);
  if (bytes == 0) return;
  const Range lines = share((bytes + kLineBytes - 1) / kLineBytes, worker);
  const int64_t end = std::min(lines.end * kLineBytes, bytes);
  for (int64_t at = lines.begin * kLineBytes; at < end;) {
    const int64_t row = at / row_bytes, column = at % row_bytes;
    const int64_t part = std::min(row_bytes - column, end - at);
    copy(at, gather.piece(rank) + row * gather.stride_bytes + column, static_cast<size_t>(part));
    at += part;
  }
}

}  // namespace

void pack(const Gather& gather, int rank, std::byte* packed, const Worker& worker) {
  for_each_part(gather, rank, worker, [packed](int64_t at, const std::byte* matrix, size_t bytes) {
    std::memcpy(packed + at, matrix, bytes);
  });
}

void unpack(const Gather& gather, int rank, const std::byte* packed, const Worker& worker) {
  for_each_part(gather, rank, worker, [packed](int64_t at, std::byte* matrix, size_t bytes) {
    std::memcpy(matrix, packed + at, bytes);
  });
}

Ranks::Ranks(int64_t rank, int64_t size, int64_t slot_bytes, double timeout_s)
    : rank_(static_cast<int>(rank)),
      size_(static_cast<int>(size)),
      slot_bytes_(slot_bytes),
      timeout_(static_cast<int64_t>(timeout_s > 0 && timeout_s <= kMaxTimeoutS ? timeout_s * 1e9 : 0)) {
  require(1 <= size && size <= kMaxRanks,
          sentence("the number of ranks must be in 1 … %ld, not %ld", kMaxRanks, size));
  require(0 <= rank && rank < size, sentence("the rank must be in 0 … %ld, not %ld", size - 1, rank));
  require(slot_bytes > 0, sentence("a slot must have bytes, not %ld", slot_bytes));
  checked_mul(checked_mul(slot_bytes, 2), size);
  require(timeout_.count() > 0, "the timeout must be above 0 and at most a million seconds");
}

Waited Ranks::await(const Counter& counter, uint64_t count, const Worker& worker) {
  if (counter.count() >= count) return Waited::reached;
  const auto start = std::chrono::steady_clock::now();
  const Waited waited = counter.wait(count, timeout_, Waiter{pools_, worker.index});
  if (worker.index == 0) {
    const std::chrono::nanoseconds time = std::chrono::steady_clock::now() - start;
    wait_nanoseconds_.fetch_add(time.count(), std::memory_order_relaxed);
  }
  return waited;
}

std::string Ranks::late(int rank) const {
  return sentence("rank %d has not answered for %.6g s", rank,
                  std::chrono::duration<double>(timeout_).count());
}

Ranks::Stats Ranks::take_stats() { return {bytes_sent_.exchange(0), wait_nanoseconds_.exchange(0)}; }

}  // namespace enginewright
