"""Kinds of requests, which differ in how sampled tokens become choices: plain, and the best of several candidates."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

from enginewright.runtime.core.kv_transfer import KvTransfer
from enginewright.runtime.core.outputs import Delta, merge
from enginewright.runtime.core.request import Request
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.speculation.speculator import Speculator
from enginewright.runtime.step.sequence import TokenSequence

logger = logging.getLogger(__name__)

Outputs = list[tuple[Request, Delta]]


def failed(count: int, reason: str, stop_reason: str | None = None) -> list[Delta]:
    """Creates the deltas of choices that fail or are aborted.

    Args:
        count: number of choices.
        reason: "error" or "abort".
        stop_reason: kind of error; None for "abort".
    """
    return [Delta(index, "", (), reason, stop_reason) for index in range(count)]


class LiveSequences:
    """Begins and ends sequences in the scheduler, in their grammars and in the speculator."""

    def __init__(self, scheduler: Scheduler, speculator: Speculator | None, transfer: KvTransfer | None = None) -> None:
        self.scheduler = scheduler
        self._transfer = transfer
        self._speculator = speculator
        self.receivers: dict[TokenSequence, RequestKind] = {}  # its request, for each sequence that has not ended
        self.kinds: dict[Request, RequestKind] = {}  # for each request that has not ended

    def __contains__(self, sequence: TokenSequence) -> bool:
        return sequence in self.receivers

    def clear(self) -> None:
        """Drops all sequences and requests when the engine closes, since they refer to this object."""
        self.receivers.clear()
        self.kinds.clear()

    def begin(self, sequence: TokenSequence, receiver: "RequestKind") -> None:
        """Queues a new sequence.

        Args:
            sequence: the sequence.
            receiver: gets its sampled tokens.
        """
        self.receivers[sequence] = receiver
        self.scheduler.add(sequence)
        if sequence.grammar is not None:
            sequence.grammar.begin()

    def fork(self, parent: TokenSequence, child: TokenSequence) -> None:
        """Begins a new beam that continues a parked one.

        Args:
            parent: the parked beam.
            child: the new beam, with the same tokens.
        """
        self.receivers[child] = self.receivers[parent]
        self.scheduler.fork(parent, child)

    def finish(self, sequence: TokenSequence, reason: str) -> None:
        """Ends a sequence.

        Args:
            sequence: the sequence.
            reason: its finish_reason, which replaces that of the scheduler.
        """
        self.scheduler.finish(sequence, reason, replace=True)
        self.forget(sequence)

    def abort(self, sequences: Sequence[TokenSequence]) -> None:
        """Ends those of these sequences that have not ended."""
        for sequence in sequences:
            self.scheduler.finish(sequence, "abort")
            if sequence in self.receivers:
                self.forget(sequence)

    def lease(self, sequence: TokenSequence) -> dict[str, object] | None:
        """Leases the prompt of a sequence that has ended to another server; returns how that fetches it."""
        return None if self._transfer is None else self._transfer.hold(sequence)

    def forget(self, sequence: TokenSequence) -> None:
        """Drops what is kept for a sequence that has ended."""
        del self.receivers[sequence]
        if sequence.grammar is not None:
            sequence.grammar.end()
        if self._speculator is not None and not sequence.is_beam:
            self._speculator.end(sequence)


class RequestKind(ABC):
    """A request while the engine's core works on it. Its Request object may live longer.

    Args:
        request: the request.
        live: begins and ends its sequences.
    """

    def __init__(self, request: Request, live: LiveSequences) -> None:
        self.request, self._live = request, live

    def begin(self) -> None:
        """Queues its sequences."""
        self._live.kinds[self.request] = self
        for completion in self.request.completions:
            self._live.begin(completion.sequence, self)

    @abstractmethod
    def on_sampled(
        self, sequence: TokenSequence, tokens: tuple[SampledToken, ...], now: float, outputs: Outputs
    ) -> int:
        """Receives the tokens that a step has sampled for one of its sequences.

        Args:
            sequence: the sequence.
            tokens: one token, or several where draft tokens were accepted.
            now: time.perf_counter, in seconds.
            outputs: gets the deltas that the tokens add to the request's answer.

        Returns:
            The number of tokens that count as generated.
        """

    def has_nan_prompt(self, sequence: TokenSequence) -> bool:
        """True if this is the first sequence, and a requested log-probability of the prompt is NaN."""
        request = self.request
        if not request.prompt_logprobs or request.completions[0].sequence is not sequence:
            return False
        return any(token is not None and token.is_nan for token in request.prompt_logprobs)

    def _finish(self) -> None:
        """Notes that no more deltas follow."""
        self.request.finished = True
        self._live.kinds.pop(self.request, None)

    @abstractmethod
    def abort(self) -> list[Delta]:
        """Ends its unfinished sequences, and returns the last deltas."""


class Plain(RequestKind):
    """A request whose completions are its choices, each of which is output as it is generated."""

    def __init__(self, request: Request, live: LiveSequences) -> None:
        super().__init__(request, live)
        self._completions = {completion.sequence: completion for completion in request.completions}

    def on_sampled(
        self, sequence: TokenSequence, tokens: tuple[SampledToken, ...], now: float, outputs: Outputs
    ) -> int:
        request, completion = self.request, self._completions[sequence]
        try:
            if sequence.finish_reason is None and completion.stops is None and len(tokens) == 1:
                # Nearly all tokens: `write` would do the same, and its call takes as long as all of this.
                text = completion.detokenizer.push(tokens[0].token)
                outputs.append((request, Delta(completion.index, text, tokens)))
                if request.first_token_s is None:
                    request.first_token_s = now - request.arrived_at
                return 1
            delta = completion.write(tokens)
        except Exception:
            logger.exception("a token could not be turned into text; its request has failed, and no other")
            delta = completion.failed(tokens)
        if request.first_token_s is None:
            request.first_token_s = now - request.arrived_at
        if delta.finish_reason is not None:
            self._end_sequence(sequence, delta.finish_reason, now)
        outputs.append((request, delta))
        return len(delta.tokens)

    def abort(self) -> list[Delta]:
        deltas = []
        for sequence, completion in self._completions.items():
            if sequence in self._live:
                self._live.finish(sequence, "abort")
                deltas.append(Delta(completion.index, "", (), "abort"))
        self._finish()
        return deltas

    def _end_sequence(self, sequence: TokenSequence, reason: str, now: float) -> None:
        """Ends a sequence, and the request with its last one.

        Args:
            sequence: the sequence.
            reason: its finish_reason.
            now: time.perf_counter, in seconds.
        """
        request = self.request
        if request.leases_prompt and reason in ("stop", "length"):
            request.kv_transfer_params = self._live.lease(sequence)
        self._live.finish(sequence, reason)
        if all(completion.finished for completion in request.completions):
            request.total_s = now - request.arrived_at
            self._finish()


class BestOf(Plain):
    """A request that outputs the n candidates with the highest cumulative log-probability, once all are complete."""

    def __init__(self, request: Request, live: LiveSequences) -> None:
        super().__init__(request, live)
        self._num_unfinished = len(request.completions)
        self._deltas: list[Delta] = []

    def on_sampled(
        self, sequence: TokenSequence, tokens: tuple[SampledToken, ...], now: float, outputs: Outputs
    ) -> int:
        own: Outputs = []
        num_generated = super().on_sampled(sequence, tokens, now, own)
        ((_, delta),) = own
        if shown := self._add(delta):
            self._end()
            outputs += [(self.request, one) for one in shown]
        return num_generated

    def abort(self) -> list[Delta]:
        self._end()
        return failed(self.request.params.n, "abort")

    def _end(self) -> None:
        self._live.abort(list(self._completions))
        self._finish()

    def _add(self, delta: Delta) -> list[Delta]:
        """Keeps a delta of a candidate.

        Returns:
            The deltas of the best candidates, best first, once all are complete; the deltas of failed choices once a
            candidate has failed; else none.
        """
        num_choices = self.request.params.n
        if delta.finish_reason == "error":
            assert delta.stop_reason is None or isinstance(delta.stop_reason, str)
            return failed(num_choices, "error", delta.stop_reason)
        self._deltas.append(delta)
        self._num_unfinished -= delta.finish_reason is not None
        if self._num_unfinished:
            return []
        best = sorted(merge(self._deltas), key=lambda one: -_logprob(one.tokens))[:num_choices]
        return [
            Delta(index, one.text, one.tokens, one.finish_reason, one.stop_reason) for index, one in enumerate(best)
        ]


def _logprob(tokens: Sequence[SampledToken]) -> float:
    """Cumulative log-probability of tokens."""
    return sum(token.logprob or 0.0 for token in tokens)
