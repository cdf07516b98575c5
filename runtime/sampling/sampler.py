"""From logits to tokens.

The arithmetic is C++ (csrc/cpu/sampling.h says what it is and in which order). A sampled token depends on the logits,
the request's parameters and history, and Philox(seed, choice, position, token), and on nothing else.
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

    token: int
    logprob: float | None = None  # None: the request names none
    top_logprobs: tuple[tuple[int, float], ...] = ()  # of the likeliest tokens, most likely first
    is_nan: bool = False  # the logits held NaN or left no token possible: `token` means nothing, the request has failed


def _joined(arrays: Sequence[npt.NDArray[np.void]], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """One behind the other. np.concatenate compares all fields of all dtypes, and takes ten times as long."""
    return np.frombuffer(bytearray().join([array.tobytes() for array in arrays]), dtype)


Fields = tuple[int, float | None, tuple[tuple[int, float], ...], bool]  # of SampledToken
Entries = npt.NDArray[np.void]
# See _cpu.sample. The first argument is what the same executor's `run` gives. What comes back may be read once, and may
# be waited for until then; the arrays may change as soon as it has been called. Where the same array of rows comes
# again, nothing has changed in it but positions and ends of entries.
Draw = Callable[[Any, Entries, Entries, Entries, Mask | None], Iterable[Fields]]


class Logits(Protocol):
    """Logits of a step, [rows, vocab_size], wherever they lie: an array, or what np.asarray makes one of."""

    def __array__(self) -> npt.NDArray[Any]: ...


_is_nan, _has_extras, _is_masked, _needs_tokens = map(attrgetter, ("is_nan", "has_extras", "is_masked", "needs_tokens"))


class SampledRows(NamedTuple):
    """Tokens in flight, one for each request of a batch: to read them is to wait for them."""

    batch: "_Batch"
    fields: Iterable[Fields]  # of each row


class Sampler:
    """Samples the next token of each request, and adds it to the request's history.

    Args:
        draw: an executor's, which shares rows among its threads; the tokens are the same.
    """

    def __init__(self, draw: Draw = _cpu.sample) -> None:
        self._draw = draw
        self._batch = _Batch([])

    def begin(self, logits: Logits, requests: Sequence[RowRequest]) -> SampledRows:
        """logits: [requests, vocab_size]."""
        batch = self._batch
        if requests is not batch.requests and tuple(requests) != batch.requests:
            batch.settle()
            batch = self._batch = _Batch(requests)
        rows = self._draw(logits, *batch.arguments()) if requests else ()
        batch.begin()
        return SampledRows(batch, rows)

    @staticmethod
    def end(rows: SampledRows) -> list[SampledToken]:
        """The sampled tokens. Requests whose row holds NaN are left as they were."""
        sampled = list(starmap(SampledToken, rows.fields))
        if rows.batch.need_tokens or any(map(_is_nan, sampled)):
            rows.batch.settle()
            for request, one in zip(rows.batch.requests, sampled, strict=True):
                request.end(None if one.is_nan else one.token)
        return sampled

    def settle(self) -> None:
        """All requests that have begun know where they are."""
        self._batch.settle()

    def sample(self, logits: Logits, requests: Sequence[RowRequest]) -> list[SampledToken]:
        """Both."""
        return self.end(self.begin(logits, requests))


class _Batch:
    """Requests that sample together, step after step; what does not change is kept."""

    def __init__(self, requests: Sequence[RowRequest]) -> None:
        self.requests = tuple(requests)  # the same one, if it is one
        self._rows = np.frombuffer(bytearray().join([request.row for request in requests]), _cpu.SAMPLING_ROW)
        self._positions = self._rows["position"]
        self._plain = not any(map(_has_extras, requests))
        self._num_begun = 0  # tokens of each that requests of a plain batch do not count yet
        self.need_tokens = any(map(_needs_tokens, requests))
        self._allowed: Mask | None = None
        if any(map(_is_masked, requests)):
            self._allowed = np.empty((len(requests), num_words(requests[0].vocab_size)), np.uint32)

    def begin(self) -> None:
        """One token more of each is in flight."""
        if self._plain:
            self._num_begun += 1
            return
        for request in self.requests:
            request.begin()

    def settle(self) -> None:
        """All requests know where they are."""
        if self._num_begun:
            for request in self.requests:
                if isinstance(request, SamplingRequest):  # others have none of their own
                    request.position += self._num_begun
            self._num_begun = 0

    def arguments(self) -> tuple[Entries, Entries, Entries, Mask | None]:
        """rows, history, biases and allowed of `_cpu.sample`."""
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
