// What adapters change of embeddings (adapters.h has the mathematics).
//
//   adapter_embed@1  tokens: i32 step input [rows]; adapters; out: f32 [rows, H], from embed.h with this
//   scale
//
// A row of out whose token an adapter has a row of its own for becomes (row * scale of int8) * scale; others
// of rows with an adapter get + (B A[:, token]) * scale. Sums are one chain over the ranks, without FMAs, so
// they have the same bits on all machines.
#pragma once

#include "kernel.h"

namespace enginewright {

// It is bound by what it reads of A and B, so one copy serves all instruction sets.
std::unique_ptr<Kernel> make_adapter_embed(const Operands& operands, const Attributes& attributes);

}  // namespace enginewright
