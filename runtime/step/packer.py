"""Packing of a step's tokens into the arrays that kernels read."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginewright.plan import CacheGroup, PagedCache, StepSizes
from enginewright.runtime.step.dims import StepCounter, widest_block_table
from enginewright.runtime.step.inputs import Arrays
from enginewright.runtime.step.sequence import NEVER, TokenSequence
from enginewright.runtime.step.step_plan import ScheduledTokens


class _PagedInputs:
    """The block tables of a paged group, and the names of its arrays in a step."""

    def __init__(self, index: int, block_size: int, table: NDArray[np.int32]) -> None:
        self.index, self.block_size = index, block_size
        self.table = table  # [row of a running sequence, logical block]
        self.table_name, self.slots_name = f"block_table.{index}", f"slots.{index}"


class Packer:
    """Builds the arrays of a step. If it decodes the same sequences as the last one, only changes are written.

    Each running sequence has a row in block tables that persist, and the tables of a step are gathered from these rows.
    Entries of a row beyond the sequence's blocks, or before its window, have no meaning. In a recurrent group a
    sequence has one slot, in the array `state_slots.{group}`.

    Args:
        groups: the plan's cache groups.
        limits: sizes of the largest step; no more sequences run than it has.
    """

    def __init__(self, groups: Sequence[CacheGroup], limits: StepSizes) -> None:
        self._paged = [
            _PagedInputs(index, group.block_size, np.zeros((limits.sequences, limits["kv_blocks"]), np.int32))
            for index, group in enumerate(groups)
            if isinstance(group, PagedCache)
        ]
        self._states = [index for index, group in enumerate(groups) if not isinstance(group, PagedCache)]
        self._counter = StepCounter(limits.dims, groups)
        self._free_rows = list(range(limits.sequences))
        self._rows = np.empty(0, np.intp)  # rows of the last step's sequences
        self._block_size = widest_block_table(groups)
        self._arrays: Arrays = {}
        self._moving = np.empty((0, 0), np.int32)  # of a step of decodes, [slots of each group, positions, kv_len]
        self._in_flight = False  # true if the last step's input tokens were still in flight
        self._sizes = self._counter.sizes(0, 0, 0, 0)
        self._longest = 0  # number of positions of the longest sequence
        self._unchanged_up_to = 0  # value of _longest up to which the sizes stay the same

    def place(self, sequence: TokenSequence) -> None:
        """Gives a sequence that begins to run a row, and copies its blocks into it."""
        sequence.cache.row = self._free_rows.pop()
        for paged in self._paged:
            blocks = sequence.cache.held[paged.index].blocks
            paged.table[sequence.cache.row, : len(blocks)] = blocks

    def remove(self, sequence: TokenSequence) -> None:
        """Frees the row of a sequence that no longer runs."""
        self._free_rows.append(sequence.cache.row)

    def pack(
        self, scheduled: Sequence[ScheduledTokens], num_decodes: int, growing: Sequence[ScheduledTokens]
    ) -> tuple[StepSizes, Arrays]:
        """Builds the sizes and arrays of a step.

        Args:
            scheduled: the tokens to compute; each sequence already holds the blocks for them.
            num_decodes: number of its first entries that have one token each, and no draft tokens.
            growing: entries whose sequences may have got new blocks for this step.

        Returns:
            The step's sizes, and its arrays by the names of the plan's inputs, valid until the next call.
        """
        for part in growing:
            sequence = part.sequence
            for paged in self._paged:
                first, blocks = part.first // paged.block_size, sequence.cache.held[paged.index].blocks
                paged.table[sequence.cache.row, first : len(blocks)] = blocks[first:]
        sequences = [part.sequence for part in scheduled]
        counts = np.array([part.num_tokens for part in scheduled], np.int32)
        starts = np.zeros(len(scheduled) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        kv_len = np.array([part.first for part in scheduled], np.int32)
        owners = np.repeat(np.arange(len(scheduled)), counts)  # index in `scheduled` of each token
        positions = np.arange(len(owners), dtype=np.int32) + (kv_len - starts[:-1])[owners]
        kv_len += counts
        tokens = np.empty(len(owners), np.int32)
        tokens[:num_decodes] = [
            sequence.token_ids[-1]
            if len(sequence.token_ids) == sequence.state.num_tokens
            else -1 - sequence.state.logits_row
            for sequence in sequences[:num_decodes]
        ]
        logit_rows = list(range(num_decodes))
        for part, end in zip(scheduled[num_decodes:], starts[num_decodes + 1 :].tolist(), strict=True):
            tokens[end - part.num_tokens : end] = _input_tokens(part)
            logit_rows += range(end - part.num_logit_rows, end)
        self._longest = int(kv_len.max())
        self._count(len(owners), len(scheduled), len(logit_rows))
        self._rows = np.array([sequence.cache.row for sequence in sequences], np.intp)
        self._in_flight = False
        self._arrays = {
            "tokens": tokens,
            "positions": positions,
            "query_start": starts,
            "kv_len": kv_len,
            "logit_rows": np.array(logit_rows, np.int32),
            "first_rows": starts[:-1],
            "token_types": _token_types(sequences, owners, positions),
            "adapter_slots": _adapter_slots(sequences, owners, positions),
        }
        self._gather()
        for paged in self._paged:
            places, offsets = np.divmod(positions, paged.block_size)
            blocks = self._arrays[paged.table_name][owners, places]
            self._arrays[paged.slots_name] = blocks * np.int32(paged.block_size) + offsets
        for index in self._states:
            self._arrays[f"state_slots.{index}"] = np.array([one.cache.held[index].slot for one in sequences], np.int32)
        if num_decodes == len(scheduled):
            names = (*(paged.slots_name for paged in self._paged), "positions", "kv_len")
            self._moving = np.stack([self._arrays[name] for name in names])
            self._arrays.update(zip(names, self._moving, strict=True))
        return self._sizes, self._arrays

    def advance(self, sequences: Sequence[TokenSequence], growing: Sequence[int]) -> tuple[StepSizes, Arrays]:
        """Builds the sizes and arrays of a step that repeats the last one, with the next token of each sequence.

        Args:
            sequences: those of the last step, which had one token each.
            growing: indices in `sequences` of those that got a new block for this step.

        Returns:
            As `pack` does.
        """
        if not sequences[0].num_in_flight_tokens:  # then all tokens are known, since a step is committed as a whole
            self._arrays["tokens"][:] = [sequence.token_ids[-1] for sequence in sequences]
            self._in_flight = False
        elif not self._in_flight:  # row n of the previous step's logits is that of sequence n
            self._arrays["tokens"][:] = np.arange(-1, -1 - len(sequences), -1)
            self._in_flight = True
        self._moving += 1
        self._longest += 1
        if self._longest > self._unchanged_up_to:
            self._count(len(sequences), len(sequences), len(sequences))
        for row in growing:
            sequence = sequences[row]
            for paged, slots in zip(self._paged, self._moving, strict=False):
                place, offset = divmod(sequence.state.num_computed_tokens, paged.block_size)
                paged.table[sequence.cache.row, place] = block = sequence.cache.held[paged.index].blocks[place]
                slots[row] = block * paged.block_size + offset
        if growing:
            self._gather()
        return self._sizes, self._arrays

    def _count(self, tokens: int, sequences: int, logit_rows: int) -> None:
        self._sizes = self._counter.sizes(tokens, sequences, logit_rows, self._longest)
        self._unchanged_up_to = self._counter.unchanged_up_to(self._longest)

    def _gather(self) -> None:
        """Builds new block tables, since an executor may still read the last step's."""
        width = -(-self._longest // self._block_size)
        for paged in self._paged:
            self._arrays[paged.table_name] = paged.table[self._rows, :width]


def _adapter_slots(
    sequences: Sequence[TokenSequence], owners: NDArray[np.intp], positions: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Slot of each token's adapter; -1: it has none.

    Args:
        sequences: those of the step.
        owners: index in `sequences` of each token.
        positions: position of each token in its sequence.
    """
    slots = np.array([sequence.state.adapter_slot for sequence in sequences], np.int32)
    if slots.max() < 0:
        return slots[owners]
    begins = np.array([sequence.adapter_from for sequence in sequences], np.int32)
    return np.where(positions >= begins[owners], slots[owners], np.int32(-1))


def _token_types(
    sequences: Sequence[TokenSequence], owners: NDArray[np.intp], positions: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Type of each token: 1 in the second text of a pair, otherwise 0.

    Args:
        sequences: the sequences of the step.
        owners: index in `sequences` of each token.
        positions: position of each token.
    """
    if not [sequence for sequence in sequences if sequence.second_from != NEVER]:
        return np.zeros(len(owners), np.int32)
    second_from = np.array([sequence.second_from for sequence in sequences], np.int32)
    return (positions >= second_from[owners]).astype(np.int32)


def _input_tokens(part: ScheduledTokens) -> list[int]:
    """Token ids of one sequence's part of a step: known tokens, then one in flight, or draft tokens."""
    sequence = part.sequence
    tokens = sequence.token_ids[part.first : part.end]
    missing = part.num_tokens - len(tokens)
    if not missing:
        return tokens
    return tokens + (
        [-1 - sequence.state.logits_row] if sequence.num_in_flight_tokens else sequence.state.draft_tokens[:missing]
    )
