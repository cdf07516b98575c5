// Ranks that are processes of one machine, and exchange by memory which all of them map.
//
// A rank has two slots, which its exchanges use by turns, and a counter of the exchanges that it has
// published. The last of its threads that has copied its share into the slot publishes: that the slot holds
// this exchange, and that the rank has finished all exchanges before it.
//
// Why a slot is not overwritten while somebody reads it: let the slot hold exchange d, and be written again
// in exchange e, two or more later. A rank that reads d copies from the slot in its receive() of d, on all
// threads, then comes a barrier, and later it publishes d + 1 (it publishes every exchange, even one in which
// it sends nothing). send() of e waits until all ranks that d reached have published d + 1. Publishing
// releases and waiting acquires, so that their reading has happened before this writing. Where exchange e - 1
// reached all ranks this has been awaited already, but where it went to one rank the others have waited for
// nobody.
//
// Why there is no deadlock: what send() of e awaits has a smaller number than e, and receive() of e awaits
// what each rank publishes in its send() of e.
#pragma once

#include "ranks.h"

namespace enginewright {

class SharedRanks final : public Ranks {
 public:
  // fd: of bytes_needed() zero bytes, of which no other group knows; it may be closed afterwards. Errors of
  // both: std::invalid_argument with a sentence.
  SharedRanks(int fd, int64_t rank, int64_t size, int64_t slot_bytes, double timeout_s);
  ~SharedRanks() override;
  static int64_t bytes_needed(int64_t size, int64_t slot_bytes);

  uint64_t send(const Gather& gather, Worker& worker) override;
  void receive(uint64_t exchange, const Gather& gather, Worker& worker) override;
  void fail(const std::string& sentence) override;
  std::string failure() const override;
  void close() override;

 private:
  struct Board;    // one of a group
  struct Station;  // one of a rank

  Station& station(int rank) const;
  std::byte* slot(int rank, uint64_t exchange) const;
  bool may_write(uint64_t exchange, const Worker& worker);
  bool await_rank(int rank, uint64_t exchange, const Worker& worker);

  struct Written {
    uint64_t exchange;
    int root;
  };

  std::byte* memory_ = nullptr;
  int64_t bytes_;
  std::atomic<int> arrived_{0};  // threads that have copied their share
  // Read by all threads until they arrive, written by the last one that has arrived.
  uint64_t exchanges_ = 0;
  Written written_[2] = {};  // what this rank's slots hold
};

}  // namespace enginewright
