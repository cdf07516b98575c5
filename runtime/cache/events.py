"""What happens to the blocks that others may find: they are stored, and they are removed, in this order."""

from collections.abc import Callable, Sequence

import msgspec


class BlocksStored(msgspec.Struct, frozen=True):
    """Blocks of one sequence, one behind the other, can be found in a group from now on."""

    group: int
    keys: Sequence[bytes]
    parent: bytes | None  # key of the block before them; None: a sequence begins with them
    token_ids: Sequence[int]  # of all of them
    cache_salt: str  # of the sequence


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Blocks cannot be found in a group any more."""

    group: int
    keys: list[bytes]


CacheEvent = BlocksStored | BlocksRemoved


class CacheEvents:
    """Collects what happens to blocks while a step is planned and committed, and passes it on once a step.

    Args:
        block_size: tokens of a block that has a key.
        put: takes the events of a step. It is called by the thread that steps, and must not wait for anybody.
    """

    def __init__(self, block_size: int, put: Callable[[list[CacheEvent]], None]) -> None:
        self._block_size, self._put = block_size, put
        self._events: list[CacheEvent] = []
        self._new: dict[int, set[bytes]] = {}  # a group: keys that `published` has not put into an event

    def changed(self, group: int, key: bytes, is_there: bool) -> None:
        """A block can be found from now on, or cannot any more."""
        if is_there:
            self._new.setdefault(group, set()).add(key)
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and last.group == group:
            last.keys.append(key)
        else:
            self._events.append(BlocksRemoved(group, [key]))

    def published(self, keys: Sequence[bytes], token_ids: Sequence[int], cache_salt: str) -> None:
        """What can be found since the last call is of this sequence.

        Args:
            keys: of its full blocks.
        """
        for group, new in self._new.items():
            places = list[int]()
            for place in reversed(range(len(keys))):  # new ones are among the last
                if len(places) == len(new):
                    break
                if keys[place] in new:
                    places.append(place)
            end = 0  # behind the run of blocks that `first` begins
            for first in reversed(places):
                if first < end:
                    continue
                end = first + 1
                while end < len(keys) and keys[end] in new:
                    end += 1
                tokens = token_ids[first * self._block_size : end * self._block_size]
                parent = keys[first - 1] if first else None
                self._events.append(BlocksStored(group, list(keys[first:end]), parent, tokens, cache_salt))
        self._new.clear()

    def flush(self) -> None:
        """A step has ended."""
        if self._events:
            events, self._events = self._events, []
            self._put(events)
