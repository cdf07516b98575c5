"""Draws tokens on the GPU: parameters go there in one copy, tokens come back in one, and logits stay where they are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat

import numpy as np
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.errors import CorruptEngineError
from enginewright.plan import Launch
from enginewright.runtime.cuda.device import Device, OnGrid
from enginewright.runtime.sampling import MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_STOPS, Entries, Fields
from enginewright.runtime.token_mask import Mask, num_words

# As csrc/cuda/sampling.cuh has them; what goes there has the dtypes of `_cpu`.
DRAWN = np.dtype([("token", np.int32), ("status", np.int32), ("logprob", np.float32)])
TOPS = np.dtype([("tokens", np.int32, MAX_LOGPROBS), ("logprobs", np.float32, MAX_LOGPROBS)])
ENTRY_BYTES = 8  # of TOKEN_COUNT and TOKEN_BIAS
TURNS = 2  # steps that may be under way: of buffers on the host, each has its own


@dataclass(frozen=True)
class SamplerLimits:
    """Of a step. entries: of histories and biases together. words: of a row's mask."""

    rows: int
    entries: int
    words: int

    @staticmethod
    def of(rows: int, length: int, vocab: int, num_ends: int) -> "SamplerLimits":
        """length: of the longest sequence. num_ends: end-of-text tokens, which may be held back at first."""
        history = min(length, vocab) + 1  # and one that is being drawn
        biases = min(MAX_BIASED_TOKENS + MAX_STOPS + num_ends, vocab)
        return SamplerLimits(rows, rows * (history + biases), num_words(vocab))

    @property
    def masks_start(self) -> int:
        """Behind parameters and entries."""
        return self.rows * _cpu.SAMPLING_ROW.itemsize + self.entries * ENTRY_BYTES

    @property
    def asked_bytes(self) -> int:
        return self.masks_start + self.rows * self.words * 4

    @property
    def tops_start(self) -> int:
        """Of an answer, behind what was drawn."""
        return self.rows * DRAWN.itemsize

    @property
    def answer_bytes(self) -> int:
        return self.tops_start + self.rows * TOPS.itemsize

    @property
    def saved_bytes(self) -> int:
        """For the logits that entries change."""
        return self.entries * 4

    @property
    def device_bytes(self) -> int:
        return self.asked_bytes + self.answer_bytes + self.saved_bytes


class _Turn:
    """The host's side of a step. done: when its answer is there."""

    def __init__(self, limits: SamplerLimits, device: Device) -> None:
        self.asked, self.answer = device.pinned(limits.asked_bytes), device.pinned(limits.answer_bytes)
        drawn, tops = self.answer[: limits.tops_start].view(DRAWN), self.answer[limits.tops_start :].view(TOPS)
        self.tokens, self.status, self.logprobs = (drawn[name] for name in ("token", "status", "logprob"))
        self.top_tokens, self.top_logprobs = tops["tokens"], tops["logprobs"]
        self.done = device.event()


class DeviceSampler:
    """Rows of parameters and entries (histories, then biases) and masks on their way there, and what was drawn on its
    way back.

    Args:
        launch: the plan's. places: addresses of the step's sizes and of what else the launch takes, by role.
    """

    def __init__(self, launch: Launch, limits: SamplerLimits, places: Mapping[str, int], device: Device) -> None:
        self._device = device
        self._entries_start = limits.rows * _cpu.SAMPLING_ROW.itemsize
        self._masks_start = limits.masks_start
        self._tops_start = limits.tops_start
        self._turns = cycle([_Turn(limits, device) for _ in range(TURNS)])
        self._rows = np.zeros(0, _cpu.SAMPLING_ROW)  # of the last step, and what of them stays as they are
        self._row_bytes, self._wanted = _bytes(self._rows), list[tuple[int, int]]()
        self._asked, self.drawn = device.allocate(limits.asked_bytes), device.allocate(limits.answer_bytes)
        addresses = {
            **places,
            "rows": self._asked,
            "entries": self._asked + self._entries_start,
            "saved": device.allocate(limits.saved_bytes),
            "drawn": self.drawn,
            "tops": self.drawn + self._tops_start,
        }

        def launcher(allowed: int) -> OnGrid:
            known = addresses | {"allowed": allowed}
            if unknown := set(launch.arguments) - known.keys():
                why = f"to draw tokens it wants {', '.join(sorted(unknown))}"
                raise CorruptEngineError("the plan is damaged", why, "Build it again.")
            arguments = [known["sizes"], *(known[role] for role in launch.arguments)]
            return device.launcher(launch.kernel, launch.threads, launch.shared_bytes, arguments)

        self._run, self._run_masked = launcher(0), launcher(self._asked + self._masks_start)

    def draw(self, rows: Entries, history: Entries, biases: Entries, allowed: Mask | None) -> Iterable[Fields]:
        """As `_cpu.sample`, from the logits of the step that was begun last: all of its rows.

        What comes back waits for it, once it is read; that has to be before TURNS more steps.
        """
        turn, device = next(self._turns), self._device
        end = rows.nbytes
        if rows is not self._rows:
            self._rows, self._row_bytes, self._wanted = rows, _bytes(rows), _wanted(rows)
        turn.asked[:end] = self._row_bytes
        if len(history) + len(biases):
            middle = self._entries_start + history.nbytes
            end = middle + biases.nbytes
            turn.asked[self._entries_start : middle] = _bytes(history)
            turn.asked[middle:end] = _bytes(biases)
        device.upload(self._asked, turn.asked[:end])
        if allowed is not None:
            end = self._masks_start + allowed.nbytes
            turn.asked[self._masks_start : end] = _bytes(allowed)
            device.upload(self._asked + self._masks_start, turn.asked[self._masks_start : end])
        run = self._run if allowed is None else self._run_masked
        run((len(rows), 1, 1))
        wanted, end = self._wanted, len(rows) * DRAWN.itemsize
        if wanted and any(count for _, count in wanted):
            end = self._tops_start + len(rows) * TOPS.itemsize
        device.download(turn.answer[:end], self.drawn)
        device.record(turn.done)
        return _Drawn(turn, len(rows), wanted, device)


class _Drawn:
    """What a step draws, waited for when it is read.

    wanted: of each row, whether it has a log-probability, and of how many tokens beside; empty if none has.
    """

    def __init__(self, turn: _Turn, count: int, wanted: Sequence[tuple[int, int]], device: Device) -> None:
        self._turn, self._count, self._wanted, self._device = turn, count, wanted, device

    def __iter__(self) -> Iterator[Fields]:
        turn, count = self._turn, self._count
        self._device.wait(turn.done)
        tokens, status = turn.tokens[:count].tolist(), turn.status[:count].tolist()
        bad = map(bool, status) if any(status) else repeat(False, count)
        if not self._wanted:
            return zip(tokens, repeat(None), repeat(()), bad, strict=False)
        logprobs = turn.logprobs[:count].tolist()
        tops = zip(turn.top_tokens[:count].tolist(), turn.top_logprobs[:count].tolist(), strict=True)
        return map(_fields, zip(tokens, bad, logprobs, tops, self._wanted, strict=True))


def _fields(row: tuple[int, bool, float, tuple[list[int], list[float]], tuple[int, int]]) -> Fields:
    token, is_nan, logprob, (ids, logprobs), (asked, named) = row
    if is_nan:
        return 0, None, (), True
    return token, logprob if asked else None, tuple(zip(ids[:named], logprobs[:named], strict=True)), False


def _wanted(rows: Entries) -> list[tuple[int, int]]:
    """Of each row, whether it wants a log-probability, and of how many tokens beside; empty if none does."""
    return rows[["logprobs", "top_logprobs"]].tolist() if rows["logprobs"].any() else []


def _bytes(array: Entries | Mask) -> NDArray[np.uint8]:
    return np.frombuffer(array, np.uint8)
