"""Packing of a step's tokens into the arrays that kernels read."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from enginewright.plan import CacheGroup, PagedCache, StepSizes
from enginewright.runtime.step.dims import StepCounter, widest_block_table
from enginewright.runtime.step.inputs import Arrays
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import ScheduledTokens


class _PagedInputs:
    """What a paged group adds to a step's arrays."""

    def __init__(self, index: int, block_size: int, table: NDArray[np.int32]) -> None:
        self.index, self.block_size = index, block_size
        self.table = table  # of all sequences that run, [row, logical block]
        self.table_name, self.slots_name = f"block_table.{index}", f"slots.{index}"


class Packer:
    """Makes the arrays of a step; of one that decodes the same sequences as the last one, only what has changed.

    Sequences that run have a row each of tables that stay, and a step's are put together from these. In a row, what its
    sequence does not see is of no meaning. Of a recurrent state, a sequence has one slot: `state_slots.{group}`.

    Args:
        limits: of a step, which are those of all that runs.
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
        self._rows = np.empty(0, np.intp)  # of the last step's sequences
        self._block_size = widest_block_table(groups)
        self._arrays: Arrays = {}
        self._moving = np.empty((0, 0), np.int32)  # in a step of decodes: slots of each group, positions, kv_len
        self._in_flight = False  # the tokens of the last step: none of them was known
        self._sizes = self._counter.sizes(0, 0, 0, 0)
        self._longest = 0  # positions of the longest sequence
        self._unchanged_up_to = 0  # positions of the longest sequence, in steps of the same sizes

    def place(self, sequence: TokenSequence) -> None:
        """It runs from now on, with the blocks that it has."""
        sequence.row = self._free_rows.pop()
        for paged in self._paged:
            blocks = sequence.held[paged.index].blocks
            paged.table[sequence.row, : len(blocks)] = blocks

    def remove(self, sequence: TokenSequence) -> None:
        self._free_rows.append(sequence.row)

    def pack(
        self, scheduled: Sequence[ScheduledTokens], num_decodes: int, growing: Sequence[ScheduledTokens]
    ) -> tuple[StepSizes, Arrays]:
        """Makes the sizes and arrays of a step.

        Args:
            scheduled: tokens of sequences whose block tables reach to the end of what is computed.
            num_decodes: the first of them, of one token each, after which no draft token is verified.
            growing: those that may have got blocks for this step.
        """
        for part in growing:
            sequence = part.sequence
            for paged in self._paged:
                first, blocks = part.first // paged.block_size, sequence.held[paged.index].blocks
                paged.table[sequence.row, first : len(blocks)] = blocks[first:]
        sequences = [part.sequence for part in scheduled]
        counts = [part.num_tokens for part in scheduled]
        starts = np.array([0, *accumulate(counts)], np.int32)
        kv_len = np.array([part.first for part in scheduled], np.int32)
        owners = np.repeat(np.arange(len(scheduled)), counts)  # a token's part
        positions = np.arange(len(owners), dtype=np.int32) + (kv_len - starts[:-1])[owners]
        kv_len += counts
        seconds = np.array([sequence.second_from for sequence in sequences], np.int32)
        tokens = np.empty(len(owners), np.int32)
        tokens[:num_decodes] = [
            sequence.token_ids[-1] if len(sequence.token_ids) == sequence.num_tokens else -1 - sequence.logits_row
            for sequence in sequences[:num_decodes]
        ]
        logit_rows = list(range(num_decodes))
        for part, end in zip(scheduled[num_decodes:], starts[num_decodes + 1 :].tolist(), strict=True):
            tokens[end - part.num_tokens : end] = _input_tokens(part)
            logit_rows += range(end - part.num_logit_rows, end)
        self._longest = int(kv_len.max())
        self._count(len(owners), len(scheduled), len(logit_rows))
        self._rows = np.array([sequence.row for sequence in sequences], np.intp)
        self._in_flight = False
        self._arrays = {
            "tokens": tokens,
            "positions": positions,
            "query_start": starts,
            "kv_len": kv_len,
            "logit_rows": np.array(logit_rows, np.int32),
            "first_rows": starts[:-1],
            "token_types": (positions >= seconds[owners]).astype(np.int32),
        }
        self._gather()
        for paged in self._paged:
            places, offsets = np.divmod(positions, paged.block_size)
            blocks = self._arrays[paged.table_name][owners, places]
            self._arrays[paged.slots_name] = blocks * np.int32(paged.block_size) + offsets
        for index in self._states:
            self._arrays[f"state_slots.{index}"] = np.array([one.held[index].slot for one in sequences], np.int32)
        if num_decodes == len(scheduled):
            names = (*(paged.slots_name for paged in self._paged), "positions", "kv_len")
            self._moving = np.stack([self._arrays[name] for name in names])
            self._arrays.update(zip(names, self._moving, strict=True))
        return self._sizes, self._arrays

    def advance(self, sequences: Sequence[TokenSequence], growing: Sequence[int]) -> tuple[StepSizes, Arrays]:
        """Makes those of a step that takes one token of each sequence, as the last one did, and now their next."""
        if not sequences[0].num_in_flight_tokens:  # so all of them are known: a step is committed as a whole
            self._arrays["tokens"][:] = [sequence.token_ids[-1] for sequence in sequences]
            self._in_flight = False
        elif not self._in_flight:  # row n is that of sequence n, as in the step before
            self._arrays["tokens"][:] = np.arange(-1, -1 - len(sequences), -1)
            self._in_flight = True
        self._moving += 1
        self._longest += 1
        if self._longest > self._unchanged_up_to:
            self._count(len(sequences), len(sequences), len(sequences))
        for row in growing:
            sequence = sequences[row]
            for paged, slots in zip(self._paged, self._moving, strict=False):
                place, offset = divmod(sequence.num_computed_tokens, paged.block_size)
                paged.table[sequence.row, place] = block = sequence.held[paged.index].blocks[place]
                slots[row] = block * paged.block_size + offset
        if growing:
            self._gather()
        return self._sizes, self._arrays

    def _count(self, tokens: int, sequences: int, logit_rows: int) -> None:
        self._sizes = self._counter.sizes(tokens, sequences, logit_rows, self._longest)
        self._unchanged_up_to = self._counter.unchanged_up_to(self._longest)

    def _gather(self) -> None:
        """New block tables, since whoever has the last ones may not be done with them."""
        width = -(-self._longest // self._block_size)
        for paged in self._paged:
            self._arrays[paged.table_name] = paged.table[self._rows, :width]


def _input_tokens(part: ScheduledTokens) -> list[int]:
    """Token ids of what is read in: those that are known, then one in flight or draft tokens."""
    sequence = part.sequence
    tokens = sequence.token_ids[part.first : part.end]
    missing = part.num_tokens - len(tokens)
    if not missing:
        return tokens
    return tokens + ([-1 - sequence.logits_row] if sequence.num_in_flight_tokens else sequence.draft_tokens[:missing])
