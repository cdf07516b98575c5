"""From logits to tokens: what a request may ask for, and the draw.

The arithmetic is C++ (csrc/cpu/sampling.h says what it is and in which order). A draw depends on the logits, the
request's parameters and history, and Philox(seed, choice, position, token), and on nothing else.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import starmap
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from enginewright import _cpu
from enginewright.runtime.checks import require, require_known, require_number, require_whole
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.sampling.token_mask import ALL, WORD_BITS, Grammar, Mask, mask_of, num_words

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 4096  # of all stop strings of a request together
MAX_BIASED_TOKENS = 1024
MAX_BEAMS = 16
MAX_LENGTH_PENALTY = 10.0
MAX_PENALTY = 2.0  # frequency and presence, as in OpenAI's API
MAX_BIAS = 100.0  # likewise
IN_FLIGHT = -1  # in a history: the token that the row's logits come from, which only the device knows


class RequestOutputKind(Enum):
    """What AsyncLLM.generate yields while an answer is written; LLM gives whole answers whatever this is."""

    CUMULATIVE = 0  # the answer so far, each time
    DELTA = 1  # what is new since the time before
    FINAL_ONLY = 2  # the whole answer, once


@dataclass(slots=True)
class SamplingParams:
    """How a request wants its tokens sampled and when it wants to end; names and defaults as in vLLM.

    They may be changed. A request takes a copy when it is submitted, which is checked as new ones are: a change after
    that is for later requests.

    Raises:
        UsageError: a name is none, or a value is of the wrong type or out of its range.
    """

    n: int = 1  # completions of one prompt
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # the smallest set of the likeliest tokens that has this probability
    top_k: int = 0  # the likeliest tokens; 0 (or -1) is all
    min_p: float = 0.0  # tokens at least this likely, relative to the likeliest
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0  # of tokens in the output, for each time
    repetition_penalty: float = 1.0  # of tokens in prompt and output
    seed: int | None = None  # None: a new one for each request
    stop: Sequence[str] = ()  # texts that end it
    stop_token_ids: Sequence[int] = ()  # tokens that end it
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False  # the model's end-of-text tokens do not end it
    max_tokens: int | None = 16  # None is up to the model's length, 0 reads the prompt alone
    min_tokens: int = 0  # before these, neither an end-of-text nor a stop token is sampled
    logprobs: int | None = None  # None is none; n also names the n likeliest tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of tokens, by id
    # No others are sampled, so that a completion ends early only if its end is among them; None allows all.
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True  # in the text
    prompt_logprobs: int | None = None  # as logprobs, for the tokens of the prompt
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # what AsyncLLM.generate yields
    structured_outputs: StructuredOutputsParams | None = None  # what the text has to be; a mapping may stand for it
    best_of: int | None = None  # completions to choose the n of the highest cumulative log-probability from; None: n
    use_beam_search: bool = False  # the completions are the likeliest ones; best_of, or else n, is the number of beams
    length_penalty: float = 1.0  # of beam search: above 0 long completions are preferred (beam_search.py)
    early_stopping: bool | Literal["never"] = False  # of beam search: True, False or "never" (beam_search.py)

    def __new__(cls, *args: Any, **options: Any) -> "SamplingParams":
        """Refuses names that are none; `__init__` would raise a TypeError."""
        require_known(options, cls.__dataclass_fields__, "sampling parameter")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        # As in vLLM, a list may stand for a tuple, a string for one of them, and None for nothing.
        self.stop = _as_tuple((self.stop,) if isinstance(self.stop, str) else self.stop)
        self.stop_token_ids = _as_tuple(self.stop_token_ids)
        self.logit_bias = {} if self.logit_bias is None else self.logit_bias
        require_whole("n", self.n, 1, MAX_CHOICES)
        require_number("temperature", self.temperature, 0, 1000)
        require_number("top_p", self.top_p, 0, 1)
        require(self.top_p > 0, "top_p", "must be above 0")
        require_whole("top_k", self.top_k, -1, 2**31 - 1)
        require_number("min_p", self.min_p, 0, 1)
        require_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        require_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        require_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if self.seed is not None:
            require_whole("seed", self.seed, -(2**63), 2**64 - 1)
        require(isinstance(self.stop, tuple), "stop", "must be strings")
        require(
            all(isinstance(text, str) and text for text in self.stop), "stop", "must hold strings that are not empty"
        )
        require(len(self.stop) <= MAX_STOPS, "stop", f"must not hold more than {MAX_STOPS} strings")
        stop_chars = sum(map(len, self.stop))
        require(stop_chars <= MAX_STOP_CHARS, "stop", f"must not hold more than {MAX_STOP_CHARS} characters together")
        require(isinstance(self.stop_token_ids, tuple), "stop_token_ids", "must be token ids")
        require(len(self.stop_token_ids) <= MAX_STOPS, "stop_token_ids", f"must not hold more than {MAX_STOPS} ids")
        for token in self.stop_token_ids:
            require_whole("stop_token_ids", token, 0, 2**31 - 1)
        if self.max_tokens is not None:
            require_whole("max_tokens", self.max_tokens, 0, 2**31 - 1)
        require_whole("min_tokens", self.min_tokens, 0, 2**31 - 1 if self.max_tokens is None else self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        require(isinstance(self.logit_bias, Mapping), "logit_bias", "must map token ids to numbers")
        require(len(self.logit_bias) <= MAX_BIASED_TOKENS, "logit_bias", f"must not hold more than {MAX_BIASED_TOKENS}")
        self.logit_bias = dict(self.logit_bias)
        for token, bias in self.logit_bias.items():
            require_whole("logit_bias", token, 0, 2**31 - 1)
            require_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = ids = _as_tuple(self.allowed_token_ids)
            whole = isinstance(ids, tuple) and len(ids) > 0 and all(type(token) is int for token in ids)
            require(whole and min(ids) >= 0, "allowed_token_ids", "must be token ids, one at least")
        for flag in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            require(isinstance(getattr(self, flag), bool), flag, "must be True or False")
        require(isinstance(self.output_kind, RequestOutputKind), "output_kind", "must be a RequestOutputKind")
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
            rule = "makes no sense with structured_outputs, which say when the answer ends"
            require(not self.ignore_eos, "ignore_eos", rule)
            require(not self.min_tokens, "min_tokens", rule)

        if self.best_of is not None:
            require_whole("best_of", self.best_of, self.n, MAX_CHOICES)
        require(isinstance(self.use_beam_search, bool), "use_beam_search", "must be True or False")
        require_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        require(is_known, "early_stopping", 'must be True, False or "never"')
        if self.use_beam_search:
            self._check_beam_search()
        else:
            require(self.length_penalty == 1.0, "length_penalty", "is for use_beam_search, and must be 1 without it")
            require(self.early_stopping is False, "early_stopping", "is for use_beam_search, and must be False without")

    def _check_beam_search(self) -> None:
        """Raises UsageError for what cannot be combined with it: the likeliest completions are those of the model."""
        name = "n" if self.best_of is None else "best_of"
        require(self.num_candidates <= MAX_BEAMS, name, f"must be at most {MAX_BEAMS} with use_beam_search")
        require(self.temperature == 0, "temperature", "must be 0 with use_beam_search, which samples nothing")
        require(self.max_tokens != 0, "max_tokens", "must be at least 1 with use_beam_search")
        for one, nothing in _NOT_WITH_BEAMS.items():
            require(getattr(self, one) == nothing, one, "cannot be combined with use_beam_search")

    @property
    def num_candidates(self) -> int:
        """Completions that are computed for n of them."""
        return self.n if self.best_of is None else self.best_of

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one, checked as new ones are.

        Raises:
            UsageError: a value was changed to what makes no sense.
        """
        return replace(self)

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


# What cannot be combined with beam search, and the values that ask for nothing.
_NOT_WITH_BEAMS: Mapping[str, Any] = {
    "allowed_token_ids": None,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_tokens": 0,
    "presence_penalty": 0,
    "prompt_logprobs": None,
    "repetition_penalty": 1,
    "stop": (),
    "structured_outputs": None,
}


def _as_tuple(value: Any) -> Any:
    return () if value is None else tuple(value) if isinstance(value, list) else value


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """A sampled token. Log-probabilities are the model's own, before penalties and temperature."""

    token: int
    logprob: float | None = None  # None: the request names none
    top_logprobs: tuple[tuple[int, float], ...] = ()  # of the likeliest tokens, most likely first
    is_nan: bool = False  # the logits held NaN or left no token possible: `token` means nothing, the request has failed


def new_seed() -> int:
    """For a request that names none; all its choices draw by the same."""
    return secrets.randbits(64)


_NO_HISTORY = np.zeros(0, dtype=_cpu.TOKEN_COUNT)
_NO_BIASES = np.zeros(0, dtype=_cpu.TOKEN_BIAS)


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
        self.history, self.biases = _NO_HISTORY, _NO_BIASES
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
        self.history, self.biases = _NO_HISTORY, _NO_BIASES
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
        return _NO_HISTORY if self._history is None else self._history.entries

    @property
    def biases(self) -> npt.NDArray[np.void]:
        """TOKEN_BIAS, each token once."""
        return self._rules.biases_at_first if self.position < self._may_end_at else self._rules.biases

    def rows_after(self, guesses: Sequence[int]) -> "list[RowAfterDraft]":
        """What rows are for that come behind the first guess, the first two, …: as if these had been taken."""
        return [RowAfterDraft(self, guesses[: place + 1]) for place in range(len(guesses))]

    def history_after(self, guesses: Sequence[int]) -> npt.NDArray[np.void]:
        return _NO_HISTORY if self._history is None else self._history.after(guesses)

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
    """Draws the next token of each request, and adds it to the request's history.

    Args:
        draw: an executor's, which shares rows among its threads; the draws are the same.
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
            return rows, _NO_HISTORY, _NO_BIASES, allowed
        histories = [request.history for request in self.requests]
        biases = [request.biases for request in self.requests]
        rows["history_end"] = np.cumsum([len(entries) for entries in histories])
        rows["bias_end"] = np.cumsum([len(entries) for entries in biases])
        return rows, _joined(histories, _cpu.TOKEN_COUNT), _joined(biases, _cpu.TOKEN_BIAS), allowed
