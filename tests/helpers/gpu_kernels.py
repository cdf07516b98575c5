"""Kernels compiled by NVRTC and launched on a GPU, on which ENGINEWRIGHT_TEST_DEVICE=cuda runs the emulator's tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np

from enginewright.builder.cuda import Compiled, Instance, compile_each
from enginewright.runtime.device.cuda.device import CudaDevice
from enginewright.targets import SMS, choose_code
from tests.emulator.kernels import Argument


@cache
def _device() -> CudaDevice:
    return CudaDevice()


class GpuKernels:
    """EmulatedKernels on a real GPU, which orders its warps itself: schedules change nothing, and no barrier can be
    left out.
    """

    def __init__(self, instances: Sequence[tuple[str, str]], sm: int = 80) -> None:
        architecture = choose_code(_device().capability, SMS)
        wanted = {expression: Instance(source, expression) for source, expression in instances}
        made = compile_each([(architecture, instance) for instance in wanted.values()])
        self._compiled: dict[str, Compiled] = {name: made[architecture, one] for name, one in wanted.items()}
        self.sites: list[str] = []

    def launch(
        self,
        expression: str,
        grid: Sequence[int],
        threads: int,
        shared_bytes: int,
        *arguments: Argument,
        schedule: str = "forward",
        seed: int = 0,
    ) -> None:
        device = _device()
        device.code = lambda name: (self._compiled[name].cubin, self._compiled[name].launch)  # of this name, always
        roots = {id(root): root for root in map(_root, arguments) if root is not None}
        memory = {}
        for key, root in roots.items():
            memory[key] = device.allocate(root.nbytes)
            device.upload(memory[key], _bytes(root))
        run = device.launcher(expression, threads, shared_bytes, [_value(one, memory) for one in arguments])
        run((*grid, *[1] * (3 - len(grid))))
        device.synchronize()
        for key, root in roots.items():
            if root.flags.writeable:
                device.download(_bytes(root), memory[key])
        device.synchronize()
        for address in memory.values():
            device.free(address)

    @staticmethod
    def are_for(sm: int) -> bool:
        major, minor = _device().capability
        return 10 * major + minor == sm

    @contextmanager
    def without(self, site: str) -> Iterator[None]:
        raise AssertionError(f"{site} is part of the code")
        yield


def _root(argument: Argument) -> np.ndarray | None:
    """The array whose memory an argument is in."""
    if not isinstance(argument, np.ndarray):
        return None
    while isinstance(argument.base, np.ndarray):
        argument = argument.base
    return argument


def _bytes(root: np.ndarray) -> np.ndarray:
    assert root.flags.c_contiguous
    return root.reshape(-1).view(np.uint8)


def _value(argument: Argument, memory: dict[int, int]) -> int:
    root = _root(argument)
    if root is not None:
        assert isinstance(argument, np.ndarray)
        return memory[id(root)] + argument.ctypes.data - root.ctypes.data
    if isinstance(argument, float):
        return int(np.float32(argument).view(np.uint32))
    assert argument is None or isinstance(argument, int)
    return argument or 0
