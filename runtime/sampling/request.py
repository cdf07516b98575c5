"""One answer in the making: what a row of logits is sampled for, and by which rules."""

import math
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from enginewright import _cpu
from enginewright.runtime.checks import require
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.token_mask import ALL, WORD_BITS, Grammar, Mask, mask_of

IN_FLIGHT = -1  # in a history: the token that the row's logits come from, which only the device knows


def new_seed() -> int:
    """Makes a seed for a request that names none; all its choices are sampled by the same."""
    return secrets.randbits(64)


NO_HISTORY = np.zeros(0, dtype=_cpu.TOKEN_COUNT)
NO_BIASES = np.zeros(0, dtype=_cpu.TOKEN_BIAS)


class TokenRules:
    """What a request's parameters say of single tokens, held against a vocabulary: once for all of its answers.

    Args:
        vocab_size: width of the logits.
        eos_token_ids: as of SamplingRequest.

    Raises:
        UsageError: a token is beyond the vocabulary, there are more of them than it has, or none that may be sampled.
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
    """A greedy SAMPLING_ROW that reports the log-probabilities of the sampled token and of the likeliest ones."""
    row = np.zeros(1, dtype=_cpu.SAMPLING_ROW)
    row["top_p"] = row["repetition_penalty"] = 1.0
    row["logprobs"] = logprobs is not None
    row["top_logprobs"] = min(logprobs or 0, vocab_size)
    return row


class PromptToken:
    """A token of a prompt, in the place of an answer's request: it alone may be sampled, for its log-probability.

    Log-probabilities are the model's own, whatever may be sampled, so a mask of one token is all that it takes.
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
        mask[:] = 0
        mask[self.token // WORD_BITS] = 1 << self.token % WORD_BITS

    def begin(self) -> None:
        """Its token is known."""

    def end(self, token: int | None) -> None:
        """Its token was known."""


class DroppedRow:
    """A row that is sampled for nobody, in the place of a request that is sampled later."""

    has_extras = needs_tokens = is_masked = False
    grammar: Grammar | None = None
    position = 0  # nothing is random

    def __init__(self, vocab_size: int) -> None:
        self.row = _row(None, vocab_size).tobytes()
        self.history, self.biases = NO_HISTORY, NO_BIASES
        self.vocab_size = vocab_size

    def allow(self, mask: Mask) -> None:
        mask[:] = ALL

    def begin(self) -> None:
        """Nobody has begun."""

    def end(self, token: int | None) -> None:
        """Nobody goes on."""


class SamplingRequest:
    """One answer in the making: its parameters, and how often each token has occurred.

    Args:
        params: what the request asks for.
        prompt: token ids.
        vocab_size: width of the logits.
        eos_token_ids: the model's end-of-text tokens: not sampled before `min_tokens`, unless `ignore_eos` makes them
            tokens like others.
        choice: which of the n answers this is.
        seed: of all n answers, for requests that name none: draw it once and give it to each.
        grammar: that this answer has to follow.
        rules: of the request, if it has several answers; made from the parameters otherwise.
        logprobs: that are named, where it is not those that the parameters ask for.
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
        # Of the token that comes next, in the whole text; one may be in flight before it. A Sampler may advance those
        # of requests without extras later.
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
        self.has_extras = self._history is not None or has_biases  # now, or later
        self.is_masked = self._rules.allowed is not None or grammar is not None  # some tokens may not be sampled
        self.needs_tokens = self._history is not None or grammar is not None  # `end` has to have them

    @property
    def history(self) -> npt.NDArray[np.void]:
        """TOKEN_COUNT, each token of prompt and output once; empty if no penalty asks for it.

        For one that is in flight, an entry more: IN_FLIGHT, which may be any of the others.
        """
        return NO_HISTORY if self._history is None else self._history.entries

    @property
    def biases(self) -> npt.NDArray[np.void]:
        """TOKEN_BIAS, each token once."""
        return self._rules.biases_at_first if self.position < self._may_end_at else self._rules.biases

    def rows_after(self, guesses: Sequence[int]) -> "list[RowAfterDraft]":
        """What rows are for that come behind the first guess, the first two, …: as if these had been taken."""
        return [RowAfterDraft(self, guesses[: place + 1]) for place in range(len(guesses))]

    def history_after(self, guesses: Sequence[int]) -> npt.NDArray[np.void]:
        return NO_HISTORY if self._history is None else self._history.after(guesses)

    def biases_after(self, count: int) -> npt.NDArray[np.void]:
        at_first = self.position + count < self._may_end_at
        return self._rules.biases_at_first if at_first else self._rules.biases

    def accept(self, token: int) -> None:
        """The answer goes on with a token that was sampled behind a guess that was right."""
        self.position += 1
        if self._history is not None:
            self._history.append(token)
        if self.grammar is not None:
            self.grammar.take(token)

    def prompt_token(self, token: int) -> PromptToken:
        """What a row is for that scores this token of the prompt."""
        return PromptToken(token, self.params.prompt_logprobs or 0, self.vocab_size)

    def allow(self, mask: Mask, behind: Sequence[int] = ()) -> None:
        """Write which tokens may come next, or after draft tokens. A grammar has to know it (Grammar.wait)."""
        if self.grammar is None:
            mask[:] = ALL if self._rules.allowed is None else self._rules.allowed
            return
        mask[:] = 0
        self.grammar.allow(mask, behind)
        if self._rules.allowed is not None:
            mask &= self._rules.allowed

    def begin(self) -> None:
        """The answer goes on with a token that is in flight."""
        self.position += 1
        if self._history is not None:
            self._history.num_in_flight += 1

    def end(self, token: int | None) -> None:
        """It is this one, or none after all."""
        self.position -= token is None
        if self._history is not None:
            self._history.num_in_flight -= 1
            if token is not None:
                self._history.append(token)
        if self.grammar is not None and token is not None:
            self.grammar.take(token)


class RowAfterDraft:
    """A row that is sampled as if guesses had been taken. What comes of it is for `SamplingRequest.accept`."""

    has_extras, needs_tokens = True, False

    def __init__(self, request: SamplingRequest, guesses: Sequence[int]) -> None:
        self.request, self.draft_tokens = request, tuple(guesses)
        self.row, self.vocab_size = request.row, request.vocab_size
        self.grammar, self.is_masked = request.grammar, request.is_masked

    @property
    def position(self) -> int:
        return self.request.position + len(self.draft_tokens)

    @property
    def history(self) -> npt.NDArray[np.void]:
        return self.request.history_after(self.draft_tokens)

    @property
    def biases(self) -> npt.NDArray[np.void]:
        return self.request.biases_after(len(self.draft_tokens))

    def allow(self, mask: Mask) -> None:
        self.request.allow(mask, self.draft_tokens)

    def begin(self) -> None:
        """The request has begun with the row before the guesses."""

    def end(self, token: int | None) -> None:
        """Whoever knows which guesses were right accepts the token."""


class DraftRow(RowAfterDraft):
    """A row of a draft, which is sampled for a guess, and for its log-probability, whatever the request asks for.

    Nobody waits for a grammar here.

    mask_known: whether it was known what may come; else any token was sampled, and is no guess.
    """

    mask_known = True

    def __init__(self, request: SamplingRequest, guesses: Sequence[int]) -> None:
        super().__init__(request, guesses)
        row = np.frombuffer(bytearray(request.row), dtype=_cpu.SAMPLING_ROW)
        row["logprobs"], row["top_logprobs"] = 1, 0
        self.row = row.tobytes()

    def allow(self, mask: Mask) -> None:
        self.mask_known = self.grammar is None or self.grammar.wait(0, self.draft_tokens)
        if self.mask_known:
            super().allow(mask)
        else:
            mask[:] = ALL


class _History:
    """Tokens seen so far, each once, and how often each is in the output."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._entries = np.zeros(2 * len(self._places) + 16, dtype=_cpu.TOKEN_COUNT)
        self._entries["token"][: len(self._places)] = list(self._places)
        self.num_in_flight = 0  # 1 if one more is on its way

    @property
    def entries(self) -> npt.NDArray[np.void]:
        known = len(self._places)
        if self.num_in_flight:
            self._entries[known] = (IN_FLIGHT, 1)
        return self._entries[: known + self.num_in_flight]

    def after(self, tokens: Sequence[int]) -> npt.NDArray[np.void]:
        """The entries with these tokens, too."""
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
        if place + 1 == len(self._entries):  # there is always room for one more
            self._entries = np.concatenate([self._entries, np.zeros_like(self._entries)])


RowRequest = SamplingRequest | RowAfterDraft | PromptToken | DroppedRow  # what a row of logits is for


def _biases(values: Mapping[int, float]) -> npt.NDArray[np.void]:
    return np.array(list(values.items()), dtype=_cpu.TOKEN_BIAS)
