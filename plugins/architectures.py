"""What GPUs of each architecture have, as far as it decides what is launched on them.

Launches are chosen for the GPUs that are named here; others of the architecture run the same.
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
    multiprocessors: int
    shared_bytes: int = 99 << 10  # of a block, at most; code for sm_80 runs on 8.6, too, which has no more
    wgmma_gemm: bool = False  # gemm_wgmma in place of gemm_large
    wgmma_prefill: bool = False  # paged_prefill_wgmma in place of paged_prefill

    @property
    def shared_bytes_of_two(self) -> int:
        """Of each of two blocks on a multiprocessor, where the system takes 1 KB for a block."""
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
        ArchSpec(PTX, 132),  # any GPU: the middle of the others
    )
}


def by_architecture(call: Call, launches_on: Callable[[ArchSpec], Sequence[Launch]]) -> tuple[Launch, ...]:
    """What a call launches on each of the architectures that it is lowered for; what they share stands there once."""
    assert call.architectures, "a call for GPUs is lowered for some architecture"
    names: dict[Launch, tuple[str, ...]] = {}
    for name in call.architectures:
        for launch in launches_on(ARCHITECTURES[name]):
            names[launch] = (*names.get(launch, ()), name)
    return tuple(replace(launch, architectures=() if on == call.architectures else on) for launch, on in names.items())
