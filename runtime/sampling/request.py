"""The sampling state of one completion, and the requests that stand for single rows of logits."""

import math
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from enginewright import _cpu
from enginewright.runtime.checks import require
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.token_mask import ALL, WORD_BITS, Grammar, Mask, mask_of

IN_FLIGHT = -1  # token id in a history that stands for the row's last input token, if only the device knows it


def new_seed() -> int:
    """Makes a seed for a request without one. All completions of the request use it."""
    return secrets.randbits(64)


NO_HISTORY = np.zeros(0, dtype=_cpu.TOKEN_COUNT)
NO_BIASES = np.zeros(0, dtype=_cpu.TOKEN_BIAS)


class TokenRules:
    """Biases and allowed tokens of a request, checked against the vocabulary once for all of its completions.

    Args:
        params: the request's parameters.
        vocab_size: width of the logits.
        eos_token_ids: the model's end-of-text tokens, as for SamplingRequest.

    Raises:
        UsageError: a token is not in the vocabulary, or no token may be sampled.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            token = max(getattr(params, name) or (), default=0)
            require(token < vocab_size, name, f"names token {token}, and the vocabulary has {vocab_size}")
        held_back = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
        self.biases = _biases(params.logit_bias)
        self.biases_at_first = self.biases
        if params.min_tokens:
            self.biases_at_first = _biases({**params.logit_bias, **dict.fromkeys(held_back, -math.inf)})
        self.allowed: Mask | None = None
        if params.allowed_token_ids is not None:
            allowed = set(params.allowed_token_ids)
            some = not params.min_tokens or not allowed <= set(held_back)
            require(some, "allowed_token_ids", "must hold tokens that do not end the answer, since it has min_tokens")
            self.allowed = mask_of(allowed, vocab_size)


def _row(logprobs: int | None, vocab_size: int) -> npt.NDArray[np.void]:
    """Makes a greedy SAMPLING_ROW that reports the log-probabilities of the sampled and the most likely tokens."""
    row = np.zeros(1, dtype=_cpu.SAMPLING_ROW)
    row["top_p"] = row["repetition_penalty"] = 1.0
    row["logprobs"] = logprobs is not None
    row["top_logprobs"] = min(logprobs or 0, vocab_size)
    return row


class PromptToken:
    """Scores a token of a prompt: a row's request with a mask that allows this token only.

    The reported log-probability is the model's own, which the mask does not change.

    Args:
        token: id of the token to score.
        logprobs: number of the most likely tokens to report with it.
        vocab_size: width of the logits.
    """

    has_extras = needs_tokens = False
    is_masked = True
    grammar: Grammar | None = None
    position = 0  # nothing is random

    def __init__(self, token: int, logprobs: int, vocab_size: int) -> None:
        self.row = _row(logprobs, vocab_size).tobytes()
        self.history, self.biases = NO_HISTORY, NO_BIASES
        self.vocab_size = vocab_size
        self.token = token

    def allow(self, mask: Mask) -> None:
        """Writes the mask of this token only."""
        mask[:] = 0
        mask[self.token // WORD_BITS] = 1 << self.token % WORD_BITS

    def begin(self) -> None:
        """Does nothing, since the token is known."""

    def end(self, token: int | None) -> None:
        """Does nothing, since the token was known."""


class DroppedRow:
    """Stands for a row whose sampled token is ignored, since its sequence is sampled later."""

    has_extras = needs_tokens = is_masked = False
    grammar: Grammar | None = None
    position = 0  # nothing is random

    def __init__(self, vocab_size: int) -> None:
        self.row = _row(None, vocab_size).tobytes()
        self.history, self.biases = NO_HISTORY, NO_BIASES
        self.vocab_size = vocab_size

    def allow(self, mask: Mask) -> None:
        """Allows all tokens."""
        mask[:] = ALL

    def begin(self) -> None:
        """Does nothing, since the token is ignored."""

    def end(self, token: int | None) -> None:
        """Does nothing, since the token is ignored."""


class SamplingRequest:
    """The sampling state of one completion: its parameters, its position, and how often each token has occurred.

    Args:
        params: the request's parameters.
        prompt: token ids.
        vocab_size: width of the logits.
        eos_token_ids: the model's end-of-text tokens. They are not sampled before `min_tokens`, unless `ignore_eos`
            makes them ordinary tokens.
        choice: index of this completion among the n of the request.
        seed: seed if the parameters have none. A request with several completions calls `new_seed` once for all.
        grammar: grammar that this completion has to follow.
        rules: the request's, to be shared by its completions; None makes them from the parameters.
        logprobs: number of the most likely tokens to report; None takes that of the parameters.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        choice: int = 0,
        seed: int | None = None,
        grammar: Grammar | None = None,
        rules: TokenRules | None = None,
        logprobs: int | None = None,
    ) -> None:
        self.params, self.vocab_size = params, vocab_size
        self.num_prompt_tokens = len(prompt)
        # Position of the next token, counted from the first token of the prompt. A token in flight counts. For requests
        # without extras, a Sampler may update it later (Sampler.settle).
        self.position = len(prompt)
        self._may_end_at = len(prompt) + params.min_tokens
        row = _row(params.logprobs if logprobs is None else logprobs, vocab_size)
        row["seed"] = next(one for one in (params.seed, seed, new_seed()) if one is not None) % 2**64
        row["choice"] = choice
        row["top_k"] = max(params.top_k, 0)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            row[name] = getattr(params, name)
        self.row = row.tobytes()
        self._history = _History(prompt) if params.penalized else None
        self._rules = rules or TokenRules(params, vocab_size, eos_token_ids)
        self.grammar = grammar
        has_biases = len(self._rules.biases) + len(self._rules.biases_at_first) > 0
        self.has_extras = self._history is not None or has_biases  # now or at a later position
        self.is_masked = self._rules.allowed is not None or grammar is not None  # some tokens may not be sampled
        self.needs_tokens = self._history is not None or grammar is not None  # `end` has to be called with each token

    @property
    def history(self) -> npt.NDArray[np.void]:
        """Counts of tokens for penalties, an array of TOKEN_COUNT; empty without penalties.

        Each token of prompt and output has one entry. A token in flight has an additional entry IN_FLIGHT, which may
        turn out to be one of the other tokens.
        """
        return NO_HISTORY if self._history is None else self._history.entries

    @property
    def biases(self) -> npt.NDArray[np.void]:
        """Biases of logits at the next position, an array of TOKEN_BIAS with at most one entry for each token."""
        return self._rules.biases_at_first if self.position < self._may_end_at else self._rules.biases

    def rows_after(self, draft_tokens: Sequence[int]) -> "list[RowAfterDraft]":
        """Makes the requests of the rows after the first draft token, the first two, and so on."""
        return [RowAfterDraft(self, draft_tokens[: place + 1]) for place in range(len(draft_tokens))]

    def history_after(self, draft_tokens: Sequence[int]) -> npt.NDArray[np.void]:
        """`history` as it would be after these draft tokens."""
        return NO_HISTORY if self._history is None else self._history.after(draft_tokens)

    def biases_after(self, count: int) -> npt.NDArray[np.void]:
        """`biases` as they would be after `count` more tokens."""
        at_first = self.position + count < self._may_end_at
        return self._rules.biases_at_first if at_first else self._rules.biases

    def accept(self, token: int) -> None:
        """Appends a token that was sampled after a draft token that was right."""
        self.position += 1
        if self._history is not None:
            self._history.append(token)
        if self.grammar is not None:
            self.grammar.take(token)

    def prompt_token(self, token: int) -> PromptToken:
        """Makes the request of a row that scores this token of the prompt."""
        return PromptToken(token, self.params.prompt_logprobs or 0, self.vocab_size)

    def allow(self, mask: Mask, after: Sequence[int] = ()) -> None:
        """Writes the mask of tokens that may come next, or after draft tokens.

        With a grammar, `Grammar.wait` has to have returned True for it.

        Args:
            mask: words to write, uint32 [num_words(vocab_size)].
            after: draft tokens before the one that is sampled.
        """
        if self.grammar is None:
            mask[:] = ALL if self._rules.allowed is None else self._rules.allowed
            return
        mask[:] = 0
        self.grammar.allow(mask, after)
        if self._rules.allowed is not None:
            mask &= self._rules.allowed

    def begin(self) -> None:
        """Counts a token that is in flight: its sampling has begun."""
        self.position += 1
        if self._history is not None:
            self._history.num_in_flight += 1

    def end(self, token: int | None) -> None:
        """Appends the token that was in flight; None: there is none, since the row failed."""
        self.position -= token is None
        if self._history is not None:
            self._history.num_in_flight -= 1
            if token is not None:
                self._history.append(token)
        if self.grammar is not None and token is not None:
            self.grammar.take(token)


class RowAfterDraft:
    """Samples a row as if draft tokens had been accepted. If they are, the token goes to `SamplingRequest.accept`."""

    has_extras, needs_tokens = True, False

    def __init__(self, request: SamplingRequest, draft_tokens: Sequence[int]) -> None:
        self.request, self.draft_tokens = request, tuple(draft_tokens)
        self.row, self.vocab_size = request.row, request.vocab_size
        self.grammar, self.is_masked = request.grammar, request.is_masked

    @property
    def position(self) -> int:
        """Position of the token that the row samples."""
        return self.request.position + len(self.draft_tokens)

    @property
    def history(self) -> npt.NDArray[np.void]:
        """Counts of tokens, with the draft tokens included."""
        return self.request.history_after(self.draft_tokens)

    @property
    def biases(self) -> npt.NDArray[np.void]:
        """Biases of logits at the row's position."""
        return self.request.biases_after(len(self.draft_tokens))

    def allow(self, mask: Mask) -> None:
        """Writes the mask of tokens that may come after the draft tokens."""
        self.request.allow(mask, self.draft_tokens)

    def begin(self) -> None:
        """Does nothing: the request has counted the token of the row before the draft tokens."""

    def end(self, token: int | None) -> None:
        """Does nothing: runtime/core/drafting.py accepts the token if the draft tokens before it were right."""


class DraftRow(RowAfterDraft):
    """Samples a draft token from the logits of a draft model, with its log-probability, whatever the request says.

    It does not wait for a grammar. `mask_known` is False if the grammar's mask was not ready: the row was then sampled
    without a mask, and its token must not be used.
    """

    mask_known = True

    def __init__(self, request: SamplingRequest, draft_tokens: Sequence[int]) -> None:
        super().__init__(request, draft_tokens)
        row = np.frombuffer(bytearray(request.row), dtype=_cpu.SAMPLING_ROW)
        row["logprobs"], row["top_logprobs"] = 1, 0
        self.row = row.tobytes()

    def allow(self, mask: Mask) -> None:
        """Writes the mask if it is ready, and else allows all tokens."""
        self.mask_known = self.grammar is None or self.grammar.wait(0, self.draft_tokens)
        if self.mask_known:
            super().allow(mask)
        else:
            mask[:] = ALL


class _History:
    """The different tokens of prompt and output, with the number of times that each is in the output."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._entries = np.zeros(2 * len(self._places) + 16, dtype=_cpu.TOKEN_COUNT)
        self._entries["token"][: len(self._places)] = list(self._places)
        self.num_in_flight = 0  # 1 while a token is in flight, otherwise 0

    @property
    def entries(self) -> npt.NDArray[np.void]:
        known = len(self._places)
        if self.num_in_flight:
            self._entries[known] = (IN_FLIGHT, 1)
        return self._entries[: known + self.num_in_flight]

    def after(self, tokens: Sequence[int]) -> npt.NDArray[np.void]:
        """Copies the entries, with these tokens added."""
        entries, new = self.entries.copy(), dict[int, int]()
        for token in tokens:
            if token in self._places:
                entries["count"][self._places[token]] += 1
            else:
                new[token] = new.get(token, 0) + 1
        return np.concatenate([entries, np.array(list(new.items()), dtype=_cpu.TOKEN_COUNT)])

    def append(self, token: int) -> None:
        place = self._places.get(token)
        if place is not None:
            self._entries["count"][place] += 1
            return
        place = self._places[token] = len(self._places)
        self._entries[place] = (token, 1)
        if place + 1 == len(self._entries):  # keeps one free entry for a token in flight
            self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)])


RowRequest = SamplingRequest | RowAfterDraft | PromptToken | DroppedRow  # request of a row of logits


def _biases(values: Mapping[int, float]) -> npt.NDArray[np.void]:
    return np.array(list(values.items()), dtype=_cpu.TOKEN_BIAS)
