"""Kernels with Hopper's own tensor core instructions (csrc/cuda/wgmma.cuh), and whose code has them.

Each is in place of a kernel that all GPUs have. "sm_90a", the architecture that can, belongs here as soon as a GPU has
shown that the kernel is right, and faster: `python -m benchmarks.gpu` compares (`over mma.sync`). They add in another
order than kernels for few tokens do, so engines that are built batch-invariant never have them.
"""

from collections.abc import Sequence

from msgspec import structs

from enginewright.plan import Launch
from enginewright.plugins.kernel import Call
from enginewright.targets import PTX, SMS

GEMM_ON: tuple[str, ...] = ()  # gemm_wgmma in place of gemm_large
PREFILL_ON: tuple[str, ...] = ()  # paged_prefill_wgmma in place of paged_prefill


def in_place_of(launches: Sequence[Launch], ours: Sequence[Launch], on: Sequence[str], call: Call) -> list[Launch]:
    """Those for other architectures, and ours for these; all as they are, where we have none."""
    if not on or not ours or call.batch_invariant:
        return list(launches)
    others = tuple(architecture for architecture in (*SMS, PTX) if architecture not in on)
    return [
        *(structs.replace(launch, architectures=others) for launch in launches),
        *(structs.replace(launch, architectures=tuple(on)) for launch in ours),
    ]
