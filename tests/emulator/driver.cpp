// A CUDA driver without a GPU, libcuda.so.1: as much of its API as CudaDevice calls, where memory is this
// process's and kernels are emulated (emulated.py). What the documentation leaves open is chosen to be
// hostile, and what it forbids is an error: memory is poisoned at first; what is asked of a stream is done
// when somebody waits for it; a thread that has no context, or that allocates, loads or waits while it
// captures, is refused.
//
// DRIVER_DEVICES is the number of GPUs, 1 without. DRIVER_KERNELS names a file of what is emulated in place
// of the kernels in cubins: a line each of a kernel's symbol, a library ("none": it cannot be launched), the
// kernel's index in it, and the number of its parameters.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

enum Result {
  OK,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  NOT_FOUND = 500,
  FAILED = 719,
  CAPTURING = 900
};

struct Launch {
  int32_t grid[3], threads;
  int64_t shared_bytes;
  int32_t schedule;
  uint32_t seed;
};
using Run = const char* (*)(int, const Launch*, void**);  // gives why it failed, or nothing
struct Function {
  Run launch;
  int index;  // in its library
  std::size_t parameters;
  unsigned shared_bytes = 48 << 10;
};
struct Module {
  std::vector<Function*> functions;
};
using Work = std::function<bool()>;  // false where a kernel failed
using Graph = std::vector<Work>;
struct Event {
  std::size_t end = 0;  // of what was asked for before it was recorded
};
struct Stream {
  std::deque<Work> asked;
  std::size_t asked_of = 0, done = 0;
  Graph* captured = nullptr;
  std::mutex asking, doing;  // what is asked for is done by whichever thread waits
};

constexpr std::size_t MEMORY = 512 << 20, ALIGN = 256;
int context;  // its address
thread_local void* current;
thread_local Stream* capturing;
std::map<uintptr_t, std::size_t> memory;
std::set<void*> pinned, live;  // live: streams, events, modules and graphs
int retained;                  // how often the context is
Result broken = OK;

Result forbidden_while_capturing() { return !current ? INVALID_CONTEXT : capturing ? CAPTURING : broken; }

Result ask(Stream* stream, Work work) {
  if (!current) return INVALID_CONTEXT;
  if (!live.count(stream)) return INVALID_VALUE;
  if (stream->captured) {
    stream->captured->push_back(std::move(work));
  } else {
    std::lock_guard lock(stream->asking);
    stream->asked.push_back(std::move(work));
    ++stream->asked_of;
  }
  return broken;
}
Result finish(Stream* stream, std::size_t end) {
  std::lock_guard lock(stream->doing);
  while (stream->done < end) {
    Work next;
    {
      std::lock_guard also(stream->asking);
      if (stream->asked.empty()) break;
      next = std::move(stream->asked.front());
      stream->asked.pop_front();
    }
    if (!next()) broken = FAILED;
    ++stream->done;
  }
  return broken;
}
bool on_device(uintptr_t address, std::size_t count) {
  auto after = memory.upper_bound(address);
  if (after == memory.begin()) return false;
  auto [begin, bytes] = *std::prev(after);
  return address + count <= begin + bytes;
}
template <class T>
T* made(T* thing) {
  live.insert(thing);
  return thing;
}
template <class T>
Result gone(T* thing) {
  if (!live.erase(thing)) return INVALID_VALUE;
  delete thing;
  return OK;
}
Stream* the_stream;

}  // namespace

extern "C" {

Result cuInit(unsigned flags) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return flags ? INVALID_VALUE : visible && !*visible ? NO_DEVICE : OK;
}
Result cuDriverGetVersion(int* version) { return *version = 13000, OK; }
Result cuDeviceGetCount(int* count) {
  const char* devices = std::getenv("DRIVER_DEVICES");
  return *count = devices ? std::atoi(devices) : 1, OK;
}
Result cuDeviceGet(int* device, int index) {
  int count;
  return cuDeviceGetCount(&count), *device = index, 0 <= index && index < count ? OK : Result(101);
}
Result cuDeviceGetName(char* name, int size, int) { return std::strncpy(name, "emulated", size), OK; }
Result cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 3 : -1;
  return *value < 0 ? INVALID_VALUE : OK;
}
Result cuDevicePrimaryCtxRetain(void** to, int) { return *to = &context, ++retained, OK; }
Result cuDevicePrimaryCtxRelease_v2(int) { return retained-- > 0 ? OK : INVALID_CONTEXT; }
Result cuCtxSetCurrent(void* given) { return current = given, given == &context ? OK : INVALID_CONTEXT; }
Result cuGetErrorString(Result error, const char** text) {
  return *text = error == FAILED      ? "a kernel failed"
                 : error == CAPTURING ? "not while capturing"
                                      : "an error",
         OK;
}

// NVRTC asks for tables of its own, and does without.
Result cuGetExportTable(const void** table, const void*) { return *table = nullptr, NOT_FOUND; }

Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  *free = *total = MEMORY;
  for (auto& [_, bytes] : memory) *free -= bytes;
  return current ? OK : INVALID_CONTEXT;
}
Result cuMemAlloc_v2(uintptr_t* address, std::size_t bytes) {
  if (Result why = forbidden_while_capturing()) return why;
  std::size_t whole = (bytes + ALIGN - 1) / ALIGN * ALIGN;
  std::size_t free, total;
  if (!bytes) return INVALID_VALUE;
  if (cuMemGetInfo_v2(&free, &total) || bytes > free) return OUT_OF_MEMORY;
  *address = reinterpret_cast<uintptr_t>(std::aligned_alloc(ALIGN, whole));
  std::memset(reinterpret_cast<void*>(*address), 0xff, whole);
  memory[*address] = bytes;
  return OK;
}
Result cuMemFree_v2(uintptr_t address) {
  if (Result why = forbidden_while_capturing()) return why;
  if (!memory.erase(address)) return INVALID_VALUE;
  return finish(the_stream, the_stream->asked_of), std::free(reinterpret_cast<void*>(address)), OK;
}
Result cuMemHostAlloc(void** address, std::size_t bytes, unsigned flags) {
  if (Result why = forbidden_while_capturing()) return why;
  if (!bytes || flags) return INVALID_VALUE;
  *address = std::malloc(bytes);
  std::memset(*address, 0xff, bytes);
  return pinned.insert(*address), OK;
}
Result cuMemFreeHost(void* address) {
  if (!pinned.erase(address)) return INVALID_VALUE;
  return std::free(address), OK;
}
Result cuMemsetD8Async(uintptr_t to, unsigned char value, std::size_t count, Stream* stream) {
  if (!on_device(to, count)) return INVALID_VALUE;
  return ask(stream, [=] { return std::memset(reinterpret_cast<void*>(to), value, count) != nullptr; });
}
static Result copy(uintptr_t to, uintptr_t from, std::size_t count, Stream* stream) {
  auto* target = reinterpret_cast<void*>(to);
  return ask(stream, [=] { return std::memcpy(target, reinterpret_cast<void*>(from), count) != nullptr; });
}
Result cuMemcpyHtoDAsync_v2(uintptr_t to, uintptr_t from, std::size_t count, Stream* stream) {
  return on_device(to, count) && from ? copy(to, from, count, stream) : INVALID_VALUE;
}
Result cuMemcpyDtoHAsync_v2(uintptr_t to, uintptr_t from, std::size_t count, Stream* stream) {
  return on_device(from, count) && to ? copy(to, from, count, stream) : INVALID_VALUE;
}
Result cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, std::size_t count, Stream* stream) {
  return on_device(to, count) && on_device(from, count) ? copy(to, from, count, stream) : INVALID_VALUE;
}

Result cuStreamCreate(Stream** stream, unsigned flags) {
  if (flags != 1) return INVALID_VALUE;  // CU_STREAM_NON_BLOCKING
  return *stream = the_stream = made(new Stream), current ? OK : INVALID_CONTEXT;
}
Result cuStreamDestroy_v2(Stream* stream) { return gone(stream); }
Result cuStreamSynchronize(Stream* stream) {
  Result why = forbidden_while_capturing();
  return why ? why : finish(stream, stream->asked_of);
}
Result cuEventCreate(Event** event, unsigned flags) {
  return *event = made(new Event),
         flags == 2 || flags == 3 ? OK : INVALID_VALUE;  // no timing; 1: waits asleep
}
Result cuEventDestroy_v2(Event* event) { return gone(event); }
Result cuEventRecord(Event* event, Stream* stream) {
  return event->end = stream->asked_of, current ? OK : INVALID_CONTEXT;
}
Result cuEventSynchronize(Event* event) {
  Result why = forbidden_while_capturing();
  return why ? why : finish(the_stream, event->end);
}

Result cuModuleLoadData(Module** module, const char* image) {
  if (Result why = forbidden_while_capturing()) return why;
  const char magic[] = {0x7f, 'E', 'L', 'F'};
  return *module = made(new Module), std::memcmp(image, magic, 4) ? INVALID_IMAGE : OK;
}
Result cuModuleUnload(Module* module) {
  for (Function* function : module->functions) delete function;
  return gone(module);
}
Result cuModuleGetFunction(Function** function, Module* module, const char* name) {
  std::ifstream kernels(std::getenv("DRIVER_KERNELS"));
  std::string symbol, library;
  int index;
  for (std::size_t parameters; kernels >> symbol >> library >> index >> parameters;) {
    if (symbol != name) continue;
    void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* launch = opened ? dlsym(opened, "enginewright_launch") : nullptr;
    *function = new Function{reinterpret_cast<Run>(launch), index, parameters};
    return module->functions.push_back(*function), OK;
  }
  return NOT_FOUND;
}
Result cuFuncSetAttribute(Function* function, int attribute, int value) {
  if (attribute != 8 || value > (227 << 10)) return INVALID_VALUE;  // MAX_DYNAMIC_SHARED_SIZE_BYTES
  return function->shared_bytes = static_cast<unsigned>(value), OK;
}
Result cuLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned threads,
                      unsigned threads_y, unsigned threads_z, unsigned shared_bytes, Stream* stream,
                      void** parameters, void** extra) {
  bool sane = x && y && z && x < 1u << 31 && y < 1u << 16 && z < 1u << 16 && threads && threads <= 1024 &&
              threads_y == 1 && threads_z == 1 && !extra;
  if (!function->launch || shared_bytes > function->shared_bytes) return INVALID_VALUE;
  if (!sane) return INVALID_VALUE;
  std::vector<uint64_t> values(function->parameters);  // are copied at once; all have 8 bytes
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = *static_cast<uint64_t*>(parameters[i]);
  Launch launch = {{int(x), int(y), int(z)}, int(threads), shared_bytes, 2, 1};
  return ask(stream, [function, launch, values]() mutable {
    std::vector<void*> addresses;
    for (uint64_t& value : values) addresses.push_back(&value);
    return !*function->launch(function->index, &launch, addresses.data());
  });
}

Result cuStreamBeginCapture_v2(Stream* stream, int mode) {
  if (stream->captured || mode < 0 || mode > 2) return INVALID_VALUE;
  stream->captured = made(new Graph);
  return capturing = stream, OK;
}
Result cuStreamEndCapture(Stream* stream, Graph** graph) {
  *graph = stream->captured;
  stream->captured = nullptr;
  capturing = nullptr;
  return *graph ? OK : INVALID_VALUE;
}
Result cuGraphInstantiateWithFlags(Graph** whole, Graph* graph, unsigned long long flags) {
  return *whole = made(new Graph(*graph)), flags ? INVALID_VALUE : OK;
}
Result cuGraphDestroy(Graph* graph) { return gone(graph); }
Result cuGraphExecDestroy(Graph* graph) { return gone(graph); }
Result cuGraphUpload(Graph* graph, Stream*) { return live.count(graph) ? OK : INVALID_VALUE; }
Result cuGraphLaunch(Graph* graph, Stream* stream) {
  if (!live.count(graph)) return INVALID_VALUE;
  for (Work& work : *graph)
    if (Result why = ask(stream, work)) return why;
  return OK;
}

// For another library (nccl.cpp): work of a stream, which is also captured, and if memory is the device's.
int driver_ask(Stream* stream, bool (*work)(void*), void* given) {
  return ask(stream, [=] { return work(given); });
}
bool driver_on_device(uintptr_t address, std::size_t count) { return on_device(address, count); }

// What has not been given back.
int driver_left() { return static_cast<int>(memory.size() + pinned.size() + live.size()) + retained; }

Result cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* found) {
  for (const char* version : {"_v2", "", "WithFlags"})
    if ((*function = dlsym(RTLD_DEFAULT, (std::string(name) + version).c_str()))) break;
  if (found) *found = *function ? 0 : 1;
  return OK;
}
}
