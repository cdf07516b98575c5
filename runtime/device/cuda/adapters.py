"""Adapters in the GPU's memory: a slot for each, and the rows of a step sorted by their slots.

The layout is that of csrc/cuda/adapters.cuh: one piece of memory with a SiteCall for each matrix product of the plan,
then the slots. A slot has a SiteChange for each site, pieces, and the matrices as the adapter's file has them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginewright.adapter_file import Factor, SiteAdapter
from enginewright.adapter_plan import KERNEL, OF_TILE, ROW_INPUTS, RowInputs, site_rank
from enginewright.adapter_sites import Site
from enginewright.plan import AdaptersOperand, Buffer, BufferOperand, KernelCall, Plan
from enginewright.runtime.device.adapters import CHANGE_BYTES, PIECE_BYTES, aligned, slot_bytes, without_gaps
from enginewright.runtime.device.cuda.device import Bytes, Device
from enginewright.runtime.step.inputs import Arrays

STAGED_BYTES = 4 << 20  # bytes of a pinned buffer, two of which take turns
SITE_CALL = np.dtype(
    [(name, np.int64) for name in ("self", "changes", "slot_bytes")]
    + [(name, np.int32) for name in ("columns", "x_stride", "x_scale_stride", "group")]
    + [(name, np.int32) for name in ("max_rank", "shrunk_stride", "delta_stride", "unused")]
)
SITE_CHANGE = np.dtype(
    [(name, np.int64) for name in ("a", "a_scale", "pieces", "bias", "gain")]
    + [(name, np.int32) for name in ("rank", "num_pieces")]
)
PIECE = np.dtype(
    [(name, np.int64) for name in ("b", "b_scale")]
    + [(name, np.int32) for name in ("begin", "count", "rank", "first_rank")]
)
assert (SITE_CHANGE.itemsize, PIECE.itemsize) == (CHANGE_BYTES, PIECE_BYTES)
# Inputs of a step in which no row has an adapter, whose launches read none of them.
NO_TABLES: Arrays = {one.name: np.empty(0, np.int32) for inputs in ROW_INPUTS.values() for one in inputs.inputs}


@dataclass(frozen=True)
class _Staging:
    """A pinned buffer, and the event after its last copy."""

    data: Bytes
    done: Any


class DeviceAdapters:
    """The adapters of a CudaExecutor.

    Args:
        device: the GPU.
        plan: the plan, from `with_adapters`.
        sites: the engine's sites.
        num_slots: number of slots.
        max_rank: largest rank of a module.
    """

    def __init__(self, device: Device, plan: Plan, sites: Sequence[Site], num_slots: int, max_rank: int) -> None:
        assert plan.adapting is not None, "model_plan refuses engines without code for adapters"
        self._device = device
        self._site_index = {site.key: index for index, site in enumerate(sites)}
        self._max_ranks = [site_rank(site, max_rank) for site in sites]
        self._tile_rows = plan.adapting.expand.grid[0].per
        calls = [call for call in plan.calls if call.kernel == KERNEL]
        self._slot_bytes = slot_bytes(sites, max_rank)
        self._first_slot = aligned(SITE_CALL.itemsize * len(calls))
        self._memory = device.allocate(self._first_slot + num_slots * self._slot_bytes)
        self._staging = cycle([_Staging(device.pinned(STAGED_BYTES), device.event()) for _ in range(2)])
        table = np.zeros(len(calls), SITE_CALL)
        self._places: dict[int, int] = {}  # index of a call's buffer for its delta → place of its SiteCall
        for number, call in enumerate(calls):
            delta, place = call.operands["delta"], SITE_CALL.itemsize * number
            assert isinstance(delta, BufferOperand)
            self._places[delta.index] = place
            for name, value in {"self": place, **self._constants(call, plan.buffers, sites)}.items():
                table[name][number] = value
        self._upload(self._memory, [(0, table.view(np.uint8))])
        self._of: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None  # arrays that the tables are of
        self._tables: Arrays = {}

    def _constants(self, call: KernelCall, buffers: Sequence[Buffer], sites: Sequence[Site]) -> Mapping[str, int]:
        """Fields of a call's SiteCall, without its place."""
        site = call.operands["adapters"]
        assert isinstance(site, AdaptersOperand)
        strides = {
            f"{role}_stride": buffers[operand.index].stride
            for role, operand in call.operands.items()
            if isinstance(operand, BufferOperand)
        }
        return {
            **strides,
            "changes": self._first_slot + CHANGE_BYTES * site.site,
            "slot_bytes": self._slot_bytes,
            "columns": sites[site.site].columns,
            "group": int(call.attributes.get("group", 0)),
            "max_rank": self._max_ranks[site.site],
        }

    def address(self, delta: int) -> int:
        """Address of a product's SiteCall.

        Args:
            delta: index of the buffer for its delta.
        """
        return self._memory + self._places[delta]

    def load(self, slot: int, adapted: Mapping[str, SiteAdapter]) -> None:
        """Queues copies of an adapter to a slot that no step uses.

        Args:
            slot: the slot.
            adapted: name of a weight in the plan → what the adapter changes there; it fits (`check_slot`).
        """
        start = self._first_slot + slot * self._slot_bytes  # place of the slot
        changes = np.zeros(len(self._site_index), SITE_CHANGE)
        parts = [(0, changes.view(np.uint8))]
        end = aligned(changes.nbytes)

        def placed(data: memoryview | NDArray[Any] | None) -> int:
            """Adds what has a place in the slot. Returns the place; 0 if it is not there, or empty."""
            nonlocal end
            if data is None or not data.nbytes:
                return 0
            place = end
            parts.append((place, np.frombuffer(data, np.uint8)))
            end += aligned(data.nbytes)
            return start + place

        def factor(one: Factor) -> tuple[int, int]:
            return placed(one.data), placed(one.scale)

        for weight, site in adapted.items():
            if not site.pieces and site.bias is None and site.gain is None:
                continue
            index = self._site_index[weight]
            assert site.rank <= self._max_ranks[index], "check_slot refuses what does not fit"
            rows = without_gaps(site)
            pieces = np.zeros(len(rows), PIECE)
            for number, (begin, count, piece) in enumerate(rows):
                own = (0, 0, begin, count, 0, 0)
                if piece is not None:
                    own = (*factor(piece.b), begin, count, piece.rank, piece.first_rank)
                pieces[number] = own
            a, a_scale = factor(site.a)
            places = a, a_scale, placed(pieces), placed(site.bias), placed(site.gain)
            changes[index] = (*places, site.rank, len(rows))
        assert end <= self._slot_bytes, "check_slot refuses what does not fit"
        self._device.bind()
        self._upload(self._memory + start, parts)

    def tables(self, slots: NDArray[np.int32], logit_rows: NDArray[np.int32]) -> Arrays:
        """Sorts the rows of a step by their slots.

        Args:
            slots: slot of each token's adapter; -1: none.
            logit_rows: tokens with logits.

        Returns:
            The inputs of the plan about adapters; NO_TABLES if no token has one.
        """
        if self._of is None or self._of[0] is not slots or self._of[1] is not logit_rows:
            self._of = slots, logit_rows
            self._tables = NO_TABLES
            if slots.max(initial=-1) >= 0:
                of_rows = zip(ROW_INPUTS.values(), (slots, slots[logit_rows]), strict=True)
                self._tables = {
                    name: values
                    for inputs, own in of_rows
                    for name, values in _sorted(inputs, own, self._tile_rows).items()
                }
        return self._tables

    def _upload(self, address: int, parts: Sequence[tuple[int, Bytes]]) -> None:
        """Queues copies of parts to their places after an address. They ascend; bytes between them are undefined."""
        waiting = deque(parts)
        end = parts[-1][0] + len(parts[-1][1])
        for begin in range(0, end, STAGED_BYTES):
            staging, count = next(self._staging), min(STAGED_BYTES, end - begin)
            self._device.wait(staging.done)  # until then the buffer is in use
            while waiting and waiting[0][0] < begin + count:
                place, data = waiting.popleft()
                now = data[: begin + count - place]
                staging.data[place - begin : place - begin + len(now)] = now
                if len(now) < len(data):
                    waiting.appendleft((place + len(now), data[len(now) :]))
            self._device.upload(address + begin, staging.data[:count])
            self._device.record(staging.done)


def _sorted(inputs: RowInputs, slots: NDArray[np.int32], tile_rows: int) -> Mapping[str, NDArray[np.int32]]:
    """Makes the inputs about some rows.

    Args:
        inputs: the inputs.
        slots: slot of each row; -1: none.
        tile_rows: largest number of rows of a tile.
    """
    rows = np.argsort(slots, kind="stable").astype(np.int32)
    rows = rows[np.count_nonzero(slots < 0) :]
    own, starts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
    tiles = [
        (slot, start + begin, min(tile_rows, count - begin))
        for slot, start, count in zip(own.tolist(), starts.tolist(), counts.tolist(), strict=True)
        for begin in range(0, count, tile_rows)
    ]
    table = np.empty(1 + OF_TILE * len(tiles), np.int32)
    table[0] = len(tiles)
    table[1:] = np.array(tiles, np.int32).reshape(-1)
    return {inputs.slots.name: slots, inputs.sorted.name: rows, inputs.tiles.name: table}
