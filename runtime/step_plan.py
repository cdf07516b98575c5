"""One step, as the scheduler plans it and the executor runs it; and the packing of its tokens into arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginewright.plan import KvGroup, Sizes
from enginewright.runtime.envelope import SPLIT_TOKENS
from enginewright.runtime.sampling import SamplingRequest
from enginewright.runtime.sequence import TokenSequence

Inputs = dict[str, NDArray[np.int32]]


class Part(NamedTuple):
    """The tokens of one sequence that a step computes, from position `first` on.

    num_logit_rows: how many of them, from the end, give logits.
    """

    sequence: TokenSequence
    first: int
    num_tokens: int
    num_logit_rows: int

    @property
    def end(self) -> int:
        return self.first + self.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step.

    num_decodes: the first parts, that go on by one token; the others are read in. inputs: int32 arrays by the names of
    the plan's inputs (enginewright/plan.py), valid until the next step is planned. A token below 0 stands for one that
    the step before draws: -1 - n is the n-th of those. copies: (from, to), KV blocks, a group, to copy before anything
    else happens. new_blocks: KV blocks, a group, that a sequence holds from this step on. Zero them next: kernels read
    whole blocks, and whoever had one may have left NaN. drawing: the parts whose sequences get a token.
    """

    parts: tuple[Part, ...]
    num_decodes: int
    sizes: Sizes
    inputs: Inputs
    copies: tuple[list[tuple[int, int]], ...]
    new_blocks: tuple[list[int], ...]
    drawing: tuple[Part, ...] = ()

    @property
    def requests(self) -> list[SamplingRequest]:
        """Of the sequences that get a token, in the order of their rows of logits."""
        return [request for part in self.drawing if (request := part.sequence.request) is not None]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that are read in."""
        return self.sizes.tokens - self.num_decodes


class Packer:
    """Makes the arrays of a step; of one that decodes the same sequences as the last one, only what has changed."""

    def __init__(self, groups: Sequence[KvGroup]) -> None:
        self._groups = tuple(groups)
        self._moving_names = ("positions", "kv_len", *(f"slots.{index}" for index in range(len(self._groups))))
        self._block_size = min(group.block_size for group in groups)  # of the widest block table
        self._last: list[TokenSequence] = []  # of the last step, if it did nothing but decode
        self._inputs: Inputs = {}
        self._moving = np.empty((0, 0), np.int32)  # in a step of decodes: positions, kv_len, slots of each group
        self._sizes = Sizes(0, 0, 0, 0, 0)
        self._longest = 0  # positions of the longest sequence

    def pack(self, parts: Sequence[Part], num_decodes: int, growing: Sequence[int]) -> tuple[Sizes, Inputs]:
        """Sizes and arrays for `parts`, whose block tables reach to the end of what is computed.

        Args:
            growing: those whose tables may have changed since the last step, if it had the same.
        """
        sequences = [part.sequence for part in parts]
        decodes = num_decodes == len(parts)
        if decodes and sequences == self._last:
            self._advance(sequences, growing)
        else:
            self._pack(parts)
            if decodes:
                names = self._moving_names
                self._moving = np.stack([self._inputs[name] for name in names])
                self._inputs.update(zip(names, self._moving, strict=True))
        self._last = sequences if decodes else []
        return self._sizes, self._inputs

    def _widths(self) -> tuple[int, int]:
        """KV blocks and splits of the longest sequence."""
        return -(-self._longest // self._block_size), -(-self._longest // SPLIT_TOKENS)

    def _pack(self, parts: Sequence[Part]) -> None:
        starts = [0, *accumulate(part.num_tokens for part in parts)]
        tokens = np.empty(starts[-1], np.int32)
        positions = np.empty(starts[-1], np.int32)
        kv_len = np.empty(len(parts), np.int32)
        rows: list[int] = []
        for index, part in enumerate(parts):
            sequence, here = part.sequence, slice(starts[index], starts[index + 1])
            tokens[here] = sequence.token_ids[part.first : part.end]
            positions[here] = np.arange(part.first, part.end, dtype=np.int32)
            kv_len[index] = part.end
            rows.extend(range(starts[index + 1] - part.num_logit_rows, starts[index + 1]))
        self._longest = int(kv_len.max())
        self._sizes = Sizes(starts[-1], len(parts), len(rows), *self._widths())
        self._inputs = {
            "tokens": tokens,
            "positions": positions,
            "query_start": np.array(starts, np.int32),
            "kv_len": kv_len,
            "logit_rows": np.array(rows, np.int32),
        }
        owners = np.repeat(np.arange(len(parts)), np.diff(starts))  # a token's row of the block table
        for index, group in enumerate(self._groups):
            table = np.zeros((len(parts), self._sizes.kv_blocks), np.int32)
            for row, part in enumerate(parts):
                blocks = part.sequence.tables[index].blocks
                table[row, : len(blocks)] = blocks
            self._inputs[f"block_table.{index}"] = table
            block, place = np.divmod(positions, group.block_size)
            self._inputs[f"slots.{index}"] = table[owners, block] * np.int32(group.block_size) + place

    def _advance(self, sequences: Sequence[TokenSequence], growing: Sequence[int]) -> None:
        """Every sequence is one position further."""
        self._inputs["tokens"][:] = [sequence.token_ids[-1] for sequence in sequences]
        self._moving += 1
        self._longest += 1
        widths = self._widths()
        if widths != (self._sizes.kv_blocks, self._sizes.kv_splits):
            self._sizes = Sizes(len(sequences), len(sequences), len(sequences), *widths)
        if growing:
            for index, group in enumerate(self._groups):
                self._grow(index, group.block_size, [(row, sequences[row]) for row in growing])

    def _grow(self, index: int, block_size: int, rows: Sequence[tuple[int, TokenSequence]]) -> None:
        """A new table, since whoever has the last one may not be done with it."""
        name = f"block_table.{index}"
        table, last = np.zeros((self._sizes.sequences, self._sizes.kv_blocks), np.int32), self._inputs[name]
        table[:, : last.shape[1]] = last
        for row, sequence in rows:
            blocks, position = sequence.tables[index].blocks, sequence.num_computed_tokens
            table[row, : len(blocks)] = blocks
            self._inputs[f"slots.{index}"][row] = blocks[position // block_size] * block_size + position % block_size
        self._inputs[name] = table
