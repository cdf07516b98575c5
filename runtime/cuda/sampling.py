"""Draws tokens on the GPU: parameters go there in one copy, tokens come back in one, and logits stay where they are."""

import numpy as np
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.plan import Launch
from enginewright.runtime.cuda.device import Device
from enginewright.runtime.sampling import MAX_LOGPROBS, Entries, Fields

# As csrc/cuda/sampling.cuh has them; what goes there has the dtypes of `_cpu`.
DRAWN = np.dtype([("token", np.int32), ("status", np.int32), ("logprob", np.float32)])
TOPS = np.dtype([("tokens", np.int32, MAX_LOGPROBS), ("logprobs", np.float32, MAX_LOGPROBS)])
ENTRY_BYTES = 8  # of TOKEN_COUNT and TOKEN_BIAS
FEWEST_ENTRIES = 4096


class DeviceSampler:
    """Rows of parameters and entries (histories, then biases) on their way there, and what was drawn on its way back.

    Args:
        launch: the plan's. logits, sizes: where the step's lie. most_rows: of a step.
    """

    def __init__(self, launch: Launch, logits: int, sizes: int, most_rows: int, device: Device) -> None:
        self._launch, self._logits, self._sizes, self._device = launch, logits, sizes, device
        self._entries_start = most_rows * _cpu.SAMPLING_ROW.itemsize
        self._tops_start = most_rows * DRAWN.itemsize
        answer_bytes = self._tops_start + most_rows * TOPS.itemsize
        self._answer, self._answer_there = device.pinned(answer_bytes), device.allocate(answer_bytes)
        self._reserve(FEWEST_ENTRIES)

    def draw(self, rows: Entries, history: Entries, biases: Entries) -> list[Fields]:
        """As `_cpu.sample`, from the logits of the step that ran last: all of its rows."""
        entries, device = len(history) + len(biases), self._device
        if entries > self._most_entries:
            self._reserve(2 * entries)
        end = rows.nbytes
        self._asked[:end] = _bytes(rows)
        if entries:
            middle = self._entries_start + history.nbytes
            end = middle + biases.nbytes
            self._asked[self._entries_start : middle] = _bytes(history)
            self._asked[middle:end] = _bytes(biases)
        device.upload(self._asked_there, self._asked[:end])
        self._run((len(rows), 1, 1))
        with_tops = bool(rows["top_logprobs"].any())
        end = self._tops_start + len(rows) * TOPS.itemsize if with_tops else len(rows) * DRAWN.itemsize
        device.download(self._answer[:end], self._answer_there)
        device.synchronize()
        return self._fields(rows, with_tops)

    def _fields(self, rows: Entries, with_tops: bool) -> list[Fields]:
        drawn = self._answer[: len(rows) * DRAWN.itemsize].view(DRAWN)
        tokens, bad = drawn["token"].tolist(), (drawn["status"] != 0).tolist()
        if not rows["logprobs"].any():
            return [(token, None, (), is_nan) for token, is_nan in zip(tokens, bad, strict=True)]
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
        if with_tops:
            start = self._tops_start
            listed = self._answer[start : start + len(rows) * TOPS.itemsize].view(TOPS)
            pairs = zip(listed["tokens"].tolist(), listed["logprobs"].tolist(), strict=True)
            counts = rows["top_logprobs"].tolist()
            tops = [tuple(zip(*pair, strict=True))[:count] for pair, count in zip(pairs, counts, strict=True)]
        asked, logprobs = rows["logprobs"].tolist(), drawn["logprob"].tolist()
        return [
            (0, None, (), True) if is_nan else (token, logprob if wanted else None, top, False)
            for token, logprob, wanted, top, is_nan in zip(tokens, logprobs, asked, tops, bad, strict=True)
        ]

    def _reserve(self, entries: int) -> None:
        """Memory for so many entries. Histories grow with their texts, so it cannot all be taken at the start; what was
        there before is not given back, and is no more than this.
        """
        device, launch, self._most_entries = self._device, self._launch, entries
        nbytes = self._entries_start + entries * ENTRY_BYTES
        self._asked, self._asked_there = device.pinned(nbytes), device.allocate(nbytes)
        addresses = {
            "rows": self._asked_there,
            "entries": self._asked_there + self._entries_start,
            "saved": device.allocate(entries * 4),
            "logits": self._logits,
            "drawn": self._answer_there,
            "tops": self._answer_there + self._tops_start,
        }
        arguments = [self._sizes, *(addresses.get(role, 0) for role in launch.arguments)]
        self._run = device.launcher(launch.kernel, launch.threads, launch.shared_bytes, arguments)


def _bytes(array: Entries) -> NDArray[np.uint8]:
    return np.frombuffer(array, np.uint8)
