#include "shared_ranks.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "memory.h"
#include "sentence.h"

namespace enginewright {

namespace {

constexpr int64_t kPageBytes = 4096;
constexpr size_t kSentenceBytes = 1024;
enum Failing : uint32_t { kNone, kBeingWritten, kWritten };

}  // namespace

// Zero bytes are the beginning of both.
struct SharedRanks::Board {
  std::atomic<int64_t> size, slot_bytes;  // as the first rank says
  std::atomic<uint32_t> failing;
  char sentence[kSentenceBytes];  // of the failure; ends with a zero byte
};

struct alignas(64) SharedRanks::Station {
  Counter published;
  SeenCores pool;
  std::atomic<uint32_t> present;  // 1: a process is this rank
  struct Slot {                   // what it holds
    uint64_t exchange;
    int64_t bytes;
  };
  alignas(64) Slot slots[2];
};

namespace {

void refuse(const char* why, int error) {
  throw std::invalid_argument(
      sentence("the shared memory of the ranks %s: %s", why, std::generic_category().message(error).c_str()));
}

int64_t slot_stride(int64_t slot_bytes) { return round_up(slot_bytes, kPageBytes); }

// Returns true if `value` is what the first one that called this for the atomic said.
bool agreed(std::atomic<int64_t>& said, int64_t value) {
  int64_t before = 0;
  return said.compare_exchange_strong(before, value) || before == value;
}

}  // namespace

int64_t SharedRanks::bytes_needed(int64_t size, int64_t slot_bytes) {
  static_assert(sizeof(Board) <= kPageBytes, "the stations begin with the second page");
  require(1 <= size && size <= kMaxRanks && slot_bytes > 0, "a group needs ranks, and slots need bytes");
  const int64_t stations = round_up(size * int64_t{sizeof(Station)}, kPageBytes);
  return checked_add(kPageBytes + stations,
                     checked_mul(2 * size, slot_stride(checked_add(slot_bytes, kPageBytes) - kPageBytes)));
}

SharedRanks::SharedRanks(int fd, int64_t rank, int64_t size, int64_t slot_bytes, double timeout_s)
    : Ranks(rank, size, slot_bytes, timeout_s), bytes_(bytes_needed(size, slot_bytes)) {
  struct stat status = {};
  if (fstat(fd, &status) != 0) refuse("cannot be used", errno);
  require(status.st_size >= bytes_,
          sentence("the shared memory of the ranks has %ld bytes, and they need %ld",
                   static_cast<int64_t>(status.st_size), bytes_));
  void* mapped = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) refuse("cannot be mapped", errno);
  memory_ = static_cast<std::byte*>(mapped);
  auto& board = *reinterpret_cast<Board*>(memory_);
  std::string refused;
  if (!agreed(board.size, size) || !agreed(board.slot_bytes, slot_bytes)) {
    refused =
        sentence("the shared memory belongs to %ld ranks with slots of %ld bytes, not %ld with slots of %ld",
                 board.size.load(), board.slot_bytes.load(), size, slot_bytes);
  } else if (station(this->rank()).present.exchange(1) != 0) {
    refused = sentence("another process is rank %ld, or has been", rank);
  }
  if (!refused.empty()) {
    munmap(memory_, static_cast<size_t>(bytes_));
    throw std::invalid_argument(refused);
  }
  pools_.push_back(&station(this->rank()).pool);
  for (int other = 0; other < this->size(); ++other) {
    if (other != this->rank()) pools_.push_back(&station(other).pool);
  }
}

SharedRanks::~SharedRanks() {
  close();
  munmap(memory_, static_cast<size_t>(bytes_));
}

SharedRanks::Station& SharedRanks::station(int rank) const {
  return reinterpret_cast<Station*>(memory_ + kPageBytes)[rank];
}

std::byte* SharedRanks::slot(int rank, uint64_t exchange) const {
  const int64_t index = 2 * int64_t{rank} + static_cast<int64_t>(exchange % 2);
  return memory_ + bytes_ - (2 * size() - index) * slot_stride(slot_bytes());
}

uint64_t SharedRanks::send(const Gather& gather, Worker& worker) {
  Station& own = station(rank());
  const uint64_t exchange = exchanges_ + 1;
  const int64_t bytes = gather.root == rank() || size() == 1 ? 0 : gather.bytes(rank());
  own.pool.note(worker.index);
  if (bytes != 0 && may_write(exchange, worker)) pack(gather, rank(), slot(rank(), exchange), worker);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == worker.count) {
    arrived_.store(0, std::memory_order_relaxed);
    exchanges_ = exchange;
    if (bytes != 0) {
      written_[exchange % 2] = {exchange, gather.root};
      own.slots[exchange % 2] = {exchange, bytes};
    }
    own.published.advance();
    count_sent(bytes);
  }
  return exchange;
}

void SharedRanks::receive(uint64_t exchange, const Gather& gather, Worker& worker) {
  for (int step = 1; step < size(); ++step) {
    const int other = (rank() + step) % size();
    const int64_t bytes = gather.bytes(other);
    if (bytes == 0) continue;
    if (!await_rank(other, exchange, worker)) return;
    const Station::Slot held = station(other).slots[exchange % 2];
    const int64_t sent = held.exchange == exchange ? held.bytes : 0;
    if (sent != bytes) {
      fail(sentence("rank %d has sent %ld bytes to rank %d, which needs %ld in exchange %lu", other, sent,
                    rank(), bytes, exchange));
      return;
    }
    unpack(gather, other, slot(other, exchange), worker);
  }
}

// See the top of shared_ranks.h.
bool SharedRanks::may_write(uint64_t exchange, const Worker& worker) {
  const Written before = written_[exchange % 2];
  if (before.exchange == 0) return true;
  for (int other = 0; other < size(); ++other) {
    if (other == rank() || (before.root >= 0 && before.root != other)) continue;
    if (!await_rank(other, before.exchange + 1, worker)) return false;
  }
  return true;
}

// Returns false if the group has failed before the rank has published the exchange.
bool SharedRanks::await_rank(int rank, uint64_t exchange, const Worker& worker) {
  const Waited waited = await(station(rank).published, exchange, worker);
  if (waited ==
      Waited::late) {  // because of the rank that is furthest back, for which that one may be waiting
    int last = rank;
    for (int other = 0; other < size(); ++other) {
      const bool further_back = station(other).published.count() < station(last).published.count();
      if (other != this->rank() && further_back) last = other;
    }
    fail(late(last));
  }
  return waited == Waited::reached;
}

void SharedRanks::fail(const std::string& sentence) {
  auto& board = *reinterpret_cast<Board*>(memory_);
  uint32_t before = kNone;
  if (board.failing.compare_exchange_strong(before, kBeingWritten)) {
    const size_t bytes = std::min(sentence.size(), kSentenceBytes - 1);
    std::memcpy(board.sentence, sentence.data(), bytes);
    board.failing.store(kWritten, std::memory_order_release);
  }
  for (int rank = 0; rank < size(); ++rank) station(rank).published.stop();
}

std::string SharedRanks::failure() const {
  const auto& board = *reinterpret_cast<const Board*>(memory_);
  switch (board.failing.load(std::memory_order_acquire)) {
    case kNone:
      return "";
    case kWritten:
      return std::string(board.sentence, strnlen(board.sentence, kSentenceBytes));
    default:
      return "a rank has failed";  // whose process ends before it says why, or is about to
  }
}

void SharedRanks::close() { fail(sentence("rank %d has left", rank())); }

}  // namespace enginewright
