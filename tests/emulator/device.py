"""An emulated GPU on the CPU: its memory is this process's, and kernels run in emulation (kernels.py)."""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from threading import Lock

import numpy as np

from enginewright.builder.cuda import compile_each
from enginewright.builder.cuda.sections import to_compile
from enginewright.plugins.kernel import Specialization
from enginewright.runtime.device.cuda.device import Bytes, CudaDevice, Grid
from enginewright.targets import SMS, choose_code
from tests.emulator.kernels import SCHEDULES, EmulatedKernels, libraries_with

ALIGN = 256
FREE_BYTES = 512 << 20


class EmulatedDevice:
    """Does nothing before it is waited for: what it reads from the host's memory has to stay there as long.

    kernels: the code of the engine, by name. What is captured is done when it is replayed, on the memory as it is then.
    Several threads may wait for it.
    """

    architecture = "emulated"
    multiprocessors = 3
    free_bytes = FREE_BYTES

    def __init__(self, kernels: Mapping[str, Specialization], sm: int = 80) -> None:
        self._specializations, self._sm = kernels, sm
        self._compiled: dict[str, EmulatedKernels] = {}  # as they are first launched: most are never
        self._launched: dict[str, None] = {}  # kernels of all launches that were ever queued
        self._memory: list[Bytes] = []
        self._captured: list[tuple[str, Callable[[], None]]] | None = None
        self._asked: deque[Callable[[], None]] = deque()  # and not done yet
        self._num_asked = self._num_done = 0  # in all
        self._doing = Lock()
        self._events: list[int] = []  # number of queued calls when each event was recorded
        self._schedules = cycle(SCHEDULES)
        self.launches = 0
        self.replays = 0

    def allocate(self, nbytes: int) -> int:
        memory = self.pinned(nbytes + ALIGN)
        return -(-memory.ctypes.data // ALIGN) * ALIGN

    def pinned(self, nbytes: int) -> Bytes:
        self._memory.append(np.zeros(nbytes, np.uint8))
        return self._memory[-1]

    def unpin(self, buffer: Bytes) -> None:
        pass

    def upload(self, address: int, data: Bytes) -> None:
        self._ask(lambda: ctypes.memmove(address, data.ctypes.data, data.nbytes))

    def download(self, data: Bytes, address: int) -> None:
        self._ask(lambda: ctypes.memmove(data.ctypes.data, address, data.nbytes))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._ask(lambda: ctypes.memmove(to, source, nbytes))

    def zero(self, address: int, nbytes: int) -> None:
        self._ask(lambda: ctypes.memset(address, 0, nbytes))

    def synchronize(self) -> None:
        self._do(self._num_asked)

    def event(self, *, sleeps: bool = False) -> int:
        self._events.append(0)
        return len(self._events) - 1

    def record(self, event: int) -> None:
        self._events[event] = self._num_asked

    def wait(self, event: int) -> None:
        self._do(self._events[event])

    def ask(self, work: Callable[[], None]) -> None:
        """Queues what is no kernel, or captures it, such as an exchange with another device (ranks.py)."""
        if self._captured is None:
            self._ask(work)
        else:
            self._captured.append(("", work))

    def do_next(self) -> None:
        """Does the first piece of work that is queued, for another device that waits for it."""
        with self._doing:
            self._asked.popleft()()
            self._num_done += 1

    def _ask(self, work: Callable[[], object]) -> None:
        self._asked.append(work)
        self._num_asked += 1

    def _do(self, end: int) -> None:
        """Does all work that was queued before `end`."""
        with self._doing:
            while self._num_done < end:
                self._asked.popleft()()
                self._num_done += 1

    def _ask_launch(self, kernel: str, launch: Callable[[], None]) -> None:
        self._launched[kernel] = None
        self._ask(launch)

    def _compile(self) -> None:
        """Compiles all kernels that are queued together, which takes less time than one by one."""
        missing = {one: self._specializations[one] for one in tuple(self._launched) if one not in self._compiled}
        instances = {name: kernel[:2] for name, kernel in missing.items() if not kernel.triton}
        libraries = libraries_with(list(instances.values()), self._sm)
        for (name, instance), library in zip(instances.items(), libraries, strict=True):
            self._compiled[name] = EmulatedKernels([instance], self._sm, library)

    def bind(self) -> None:
        pass

    def close(self) -> None:
        self._asked.clear()
        self._memory.clear()

    def launcher(
        self, kernel: str, threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> Callable[[Grid], None]:
        specialization = self._specializations[kernel]
        addresses = [ctypes.c_void_p(address or None) for address in arguments]

        def run(grid: Grid) -> None:
            def launch() -> None:
                self.launches += 1
                schedule, expression = next(self._schedules), specialization.expression
                if specialization.triton:
                    from tests.emulator.interpreted import launch as interpret

                    return interpret(specialization.triton, grid, arguments)
                if kernel not in self._compiled:
                    self._compile()
                self._compiled[kernel].launch(expression, grid, threads, shared_bytes, *addresses, schedule=schedule)

            if self._captured is None:
                self._ask_launch(kernel, launch)
            else:
                self._captured.append((kernel, launch))

        return run

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        captured = self._captured = []
        work()
        self._captured = None

        def replay() -> None:
            self.replays += 1
            for kernel, launch in captured:
                if kernel:
                    self._ask_launch(kernel, launch)
                else:
                    self._ask(launch)

        return replay


def device_for(kernels: Mapping[str, Specialization]) -> "EmulatedDevice | CudaDevice":
    """The device on which tests run this code: the emulated GPU, or a real one if the environment says so."""
    if os.environ.get("ENGINEWRIGHT_TEST_DEVICE") != "cuda":
        return EmulatedDevice(kernels)
    device = CudaDevice()
    architecture = choose_code(device.capability, SMS)
    instances = {name: to_compile(kernel) for name, kernel in kernels.items()}
    made = compile_each([(architecture, instance) for instance in instances.values()])
    code = {name: made[architecture, instance] for name, instance in instances.items()}
    device.code = lambda name: (code[name].cubin, code[name].launch)
    return device
