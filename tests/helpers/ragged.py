"""Runs ragged graphs in onnxruntime: several sequences, each with its blocks scattered over the KV pools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tests.helpers.onnx_run import Array, Oracle

BLOCK_SIZE = 32
NUM_SLOTS = 5  # of recurrent states; the first is nobody's
GARBAGE = 3e4  # what a slot holds before it is written; a reference that reads it is far off, but finite

Tokens = Sequence[int] | npt.NDArray[np.int64]


@dataclass
class _Sequence:
    """A sequence's memory. blocks: of each KV group, in order of positions. slot: that of all its recurrent states."""

    length: int
    blocks: list[list[int]]
    slot: int


@dataclass
class RaggedRun:
    """A ragged graph, its pools, and the sequences in it. Block 0 of a pool belongs to no sequence.

    Entries of block tables that must not be read lead to block 0: those below a group's window, and those after a
    sequence's end.
    """

    model: ir.Model
    num_blocks: int
    seed: int = 0
    pools: dict[str, Array] = field(init=False)
    outputs: dict[str, Array] = field(init=False)  # of the last step, as the graph gave them

    def __post_init__(self) -> None:
        self._oracle = Oracle(self.model)
        self._windows = [group["window"] for group in json.loads(self.model.metadata_props["enginewright.kv_groups"])]
        self._states = json.loads(self.model.metadata_props["enginewright.state_groups"])
        random = np.random.default_rng(self.seed)
        self._free_slots = [*random.permutation(np.arange(1, NUM_SLOTS)).tolist()]
        self._free = [[*random.permutation(np.arange(1, self.num_blocks)).tolist()] for _ in self._windows]
        self._random = random
        self._sequences: dict[str, _Sequence] = {}
        self.pools = {}
        for value in self.model.graph.inputs:
            if "_pool." in str(value.name):
                assert value.shape is not None and value.dtype is not None
                is_state = str(value.shape[0]).startswith("state_slots")
                shape = (NUM_SLOTS if is_state else self.num_blocks * BLOCK_SIZE, *value.shape.dims[1:])
                garbage = random.choice([-GARBAGE, GARBAGE], size=shape)
                self.pools[str(value.name)] = garbage.astype(value.dtype.numpy())

    def step(self, new: Mapping[str, Tokens]) -> dict[str, Array]:
        """Runs the next tokens of some sequences, packed in the order given; gives the new tokens' logits, [n, V]."""
        feeds, starts = self._feeds(new)
        total = starts[-1]
        rows = self._random.permutation(total).astype(np.int32)
        self.outputs = self._oracle({**feeds, "logit_rows": rows, **self.pools})
        packed = np.empty_like(self.outputs["logits"])
        packed[rows] = self.outputs["logits"]
        self.pools = {name: self.outputs[f"{name}.out"] for name in self.pools}
        return {name: packed[start:end] for name, start, end in zip(new, starts, starts[1:], strict=False)}

    def _feeds(self, new: Mapping[str, Tokens]) -> tuple[dict[str, Array], list[int]]:
        groups = range(len(self._windows))
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        slots: list[list[int]] = [[] for _ in groups]
        for name, own in new.items():
            if name not in self._sequences:
                self._begin(name)
            sequence = self._sequences[name]
            at = range(sequence.length, sequence.length + len(own))
            for group in groups:
                blocks = sequence.blocks[group]
                blocks += [self._free[group].pop() for _ in range(-(-at.stop // BLOCK_SIZE) - len(blocks))]
                slots[group] += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in at]
            tokens += [int(token) for token in own]
            positions += at
            starts.append(starts[-1] + len(own))
            sequence.length = at.stop
        lengths = [self._sequences[name].length for name in new]
        feeds: dict[str, list[int] | list[list[int]]] = {
            "tokens": tokens,
            "positions": positions,
            "query_start": starts,
            "kv_len": lengths,
        }
        width = max(-(-length // BLOCK_SIZE) for length in lengths) + 1
        for group in groups:
            feeds[f"slots.{group}"] = slots[group]
            feeds[f"block_table.{group}"] = [
                self._table(self._sequences[name], group, len(own), width) for name, own in new.items()
            ]
        for index in range(len(self._states)):
            feeds[f"state_slots.{len(self._windows) + index}"] = [self._sequences[name].slot for name in new]
        return {name: np.array(values, np.int32) for name, values in feeds.items()}, starts

    def _begin(self, name: str) -> None:
        slot = self._free_slots.pop()
        self._sequences[name] = _Sequence(0, [[] for _ in self._windows], slot)
        for state in self._states:
            for layer, part in ((layer, part) for layer in state["layers"] for part in state["tensors"]):
                self.pools[f"{part}_pool.{layer}"][slot] = 0

    def _table(self, sequence: _Sequence, group: int, new_tokens: int, width: int) -> list[int]:
        window, blocks = self._windows[group], sequence.blocks[group]
        oldest = max(0, sequence.length - new_tokens - window + 1) if window else 0  # that the first new token sees
        seen = [block if index >= oldest // BLOCK_SIZE else 0 for index, block in enumerate(blocks)]
        return seen + [0] * (width - len(seen))
