// What a machine does at best: dot products on registers alone, and a streaming read. Kernels are compared
// with it (bench/roofline.py).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel.h"

namespace enginewright {

// A loop of one instruction, or of the few that make a dot product, on independent accumulators in registers.
struct DotLoop {
  const char* operands;     // "int8", "bf16", "fp32": what is multiplied
  const char* instruction;  // for people
  int64_t operations;       // multiplications and additions of a round
  void (*run)(int64_t rounds);
};

// The best loops of an instruction set of isa_names(). std::invalid_argument when this machine does not have
// it.
std::vector<DotLoop> dot_loops(const std::string& isa);

// Operations a second of `threads` threads together: the best pass of those that fit into `seconds`.
double dot_rate(const DotLoop& loop, int threads, double seconds);

struct Bytes {
  const std::byte* data;
  int64_t size;
};

// Bytes a second, reading all of `memory` in order and again, each thread a part of each piece; the best pass
// of those that fit into `seconds`, at least one for each of two ways of reading.
double read_rate(const std::vector<Bytes>& memory, int threads, double seconds);

}  // namespace enginewright
