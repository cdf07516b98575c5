#include "socket_ranks.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "sentence.h"

namespace enginewright {

namespace {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;

constexpr uint32_t kMagic = 0x31524b52;  // "RKR1"
constexpr uint32_t kPiece = 1, kFailure = 2;
constexpr int64_t kSentenceBytes = 1024;
constexpr int64_t kPageBytes = 4096;
constexpr size_t kParts = 128;  // of a message, that are given to the system at once
constexpr int kPollMs = 20;
constexpr Nanoseconds kMaxCounted = std::chrono::milliseconds(300);  // as counter.cpp has it

std::string reason_of(int error) { return std::generic_category().message(error); }

int duplicate(int fd, int rank) {
  int type = 0;
  socklen_t bytes = sizeof(type);
  sockaddr_storage address = {};
  socklen_t address_bytes = sizeof(address);
  require(getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_STREAM &&
              getpeername(fd, reinterpret_cast<sockaddr*>(&address), &address_bytes) == 0,
          sentence("the descriptor for rank %d is no connected stream socket", rank));
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  const int error = errno;
  require(own >= 0, sentence("the socket to rank %d cannot be used: %s", rank, reason_of(error).c_str()));
  const int yes = 1;
  setsockopt(own, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));  // refused by sockets that are not TCP
  return own;
}

void wait_for(int fd, short events, int limit_ms) {
  pollfd waiting = {fd, events, 0};
  poll(&waiting, 1, limit_ms);
}

}  // namespace

// As it is sent.
struct SocketRanks::Header {
  uint32_t magic, kind;
  uint64_t exchange, bytes;
};

struct SocketRanks::Peer {
  Peer(int rank, int fd, int64_t slot_bytes)
      : rank(rank),
        fd(duplicate(fd, rank)),
        slot_stride(round_up(slot_bytes, kPageBytes)),
        slots(std::make_unique<Memory>(2 * slot_stride)) {}
  ~Peer() { close_socket(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void close_socket() {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }

  std::byte* slot(uint64_t message) const {
    return slots->data() + static_cast<int64_t>(message % 2) * slot_stride;
  }

  struct Message {
    uint64_t exchange;
    int64_t bytes;
  };

  const int rank;
  int fd;  // -1: closed
  const int64_t slot_stride;
  const std::unique_ptr<Memory> slots;
  Message messages[2] = {};  // in the slots
  Counter received, taken;   // messages: by the receiver, by the pool
  std::mutex sending;
  std::atomic<int> send_error{0};  // errno
  bool cut = false;                // a message was begun and not ended; of who holds `sending`
  std::thread receiver;
};

SocketRanks::SocketRanks(const std::vector<int>& fds, int64_t rank, int64_t slot_bytes, double timeout_s)
    : Ranks(rank, static_cast<int64_t>(fds.size()), slot_bytes, timeout_s) {
  pools_.push_back(&pool_);
  for (int other = 0; other < size(); ++other) {
    const int fd = fds[static_cast<size_t>(other)];
    require(other != this->rank() || fd == -1, "a rank has no socket to itself: the descriptor must be -1");
    peers_.push_back(other == this->rank() ? nullptr : std::make_unique<Peer>(other, fd, slot_bytes));
  }
  try {
    for (const std::unique_ptr<Peer>& peer : peers_) {
      if (peer) peer->receiver = std::thread([this, &peer = *peer] { run_receiver(peer); });
    }
  } catch (...) {  // the system gives no more threads
    close();
    throw;
  }
}

SocketRanks::~SocketRanks() { close(); }

uint64_t SocketRanks::send(const Gather& gather, Worker& worker) {
  const uint64_t exchange = exchanges_ + 1;
  pool_.note(worker.index);
  inside_.fetch_add(1);
  if (gather.bytes(rank()) != 0) {
    int turn = 0;  // peers are dealt to threads
    for (int step = 1; step < size() && !failed_.load(); ++step) {
      const int other = (rank() + step) % size();
      if (!gather.reaches(other) || turn++ % worker.count != worker.index) continue;
      send_piece(*peers_[static_cast<size_t>(other)], exchange, gather);
    }
  }
  inside_.fetch_sub(1);
  if (started_.fetch_add(1, std::memory_order_acq_rel) + 1 == worker.count) {
    started_.store(0, std::memory_order_relaxed);
    exchanges_ = exchange;
  }
  return exchange;
}

void SocketRanks::receive(uint64_t exchange, const Gather& gather, Worker& worker) {
  for (int step = 1; step < size(); ++step) {
    const int other = (rank() + step) % size();
    if (gather.bytes(other) == 0) continue;
    const Peer& peer = *peers_[static_cast<size_t>(other)];
    const uint64_t message = peer.taken.count();
    const Waited waited = await(peer.received, message + 1, worker);
    if (waited == Waited::late) fail(late(other));
    if (waited != Waited::reached) break;
    const Peer::Message& found = peer.messages[message % 2];
    if (found.exchange != exchange || found.bytes != gather.bytes(other)) {
      fail(sentence("rank %d has sent %ld bytes to rank %d in exchange %lu, which needs %ld in exchange %lu",
                    other, found.bytes, rank(), found.exchange, gather.bytes(other), exchange));
      break;
    }
    unpack(gather, other, peer.slot(message), worker);
  }
  if (ended_.fetch_add(1, std::memory_order_acq_rel) + 1 != worker.count) return;
  ended_.store(0, std::memory_order_relaxed);
  for (int other = 0; other < size(); ++other) {
    if (other != rank() && gather.bytes(other) != 0) peers_[static_cast<size_t>(other)]->taken.advance();
  }
}

// Sends from the matrix, where other threads send the same to other ranks.
void SocketRanks::send_piece(Peer& peer, uint64_t exchange, const Gather& gather) {
  const int64_t row_bytes = gather.row_bytes(rank()), bytes = gather.bytes(rank());
  Header header = {kMagic, kPiece, exchange, static_cast<uint64_t>(bytes)};
  constexpr int64_t kHeaderBytes = sizeof(header);
  const int64_t end = kHeaderBytes + bytes;
  int64_t at = 0;
  int error = 0;
  bool is_late = false;
  {
    const std::lock_guard<std::mutex> lock(peer.sending);
    Nanoseconds waited{0};
    while (at < end && error == 0 && !is_late && !failed_.load()) {
      iovec parts[kParts];
      size_t count = 0;
      int64_t next = at;
      if (next < kHeaderBytes) {
        parts[count++] = {reinterpret_cast<std::byte*>(&header) + next,
                          static_cast<size_t>(kHeaderBytes - next)};
        next = kHeaderBytes;
      }
      while (count < kParts && next < end) {
        const int64_t row = (next - kHeaderBytes) / row_bytes, column = (next - kHeaderBytes) % row_bytes;
        parts[count++] = {gather.piece(rank()) + row * gather.stride_bytes + column,
                          static_cast<size_t>(row_bytes - column)};
        next += row_bytes - column;
      }
      msghdr message = {};
      message.msg_iov = parts;
      message.msg_iovlen = count;
      const ssize_t sent = sendmsg(peer.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        at += sent;
        waited = Nanoseconds{0};
      } else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        const Clock::time_point start = Clock::now();
        wait_for(peer.fd, POLLOUT, kPollMs);
        waited += std::min<Nanoseconds>(Clock::now() - start, kMaxCounted);
        is_late = waited >= timeout();
      } else if (sent < 0 && errno != EINTR) {
        error = errno;
      }
    }
    peer.cut = 0 < at && at < end;
  }
  if (is_late) fail(late(peer.rank));
  if (error != 0) {  // the receiver fails the group, unless the other rank has said why it left
    peer.send_error.store(error);
    shutdown(peer.fd, SHUT_RDWR);
  }
  if (at == end) count_sent(bytes);
}

void SocketRanks::run_receiver(Peer& peer) {
  uint64_t last_exchange = 0;
  for (uint64_t message = 0;; ++message) {
    Header header;
    if (!receive_bytes(peer, reinterpret_cast<std::byte*>(&header), sizeof(header))) return;
    const bool is_failure = header.kind == kFailure;
    if (header.magic != kMagic || (header.kind != kPiece && !is_failure) || header.bytes == 0 ||
        header.bytes > static_cast<uint64_t>(is_failure ? kSentenceBytes : slot_bytes())) {
      return fail(sentence("the connection to rank %d carries something that no rank sends", peer.rank));
    }
    const auto bytes = static_cast<int64_t>(header.bytes);
    if (is_failure) {
      std::string sentence(static_cast<size_t>(bytes), ' ');
      if (receive_bytes(peer, reinterpret_cast<std::byte*>(sentence.data()), bytes)) fail(sentence);
      return;
    }
    if (header.exchange <= last_exchange) {
      return fail(sentence("the connection to rank %d carries exchange %lu after exchange %lu", peer.rank,
                           header.exchange, last_exchange));
    }
    last_exchange = header.exchange;
    // The slot is free when the pool has taken what it held, two messages ago.
    Waited waited = message == 0 ? Waited::reached : Waited::late;
    while (waited == Waited::late) waited = peer.taken.sleep(message - 1, timeout());
    if (waited == Waited::stopped || !receive_bytes(peer, peer.slot(message), bytes)) return;
    peer.messages[message % 2] = {header.exchange, bytes};
    peer.received.advance();
  }
}

// Returns false if the connection ends before; the group has failed then.
bool SocketRanks::receive_bytes(Peer& peer, std::byte* to, int64_t bytes) {
  for (int64_t at = 0; at < bytes;) {
    const ssize_t received = recv(peer.fd, to + at, static_cast<size_t>(bytes - at), MSG_WAITALL);
    if (received > 0) {
      at += received;
    } else if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {  // the socket does not block
      wait_for(peer.fd, POLLIN, -1);
    } else if (received == 0 || errno != EINTR) {
      connection_ended(peer, received == 0 ? peer.send_error.load() : errno);
      return false;
    }
  }
  return true;
}

void SocketRanks::connection_ended(const Peer& peer, int error) {
  const std::string why = error == 0 ? "" : ": " + reason_of(error);
  fail(sentence("the connection to rank %d has ended%s", peer.rank, why.c_str()));
}

void SocketRanks::fail(const std::string& sentence) {
  inside_.fetch_add(1);
  bool is_first = false;
  {
    const std::lock_guard<std::mutex> lock(failing_);
    is_first = !failed_.load();
    if (is_first) sentence_ = sentence.substr(0, kSentenceBytes);
    failed_.store(true);
  }
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (!peer || !is_first) continue;
    peer->received.stop();
    peer->taken.stop();
  }
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (!peer || !is_first) continue;
    const std::lock_guard<std::mutex> lock(peer->sending);  // which a thread that sends soon gives back
    if (!peer->cut) {                                       // or else it learns that the connection has ended
      std::string message(sizeof(Header), ' ');
      const Header header = {kMagic, kFailure, 0, sentence_.size()};
      std::memcpy(message.data(), &header, sizeof(header));
      message += sentence_;
      ::send(peer->fd, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    shutdown(peer->fd, SHUT_RDWR);
  }
  inside_.fetch_sub(1);
}

std::string SocketRanks::failure() const {
  const std::lock_guard<std::mutex> lock(failing_);
  return sentence_;
}

void SocketRanks::close() {
  fail(sentence("rank %d has left", rank()));
  const std::lock_guard<std::mutex> lock(closing_);
  if (closed_) return;
  closed_ = true;
  while (inside_.load() != 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (!peer) continue;
    if (peer->receiver.joinable()) peer->receiver.join();
    peer->close_socket();
  }
}

}  // namespace enginewright
