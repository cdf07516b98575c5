"""The questions that every kind of cache group answers, for one sequence at a time."""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import Generic, TypeVar

from enginewright.runtime.cache.pool import Pool

Copies = list[tuple[int, int]]  # places, (from, to), in the order in which they are made, before a step's kernels run
Held = TypeVar("Held")  # what one sequence holds of the group


class CacheKind(ABC, Generic[Held]):
    """The places of one group: blocks of tokens, or slots of a state.

    What may fail is asked first (`has_room`, `can_fork`, `missing`, `can_truncate`) and done after all groups have said
    yes. `keys` are of the blocks of tokens that a sequence begins with (PrefixKeys).
    """

    pool: Pool

    @abstractmethod
    def num_shared(self, keys: Sequence[bytes], most: int, also: Container[bytes] = ()) -> int:
        """Blocks of the longest beginning, of `most` at most, that a sequence could go on from.

        Args:
            also: keys that count as there.
        """

    @abstractmethod
    def begins_with(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Of these keys, those of what a sequence reads that goes on behind them."""

    @abstractmethod
    def has_room(self, length: int, keys: Sequence[bytes], watermark_blocks: int) -> bool:
        """Whether a sequence of `length` positions that begins with what is there can be opened now.

        Args:
            watermark_blocks: places that must be left over, where sequences take more as they grow.
        """

    @abstractmethod
    def open(
        self, length: int, keys: Sequence[bytes], copies: Copies, *, shares: bool, divergence_position: int
    ) -> Held:
        """Take what the first `length` tokens need, of which `keys` are there already.

        Args:
            shares: others may begin with what this sequence computes.
            divergence_position: position up to which an earlier sequence has the same tokens; 0: none is known.
        """

    @abstractmethod
    def can_fork(self, held: Held, computed: int, shared: int, length: int, watermark_blocks: int) -> bool:
        """Whether a sibling can go on behind the first `shared` of `computed` positions, to `length`."""

    @abstractmethod
    def fork(self, held: Held, shared: int, length: int, copies: Copies) -> Held: ...

    def missing(self, held: Held, length: int) -> int | None:
        """Places to reserve before the sequence may have `length` positions; None if they are not there now."""
        return 0

    def reserve(self, held: Held, count: int) -> None:
        """As many as were missing."""

    @abstractmethod
    def extend(self, held: Held, computed: int, length: int, new: list[int], copies: Copies) -> None:
        """Make room to write positions from `computed` up to `length`; what lies before is there already.

        Args:
            new: gets the places that have to be zeroed.
        """

    @abstractmethod
    def tag(self, held: Held, keys: Sequence[bytes]) -> None:
        """The steps planned so far write what these keys stand for."""

    @abstractmethod
    def publish(self, held: Held) -> None:
        """No NaN came out of what has a key, so others may share it; until then it is nobody else's."""

    @abstractmethod
    def can_truncate(self, held: Held, computed: int, length: int, keys: Sequence[bytes]) -> bool:
        """Whether the first `length` of `computed` positions can be had again."""

    @abstractmethod
    def truncate(self, held: Held, computed: int, length: int, keys: Sequence[bytes], copies: Copies) -> None:
        """Take back what positions from `length` on have left."""

    def checkpoint(self, held: Held, computed: int, copies: Copies) -> bool:
        """Guesses come behind `computed`: keep what it takes to go back there; False if there is no room for it."""
        return True

    def rollback_position(self, held: Held, computed: int, length: int) -> int:
        """The last position up to `length` that `truncate` can leave; that of the mark at least."""
        return length

    def drop_checkpoint(self, held: Held) -> None:
        """The guesses behind the mark are verified."""

    @abstractmethod
    def release(self, held: Held) -> None:
        """Give everything back."""

    def chunk_end(self, held: Held, first: int, end: int) -> int:
        """Where a chunk of a prompt from `first` has to end, `end` at the latest."""
        return end
