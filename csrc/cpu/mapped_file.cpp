#include "mapped_file.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <stdexcept>

namespace enginewright {

// Addresses of a mapping. The handler walks the list at any time and in any thread, so that an entry stays
// when its owner has gone, and is not used again: some bytes for each engine that the process ever opened.
struct MappedRange {
  const uintptr_t begin, end;
  MappedRange* const next;
  std::atomic<bool> live{true}, faulted{false};
};

namespace {

static_assert(std::atomic<MappedRange*>::is_always_lock_free && std::atomic<bool>::is_always_lock_free,
              "the handler takes no locks");

std::atomic<MappedRange*> ranges{nullptr};
std::mutex adding;  // of those who add to the list; the handler does without it
uintptr_t page_bytes = 0;
struct sigaction previous;

// Puts zeros where a range holds the address and after it. Another thread may do the same at the same time.
bool replaced(uintptr_t address) {
  const uintptr_t page = address / page_bytes * page_bytes;
  bool found = false;
  for (MappedRange* range = ranges.load(); range != nullptr; range = range->next) {
    if (!range->live.load() || address < range->begin || address >= range->end) continue;
    range->faulted.store(true);
    found = true;
    if (mmap(reinterpret_cast<void*>(page), range->end - page, PROT_READ,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
      return false;
    }
  }
  return found;
}

// What may be called in a signal handler: atomics without locks, and system calls.
void on_bus_error(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  const bool ours = info->si_code == BUS_ADRERR && replaced(reinterpret_cast<uintptr_t>(info->si_addr));
  errno = saved;
  if (ours) return;
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(number, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(number);
  } else {  // the signal is blocked in here, so that it comes again when this returns
    sigaction(number, &previous, nullptr);
    raise(number);
  }
}

void install() {
  page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, nullptr, &previous);  // which the handler needs from its first moment on
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace

MappedFile::MappedFile(const void* data, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(adding);
  if (page_bytes == 0) install();
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (begin % page_bytes != 0 || bytes <= 0) throw std::invalid_argument("a mapping begins with a page");
  const uintptr_t end = (begin + static_cast<uintptr_t>(bytes) + page_bytes - 1) / page_bytes * page_bytes;
  range_ = new MappedRange{begin, end, ranges.load()};
  ranges.store(range_);
}

MappedFile::~MappedFile() { range_->live.store(false); }

bool MappedFile::faulted() const { return range_->faulted.load(); }

}  // namespace enginewright
