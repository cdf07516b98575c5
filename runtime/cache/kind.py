"""The interface of one cache group, paged or recurrent."""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import Generic, TypeVar

from enginewright.runtime.cache.eviction import Retention
from enginewright.runtime.cache.pool import Pool

Copies = list[tuple[int, int]]  # pairs of places (from, to), copied in this order before a step's kernels run
Held = TypeVar("Held")  # what one sequence holds of the group


class CacheKind(ABC, Generic[Held]):
    """The places of one group: blocks of tokens, or slots of a recurrent state.

    Before an operation that may fail, `Cache` asks all groups (`has_room`, `can_fork`, `missing`, `can_truncate`), and
    performs it only if all agree. `held` is what one sequence holds of the group. `keys` are those of a sequence's
    first full blocks (PrefixKeys).
    """

    pool: Pool

    @abstractmethod
    def num_shared(self, keys: Sequence[bytes], max_blocks: int, also: Container[bytes] = ()) -> int:
        """Number of blocks of the longest prefix that a new sequence can share.

        Args:
            keys: of the sequence's full blocks.
            max_blocks: maximum number of blocks.
            also: keys that count as available, such as those on disk.
        """

    @abstractmethod
    def begins_with(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The subset of `keys` whose places a sequence reads if it shares these blocks and continues after them."""

    @abstractmethod
    def has_room(self, length: int, keys: Sequence[bytes], watermark_blocks: int) -> bool:
        """True if `open` would find enough free places now.

        Args:
            length: number of the sequence's positions so far.
            keys: of the blocks that it shares.
            watermark_blocks: number of places that must be left over in a group whose sequences take more as they grow.
        """

    @abstractmethod
    def open(
        self,
        length: int,
        keys: Sequence[bytes],
        copies: Copies,
        *,
        shares: bool,
        divergence_position: int,
        retention: Retention,
    ) -> Held:
        """Reserves what the first `length` positions need, and holds the shared blocks.

        Args:
            length: number of the sequence's positions so far.
            keys: of the blocks that it shares, which are in memory.
            copies: receives the copies to make before the next step.
            shares: True if other sequences may share what this one computes.
            divergence_position: position up to which an earlier sequence has the same tokens; 0: none is known.
            retention: hint for what the sequence leaves in the cache.
        """

    @abstractmethod
    def can_fork(self, held: Held, computed: int, shared: int, length: int, watermark_blocks: int) -> bool:
        """True if a sibling of `length` positions can share the first `shared` of `computed` positions now."""

    @abstractmethod
    def fork(self, held: Held, shared: int, length: int, copies: Copies) -> Held:
        """Opens a sibling, as `can_fork` has allowed. `copies` receives the copies to make before the next step."""
        ...

    def missing(self, held: Held, length: int) -> int | None:
        """Number of places to reserve before the sequence may have `length` positions; None if too few are free."""
        return 0

    def reserve(self, held: Held, count: int) -> None:
        """Reserves `count` places, as many as `missing` has returned."""

    @abstractmethod
    def extend(self, held: Held, computed: int, length: int, new: list[int], copies: Copies) -> None:
        """Takes the places that the next step writes, for positions `computed` to `length`.

        Args:
            held: what the sequence holds.
            computed: number of positions that the steps planned so far compute.
            length: number of positions after the next step.
            new: receives the places to zero.
            copies: receives the copies to make before that.
        """

    @abstractmethod
    def tag(self, held: Held, keys: Sequence[bytes]) -> None:
        """Notes the keys of the sequence's first blocks, which the steps planned so far fill."""

    @abstractmethod
    def publish(self, held: Held) -> None:
        """Lets other sequences share the places that have a key, after a step that gave no NaN."""

    @abstractmethod
    def can_truncate(self, held: Held, computed: int, length: int, keys: Sequence[bytes]) -> bool:
        """True if the sequence can be shortened from `computed` to `length` positions."""

    @abstractmethod
    def truncate(self, held: Held, computed: int, length: int, keys: Sequence[bytes], copies: Copies) -> None:
        """Shortens the sequence to `length` positions. `copies` receives the copies to make before the next step."""

    def checkpoint(self, held: Held, computed: int, copies: Copies) -> bool:
        """Keeps what it takes to return to `computed` after draft tokens; False if there is no room for it."""
        return True

    def rollback_position(self, held: Held, computed: int, length: int) -> int:
        """The last position up to `length` that `truncate` can restore; the checkpoint's in the worst case."""
        return length

    def drop_checkpoint(self, held: Held) -> None:
        """Releases the checkpoint, once the draft tokens after it are verified."""

    @abstractmethod
    def release(self, held: Held) -> None:
        """Releases all that the sequence holds."""

    def chunk_end(self, held: Held, first: int, end: int) -> int:
        """End of a prompt's chunk from `first`: `end`, or an earlier position at which the state is copied."""
        return end
