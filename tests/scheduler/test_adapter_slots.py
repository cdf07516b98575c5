"""Slots of adapters: which ones are loaded, and what is unloaded for others."""

from dataclasses import dataclass
from typing import Any

from enginewright.runtime.scheduler.adapters import AdapterSlots


@dataclass(frozen=True)
class Named:
    """An adapter of which the slots read no more than the hash."""

    content_hash: str


class Device:
    """An executor's slots, which refuses what a real one could not do."""

    def __init__(self, num_slots: int) -> None:
        self.content: list[str | None] = [None] * num_slots
        self.slots = AdapterSlots(num_slots, self.load, self.unload)

    def load(self, slot: int, adapter: Any) -> None:
        assert self.content[slot] is None and adapter.content_hash not in self.content
        self.content[slot] = adapter.content_hash

    def unload(self, slot: int) -> None:
        assert self.content[slot] is not None
        self.content[slot] = None

    def acquire(self, name: str) -> int:
        slot = self.slots.acquire(Named(name))  # type: ignore[arg-type]
        assert self.content[slot] == name
        return slot

    def release(self, name: str) -> None:
        self.slots.release(Named(name))  # type: ignore[arg-type]

    def has_room(self, name: str) -> bool:
        return self.slots.has_room(Named(name))  # type: ignore[arg-type]


def test_sequences_of_one_adapter_share_its_slot() -> None:
    device = Device(2)
    assert device.acquire("a") == device.acquire("a") != device.acquire("b")
    assert device.has_room("a") and device.has_room("b") and not device.has_room("c")
    device.release("a")
    assert not device.has_room("c"), "another sequence still uses it"
    device.release("a")
    assert device.has_room("c")


def test_an_idle_adapter_stays_until_its_slot_is_needed() -> None:
    device = Device(2)
    first = device.acquire("a")
    device.acquire("b")
    for name in ("b", "a"):
        device.release(name)
    assert device.content[first] == "a" and device.acquire("a") == first
    device.release("a")
    device.acquire("c")  # b was used before a
    assert set(device.content) == {"a", "c"}


def test_without_an_adapter_no_slot_is_needed() -> None:
    device = Device(1)
    device.acquire("a")
    assert device.slots.has_room(None) and device.slots.acquire(None) == -1
    device.slots.release(None)
    assert device.content == ["a"]


def test_an_adapter_in_use_is_not_dropped() -> None:
    device = Device(1)
    device.acquire("a")
    device.slots.drop("a")
    assert device.content == ["a"]
    device.release("a")
    device.slots.drop("a")
    assert device.content == [None] and device.has_room("b")
