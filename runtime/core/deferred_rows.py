"""Rows of logits that are sampled later, since the mask of their grammar was not ready in time."""

import time
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.runtime.sampling.request import DroppedRow
from enginewright.runtime.sampling.sampler import Logits, SampledToken, Sampler
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import LogitRows

# Time that a step waits for grammars: a share of the time that it has taken so far, but at least this many seconds.
WAIT_SHARE, MIN_WAIT_S = 0.25, 0.002


class KeptLogits(msgspec.Struct, frozen=True):
    """The kept logits of one deferred sequence."""

    rows: LogitRows  # rows of this sequence alone
    logits: NDArray[np.float32]  # [rows, vocab_size]

    @property
    def sequence(self) -> TokenSequence:
        """The deferred sequence."""
        return self.rows.sequences[0]

    def is_ready(self, wait_s: float) -> bool:
        """Waits for the masks of its rows; returns true if they are ready.

        Args:
            wait_s: maximum seconds to wait.
        """
        return _mask_ready(self.rows, 0, wait_s)


class DeferredRows:
    """Keeps logits of sequences whose grammars are late, so that the other sequences of the step need not wait.

    Args:
        scheduler: leaves deferred sequences out of further steps.
        vocab_size: width of the logits.
    """

    def __init__(self, scheduler: Scheduler, vocab_size: int) -> None:
        self._scheduler = scheduler
        self._sampler = Sampler()
        self._dropped = DroppedRow(vocab_size)
        self._kept: list[KeptLogits] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def defer_late(self, rows: LogitRows, logits: Logits, elapsed_s: float) -> LogitRows:
        """Keeps the logits of sequences whose grammars are late.

        Args:
            rows: rows of the step.
            logits: logits of the step, [rows, vocab_size].
            elapsed_s: seconds that the step has taken so far.

        Returns:
            The rows of the step, in which the rows of late sequences are marked as dropped.
        """
        until = time.perf_counter() + max(MIN_WAIT_S, WAIT_SHARE * elapsed_s)
        late = [
            place for place in range(len(rows.sequences)) if not _mask_ready(rows, place, until - time.perf_counter())
        ]
        if not late:
            return rows
        in_memory = np.asarray(logits)  # waits for a GPU, and meanwhile more masks may become ready
        sequences = [rows.sequences[place] for place in late if not _mask_ready(rows, place, 0)]
        if not sequences:
            return rows
        for sequence in sequences:
            where, own = rows.of_sequence(sequence)
            self._kept.append(KeptLogits(own, in_memory[where].copy()))
            self._scheduler.defer(sequence)
        return rows.without(sequences, self._dropped)

    def sample_ready(self) -> Iterator[tuple[LogitRows, list[SampledToken]]]:
        """Samples the deferred sequences whose masks are ready. Waits a little if all running sequences are deferred.

        A sequence that ends while the caller handles the tokens of another one is left out.

        Returns:
            The rows of each of these sequences, and the tokens sampled from them.
        """
        kept = self._kept
        if self._scheduler.num_running <= len(kept):
            kept[0].is_ready(MIN_WAIT_S)
        self._kept = []
        for one in kept:
            if one.sequence.finish_reason is not None:
                continue
            if one.is_ready(0):
                yield one.rows, self._sampler.sample(one.logits, one.rows.requests)
            else:
                self._kept.append(one)


def _mask_ready(rows: LogitRows, place: int, wait_s: float) -> bool:
    """Waits for the masks of a sequence and of its draft tokens; returns true if they are ready.

    Args:
        rows: rows of logits.
        place: index of the sequence in `rows.sequences`.
        wait_s: maximum seconds to wait.
    """
    grammar = rows.sequences[place].grammar
    return grammar is None or grammar.wait(wait_s, rows.draft_tokens[place] if rows.draft_tokens else ())
