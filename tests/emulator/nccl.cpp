// NCCL without GPUs, libnccl.so.2: as much of its API as runtime/device/cuda/nccl.py calls, between processes
// whose libcuda.so.1 is driver.cpp. What is asked for is work of the stream, done when somebody waits for it;
// ranks talk over FIFOs in a folder that the group is named after. An exchange that the ranks do not ask for
// alike is an error, and so is memory that is not on the device.
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result { OK = 0, UNHANDLED_CUDA = 1, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6 };
constexpr int BYTE = 1;  // ncclUint8

struct Id {
  char folder[128];
};

struct Comm {
  int rank = 0, size = 0;
  std::string folder;
  std::vector<int> to, from;  // FIFOs, by rank
  std::atomic<bool> aborted{false};
  std::atomic<int> error{OK};
};

struct Op {
  int peer;  // that gets the bytes, or gives them
  bool sends;
  uintptr_t address;
  std::size_t bytes;
};

struct Group {
  int depth = 0;
  Comm* comm = nullptr;
  void* stream = nullptr;
  std::vector<Op> ops;
};
thread_local Group group;

template <class F>
F of_driver(const char* name) {
  void* found = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
  if (!found) std::abort();
  return reinterpret_cast<F>(found);
}

// Moves bytes over a FIFO. False if the communicator is aborted before they are there.
bool moved(Comm& comm, int fifo, void* data, std::size_t bytes, bool sends) {
  auto* at = static_cast<char*>(data);
  while (bytes && !comm.aborted) {
    pollfd one{fifo, short(sends ? POLLOUT : POLLIN), 0};
    if (poll(&one, 1, 50) <= 0) continue;
    ssize_t count = sends ? write(fifo, at, bytes) : read(fifo, at, bytes);
    if (count > 0) at += count, bytes -= static_cast<std::size_t>(count);
  }
  return bytes == 0;
}

bool done(Comm& comm, const std::vector<Op>& ops) {
  auto all = [&](bool sends) {
    for (const Op& op : ops) {
      if (op.sends != sends) continue;
      int fifo = sends ? comm.to[op.peer] : comm.from[op.peer];
      uint64_t bytes = op.bytes;
      if (!moved(comm, fifo, &bytes, sizeof bytes, sends)) return;
      if (bytes != op.bytes) {
        std::fprintf(stderr, "rank %d gets %zu bytes of rank %d and not %zu\n", comm.rank,
                     static_cast<std::size_t>(bytes), op.peer, op.bytes);
        comm.error = REMOTE;
        comm.aborted = true;
        return;
      }
      if (!moved(comm, fifo, reinterpret_cast<void*>(op.address), op.bytes, sends)) return;
    }
  };
  std::thread sender(all, true);
  all(false);
  sender.join();
  return comm.error == OK;
}

struct Work {
  Comm* comm;
  std::vector<Op> ops;
};

Result ask(Comm* comm, void* stream, const std::vector<Op>& ops) {
  if (!group.depth || !comm || (group.comm && (group.comm != comm || group.stream != stream)))
    return INVALID_USAGE;
  auto on_device = of_driver<bool (*)(uintptr_t, std::size_t)>("driver_on_device");
  for (const Op& op : ops)
    if (!on_device(op.address, op.bytes) || op.peer < 0 || op.peer >= comm->size || op.peer == comm->rank)
      return INVALID_ARGUMENT;
  group.comm = comm;
  group.stream = stream;
  group.ops.insert(group.ops.end(), ops.begin(), ops.end());
  return OK;
}

}  // namespace

extern "C" {

Result ncclGetVersion(int* version) { return *version = 22900, OK; }
const char* ncclGetErrorString(Result) { return "an error"; }
const char* ncclGetLastError(Comm*) { return "the last error"; }

Result ncclGetUniqueId(Id* id) {
  std::memset(id, 0, sizeof *id);
  const char* folder = std::getenv("NCCL_FOLDER");
  std::snprintf(id->folder, sizeof id->folder, "%s/group-XXXXXX", folder ? folder : "/tmp");
  return mkdtemp(id->folder) ? OK : SYSTEM;
}

Result ncclCommInitRankScalable(Comm** to, int size, int rank, int ids, const Id* id, void* config) {
  if (ids != 1 || config || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  auto comm = std::make_unique<Comm>();
  comm->rank = rank, comm->size = size, comm->folder = id->folder;
  auto opened = [&](int source, int target) {
    std::string path = comm->folder + "/" + std::to_string(source) + "-" + std::to_string(target);
    mkfifo(path.c_str(), 0600);
    return open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  };
  for (int other = 0; other < size; ++other) {
    comm->to.push_back(other == rank ? -1 : opened(rank, other));
    comm->from.push_back(other == rank ? -1 : opened(other, rank));
  }
  for (int other = 0; other < size; ++other) {  // all have to come
    char byte = 1;
    if (other != rank && !moved(*comm, comm->to[other], &byte, 1, true)) return SYSTEM;
  }
  for (int other = 0; other < size; ++other) {
    char byte = 0;
    if (other != rank && !moved(*comm, comm->from[other], &byte, 1, false)) return SYSTEM;
  }
  return *to = comm.release(), OK;
}

Result ncclGroupStart() { return ++group.depth, OK; }

Result ncclGroupEnd() {
  if (!group.depth) return INVALID_USAGE;
  if (--group.depth) return OK;
  Group whole = std::move(group);
  group = {};
  if (whole.ops.empty()) return OK;
  auto* work = new Work{whole.comm, whole.ops};  // as long as the process: a graph may have it
  auto run = [](void* given) {
    auto* one = static_cast<Work*>(given);
    return done(*one->comm, one->ops) || one->comm->aborted;
  };
  using Ask = int (*)(void*, bool (*)(void*), void*);
  return of_driver<Ask>("driver_ask")(whole.stream, run, work) ? UNHANDLED_CUDA : OK;
}

Result ncclBroadcast(uintptr_t send, uintptr_t receive, std::size_t count, int type, int root, Comm* comm,
                     void* stream) {
  if (type != BYTE || send != receive) return INVALID_ARGUMENT;
  std::vector<Op> ops;
  if (comm->rank != root) ops.push_back({root, false, receive, count});
  for (int other = 0; comm->rank == root && other < comm->size; ++other)
    if (other != root) ops.push_back({other, true, send, count});
  return ask(comm, stream, ops);
}
Result ncclSend(uintptr_t send, std::size_t count, int type, int peer, Comm* comm, void* stream) {
  return type == BYTE ? ask(comm, stream, {{peer, true, send, count}}) : INVALID_ARGUMENT;
}
Result ncclRecv(uintptr_t receive, std::size_t count, int type, int peer, Comm* comm, void* stream) {
  return type == BYTE ? ask(comm, stream, {{peer, false, receive, count}}) : INVALID_ARGUMENT;
}

Result ncclCommGetAsyncError(Comm* comm, int* error) { return *error = comm->error, OK; }
Result ncclCommAbort(Comm* comm) {
  return comm->aborted = true, OK;
}  // its memory stays: work may still use it
}
