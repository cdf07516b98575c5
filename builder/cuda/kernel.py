"""What a GPU kernel is before and after it is compiled."""

import msgspec

from enginewright.code import CompiledKernel
from enginewright.triton_instance import TritonInstance


class Instance(msgspec.Struct, frozen=True, tag=True):
    """One kernel in CUDA C++, specialized.

    source: a header, relative to the folder of sources: "rms_norm.cuh". expression: the C++ name of the
    specialization, in namespace enginewright: "rms_norm<RmsNorm{.columns = 576}>".
    """

    source: str
    expression: str


class Job(msgspec.Struct, frozen=True):
    """sm: one of `targets.SMS`, or "ptx". texts: the source and what it includes of ours, name → text."""

    instance: Instance | TritonInstance
    sm: str
    texts: dict[str, str]


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """One kernel for one architecture.

    cubin: machine code; the text of PTX for "ptx". symbol: the kernel's name in it. registers: of a thread.
    local_bytes: memory of a thread for what its registers do not hold: spills, and arrays with a computed index.
    static_shared_bytes: of a block. All three are 0 for PTX, where the driver compiles. shared_bytes, num_warps,
    scratch_bytes: as `code.CompiledKernel` has them; 0 for CUDA C++, where who launches says them.
    """

    cubin: bytes
    symbol: str
    registers: int = 0
    local_bytes: int = 0
    static_shared_bytes: int = 0
    shared_bytes: int = 0
    num_warps: int = 0
    scratch_bytes: int = 0

    @property
    def launch(self) -> CompiledKernel:
        return CompiledKernel(self.symbol, self.shared_bytes, self.num_warps, self.scratch_bytes)


class Failed(msgspec.Struct, frozen=True, tag=True):
    """log: what the compiler says."""

    log: str
