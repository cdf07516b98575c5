// Which instruction sets this machine has, and their kernels.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace enginewright {

// Best first, of "amx", "avx512", "avx512-vnni", "avx2-vnni", "avx2", "portable". "amx" is avx512 with GEMMs
// on tiles; "avx512-vnni" has products of bf16 by FMAs, as those of AVX2 have.
std::vector<std::string> isa_names();

// std::invalid_argument when this machine has no such instruction set.
const KernelTable& kernel_table(const std::string& isa);

// One a source file, isa_*.cpp.
KernelTable portable_table();
#if defined(__x86_64__)
KernelTable avx2_table();
KernelTable avx2_vnni_table();
KernelTable avx512_vnni_table();
KernelTable avx512_table();
KernelTable amx_table();
#endif

}  // namespace enginewright
