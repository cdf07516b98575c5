// The fibers that run the threads of emulated.h, and the entry point through which Python launches kernels.
#include "emulator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "emulator_switch.h"

namespace enginewright::emulator {

Place here{};

namespace {

constexpr std::size_t STACK_BYTES = 256 << 10;
constexpr int MAX_THREADS = 1024;
constexpr std::size_t RESIDENT_BLOCKS = 3;  // of a grid, at once

struct Copy {
  void* shared;
  const void* global;
  int bytes;
};

struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;
  std::vector<int> waiting;
};

struct Warp {
  Barrier barrier;
  uint32_t ready = 0;  // a bit for each lane that can go on
  const char* doing = nullptr;
  alignas(16) unsigned char slots[2][32 * SLOT_BYTES];
};

constexpr int EVERYBODY = -1;

// 16 bytes of shared memory that a copy has brought: whose they are until a barrier, a thread's or a warp's,
// and whether they have been fenced for wgmma.
struct Granule {
  int owner = EVERYBODY;
  bool fenced = true;
};

struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<unsigned char[]> stack;
  bool done = false;
  std::deque<std::vector<Copy>> groups;  // the last one is still open
  std::vector<const void*> landed;       // what its copies have brought since its last barrier, 16 bytes each
  std::unique_ptr<Attached> attached;
};

class Block {
 public:
  Block(const Launch& launch, const int (&place)[3], const std::function<void()>& body, std::mt19937& random)
      : launch_(launch), body_(body), random_(random), warps_(launch.threads / 32) {
    std::copy(place, place + 3, place_);
    if (!idle_fibers.empty()) {
      fibers_ = std::move(idle_fibers.back());
      idle_fibers.pop_back();
    }
    fibers_.resize(MAX_THREADS);
    // malloc, so that a sanitizer sees where shared memory ends.
    shared_.reset(
        static_cast<unsigned char*>(std::aligned_alloc(128, (launch.shared_bytes + 127) / 128 * 128)));
#if defined(__SANITIZE_ADDRESS__)
    shared_.reset(static_cast<unsigned char*>(std::malloc(launch.shared_bytes ? launch.shared_bytes : 1)));
#endif
    std::memset(shared_.get(), 0xff, launch.shared_bytes);
    granules_.resize(launch.shared_bytes / 16 + 1);
    block_barrier_.expected = launch.threads;
    for (Warp& warp : warps_) warp.barrier.expected = 32;
    order_.resize(warps_.size());
    for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int>(i);
    if (launch.schedule == Schedule::reverse) std::reverse(order_.begin(), order_.end());
    for (int thread = 0; thread < launch.threads; ++thread) start(thread);
  }
  ~Block() { idle_fibers.push_back(std::move(fibers_)); }
  Block(const Block&) = delete;

  // Runs its threads until another block may go on. Gives whether any are left.
  bool go_on() {
    current_block = this;
    std::copy(place_, place_ + 3, here.block);
    for (yielded_ = false; error.empty() && !yielded_;) {
      int next = pick();
      if (next < 0) break;
      resume(next);
    }
    current_block = nullptr;
    if (yielded_) return true;
    int left = 0;
    for (int thread = 0; thread < launch_.threads; ++thread) left += !fibers_[thread].done;
    if (error.empty() && left)
      error = std::to_string(left) + " threads wait at a barrier that the others never reach";
    return false;
  }

  void yield() {
    if (launch_.schedule != Schedule::random) return;
    yielded_ = true;
    leave();
  }

  void arrive(Barrier& barrier) {
    if (++barrier.arrived == barrier.expected) {
      barrier.arrived = 0;
      for (int thread : barrier.waiting) set_ready(thread, true);
      barrier.waiting.clear();
      if (launch_.schedule == Schedule::random) std::shuffle(order_.begin(), order_.end(), random_);
      return;
    }
    barrier.waiting.push_back(current_);
    set_ready(current_, false);
    leave();
  }

  // Back to the scheduler, for good if an error was found.
  void leave() {
    [[maybe_unused]] void* fake = nullptr;
    SWITCH_BEGINS(&fake, scheduler_bottom_, scheduler_size_);
    enginewright_switch(&fibers_[current_].stack_pointer, scheduler_);
    SWITCH_ENDS(fake, nullptr, nullptr);
  }

  Fiber& fiber() { return fibers_[current_]; }
  Warp& warp() { return warps_[current_ / 32]; }
  Barrier& block_barrier() { return block_barrier_; }
  std::unique_ptr<Attached>& attached() { return attached_; }
  unsigned char* shared() { return shared_.get(); }

  Granule& granule(const void* shared) {
    return granules_[(static_cast<const unsigned char*>(shared) - shared_.get()) / 16];
  }
  int warp_as_owner() const { return MAX_THREADS + current_ / 32; }

  static inline Block* current_block = nullptr;
  static inline std::string error;

 private:
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };

  static inline std::vector<std::vector<Fiber>> idle_fibers;  // stacks are kept

  void start(int thread) {
    Fiber& fiber = fibers_[thread];
    if (!fiber.stack) fiber.stack.reset(new unsigned char[STACK_BYTES]);
    STACK_IS_NEW(fiber.stack.get(), STACK_BYTES);
    fiber.done = false;
    set_ready(thread, true);
    fiber.groups.assign(1, {});
    fiber.landed.clear();
    fiber.attached.reset();
    auto top = reinterpret_cast<std::uintptr_t>(fiber.stack.get() + STACK_BYTES) / 16 * 16;
    auto* words = reinterpret_cast<void**>(top) - 8;  // six registers, where to return to, and an empty word
    std::fill(words, words + 8, nullptr);
    words[6] = reinterpret_cast<void*>(&Block::entry);
    fiber.stack_pointer = words;
  }

  static void entry() {
    Block& block = *current_block;
    SWITCH_ENDS(nullptr, &block.scheduler_bottom_, &block.scheduler_size_);
    block.body_();
    Fiber& fiber = block.fiber();
    for (const auto& group : fiber.groups)
      if (!group.empty()) error = "a thread ends without having waited for its copies";
    if (const char* wrong = fiber.attached ? fiber.attached->at_end() : nullptr) error = wrong;
    fiber.done = true;
    block.set_ready(block.current_, false);
    SWITCH_BEGINS(nullptr, block.scheduler_bottom_, block.scheduler_size_);
    void* forgotten;
    enginewright_switch(&forgotten, block.scheduler_);
    std::abort();
  }

  int pick() const {
    for (int warp : order_)
      if (uint32_t lanes = warps_[warp].ready)
        return warp * 32 +
               (launch_.schedule == Schedule::reverse ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes));
    return -1;
  }

  void set_ready(int thread, bool ready) {
    uint32_t lane = 1u << thread % 32, &lanes = warps_[thread / 32].ready;
    lanes = ready ? lanes | lane : lanes & ~lane;
  }

  void resume(int thread) {
    current_ = thread;
    here.thread = thread;
    [[maybe_unused]] void* fake = nullptr;
    SWITCH_BEGINS(&fake, fibers_[thread].stack.get(), STACK_BYTES);
    enginewright_switch(&scheduler_, fibers_[thread].stack_pointer);
    SWITCH_ENDS(fake, nullptr, nullptr);
  }

  const Launch& launch_;
  const std::function<void()>& body_;
  std::mt19937& random_;
  int place_[3];
  std::vector<Fiber> fibers_;
  bool yielded_ = false;
  std::vector<Warp> warps_;
  std::vector<int> order_;
  Barrier block_barrier_;
  std::unique_ptr<unsigned char[], Free> shared_;
  std::vector<Granule> granules_;
  std::unique_ptr<Attached> attached_;
  void* scheduler_ = nullptr;
  [[maybe_unused]] const void* scheduler_bottom_ = nullptr;
  [[maybe_unused]] std::size_t scheduler_size_ = 0;
  int current_ = 0;
};

std::set<std::string> sites;
std::string disabled, report;

std::string name_of(Site site) {
  std::string file = site.file;
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(site.line);
}

[[noreturn]] void stop(std::string why) {
  Block::error = "thread " + std::to_string(here.thread) + " of block (" + std::to_string(here.block[0]) +
                 ", " + std::to_string(here.block[1]) + ", " + std::to_string(here.block[2]) +
                 "): " + std::move(why);
  Block::current_block->leave();
  std::abort();
}

}  // namespace

bool left_out(Site site) {
  std::string name = name_of(site);
  sites.insert(name);
  return name == disabled;
}

unsigned char* shared_bytes() { return Block::current_block->shared(); }
std::unique_ptr<Attached>& attached_to_thread() { return Block::current_block->fiber().attached; }
std::unique_ptr<Attached>& attached_to_block() { return Block::current_block->attached(); }

void require(bool holds, const char* what) {
  if (!holds) stop(what);
}

void sync_block(Site site) {
  if (left_out(site)) return;
  Block& block = *Block::current_block;
  for (const void* shared : block.fiber().landed) block.granule(shared).owner = EVERYBODY;
  block.fiber().landed.clear();
  block.arrive(block.block_barrier());
}

void sync_lanes(Site site) {
  if (left_out(site)) return;
  Block& block = *Block::current_block;
  for (const void* shared : block.fiber().landed) block.granule(shared).owner = block.warp_as_owner();
  exchange("sync_warp", nullptr, 0);
}

void visible(const void* shared) {
  Block& block = *Block::current_block;
  int owner = block.granule(shared).owner;
  require(owner == EVERYBODY || owner == block.warp_as_owner(),
          "load_matrices reads what a copy brought, without a barrier since then");
}

void fence_landed(Site site) {
  if (left_out(site)) return;
  Block& block = *Block::current_block;
  for (const void* shared : block.fiber().landed) block.granule(shared).fenced = true;
}

void visible_to_wgmma(const void* shared) {
  const Granule& granule = Block::current_block->granule(shared);
  require(granule.owner == EVERYBODY, "wgmma reads what a copy brought, without a barrier since then");
  require(granule.fenced, "wgmma reads what a copy brought, without a fence before the barrier");
}

const unsigned char* exchange(const char* what, const void* mine, std::size_t bytes) {
  Warp& warp = Block::current_block->warp();
  Barrier& barrier = warp.barrier;
  if (barrier.arrived == 0) warp.doing = what;
  if (warp.doing != what && std::strcmp(warp.doing, what) != 0)
    stop(std::string("a lane is in ") + what + " while others of its warp are in " + warp.doing);
  unsigned char* slots = warp.slots[barrier.generation & 1];
  if (bytes) std::memcpy(slots + here.thread % 32 * SLOT_BYTES, mine, bytes);
  if (barrier.arrived == barrier.expected - 1) ++barrier.generation;
  Block::current_block->arrive(barrier);
  return slots;
}

void begin_copy(void* shared, const void* global, int bytes, bool there) {
  std::memset(shared, 0xff, bytes);  // what was there is gone from now on
  Block::current_block->granule(shared).owner = EVERYBODY;
  Block::current_block->fiber().groups.back().push_back({shared, there ? global : nullptr, bytes});
}

void commit() { Block::current_block->fiber().groups.emplace_back(); }

void wait(int pending, Site site) {
  auto& groups = Block::current_block->fiber().groups;
  bool skip = left_out(site);
  while (static_cast<int>(groups.size()) - 1 > pending) {
    if (!skip)
      for (const Copy& copy : groups.front()) {
        if (copy.bytes == 16) {  // what load_matrices reads
          Block::current_block->granule(copy.shared) = {here.thread, false};
          Block::current_block->fiber().landed.push_back(copy.shared);
        }
        if (copy.global)
          std::memcpy(copy.shared, copy.global, copy.bytes);
        else
          std::memset(copy.shared, 0, copy.bytes);
      }
    groups.pop_front();
  }
}

void yield_block() { Block::current_block->yield(); }

static std::string run(const Launch& launch, const std::function<void()>& body) {
  if (launch.threads < 32 || launch.threads > MAX_THREADS || launch.threads % 32)
    return "a block of " + std::to_string(launch.threads) + " threads";
  std::mt19937 random(launch.seed);
  Block::error.clear();
  std::copy(launch.grid, launch.grid + 3, here.grid);
  std::vector<int> blocks(static_cast<std::size_t>(launch.grid[0]) * launch.grid[1] * launch.grid[2]);
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int>(i);
  if (launch.schedule == Schedule::reverse) std::reverse(blocks.begin(), blocks.end());
  if (launch.schedule == Schedule::random) std::shuffle(blocks.begin(), blocks.end(), random);
  std::size_t next = 0;
  for (std::vector<std::unique_ptr<Block>> resident; Block::error.empty();) {
    while (next < blocks.size() && resident.size() < RESIDENT_BLOCKS) {
      int block = blocks[next++], x = launch.grid[0], y = launch.grid[1];
      resident.push_back(
          std::unique_ptr<Block>(new Block(launch, {block % x, block / x % y, block / x / y}, body, random)));
    }
    if (resident.empty()) break;
    std::size_t chosen = launch.schedule == Schedule::random ? random() % resident.size() : 0;
    if (!resident[chosen]->go_on()) resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
  return Block::error;
}

}  // namespace enginewright::emulator

using namespace enginewright::emulator;

extern "C" {

// A barrier or a wait, "file:line", that does nothing from now on; an empty name brings all back.
void enginewright_disable_site(const char* name) { disabled = name; }

// The barriers and waits that have been reached, a line each.
const char* enginewright_sites() {
  report.clear();
  for (const std::string& site : sites) report += site + "\n";
  return report.c_str();
}

// The index of a kernel of this library, or -1.
int enginewright_index(const char* expression) {
  for (int index = 0; enginewright::kernels[index].expression; ++index)
    if (!std::strcmp(enginewright::kernels[index].expression, expression)) return index;
  return -1;
}

// Runs kernel `index` of this library. Gives why it could not, or nothing.
const char* enginewright_launch(int index, const Launch* launch, void** arguments) {
  report = run(*launch, [&] { enginewright::kernels[index].call(arguments); });
  return report.c_str();
}
}
