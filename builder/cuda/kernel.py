"""What a GPU kernel is before and after it is compiled."""

import msgspec

from enginewright.code import CompiledKernel


class Instance(msgspec.Struct, frozen=True, tag=True):
    """One kernel in CUDA C++, specialized.

    source: a header, relative to the folder of sources: "rms_norm.cuh". expression: the C++ name of the
    specialization, in namespace enginewright: "rms_norm<RmsNorm{.columns = 576}>".
    """

    source: str
    expression: str


class TritonInstance(msgspec.Struct, frozen=True, tag=True):
    """One kernel in Triton, specialized.

    module, function: where it is. signature: argument → type, in order, as Triton writes them ("*bf16"); pointers are
    aligned to 16 bytes. constants: argument → value, of those that are tl.constexpr. A launch passes the arguments of
    the signature, then the address of `scratch_bytes` for each block, and a null pointer.
    """

    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | bool], ...]
    num_warps: int
    num_stages: int

    @property
    def source(self) -> str:
        """Relative to the folder of sources."""
        return f"{self.module.removeprefix('enginewright.csrc.cuda.').replace('.', '/')}.py"

    @property
    def expression(self) -> str:
        return f"{self.function}<{', '.join(f'{name}={value}' for name, value in self.constants)}>"


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
