// A counter that threads wait for, those of other processes too: it may lie in shared memory, where zero
// bytes are a counter that has not begun to count.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace enginewright {

// The cores on which the threads of a pool were last seen. Zero bytes are a pool that nobody has seen.
class SeenCores {
 public:
  void note(int thread);              // it is the caller
  bool has(int core, int but) const;  // another thread than `but` was seen there; -1: any thread

 private:
  static constexpr int kThreads = 64;                   // further ones are not noted
  std::array<std::atomic<int32_t>, kThreads> cores_{};  // plus one
  std::atomic<int32_t> threads_{0};                     // the highest index that was noted, plus one
};

// A thread of a pool that waits for other pools.
struct Waiter {
  const std::vector<SeenCores*>& pools;  // the first one is its own
  int thread;

  // A thread that spins on this core may be what keeps another one waiting.
  bool shares_core() const;
};

enum class Waited { reached, stopped, late };

class Counter {
 public:
  uint64_t count() const { return word_.load(std::memory_order_acquire) >> 1; }
  bool stopped() const { return (word_.load(std::memory_order_acquire) & 1) != 0; }
  // To the next count. A thread that has waited for it sees whatever this one wrote before.
  void advance();
  // Ends all waits for counts that are not reached, now and later. Any thread may call it, any number of
  // times.
  void stop();
  // Waits until the count is at least this: spins for at most 50 µs, then sleeps. Time in which the whole
  // process does not run, since somebody has stopped it, does not count.
  Waited wait(uint64_t count, std::chrono::nanoseconds timeout, const Waiter& waiter) const;
  Waited sleep(uint64_t count, std::chrono::nanoseconds timeout) const;  // the same without spinning

 private:
  // Twice the count, and 1 if it is stopped: a thread that goes to sleep by one word misses neither. The
  // system compares its low half, where 2^31 counts would have to pass unnoticed.
  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) mutable std::atomic<uint32_t> sleepers_{0};
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8,
              "a counter is shared between processes");

}  // namespace enginewright
