"""One step, as the scheduler plans it and the executor runs it; and the packing of its tokens into arrays."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.plan import PagedCache, StepSizes
from enginewright.runtime.dims import StepCounter, widest_block_table
from enginewright.runtime.sampling import RowRequest
from enginewright.runtime.sequence import TokenSequence

Inputs = dict[str, NDArray[np.int32]]


class Part(msgspec.Struct, frozen=True):
    """The tokens of one sequence that a step computes: those up to its num_computed_tokens, until another is planned.

    num_logit_rows: how many of them, from the end, give logits.
    """

    sequence: TokenSequence
    num_tokens: int
    num_logit_rows: int


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Steps that decode the same sequences share the tuples `drawing` and `requests`."""

    parts: tuple[Part, ...]
    num_decodes: int  # the first parts, that go on by one token; the others are read in
    sizes: StepSizes
    # int32 arrays by the names of the plan's inputs (enginewright/plan.py), valid until the next step is planned. A
    # token below 0 stands for one that the step before draws: -1 - n is that of its n-th row of logits.
    inputs: Inputs
    copies: tuple[list[tuple[int, int]], ...]  # (from, to), KV blocks, a group, to copy before anything else happens
    # KV blocks, a group, that a sequence holds from this step on. They are zeroed next: kernels read whole blocks, and
    # whoever had one may have left NaN.
    new_blocks: tuple[list[int], ...]
    drawing: tuple[TokenSequence, ...] = ()  # the sequences that get a token, in the order of their rows of logits
    requests: tuple[RowRequest, ...] = ()  # what each row of logits is for: one of `drawing`, or a token of a prompt
    has_grammar: bool = False  # one of the requests at least
    ending: tuple[TokenSequence, ...] = ()  # sequences that draw nothing, and end with this step
    # Blocks of its sequences may wait for what it draws before others may use them (BlockTable).
    has_unproven: bool = False
    # Rows for tokens of prompts whose log-probabilities were asked for: row, sequence, and the token's position.
    prompt_rows: tuple[tuple[int, TokenSequence, int], ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that are read in."""
        return self.sizes.tokens - self.num_decodes


class Packer:
    """Makes the arrays of a step; of one that decodes the same sequences as the last one, only what has changed.

    Sequences that run have a row each of tables that stay, and a step's are put together from these. In a row, what its
    sequence does not see is of no meaning.

    Args:
        limits: of a step, which are those of all that runs.
    """

    def __init__(self, groups: Sequence[PagedCache], limits: StepSizes) -> None:
        self._groups = tuple(groups)
        self._tables = [np.zeros((limits.sequences, limits["kv_blocks"]), np.int32) for _ in groups]
        self._counter = StepCounter(limits.dims, groups)
        self._free_rows = list(range(limits.sequences))
        self._rows = np.empty(0, np.intp)  # of the last step's sequences
        self._table_names = [f"block_table.{index}" for index in range(len(groups))]
        self._slot_names = [f"slots.{index}" for index in range(len(groups))]
        self._block_size = widest_block_table(groups)
        self._inputs: Inputs = {}
        self._moving = np.empty((0, 0), np.int32)  # in a step of decodes: slots of each group, positions, kv_len
        self._being_drawn = False  # tokens of the last step: none of them was known
        self._sizes = self._counter.sizes(0, 0, 0, 0)
        self._longest = 0  # positions of the longest sequence
        self._unchanged_up_to = 0  # positions of the longest sequence, in steps of the same sizes

    def place(self, sequence: TokenSequence) -> None:
        """It runs from now on, with the blocks that it has."""
        sequence.row = self._free_rows.pop()
        for whole, table in zip(self._tables, sequence.tables, strict=True):
            whole[sequence.row, : len(table.blocks)] = table.blocks

    def remove(self, sequence: TokenSequence) -> None:
        self._free_rows.append(sequence.row)

    def pack(self, parts: Sequence[Part], num_decodes: int, growing: Sequence[Part]) -> tuple[StepSizes, Inputs]:
        """Sizes and arrays for `parts`, whose block tables reach to the end of what is computed.

        Args:
            num_decodes: the first parts, of one token, behind which nothing is known.
            growing: those that may have got blocks for this step.
        """
        for part in growing:
            sequence = part.sequence
            for group, whole, table in zip(self._groups, self._tables, sequence.tables, strict=True):
                first = sequence.num_computed_tokens // group.block_size
                whole[sequence.row, first : len(table.blocks)] = table.blocks[first:]
        sequences = [part.sequence for part in parts]
        counts = [part.num_tokens for part in parts]
        starts = np.array([0, *accumulate(counts)], np.int32)
        kv_len = np.array([sequence.num_computed_tokens for sequence in sequences], np.int32)
        owners = np.repeat(np.arange(len(parts)), counts)  # a token's part
        positions = np.arange(len(owners), dtype=np.int32) + (kv_len - starts[:-1])[owners]
        kv_len += counts
        tokens = np.empty(len(owners), np.int32)
        tokens[:num_decodes] = [sequence.token_ids[-1] for sequence in sequences[:num_decodes]]
        logit_rows = list(range(num_decodes))
        for part, end in zip(parts[num_decodes:], starts[num_decodes + 1 :].tolist(), strict=True):
            first, count = part.sequence.num_computed_tokens, part.num_tokens
            tokens[end - count : end] = part.sequence.token_ids[first : first + count]
            logit_rows += range(end - part.num_logit_rows, end)
        self._longest = int(kv_len.max())
        self._count(len(owners), len(parts), len(logit_rows))
        self._rows = np.array([sequence.row for sequence in sequences], np.intp)
        self._being_drawn = False
        self._inputs = {
            "tokens": tokens,
            "positions": positions,
            "query_start": starts,
            "kv_len": kv_len,
            "logit_rows": np.array(logit_rows, np.int32),
        }
        self._gather()
        for group, table_name, slot_name in zip(self._groups, self._table_names, self._slot_names, strict=True):
            places, offsets = np.divmod(positions, group.block_size)
            blocks = self._inputs[table_name][owners, places]
            self._inputs[slot_name] = blocks * np.int32(group.block_size) + offsets
        if num_decodes == len(parts):
            names = (*self._slot_names, "positions", "kv_len")
            self._moving = np.stack([self._inputs[name] for name in names])
            self._inputs.update(zip(names, self._moving, strict=True))
        return self._sizes, self._inputs

    def advance(self, sequences: Sequence[TokenSequence], growing: Sequence[int]) -> tuple[StepSizes, Inputs]:
        """As `pack`, where the last step took one token of each of these sequences, and this one takes their next."""
        if sequences[0].token_ids[-1] >= 0:  # so all of them are known: a step is committed as a whole
            self._inputs["tokens"][:] = [sequence.token_ids[-1] for sequence in sequences]
            self._being_drawn = False
        elif not self._being_drawn:
            self._inputs["tokens"][:] = np.arange(-1, -1 - len(sequences), -1)
            self._being_drawn = True
        self._moving += 1
        self._longest += 1
        if self._longest > self._unchanged_up_to:
            self._count(len(sequences), len(sequences), len(sequences))
        for row in growing:
            sequence = sequences[row]
            groups = zip(self._groups, self._tables, sequence.tables, self._moving, strict=False)
            for group, whole, table, slots in groups:
                place, offset = divmod(sequence.num_computed_tokens, group.block_size)
                whole[sequence.row, place] = block = table.blocks[place]
                slots[row] = block * group.block_size + offset
        if growing:
            self._gather()
        return self._sizes, self._inputs

    def _count(self, tokens: int, sequences: int, logit_rows: int) -> None:
        self._sizes = self._counter.sizes(tokens, sequences, logit_rows, self._longest)
        self._unchanged_up_to = self._counter.unchanged_up_to(self._longest)

    def _gather(self) -> None:
        """New block tables, since whoever has the last ones may not be done with them."""
        width = -(-self._longest // self._block_size)
        for name, whole in zip(self._table_names, self._tables, strict=True):
            self._inputs[name] = whole[self._rows, :width]
