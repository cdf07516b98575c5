"""What of a kernel in Triton is compiled: plugins say it, and the builder does it."""

import msgspec


class TritonInstance(msgspec.Struct, frozen=True, tag=True):
    """One kernel in Triton, specialized.

    module, function: where it is. signature: argument → type, in order, as Triton writes them ("*bf16"); pointers are
    aligned to 16 bytes, but for those in `unaligned`. constants: argument → value, of those that are tl.constexpr. A
    launch passes the arguments of the signature, then the address of `scratch_bytes` for each block, and a null
    pointer.
    """

    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | bool | float], ...]
    num_warps: int
    num_stages: int
    unaligned: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Relative to the folder of sources."""
        return f"{self.module.removeprefix('enginewright.csrc.cuda.').replace('.', '/')}.py"

    @property
    def expression(self) -> str:
        return f"{self.function}<{', '.join(f'{name}={value}' for name, value in self.constants)}>"
