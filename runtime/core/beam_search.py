"""A request whose choices are found by beam search: each beam is a sequence of its own."""

from collections.abc import Callable
from copy import copy

from enginewright.runtime.core.beam_scorer import Beam, BeamScorer
from enginewright.runtime.core.outputs import NAN_LOGITS, Delta
from enginewright.runtime.core.request import Request
from enginewright.runtime.core.request_kinds import LiveSequences, Outputs, RequestKind, failed
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.text.detokenizer import Detokenizer


class BeamSearch(RequestKind):
    """The beams of one request. The search advances when a token was sampled after each of them.

    Args:
        request: the request.
        live: its sequences, and those of all other requests.
        scorer: chooses the beams.
        detokenizer: creates a detokenizer for the text after the prompt.
    """

    def __init__(
        self, request: Request, live: LiveSequences, scorer: BeamScorer, detokenizer: Callable[[], Detokenizer]
    ) -> None:
        super().__init__(request, live)
        self._scorer, self._detokenizer = scorer, detokenizer
        self._sequences = [request.completions[0].sequence]  # by index of the beam
        self._sampled: dict[TokenSequence, SampledToken] = {}  # tokens after the beams so far

    def on_sampled(
        self, sequence: TokenSequence, tokens: tuple[SampledToken, ...], now: float, outputs: Outputs
    ) -> int:
        request, sampled = self.request, tokens[0]
        request.first_token_s = request.first_token_s or now - request.arrived_at
        if sampled.is_nan:
            self._end()
            outputs += [(request, delta) for delta in failed(request.params.n, "error", NAN_LOGITS)]
            return 0
        self._sampled[sequence] = sampled
        if len(self._sampled) < len(self._sequences):
            return 0
        goes_on = self._scorer.advance([self._sampled[one] for one in self._sequences])
        self._sampled.clear()
        if goes_on:
            self._branch()
            return 0
        self._end()
        request.total_s = now - request.arrived_at
        answers = self._scorer.answers()[: request.params.n]
        deltas = [self._choice(index, *answer) for index, answer in enumerate(answers)]
        outputs += [(request, delta) for delta in deltas]
        return sum(len(delta.tokens) for delta in deltas)

    def abort(self) -> list[Delta]:
        self._end()
        return failed(self.request.params.n, "abort")

    def _end(self) -> None:
        self._live.abort(self._sequences)
        self._finish()

    def _branch(self) -> None:
        """Gives each new beam a sequence: that of its parent, or a fork of it where several beams have one parent."""
        parents, beams, free = self._sequences, self._scorer.beams, set[TokenSequence]()
        going_on = {beam.parent for beam in beams}
        for place, parent in enumerate(parents):
            if place in going_on:
                free.add(parent)
            else:
                self._live.abort([parent])
        self._sequences = []
        for beam in beams:
            sequence = parents[beam.parent]
            if sequence in free:
                free.remove(sequence)
            else:
                sequence = self._fork(sequence)
            self._sequences.append(sequence)
        for beam, sequence in zip(beams, self._sequences, strict=True):
            self._live.scheduler.resume(sequence, beam.tokens[-1:])

    def _fork(self, parent: TokenSequence) -> TokenSequence:
        child = TokenSequence(
            token_ids=list(parent.token_ids),
            num_prompt_tokens=parent.num_prompt_tokens,
            max_tokens=parent.max_tokens,
            request=copy(parent.request),
            cache_salt=parent.cache_salt,
            work=parent.work,
            retention=parent.retention,
            adapter=parent.adapter,
            adapter_from=parent.adapter_from,
            is_beam=True,
        )
        self._live.fork(parent, child)
        return child

    def _choice(self, index: int, beam: Beam, reason: str) -> Delta:
        """Creates the delta of a complete choice.

        Args:
            index: index of the choice; 0 is the best.
            beam: its tokens.
            reason: the reason for its end, "stop" or "length".
        """
        params, last, detokenizer = self.request.params, beam.tokens[-1].token, self._detokenizer()
        shown = beam.tokens[:-1] if reason == "stop" else beam.tokens  # an end-of-text token is no text
        text = "".join([detokenizer.push(token.token) for token in shown]) + detokenizer.flush()
        num_top = params.logprobs or 0
        tokens = tuple(SampledToken(one.token, one.logprob, one.top_logprobs[:num_top]) for one in beam.tokens)
        return Delta(index, text, tokens, reason, last if reason == "stop" and last in params.stop_token_ids else None)
