"""The memory of a cache group on a device, and how its places come to the host and back.

Everything is asked of the device's one stream, so it is in order with the steps: what is read is what the steps before
have left, and what is written is there for the steps behind.
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
    """Where a place is on the host, on its way."""

    data: Bytes  # pinned
    done: Any  # an event: when it was copied last


class DevicePlaces:
    """Places of a cache group, which begin as zeros.

    Pinned memory is taken as it is first needed, and used again: for as many places as are being read at once, and two.
    """

    def __init__(self, device: Device, num_places: int, place_bytes: int) -> None:
        self.place_bytes = place_bytes
        self.address = device.allocate(num_places * place_bytes)
        self._device = device
        self._free: deque[_Staging] = deque()  # that which was used last to write comes last

    def copy(self, places: Copies) -> None:
        for source, to in places:
            self._device.copy(self._at(to), self._at(source), self.place_bytes)

    def zero(self, places: Iterable[int]) -> None:
        for place in places:
            self._device.zero(self._at(place), self.place_bytes)

    def read(self, place: int) -> Callable[[], bytes]:
        staging = self._take()
        self._device.download(staging.data, self._at(place))
        self._device.record(staging.done)
        return _Read(self._device, staging, self._free).content

    def write(self, place: int, content: bytes | memoryview) -> None:
        staging = self._take()
        self._device.wait(staging.done)  # what it was last used for
        staging.data[:] = np.frombuffer(content, np.uint8)
        self._device.upload(self._at(place), staging.data)
        self._device.record(staging.done)
        self._free.append(staging)

    def _at(self, place: int) -> int:
        return self.address + place * self.place_bytes

    def _take(self) -> _Staging:
        """One stays, so that of places that are written one is filled while another is copied."""
        self._device.bind()  # a thread may begin with this, before its first step
        if len(self._free) > 1:
            return self._free.popleft()
        return _Staging(self._device.pinned(self.place_bytes), self._device.event(sleeps=True))


class _Read:
    """A place that is being read."""

    def __init__(self, device: Device, staging: _Staging, free: deque[_Staging]) -> None:
        self._device, self._staging, self._free = device, staging, free
        self._lock = Lock()
        self._content: bytes | None = None  # None: it is in pinned memory, or on its way there

    def content(self) -> bytes:
        """Waits for it, in any thread; then the pinned memory is free again."""
        with self._lock:
            if self._content is None:
                self._device.bind()
                self._device.wait(self._staging.done)
                self._content = self._staging.data.tobytes()
                self._free.appendleft(self._staging)
            return self._content
