// Ranks: processes that compute one model together, each of them some columns of every layer. They exchange
// what they have computed, one exchange after the other, all ranks in the same order and with the same sizes.
//
// An exchange collects the columns of a matrix that has a copy in each rank. There is no sum in it, so that
// the bits of a result do not depend on the number of ranks. It has two phases, which all threads of a rank's
// pool call in this order: send() offers the rank's own columns, and receive() copies those of the others
// into the matrix. The carriers are shared memory between processes of one machine (shared_ranks.h), and
// stream sockets (socket_ranks.h).
//
// A group of ranks fails once and for all: a rank is gone, or does not answer, or has sent something
// unexpected. Then all waits end, exchanges return at once and leave arbitrary bytes in the matrix, and
// failure() names the rank and the reason. The caller has to look at failure() after a step, before it uses
// the results.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "counter.h"
#include "operands.h"

namespace enginewright {

constexpr int64_t kMaxRanks = 256;

// One exchange in one rank. Rows, root, and the sizes of the pieces are the same in all ranks.
struct Gather {
  std::byte* data;       // the matrix
  int64_t rows;          // of this step
  int64_t stride_bytes;  // from a row to the next one
  const Range* pieces;   // of each rank: the bytes of a row that it computes
  int root;              // the rank that receives, or -1: all ranks do
  // Of experts: the ends of each rank's rows, by rank, are those of its experts in this array; null: all
  // rows.
  const int32_t* starts = nullptr;
  const Range* experts = nullptr;

  bool reaches(int rank) const { return root < 0 || root == rank; }
  int64_t row_bytes(int rank) const { return pieces[rank].end - pieces[rank].begin; }
  Range rows_of(int rank) const {
    return starts == nullptr ? Range{0, rows} : Range{starts[experts[rank].begin], starts[experts[rank].end]};
  }
  int64_t bytes(int rank) const {
    const Range own = rows_of(rank);
    return (own.end - own.begin) * row_bytes(rank);
  }
  std::byte* piece(int rank) const { return data + rows_of(rank).begin * stride_bytes + pieces[rank].begin; }
};

// Copies this thread's share of a rank's piece to or from `packed`, where its rows lie one after the other.
void pack(const Gather& gather, int rank, std::byte* packed, const Worker& worker);
void unpack(const Gather& gather, int rank, const std::byte* packed, const Worker& worker);

class Ranks {
 public:
  virtual ~Ranks() = default;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t slot_bytes() const { return slot_bytes_; }  // the largest piece of an exchange

  // Returns the number of the exchange, for receive(). A barrier of the pool follows before the next
  // exchange.
  virtual uint64_t send(const Gather& gather, Worker& worker) = 0;
  virtual void receive(uint64_t exchange, const Gather& gather, Worker& worker) = 0;

  // Fails the group, in all ranks that can be reached. The first sentence stays.
  virtual void fail(const std::string& sentence) = 0;
  virtual std::string failure() const = 0;  // a sentence, or nothing if the group has not failed
  virtual void close() = 0;                 // this rank leaves, by which the group fails

  struct Stats {
    int64_t bytes_sent, wait_nanoseconds;  // the first thread's waits
  };
  Stats take_stats();  // since the last call

 protected:
  // std::invalid_argument
  Ranks(int64_t rank, int64_t size, int64_t slot_bytes, double timeout_s);

  Waited await(const Counter& counter, uint64_t count, const Worker& worker);
  void count_sent(int64_t bytes) { bytes_sent_.fetch_add(bytes, std::memory_order_relaxed); }
  std::string late(int rank) const;  // a sentence
  std::chrono::nanoseconds timeout() const { return timeout_; }

  std::vector<SeenCores*> pools_;  // this rank's, and those of the others on this machine

 private:
  const int rank_, size_;
  const int64_t slot_bytes_;
  const std::chrono::nanoseconds timeout_;
  std::atomic<int64_t> bytes_sent_{0}, wait_nanoseconds_{0};
};

// The kernel all_gather@1: of `columns` columns of x, in units of `unit`, rank r of n has computed those from
// unit * floor(columns / unit * r / n) to the next rank's, and after it `root`, or every rank for -1, has
// all. x: arena [rows, columns], of any dtype but those of 4 bits. `ranks` has to outlive the kernel.
//
// With starts: i32 [1, E + 1] rows are those of E experts, one after the other, and rank r has computed whole
// rows, of the experts from floor(E * r / n) to the next rank's. The unit is then all columns.
std::unique_ptr<Kernel> make_all_gather(const Operand& x, int64_t unit, int64_t root, Ranks& ranks,
                                        const Operand* starts = nullptr);

}  // namespace enginewright
