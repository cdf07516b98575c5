"""The slots of an executor for the adapters of running sequences."""

from collections import Counter, OrderedDict
from collections.abc import Callable

from enginewright.adapter_file import AdapterFile


class AdapterSlots:
    """Gives running sequences slots. An idle adapter stays until its slot is needed.

    Args:
        num_slots: number of slots, which is how many adapters a step may have.
        load: loads an adapter into a slot. No step that uses the slot runs.
        unload: empties a slot.
    """

    def __init__(self, num_slots: int, load: Callable[[int, AdapterFile], None], unload: Callable[[int], None]) -> None:
        self._load, self._unload = load, unload
        self._free = list(reversed(range(num_slots)))
        self._slots: dict[str, int] = {}  # content hash of a loaded adapter → its slot
        self._uses: Counter[str] = Counter()  # running sequences of each loaded adapter; idle ones have none
        self._idle: OrderedDict[str, None] = OrderedDict()  # loaded adapters without sequences, the last used last

    def has_room(self, adapter: AdapterFile | None) -> bool:
        """True if a sequence with it can run now."""
        return adapter is None or adapter.content_hash in self._slots or bool(self._free or self._idle)

    def acquire(self, adapter: AdapterFile | None) -> int:
        """Returns the slot of a sequence that begins to run, after `has_room`; -1 without an adapter."""
        if adapter is None:
            return -1
        key = adapter.content_hash
        if key not in self._slots:
            if not self._free:
                self.drop(next(iter(self._idle)))
            slot = self._free.pop()
            self._load(slot, adapter)
            self._slots[key] = slot
        self._idle.pop(key, None)
        self._uses[key] += 1
        return self._slots[key]

    def release(self, adapter: AdapterFile | None) -> None:
        """Ends a sequence's use of its slot."""
        if adapter is None:
            return
        key = adapter.content_hash
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self._idle[key] = None

    def drop(self, content_hash: str) -> None:
        """Empties the slot of an adapter that no running sequence uses, if it has one."""
        if content_hash in self._idle:
            del self._idle[content_hash]
            slot = self._slots.pop(content_hash)
            self._unload(slot)
            self._free.append(slot)
