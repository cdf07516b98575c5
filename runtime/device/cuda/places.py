"""The memory of a cache group on a device, and copies of its blocks or slots to the host and back.

All copies are queued on the device's one stream, in order with the steps. So a read sees the results of all earlier
steps, and all later steps see what was written.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.device.cuda.device import Bytes, Device


@dataclass(frozen=True, eq=False)
class _Staging:
    """A host buffer through which a place's content is copied."""

    data: Bytes  # pinned memory of the size of a place
    done: Any  # event recorded after the last copy from or to it


class DevicePlaces:
    """The memory of a cache group's blocks or slots on a device (PlaceMemory), zero at first.

    Pinned buffers are allocated when they are first needed, and reused. There are two more of them, at most, than the
    number of places that are read at the same time.

    Args:
        device: the GPU.
        num_places: number of blocks or slots.
        place_bytes: bytes of each.
    """

    def __init__(self, device: Device, num_places: int, place_bytes: int) -> None:
        self.place_bytes = place_bytes
        self.address = device.allocate(num_places * place_bytes)
        self._device = device
        self._free: deque[_Staging] = (
            deque()
        )  # buffers; one that was written from goes to the end, since its copy may still run

    def copy(self, places: Copies) -> None:
        """Queues copies of places, in order."""
        for source, to in places:
            self._device.copy(self._at(to), self._at(source), self.place_bytes)

    def zero(self, places: Iterable[int]) -> None:
        """Queues filling places with zeros."""
        for place in places:
            self._device.zero(self._at(place), self.place_bytes)

    def read(self, place: int) -> Callable[[], bytes]:
        """Queues a copy to the host. The returned function waits for it, in any thread, and gives the content."""
        staging = self._take()
        self._device.download(staging.data, self._at(place))
        self._device.record(staging.done)
        return _Read(self._device, staging, self._free).content

    def write(self, place: int, content: bytes | memoryview) -> None:
        """Queues a copy of `content` to a place."""
        staging = self._take()
        self._device.wait(staging.done)  # until then the buffer is in use
        staging.data[:] = np.frombuffer(content, np.uint8)
        self._device.upload(self._at(place), staging.data)
        self._device.record(staging.done)
        self._free.append(staging)

    def _at(self, place: int) -> int:
        return self.address + place * self.place_bytes

    def _take(self) -> _Staging:
        """Takes a free buffer, or a new one. It leaves the most recently used one, whose copy may still run."""
        self._device.bind()  # this may be a thread's first call, before its first step
        if len(self._free) > 1:
            return self._free.popleft()
        return _Staging(self._device.pinned(self.place_bytes), self._device.event(sleeps=True))


class _Read:
    """A read of a place that is under way."""

    def __init__(self, device: Device, staging: _Staging, free: deque[_Staging]) -> None:
        self._device, self._staging, self._free = device, staging, free
        self._lock = Lock()
        self._content: bytes | None = None  # None: it is still in the pinned buffer, or being copied there

    def content(self) -> bytes:
        """Waits for the content, in any thread, and frees the pinned buffer for reuse."""
        with self._lock:
            if self._content is None:
                self._device.bind()
                self._device.wait(self._staging.done)
                self._content = self._staging.data.tobytes()
                self._free.appendleft(self._staging)
            return self._content
