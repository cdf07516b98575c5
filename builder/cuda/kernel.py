"""GPU kernels before and after they are compiled."""

import msgspec

from enginewright.code import CompiledKernel
from enginewright.triton_instance import TritonInstance


class Instance(msgspec.Struct, frozen=True, tag=True):
    """One kernel in CUDA C++, specialized."""

    source: str  # header, relative to the folder of sources: "rms_norm.cuh"
    # C++ name of the specialization, in namespace enginewright: "rms_norm<RmsNorm{.columns = 576}>"
    expression: str


class Job(msgspec.Struct, frozen=True):
    """A kernel to compile for one architecture."""

    instance: Instance | TritonInstance  # the kernel
    sm: str  # one of `targets.SMS`, or "ptx"
    texts: dict[str, str]  # the source and our headers that it includes, name → text


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """One kernel for one architecture."""

    cubin: bytes  # machine code; the text of PTX for "ptx"
    symbol: str  # name of the kernel in it

    # Resources that the compiler reports; 0 for PTX, which the driver compiles when the engine is opened.
    registers: int = 0  # registers of a thread
    local_bytes: int = 0  # memory of a thread beyond its registers, in bytes: spills, and arrays with a computed index
    static_shared_bytes: int = 0  # static shared memory of a block, in bytes

    # Launch parameters, as in `code.CompiledKernel`, that Triton has chosen; 0 for CUDA C++, where the plan has them.
    shared_bytes: int = 0  # dynamic shared memory of a block, in bytes
    num_warps: int = 0  # warps of a block
    scratch_bytes: int = 0  # global memory of a block, in bytes

    @property
    def launch(self) -> CompiledKernel:
        """Launch of the kernel, as the engine's code stores it."""
        return CompiledKernel(self.symbol, self.shared_bytes, self.num_warps, self.scratch_bytes)


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A kernel that does not compile."""

    log: str  # text of the compiler
