// Persistent threads that run one job at a time together. Thread 0 is the caller of run().
//
// Waiting, for a job or at a barrier, spins at most 50 µs and then sleeps, so that an idle pool costs nothing
// and a server's other threads get the cores. It sleeps at once where another thread of the pool is on the
// same core, as happens when other processes run: at each barrier the one would spin in place of the other.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernel.h"
#include "memory.h"

namespace enginewright {

// The core on which each thread was last seen.
class Cores {
 public:
  explicit Cores(int threads) : seen_(static_cast<size_t>(threads)) {}
  void note(int thread);  // it is the caller
  bool shared(
      int thread) const;  // with another one: a thread that spins there may be what keeps that one waiting

 private:
  struct alignas(64) Core {
    std::atomic<int> number{-1};
  };
  std::vector<Core> seen_;
};

// A counter that threads wait for.
class Gate {
 public:
  uint32_t turn() const { return turn_.load(std::memory_order_acquire); }
  void advance();                                           // to the next turn; wakes who waits
  void wait_past(uint32_t turn, Cores& cores, int thread);  // until turn() != turn

 private:
  std::atomic<uint32_t> turn_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable condition_;
};

class Job {
 public:
  virtual void run(Worker& worker) = 0;  // on every thread; must not throw

 protected:
  ~Job() = default;
};

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }
  // Every thread's scratch holds at least `bytes`. Not while a job runs.
  void reserve_scratch(int64_t bytes);
  void run(Job& job);     // returns when every thread is done
  void sync(int thread);  // barrier; called by all threads of a job

 private:
  std::byte* scratch(int index) const;
  void serve(int index);
  void end();

  const int threads_;
  Cores cores_;
  alignas(64) Gate start_;
  alignas(64) Gate barrier_;
  alignas(64) std::atomic<int> arrived_{0};
  Job* job_ = nullptr;  // null in a turn: the pool ends
  int64_t scratch_bytes_ = 0;
  std::vector<std::unique_ptr<Memory>> scratch_;
  std::vector<std::thread> others_;
};

}  // namespace enginewright
