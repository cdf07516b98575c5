"""Facts about GPUs of each architecture that decide what is launched on them.

Launches are chosen for the GPUs that are named here; others of the same architecture run the same launches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from enginewright.plan import Launch
from enginewright.plugins.kernel import Call
from enginewright.targets import PTX


@dataclass(frozen=True)
class ArchSpec:
    """An architecture that kernels are compiled for.

    Kernels with Hopper's own tensor core instructions (csrc/cuda/wgmma.cuh) are switched on here as soon as a GPU has
    shown that they are right, and faster: `python -m benchmarks.gpu` compares (`over mma.sync`). They add in another
    order than kernels for few tokens do, so engines that are built batch-invariant never have them.
    """

    name: str  # one of targets.SMS, or PTX
    multiprocessors: int  # multiprocessors of the GPU
    # limit of a block's shared memory, in bytes; code for sm_80 runs on 8.6, too, which has no more
    shared_bytes: int = 99 << 10
    wgmma_gemm: bool = False  # True if gemm_wgmma replaces gemm_large
    wgmma_prefill: bool = False  # True if paged_prefill_wgmma replaces paged_prefill

    @property
    def shared_bytes_of_two(self) -> int:
        """Limit for two blocks on a multiprocessor, in bytes each; the system takes 1 KB for a block."""
        return (self.shared_bytes + 1024) // 2 - 1024


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        ArchSpec("sm_80", 108),  # A100
        ArchSpec("sm_86", 82),  # GeForce RTX 3090; A40 has 84
        ArchSpec("sm_89", 128),  # GeForce RTX 4090; L40S has 142
        ArchSpec("sm_90a", 132, shared_bytes=227 << 10),  # H100 SXM, H200
        ArchSpec("sm_100a", 148, shared_bytes=227 << 10),  # B200
        ArchSpec("sm_120", 170),  # GeForce RTX 5090; RTX PRO 6000 has 188
        ArchSpec(PTX, 132),  # any GPU: the median of the others
    )
}


def by_architecture(call: Call, launches_on: Callable[[ArchSpec], Sequence[Launch]]) -> tuple[Launch, ...]:
    """Lists the launches of a call on each architecture that it is lowered for; shared launches are listed once.

    Args:
        call: the call.
        launches_on: architecture → launches there.
    """
    assert call.architectures, "a call for GPUs is lowered for some architecture"
    names: dict[Launch, tuple[str, ...]] = {}
    for name in call.architectures:
        for launch in launches_on(ARCHITECTURES[name]):
            names[launch] = (*names.get(launch, ()), name)
    return tuple(replace(launch, architectures=() if on == call.architectures else on) for launch, on in names.items())
