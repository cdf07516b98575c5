"""One step, as the scheduler plans it and the executor runs it; and the packing of its tokens into arrays."""

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.plan import CacheGroup, PagedCache, StepSizes
from enginewright.runtime.sampling.sampling import Logits, RowRequest
from enginewright.runtime.step.dims import StepCounter, widest_block_table
from enginewright.runtime.step.sequence import TokenSequence

Inputs = dict[str, NDArray[np.int32]]


class Part(msgspec.Struct, frozen=True, gc=False):  # nothing that it leads to leads back to it
    """The tokens of one sequence that a step computes."""

    sequence: TokenSequence
    first: int  # position
    num_tokens: int
    num_logit_rows: int  # how many of them, from the end, give logits

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first + self.num_tokens


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Steps that decode the same sequences share `first_parts`, `sampling` and `requests`."""

    first_parts: tuple[Part, ...]  # of the first of such steps; see `parts`
    num_decodes: int  # the first parts, that go on by one token; the others are read in
    sizes: StepSizes
    # int32 arrays by the names of the plan's inputs (enginewright/plan.py), valid until the next step is planned. A
    # token below 0 stands for one that the step before samples: -1 - n is that of its n-th row of logits.
    inputs: Inputs
    # (from, to), blocks or slots, a group, to copy before anything else happens, in this order: one may be copied from,
    # and then to.
    copies: tuple[list[tuple[int, int]], ...]
    # Blocks or slots, a group, that a sequence holds from this step on. They are zeroed next: a state begins so, and
    # kernels read whole blocks, where the last sequence may have left NaN.
    new_blocks: tuple[list[int], ...]
    sampling: tuple[TokenSequence, ...] = ()  # the sequences that get tokens, in the order of their rows of logits
    requests: tuple[RowRequest, ...] = ()  # what each row of logits is for: one of `sampling`, or a token of a prompt
    has_grammar: bool = False  # one of the requests at least
    ending: tuple[TokenSequence, ...] = ()  # sequences that sample nothing, and end with this step
    has_unpublished_blocks: bool = False  # of `sampling`: others may use them once this step is known to hold no NaN
    # Rows for tokens of prompts whose log-probabilities were asked for: row, sequence, and the token's position.
    prompt_rows: tuple[tuple[int, TokenSequence, int], ...] = ()
    verifying: tuple[TokenSequence, ...] = ()  # those of `sampling` with guesses: a row for each, and one before them
    num_steps_since: int = 0  # the first of the steps that decode the same sequences
    hidden: NDArray[np.float32] | None = None  # [tokens, columns], HIDDEN_BEFORE, where the executor's plan is given it

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it computes of each sequence."""
        if not self.num_steps_since:
            return self.first_parts
        return tuple(
            msgspec.structs.replace(part, first=part.first + self.num_steps_since) for part in self.first_parts
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that are read in."""
        return self.sizes.tokens - self.num_decodes


class StepOutputs(msgspec.Struct, frozen=True):
    """What an executor gives for a step, by the names of the plan's outputs. The next step overwrites it."""

    logits: Logits  # [logit_rows, vocab_size]; of an embedding model the rows of texts that end, in their order
    hidden: Logits | None = None  # HIDDEN, [tokens, columns], of a plan that shows it


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
        self._inputs: Inputs = {}
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

    def pack(self, parts: Sequence[Part], num_decodes: int, growing: Sequence[Part]) -> tuple[StepSizes, Inputs]:
        """Sizes and arrays for `parts`, whose block tables reach to the end of what is computed.

        Args:
            num_decodes: the first parts, of one token, behind which nothing is known.
            growing: those that may have got blocks for this step.
        """
        for part in growing:
            sequence = part.sequence
            for paged in self._paged:
                first, blocks = part.first // paged.block_size, sequence.held[paged.index].blocks
                paged.table[sequence.row, first : len(blocks)] = blocks[first:]
        sequences = [part.sequence for part in parts]
        counts = [part.num_tokens for part in parts]
        starts = np.array([0, *accumulate(counts)], np.int32)
        kv_len = np.array([part.first for part in parts], np.int32)
        owners = np.repeat(np.arange(len(parts)), counts)  # a token's part
        positions = np.arange(len(owners), dtype=np.int32) + (kv_len - starts[:-1])[owners]
        kv_len += counts
        seconds = np.array([sequence.second_from for sequence in sequences], np.int32)
        tokens = np.empty(len(owners), np.int32)
        tokens[:num_decodes] = [
            sequence.token_ids[-1] if len(sequence.token_ids) == sequence.num_tokens else -1 - sequence.logits_row
            for sequence in sequences[:num_decodes]
        ]
        logit_rows = list(range(num_decodes))
        for part, end in zip(parts[num_decodes:], starts[num_decodes + 1 :].tolist(), strict=True):
            tokens[end - part.num_tokens : end] = _input_tokens(part)
            logit_rows += range(end - part.num_logit_rows, end)
        self._longest = int(kv_len.max())
        self._count(len(owners), len(parts), len(logit_rows))
        self._rows = np.array([sequence.row for sequence in sequences], np.intp)
        self._in_flight = False
        self._inputs = {
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
            blocks = self._inputs[paged.table_name][owners, places]
            self._inputs[paged.slots_name] = blocks * np.int32(paged.block_size) + offsets
        for index in self._states:
            self._inputs[f"state_slots.{index}"] = np.array([one.held[index].slot for one in sequences], np.int32)
        if num_decodes == len(parts):
            names = (*(paged.slots_name for paged in self._paged), "positions", "kv_len")
            self._moving = np.stack([self._inputs[name] for name in names])
            self._inputs.update(zip(names, self._moving, strict=True))
        return self._sizes, self._inputs

    def advance(self, sequences: Sequence[TokenSequence], growing: Sequence[int]) -> tuple[StepSizes, Inputs]:
        """As `pack`, where the last step took one token of each of these sequences, and this one takes their next."""
        if not sequences[0].num_in_flight_tokens:  # so all of them are known: a step is committed as a whole
            self._inputs["tokens"][:] = [sequence.token_ids[-1] for sequence in sequences]
            self._in_flight = False
        elif not self._in_flight:  # row n is that of sequence n, as in the step before
            self._inputs["tokens"][:] = np.arange(-1, -1 - len(sequences), -1)
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
        return self._sizes, self._inputs

    def _count(self, tokens: int, sequences: int, logit_rows: int) -> None:
        self._sizes = self._counter.sizes(tokens, sequences, logit_rows, self._longest)
        self._unchanged_up_to = self._counter.unchanged_up_to(self._longest)

    def _gather(self) -> None:
        """New block tables, since whoever has the last ones may not be done with them."""
        width = -(-self._longest // self._block_size)
        for paged in self._paged:
            self._inputs[paged.table_name] = paged.table[self._rows, :width]


def _input_tokens(part: Part) -> list[int]:
    """Token ids of a part that is read in: those that are known, then one in flight or guesses."""
    sequence = part.sequence
    tokens = sequence.token_ids[part.first : part.end]
    missing = part.num_tokens - len(tokens)
    if not missing:
        return tokens
    return tokens + ([-1 - sequence.logits_row] if sequence.num_in_flight_tokens else sequence.draft_tokens[:missing])
