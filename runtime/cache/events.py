"""Events of the prefix cache: blocks that other sequences can find from now on, and blocks that they no longer can.

Routers use them to send a request to the server that has its prefix (runtime/core/kv_events.py).
"""

from collections.abc import Callable, Sequence

import msgspec


class BlocksStored(msgspec.Struct, frozen=True):
    """Consecutive blocks of one sequence that can be found from now on."""

    group: int  # index of the cache group
    keys: Sequence[bytes]  # keys of the blocks, in order
    parent: bytes | None  # key of the block before them; None: they are the first of the sequence
    token_ids: Sequence[int]  # tokens of all the blocks
    cache_salt: str  # salt of the sequence: only sequences of the same salt share the blocks
    adapter: str | None = None  # name of the sequence's adapter: only sequences of the same one share the blocks


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Blocks that can no longer be found."""

    group: int  # index of the cache group
    keys: list[bytes]  # keys of the blocks, in the order of removal


CacheEvent = BlocksStored | BlocksRemoved


class CacheEvents:
    """Collects events while a step is planned and committed, and passes them on once a step.

    Args:
        block_size: number of tokens of a block that has a key.
        put: takes the events of a step. The thread that runs the steps calls it, so it must not block.
    """

    def __init__(self, block_size: int, put: Callable[[list[CacheEvent]], None]) -> None:
        self._block_size, self._put = block_size, put
        self._events: list[CacheEvent] = []
        self._new: dict[int, set[bytes]] = {}  # by group, keys that `published` has not put into an event

    def changed(self, group: int, key: bytes, is_there: bool) -> None:
        """Notes that a block can be found from now on (`is_there`), or no longer can."""
        if is_there:
            self._new.setdefault(group, set()).add(key)
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and last.group == group:
            last.keys.append(key)
        else:
            self._events.append(BlocksRemoved(group, [key]))

    def published(
        self,
        keys: Sequence[bytes],
        token_ids: Sequence[int],
        cache_salt: str,
        adapter: str | None = None,
        first_adapted: int = 0,
    ) -> None:
        """Makes events of the blocks that can be found since the last call, all of which belong to this sequence.

        Args:
            keys: of its full blocks.
            token_ids: its tokens, at least those of its full blocks.
            cache_salt: its salt.
            adapter: name of its adapter; None: it has none.
            first_adapted: first block with tokens that have the adapter.
        """
        for group, new in self._new.items():
            places = list[int]()
            for place in reversed(range(len(keys))):  # new ones are among the last
                if len(places) == len(new):
                    break
                if keys[place] in new:
                    places.append(place)
            end = 0  # after the last of the consecutive blocks that begin with `first`
            for first in reversed(places):
                if first < end:
                    continue
                end = first + 1
                while end < len(keys) and keys[end] in new and end != first_adapted:
                    end += 1
                tokens = token_ids[first * self._block_size : end * self._block_size]
                parent = keys[first - 1] if first else None
                name = adapter if first >= first_adapted else None
                self._events.append(BlocksStored(group, list(keys[first:end]), parent, tokens, cache_salt, name))
        self._new.clear()

    def flush(self) -> None:
        """Passes on the events of a step, at its end."""
        if self._events:
            events, self._events = self._events, []
            self._put(events)
