"""Samples tokens from logits.

The arithmetic is in C++; csrc/cpu/sampling.h describes its steps in order. A sampled token depends only on the logits,
the request's parameters and history, and Philox(seed, choice, position, token).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from enginewright import _cpu
from enginewright.runtime.sampling.request import NO_BIASES, NO_HISTORY, RowRequest, SamplingRequest
from enginewright.runtime.sampling.token_mask import Mask, num_words


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """A sampled token. Log-probabilities are the model's own, before penalties and temperature."""

    token: int  # token id
    logprob: float | None = None  # log-probability; None: the request does not report any
    top_logprobs: tuple[tuple[int, float], ...] = ()  # token id and log-probability, most likely first
    is_nan: bool = False  # true if logits held NaN or no token was possible: the request fails, `token` has no meaning


def _joined(arrays: Sequence[npt.NDArray[np.void]], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """Concatenates arrays. np.concatenate compares all fields of all dtypes, which takes ten times as long."""
    return np.frombuffer(bytearray().join([array.tobytes() for array in arrays]), dtype)


Fields = tuple[int, float | None, tuple[tuple[int, float], ...], bool]  # fields of a SampledToken
Entries = npt.NDArray[np.void]
# A function like _cpu.sample. Its first argument is the logits that the same executor's `run` has returned. The result
# may be read once, which may wait for the device. The other arrays may be changed as soon as the call has returned. If
# the same array of rows is passed again, only positions and ends of entries have changed in it.
Draw = Callable[[Any, Entries, Entries, Entries, Mask | None], Iterable[Fields]]


class Logits(Protocol):
    """Logits of a step, [rows, vocab_size]: an array, or an object that np.asarray copies from a device."""

    def __array__(self) -> npt.NDArray[Any]: ...


_is_nan, _has_extras, _is_masked, _needs_tokens = map(attrgetter, ("is_nan", "has_extras", "is_masked", "needs_tokens"))


class SampledRows(NamedTuple):
    """Tokens in flight, one for each request of a batch. Reading `fields` waits for them."""

    batch: "_Batch"  # batch of requests that they are for
    fields: Iterable[Fields]  # fields of each row's SampledToken


class Sampler:
    """Samples the next token of each request, and adds it to the request's history.

    Args:
        draw: sampling function of an executor, such as one that divides rows among its threads. All give the same
            tokens.
    """

    def __init__(self, draw: Draw = _cpu.sample) -> None:
        self._draw = draw
        self._batch = _Batch([])

    def begin(self, logits: Logits, requests: Sequence[RowRequest]) -> SampledRows:
        """Begins to sample a token of each request.

        Args:
            logits: [requests, vocab_size].
            requests: one for each row.

        Returns:
            The tokens in flight, for `end`.
        """
        batch = self._batch
        if requests is not batch.requests and tuple(requests) != batch.requests:
            batch.settle()
            batch = self._batch = _Batch(requests)
        rows = self._draw(logits, *batch.arguments()) if requests else ()
        batch.begin()
        return SampledRows(batch, rows)

    @staticmethod
    def end(rows: SampledRows) -> list[SampledToken]:
        """Waits for the sampled tokens and adds them to their requests, except for rows that failed."""
        sampled = list(starmap(SampledToken, rows.fields))
        if rows.batch.need_tokens or any(map(_is_nan, sampled)):
            rows.batch.settle()
            for request, one in zip(rows.batch.requests, sampled, strict=True):
                request.end(None if one.is_nan else one.token)
        return sampled

    def settle(self) -> None:
        """Updates the positions of requests whose tokens were begun, which `begin` may postpone."""
        self._batch.settle()

    def sample(self, logits: Logits, requests: Sequence[RowRequest]) -> list[SampledToken]:
        """Samples a token of each request: `begin`, then `end`."""
        return self.end(self.begin(logits, requests))


class _Batch:
    """Requests that are sampled together in consecutive steps. Arrays that do not change are reused."""

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        self.requests = tuple(requests)  # tuple() returns a tuple as it is, so `begin` recognizes it by identity
        self._rows = np.frombuffer(bytearray().join([request.row for request in requests]), _cpu.SAMPLING_ROW)
        self._positions = self._rows["position"]
        self._plain = not any(map(_has_extras, requests))
        self._num_begun = 0  # number of begun tokens that requests of a plain batch do not count yet
        self.need_tokens = any(map(_needs_tokens, requests))
        self._allowed: Mask | None = None
        if any(map(_is_masked, requests)):
            self._allowed = np.empty((len(requests), num_words(requests[0].vocab_size)), np.uint32)

    def begin(self) -> None:
        """Counts one more token in flight for each request."""
        if self._plain:
            self._num_begun += 1
            return
        for request in self.requests:
            request.begin()

    def settle(self) -> None:
        """Updates the requests' positions."""
        if self._num_begun:
            for request in self.requests:
                if isinstance(request, SamplingRequest):  # the others have no position of their own
                    request.position += self._num_begun
            self._num_begun = 0

    def arguments(self) -> tuple[Entries, Entries, Entries, Mask | None]:
        """Arguments of `_cpu.sample` after the logits: rows, history, biases and allowed."""
        rows, allowed = self._rows, self._allowed
        if self._num_begun:
            self._positions += 1
        else:
            self._positions[:] = [request.position for request in self.requests]
        if allowed is not None:
            for request, mask in zip(self.requests, allowed, strict=True):
                request.allow(mask)
        if self._plain:
            return rows, NO_HISTORY, NO_BIASES, allowed
        histories = [request.history for request in self.requests]
        biases = [request.biases for request in self.requests]
        rows["history_end"] = np.cumsum([len(entries) for entries in histories])
        rows["bias_end"] = np.cumsum([len(entries) for entries in biases])
        return rows, _joined(histories, _cpu.TOKEN_COUNT), _joined(biases, _cpu.TOKEN_BIAS), allowed
