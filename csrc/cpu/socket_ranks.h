// Ranks that exchange by stream sockets, one between each two of them.
//
// A thread for each other rank receives its messages into two slots by turns, a message in one of them as
// soon as the pool has taken what was there. A rank that is ahead is stopped by that, since the socket is not
// read any more. Sending is done by the pool's threads, from the matrix.
//
// A message is a Header and its bytes, numbers little-endian. A rank whose group has failed says why to the
// others, in a message of another kind, before it shuts the connections down.
#pragma once

#include <mutex>
#include <thread>

#include "memory.h"
#include "ranks.h"

namespace enginewright {

class SocketRanks final : public Ranks {
 public:
  // fds: connected sockets to the other ranks, whose other ends are known to be them; -1 at this rank's
  // place. The caller may close them afterwards. std::invalid_argument with a sentence.
  SocketRanks(const std::vector<int>& fds, int64_t rank, int64_t slot_bytes, double timeout_s);
  ~SocketRanks() override;

  uint64_t send(const Gather& gather, Worker& worker) override;
  void receive(uint64_t exchange, const Gather& gather, Worker& worker) override;
  void fail(const std::string& sentence) override;
  std::string failure() const override;
  void close() override;

 private:
  struct Peer;
  struct Header;

  void run_receiver(Peer& peer);
  bool receive_bytes(Peer& peer, std::byte* to, int64_t bytes);
  void send_piece(Peer& peer, uint64_t exchange, const Gather& gather);
  void connection_ended(const Peer& peer, int error);

  std::vector<std::unique_ptr<Peer>> peers_;  // of each rank; null at this rank's place
  SeenCores pool_;
  std::atomic<bool> failed_{false};
  mutable std::mutex failing_;  // of who writes or reads the sentence
  std::string sentence_;
  std::mutex closing_;
  bool closed_ = false;
  std::atomic<int> inside_{0};              // threads of the pool that may use a socket
  std::atomic<int> started_{0}, ended_{0};  // threads of the pool in this exchange
  uint64_t exchanges_ = 0;                  // read by all threads until they start, written by the last one
};

}  // namespace enginewright
