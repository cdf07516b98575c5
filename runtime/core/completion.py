"""One choice of a request while it is generated: its sequence, and the text of its tokens."""

from dataclasses import dataclass

from enginewright.runtime.core.outputs import DETOKENIZER, GRAMMAR, NAN_LOGITS, Delta, ends_of
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.text.detokenizer import Detokenizer, StopStrings


@dataclass(eq=False, slots=True)
class Completion:
    """One choice of a request. It has no reference to its request, since that would be a reference cycle."""

    params: SamplingParams  # sampling parameters of its request
    index: int  # index among the n choices, or among the best_of that these are chosen from
    sequence: TokenSequence  # the tokens of prompt and answer
    detokenizer: Detokenizer  # turns the tokens of the answer into text
    stops: StopStrings | None  # finds stop strings in the text; None: the request names none

    @property
    def finished(self) -> bool:
        """True once it gets no more tokens."""
        return self.sequence.finish_reason is not None

    def write(self, tokens: tuple[SampledToken, ...]) -> Delta:
        """Turns tokens into text.

        Args:
            tokens: tokens that were just appended to the sequence. If the sequence has a finish_reason, it ends with
                the last of them.

        Returns:
            The text and tokens that they add to the choice. The delta has a finish_reason also where a stop string or
            an error ends the choice, while the sequence has none yet.
        """
        if self.stops is not None or self.sequence.finish_reason is not None:
            return self._write_with_end(tokens)
        texts = [self.detokenizer.push(token.token) for token in tokens]
        return Delta(self.index, "".join(texts), tokens, ends=ends_of(texts))

    def failed(self, tokens: tuple[SampledToken, ...]) -> Delta:
        """Last delta of a choice whose tokens could not be turned into text.

        Args:
            tokens: the tokens.
        """
        return Delta(self.index, "", _without_nan(tokens), "error", DETOKENIZER)

    def _write_with_end(self, tokens: tuple[SampledToken, ...]) -> Delta:
        """Does the work of `write` where the choice ends with these tokens, or has stop strings."""
        if self.params.max_tokens == 0 and not tokens[-1].is_nan:
            return Delta(self.index, "", (), "length")
        sequence, texts = self.sequence, list[str]()
        num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
        for num_later in reversed(range(len(tokens))):
            token = tokens[-1 - num_later]
            reason = None if num_later else sequence.finish_reason
            texts.append(self._text(token, num_output - num_later, reason))
            if self.stops is not None and self.stops.found is not None:
                shown = _without_nan(tokens[: len(tokens) - num_later])
                return Delta(self.index, "".join(texts), shown, "stop", self.stops.found, ends_of(texts))
        shown, reason = _without_nan(tokens), sequence.finish_reason
        return Delta(
            self.index, "".join(texts), shown, reason, self._stop_reason(tokens[-1]), ends_of(texts[: len(shown)])
        )

    def _stop_reason(self, last: SampledToken) -> int | str | None:
        """The stop token, or the kind of error, that has ended the sequence."""
        sequence = self.sequence
        if sequence.finish_reason == "error":
            grammar = sequence.grammar
            return GRAMMAR if grammar is not None and grammar.failed else NAN_LOGITS
        if sequence.finish_reason == "stop" and last.token in self.params.stop_token_ids:
            return last.token
        return None

    def _text(self, token: SampledToken, num_output: int, reason: str | None) -> str:
        """Text that a token adds to the completion.

        Args:
            token: the token.
            num_output: number of the token in the completion, counted from 1.
            reason: finish_reason of a completion that ends with the token; None: it does not end.
        """
        stops, text = self.stops, ""
        if not token.is_nan and reason != "stop":  # an end-of-text token is no text
            text = self.detokenizer.push(token.token)
        if reason is not None:
            text += self.detokenizer.flush()
        if stops is None or num_output <= self.params.min_tokens:
            return text
        text = stops.push(text)
        return text if reason is None or stops.found is not None else text + stops.flush()


def _without_nan(tokens: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
    """The tokens without one whose logits were NaN, which is the last."""
    return tuple(token for token in tokens if not token.is_nan)
