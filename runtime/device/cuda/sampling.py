"""Samples on the GPU: parameters are uploaded in one copy, tokens come back in one, and logits stay on the device."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat

import numpy as np
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.errors import CorruptEngineError
from enginewright.plan import Launch
from enginewright.runtime.device.cuda.device import Device, OnGrid
from enginewright.runtime.sampling.parameters import MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_STOPS
from enginewright.runtime.sampling.sampler import Entries, Fields
from enginewright.runtime.sampling.token_mask import Mask, num_words

# Results, with the layout of csrc/cuda/sampling.cuh. Parameters have the dtypes of `_cpu`.
SAMPLED_ROW = np.dtype([("token", np.int32), ("status", np.int32), ("logprob", np.float32)])
TOPS = np.dtype([("tokens", np.int32, MAX_LOGPROBS), ("logprobs", np.float32, MAX_LOGPROBS)])
ENTRY_BYTES = 8  # bytes of a TOKEN_COUNT or TOKEN_BIAS
PIPELINE_SLOTS = 2  # number of steps that may be in flight, each with host buffers of its own


@dataclass(frozen=True)
class SamplerLimits:
    """Maximum sizes of what a step's sampling needs, and the layout of its buffers."""

    rows: int  # rows of logits
    entries: int  # entries of all rows' histories and biases together
    words: int  # 32-bit words of a row's mask

    @staticmethod
    def of(rows: int, length: int, vocab: int, num_ends: int) -> "SamplerLimits":
        """Computes the limits.

        Args:
            rows: rows of logits.
            length: maximum number of positions of a sequence.
            vocab: number of tokens of the vocabulary.
            num_ends: number of end-of-text tokens, which have biases before min_tokens.
        """
        history = min(length, vocab) + 1  # one more for the token in flight
        biases = min(MAX_BIASED_TOKENS + MAX_STOPS + num_ends, vocab)
        return SamplerLimits(rows, rows * (history + biases), num_words(vocab))

    @property
    def masks_start(self) -> int:
        """Byte offset of the masks in the input buffer, after parameters and entries."""
        return self.rows * _cpu.SAMPLING_ROW.itemsize + self.entries * ENTRY_BYTES

    @property
    def input_bytes(self) -> int:
        """Bytes of the input buffer: parameters, entries and masks."""
        return self.masks_start + self.rows * self.words * 4

    @property
    def tops_start(self) -> int:
        """Byte offset of the top log-probabilities in the result buffer."""
        return self.rows * SAMPLED_ROW.itemsize

    @property
    def result_bytes(self) -> int:
        """Bytes of the result buffer: sampled tokens, and top log-probabilities."""
        return self.tops_start + self.rows * TOPS.itemsize

    @property
    def saved_bytes(self) -> int:
        """Bytes to save the logits that entries change, which the kernel restores."""
        return self.entries * 4

    @property
    def device_bytes(self) -> int:
        """Bytes of all buffers on the device."""
        return self.input_bytes + self.result_bytes + self.saved_bytes


class _PipelineSlot:
    """Host buffers of one step in flight. The event `done` is recorded after the copy of its result."""

    def __init__(self, limits: SamplerLimits, device: Device) -> None:
        self.input, self.result = device.pinned(limits.input_bytes), device.pinned(limits.result_bytes)
        sampled, tops = self.result[: limits.tops_start].view(SAMPLED_ROW), self.result[limits.tops_start :].view(TOPS)
        self.tokens, self.status, self.logprobs = (sampled[name] for name in ("token", "status", "logprob"))
        self.top_tokens, self.top_logprobs = tops["tokens"], tops["logprobs"]
        self.done = device.event()


class DeviceSampler:
    """Uploads rows of parameters, entries (histories, then biases) and masks, and reads the sampled tokens.

    Args:
        launch: the plan's launch of the sampling kernel.
        limits: maximum sizes of a step.
        places: addresses of the step's sizes and of the launch's other arguments, by role.
        device: the GPU.
    """

    def __init__(self, launch: Launch, limits: SamplerLimits, places: Mapping[str, int], device: Device) -> None:
        self._device = device
        self._entries_start = limits.rows * _cpu.SAMPLING_ROW.itemsize
        self._masks_start = limits.masks_start
        self._tops_start = limits.tops_start
        self._slots = cycle([_PipelineSlot(limits, device) for _ in range(PIPELINE_SLOTS)])
        self._rows = np.zeros(0, _cpu.SAMPLING_ROW)  # rows of the last step, and what is derived from them
        self._row_bytes, self._wanted = _bytes(self._rows), list[tuple[int, int]]()
        self._input, self.sampled = device.allocate(limits.input_bytes), device.allocate(limits.result_bytes)
        addresses = {
            **places,
            "rows": self._input,
            "entries": self._input + self._entries_start,
            "saved": device.allocate(limits.saved_bytes),
            "sampled": self.sampled,
            "tops": self.sampled + self._tops_start,
        }

        def launcher(allowed: int) -> OnGrid:
            known = addresses | {"allowed": allowed}
            if unknown := set(launch.arguments) - known.keys():
                why = f"to sample it wants {', '.join(sorted(unknown))}"
                raise CorruptEngineError("the plan is damaged", why, "Build it again.")
            arguments = [known["sizes"], *(known[role] for role in launch.arguments)]
            return device.launcher(launch.kernel, launch.threads, launch.shared_bytes, arguments)

        self._run, self._run_masked = launcher(0), launcher(self._input + self._masks_start)

    def draw(self, rows: Entries, history: Entries, biases: Entries, allowed: Mask | None) -> Iterable[Fields]:
        """Samples all rows of the last queued step's logits.

        Args:
            rows: SAMPLING_ROW for each row of logits.
            history: TOKEN_COUNT entries of all rows.
            biases: TOKEN_BIAS entries of all rows.
            allowed: masks, uint32 [rows, words]; None: all tokens are allowed.

        Returns:
            Fields of each row's token, as `_cpu.sample` does. Reading them waits for the step, and has to happen before
            PIPELINE_SLOTS more steps are sampled.
        """
        slot, device = next(self._slots), self._device
        end = rows.nbytes
        if rows is not self._rows:
            self._rows, self._row_bytes, self._wanted = rows, _bytes(rows), _wanted(rows)
        slot.input[:end] = self._row_bytes
        if len(history) + len(biases):
            middle = self._entries_start + history.nbytes
            end = middle + biases.nbytes
            slot.input[self._entries_start : middle] = _bytes(history)
            slot.input[middle:end] = _bytes(biases)
        device.upload(self._input, slot.input[:end])
        if allowed is not None:
            end = self._masks_start + allowed.nbytes
            slot.input[self._masks_start : end] = _bytes(allowed)
            device.upload(self._input + self._masks_start, slot.input[self._masks_start : end])
        run = self._run if allowed is None else self._run_masked
        run((len(rows), 1, 1))
        wanted, end = self._wanted, len(rows) * SAMPLED_ROW.itemsize
        if wanted and any(count for _, count in wanted):
            end = self._tops_start + len(rows) * TOPS.itemsize
        device.download(slot.result[:end], self.sampled)
        device.record(slot.done)
        return _SampledRows(slot, len(rows), wanted, device)


class _SampledRows:
    """The sampled tokens of a step. Iterating over them waits for the step.

    Args:
        slot: host buffers with the result.
        count: number of rows.
        wanted: for each row, if a log-probability is reported, and the number of most likely tokens to report with it;
            empty if no row reports any.
        device: the GPU.
    """

    def __init__(self, slot: _PipelineSlot, count: int, wanted: Sequence[tuple[int, int]], device: Device) -> None:
        self._slot, self._count, self._wanted, self._device = slot, count, wanted, device

    def __iter__(self) -> Iterator[Fields]:
        slot, count = self._slot, self._count
        self._device.wait(slot.done)
        tokens, status = slot.tokens[:count].tolist(), slot.status[:count].tolist()
        bad = map(bool, status) if any(status) else repeat(False, count)
        if not self._wanted:
            return zip(tokens, repeat(None), repeat(()), bad, strict=False)
        logprobs = slot.logprobs[:count].tolist()
        tops = zip(slot.top_tokens[:count].tolist(), slot.top_logprobs[:count].tolist(), strict=True)
        return map(_fields, zip(tokens, bad, logprobs, tops, self._wanted, strict=True))


def _fields(row: tuple[int, bool, float, tuple[list[int], list[float]], tuple[int, int]]) -> Fields:
    token, is_nan, logprob, (ids, logprobs), (has_logprob, named) = row
    if is_nan:
        return 0, None, (), True
    return token, logprob if has_logprob else None, tuple(zip(ids[:named], logprobs[:named], strict=True)), False


def _wanted(rows: Entries) -> list[tuple[int, int]]:
    """For each row, if it wants a log-probability, and the number of most likely tokens with it; empty if none does."""
    return rows[["logprobs", "top_logprobs"]].tolist() if rows["logprobs"].any() else []


def _bytes(array: Entries | Mask) -> NDArray[np.uint8]:
    return np.frombuffer(array, np.uint8)
