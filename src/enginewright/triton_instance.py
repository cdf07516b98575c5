"""The description of a Triton kernel's specialization: plugins make it, and the builder compiles it."""

import msgspec


class TritonInstance(msgspec.Struct, frozen=True, tag=True):
    """One kernel in Triton, specialized.

    A launch passes the arguments of the signature, then the address of `scratch_bytes` for each block, and a null
    pointer. Pointers are aligned to 16 bytes, but for those in `unaligned`.
    """

    module: str  # module of the kernel
    function: str  # name of the kernel in it
    signature: tuple[tuple[str, str], ...]  # argument and its type, in order, as Triton writes them ("*bf16")
    constants: tuple[tuple[str, int | bool | float], ...]  # argument and its value, for arguments that are tl.constexpr
    num_warps: int  # warps of a block
    num_stages: int  # stages of software pipelining
    unaligned: tuple[str, ...] = ()  # pointers that need not be aligned

    @property
    def source(self) -> str:
        """Path of the source file, relative to the folder of sources."""
        return f"{self.module.removeprefix('enginewright.csrc.cuda.').replace('.', '/')}.py"

    @property
    def expression(self) -> str:
        """Name of the specialization, as messages show it."""
        return f"{self.function}<{', '.join(f'{name}={value}' for name, value in self.constants)}>"
