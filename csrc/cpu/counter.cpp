#include "counter.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace enginewright {

namespace {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;

constexpr std::chrono::microseconds kSpin{50};
constexpr int kPausesPerLook = 32;  // at the clock
constexpr std::chrono::milliseconds kSleep{100};
constexpr std::chrono::milliseconds kMaxCounted{300};  // of one sleep: more is not waiting, but being stopped

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The half of a word that the system compares and wakes by. Not private: other processes map it, too.
void* low_half(const std::atomic<uint64_t>& word) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half comes first");
  return const_cast<std::atomic<uint64_t>*>(&word);
}

void sleep_while(const std::atomic<uint64_t>& word, uint64_t value, Nanoseconds limit) {
  const std::chrono::seconds seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  struct timespec time = {};
  time.tv_sec = seconds.count();
  time.tv_nsec = static_cast<long>((limit - seconds).count());
  syscall(SYS_futex, low_half(word), FUTEX_WAIT, static_cast<uint32_t>(value), &time, nullptr, 0);
}

void wake_all(const std::atomic<uint64_t>& word) {
  syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

void SeenCores::note(int thread) {
  if (thread >= kThreads) return;
  const int32_t core = sched_getcpu() + 1;
  std::atomic<int32_t>& seen = cores_[static_cast<size_t>(thread)];
  if (seen.load(std::memory_order_relaxed) != core) seen.store(core, std::memory_order_relaxed);
  int32_t threads = threads_.load(std::memory_order_relaxed);
  while (threads <= thread && !threads_.compare_exchange_weak(threads, thread + 1)) {
  }
}

bool SeenCores::has(int core, int but) const {
  const int32_t threads = std::min(threads_.load(std::memory_order_relaxed), int32_t{kThreads});
  for (int32_t thread = 0; thread < threads; ++thread) {
    const int32_t seen = cores_[static_cast<size_t>(thread)].load(std::memory_order_relaxed);
    if (thread != but && seen == core + 1) return true;
  }
  return false;
}

bool Waiter::shares_core() const {
  const int core = sched_getcpu();
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    if (pools[pool]->has(core, pool == 0 ? thread : -1)) return true;
  }
  return false;
}

// The word and the number of sleepers are each written before the other is read, sequentially consistent on
// both sides: either a thread that goes to sleep sees the new word, or this one sees a sleeper and wakes it.
void Counter::advance() {
  word_.fetch_add(2);
  if (sleepers_.load() != 0) wake_all(word_);
}

void Counter::stop() {
  word_.fetch_or(1);
  if (sleepers_.load() != 0) wake_all(word_);
}

Waited Counter::wait(uint64_t count, Nanoseconds timeout, const Waiter& waiter) const {
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      const uint64_t word = word_.load(std::memory_order_acquire);
      if (word >> 1 >= count) return Waited::reached;
      if ((word & 1) != 0) return Waited::stopped;
      pause();
    }
  } while (!waiter.shares_core() && Clock::now() < end);
  const Waited waited = sleep(count, timeout);
  waiter.pools.front()->note(waiter.thread);
  return waited;
}

Waited Counter::sleep(uint64_t count, Nanoseconds timeout) const {
  Nanoseconds waited{0};
  for (Clock::time_point last = Clock::now();;) {
    sleepers_.fetch_add(1);
    uint64_t word = word_.load();
    if (word >> 1 < count && (word & 1) == 0) {
      sleep_while(word_, word, std::min<Nanoseconds>(kSleep, timeout - waited));
    }
    sleepers_.fetch_sub(1);
    word = word_.load(std::memory_order_acquire);
    if (word >> 1 >= count) return Waited::reached;
    if ((word & 1) != 0) return Waited::stopped;
    const Clock::time_point now = Clock::now();
    waited += std::min<Nanoseconds>(now - last, kMaxCounted);
    last = now;
    if (waited >= timeout) return Waited::late;
  }
}

}  // namespace enginewright
