"""Kernels for several architectures, each for all of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from enginewright.builder.cuda import Compiled, Instance, TritonInstance, compile_each

Kernel = TypeVar("Kernel", Instance, TritonInstance)


def compile_kernels(
    instances: Iterable[Kernel], sms: Sequence[str], jobs: int | None = None, **folders: Path
) -> dict[str, dict[Kernel, Compiled]]:
    """Architecture → kernel → its code."""
    kernels = list(instances)
    made = compile_each([(sm, kernel) for sm in sms for kernel in kernels], jobs, **folders)
    return {sm: {kernel: made[sm, kernel] for kernel in kernels} for sm in sms}
