#include "thread_pool.h"

#include <sched.h>

#include <chrono>

namespace enginewright {

namespace {

constexpr std::chrono::microseconds kSpin{50};
constexpr int kPausesPerLook = 32;  // at the clock

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Stores past the caches are otherwise in no order with what follows.
inline void finish_streams() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

class PoolWorker final : public Worker {
 public:
  PoolWorker(ThreadPool& pool, int index, std::byte* scratch)
      : Worker(index, pool.threads(), scratch), pool_(pool) {}
  void sync() override { pool_.sync(index); }

 private:
  ThreadPool& pool_;
};

}  // namespace

void Cores::note(int thread) {
  const int core = sched_getcpu();
  std::atomic<int>& seen = seen_[static_cast<size_t>(thread)].number;
  if (seen.load(std::memory_order_relaxed) != core) seen.store(core, std::memory_order_relaxed);
}

bool Cores::shared(int thread) const {
  const int core = seen_[static_cast<size_t>(thread)].number.load(std::memory_order_relaxed);
  for (size_t other = 0; other < seen_.size(); ++other) {
    if (other != static_cast<size_t>(thread) && seen_[other].number.load(std::memory_order_relaxed) == core)
      return true;
  }
  return false;
}

// The turn and the number of sleepers are each written before the other is read, sequentially consistent on
// both sides: either the waiter sees the new turn, or advance() sees a sleeper and locks to wake it.
void Gate::advance() {
  turn_.fetch_add(1);
  if (sleepers_.load() == 0) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
  }
  condition_.notify_all();
}

void Gate::wait_past(uint32_t turn, Cores& cores, int thread) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (this->turn() != turn) return;
      pause();
    }
  } while (!cores.shared(thread) && std::chrono::steady_clock::now() < end);
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  condition_.wait(lock, [&] { return turn_.load() != turn; });
  sleepers_.fetch_sub(1);
  cores.note(thread);
}

ThreadPool::ThreadPool(int threads)
    : threads_(threads), cores_(threads), scratch_(static_cast<size_t>(threads)) {
  others_.reserve(static_cast<size_t>(threads));
  try {
    for (int index = 1; index < threads; ++index) others_.emplace_back([this, index] { serve(index); });
  } catch (...) {  // the system gives no more threads: end those that have started
    end();
    throw;
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  job_ = nullptr;
  start_.advance();
  for (std::thread& thread : others_) thread.join();
}

void ThreadPool::reserve_scratch(int64_t bytes) {
  if (bytes <= scratch_bytes_) return;
  std::vector<std::unique_ptr<Memory>> grown;
  for (int i = 0; i < threads_; ++i) grown.push_back(std::make_unique<Memory>(bytes));
  scratch_ = std::move(grown);
  scratch_bytes_ = bytes;
}

std::byte* ThreadPool::scratch(int index) const {
  const auto& memory = scratch_[static_cast<size_t>(index)];
  return memory ? memory->data() : nullptr;
}

void ThreadPool::run(Job& job) {
  job_ = &job;
  if (threads_ > 1) start_.advance();
  PoolWorker worker(*this, 0, scratch(0));
  job.run(worker);
  sync(0);
}

void ThreadPool::sync(int thread) {
  if (threads_ == 1) return;
  finish_streams();
  cores_.note(thread);
  const uint32_t turn = barrier_.turn();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_.advance();
  } else {
    barrier_.wait_past(turn, cores_, thread);
  }
}

void ThreadPool::serve(int index) {
  for (uint32_t turn = 0;; ++turn) {
    start_.wait_past(turn, cores_, index);
    if (job_ == nullptr) return;
    PoolWorker worker(*this, index, scratch(index));
    job_->run(worker);
    sync(index);
  }
}

}  // namespace enginewright
