// Launches of kernels on the fibers of emulator.cpp.
#pragma once

#include <cstdint>
#include <utility>

#include "emulated.h"

namespace enginewright::emulator {

// Who runs first where a GPU leaves it open: warps and blocks from the first on, from the last on, or by
// chance.
enum class Schedule : int32_t { forward, reverse, random };

struct Launch {
  int32_t grid[3];
  int32_t threads;
  int64_t shared_bytes;
  Schedule schedule;
  uint32_t seed;
};

// A kernel with addresses of its arguments, as CUDA's launches take them.
using Call = void (*)(void** arguments);

struct Kernel {
  const char* expression;
  Call call;
};

template <auto KERNEL_FUNCTION>
struct Caller;
template <class... A, void (*KERNEL_FUNCTION)(A...)>
struct Caller<KERNEL_FUNCTION> {
  static void call(void** arguments) { call(arguments, std::index_sequence_for<A...>{}); }
  template <std::size_t... I>
  static void call(void** arguments, std::index_sequence<I...>) {
    KERNEL_FUNCTION(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
  }
};

}  // namespace enginewright::emulator

namespace enginewright {
extern const emulator::Kernel kernels[];  // the library's, by index; the last has no expression
}
