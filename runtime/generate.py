"""Generation: prompts in, text out, one at a time or many together."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.detokenizer import Detokenizer, StopStrings
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.sampling import SampledToken, Sampler, SamplingParams, SamplingRequest
from enginewright.runtime.scheduler import Scheduler, Text

SAMPLED_BY = ("top_k", "top_p", "min_p", "seed")  # naming one of these asks for sampling


@dataclass(frozen=True)
class Delta:
    """What one token added. finish_reason: "stop", "length" or "error" with the last."""

    text: str
    token: SampledToken | None
    finish_reason: str | None


@dataclass(frozen=True)
class GenerationResult:
    """An answer. tokens: with log-probabilities if they were asked for. Seconds count from when it was asked."""

    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[SampledToken, ...]
    finish_reason: str
    num_prompt_tokens: int
    first_token_s: float
    total_s: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON would hold it; log-probabilities only where they were asked for."""
        fields = asdict(self)
        del fields["tokens"]
        if any(token.logprob is not None for token in self.tokens):
            fields["logprobs"] = [
                {"token_id": token.token, "logprob": token.logprob, "top": dict(token.top_logprobs)}
                for token in self.tokens
            ]
        return fields


@dataclass(eq=False)
class _Answer:
    text: Text
    detokenizer: Detokenizer
    stops: StopStrings
    min_tokens: int
    asked: float
    first_token_s: float = 0.0
    total_s: float = 0.0
    pieces: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    deltas: deque[Delta] = field(default_factory=deque)  # not fetched yet


def default_params(engine: Engine, **given: Any) -> SamplingParams:
    """The model's own sampling defaults (generation_config.json), overridden by what is given and not None."""
    given = {name: value for name, value in given.items() if value is not None}
    config = engine.generation_config
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}
    if config.get("do_sample") or given.get("temperature") or any(name in given for name in SAMPLED_BY):
        defaults["temperature"] = config.get("temperature") or 1.0
        defaults |= {name: config[name] for name in ("top_k", "top_p", "min_p") if config.get(name) is not None}
    if config.get("repetition_penalty") is not None:
        defaults["repetition_penalty"] = config["repetition_penalty"]
    return SamplingParams(**defaults | given)


class Generator:
    """An engine with memory to run in.

    Whatever is asked runs together, step by step, as long as somebody waits for an answer: a stream that nobody reads
    for a while goes on in the steps of another. For one thread at a time.

    Args:
        config: limits; see RuntimeConfig.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig | None = None) -> None:
        self.engine = engine
        self.executor = CpuExecutor(engine, config)
        self._sampler = Sampler()
        self._scheduler = Scheduler(engine.plan.kv_groups, self.executor.envelope)
        self._answers: dict[Text, _Answer] = {}

    def encode(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a text, of a conversation (messages with role and content), or the ids themselves.

        Raises:
            UsageError: no token, an id that is none, or more than fit the longest sequence.
        """
        if isinstance(prompt, str):
            ids = self.engine.tokenizer.encode(prompt)
        else:
            messages = [message for message in prompt if isinstance(message, Mapping)]
            ids = [int(token) for token in prompt if isinstance(token, Integral)]  # numpy's, too
            if len(prompt) not in (len(messages), len(ids)):
                raise UsageError("the prompt is neither token ids nor messages", "all its entries must be of one kind")
            if messages:
                ids = self.engine.tokenizer.encode_chat(messages)
        vocab_size, longest = self.engine.plan.vocab_size, self.executor.envelope.max_model_len
        if not ids:
            raise UsageError("the prompt is empty", fix="Give at least one token.")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise UsageError("the prompt has a token that is none", f"token ids are 0 to {vocab_size - 1}")
        if len(ids) >= longest:
            raise UsageError(
                f"the prompt has {len(ids)} tokens",
                f"with an answer of at least one token it does not fit the limit of {longest}",
                "Shorten it, or raise --max-model-len if the engine's own limit is higher (engine inspect).",
            )
        return ids

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[GenerationResult]:
        """Answers to all prompts, computed together, in the prompts' order.

        Args:
            params: for all, or one for each.
            on_progress: called after each step with (answers done, tokens written).
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        asked = [self._ask(self.encode(prompt), one) for prompt, one in zip(prompts, each, strict=True)]
        own = set(asked)
        done = written = 0
        with self._running(asked):
            while done < len(asked):
                told = [answer for answer in self._step() if answer in own]
                written += len(told)
                done += sum(answer.text.finish_reason is not None for answer in told)
                for answer in told:
                    answer.deltas.clear()
                if on_progress is not None:
                    on_progress(done, written)
        return [_result(answer) for answer in asked]

    def stream(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Iterator[Delta]:
        """One answer, token by token. What is wrong with the request is said at once, before the first of them."""
        return self._stream(self._ask(self.encode(prompt), params))

    def _stream(self, answer: _Answer) -> Iterator[Delta]:
        with self._running([answer]):
            while answer.deltas or answer.text.finish_reason is None:
                if not answer.deltas:
                    self._step()
                while answer.deltas:
                    yield answer.deltas.popleft()

    @contextmanager
    def _running(self, asked: Sequence[_Answer]) -> Iterator[None]:
        """Hands answers to the scheduler; those that are not done at the end are taken back."""
        for answer in asked:
            self._answers[answer.text] = answer
            self._scheduler.add(answer.text)
        try:
            yield
        finally:
            for answer in asked:
                del self._answers[answer.text]
                if answer.text.finish_reason is None:
                    self._scheduler.finish(answer.text, "abort")

    def _ask(self, prompt: list[int], params: SamplingParams) -> _Answer:
        if params.n != 1:
            raise UsageError("several answers to one prompt are not implemented yet", fix="Ask several times.")
        longest = self.executor.envelope.max_model_len
        whole = longest if params.max_tokens is None else min(longest, len(prompt) + params.max_tokens)
        ends = () if params.ignore_eos else self.engine.eos_token_ids
        request = SamplingRequest(params, prompt, self.engine.plan.vocab_size, ends)
        text = Text(list(prompt), len(prompt), whole, frozenset((*ends, *params.stop_token_ids)), request)
        detokenizer = Detokenizer(self.engine.tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)
        stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        return _Answer(text, detokenizer, stops, params.min_tokens, time.perf_counter())

    def _step(self) -> list[_Answer]:
        """One step of all that is asked; the answers that it added to."""
        plan = self._scheduler.schedule()
        assert plan is not None, "an empty KV cache holds the longest text there may be"
        sampled = self._sampler.sample(self.executor.run(plan), plan.requests)
        self._scheduler.commit(plan, sampled)
        told = [self._answers[part.text] for part in plan.drawing]
        for answer, token in zip(told, sampled, strict=True):
            piece = self._take(answer, token)
            if answer.stops.found:
                self._scheduler.finish(answer.text, "stop")
                answer.text.finish_reason = "stop"  # even if it was its last token
            reason = answer.text.finish_reason
            if reason is not None:
                answer.total_s = time.perf_counter() - answer.asked
            answer.pieces.append(piece)
            answer.deltas.append(Delta(piece, None if token.is_nan else token, reason))
        return told

    def _take(self, answer: _Answer, token: SampledToken) -> str:
        """The text that a token adds."""
        reason, stops, piece = answer.text.finish_reason, answer.stops, ""
        if not answer.tokens:
            answer.first_token_s = time.perf_counter() - answer.asked
        if not token.is_nan:
            answer.tokens.append(token)
            if reason != "stop":  # an end-of-text token is no text
                piece = answer.detokenizer.push(token.token)
        if reason is not None:
            piece += answer.detokenizer.flush()
        if len(answer.tokens) <= answer.min_tokens:
            return piece
        piece = stops.push(piece)
        return piece if reason is None or stops.found else piece + stops.flush()


def _result(answer: _Answer) -> GenerationResult:
    return GenerationResult(
        text="".join(answer.pieces),
        token_ids=tuple(answer.text.token_ids[answer.text.num_prompt_tokens :]),
        tokens=tuple(answer.tokens),
        finish_reason=answer.text.finish_reason or "error",
        num_prompt_tokens=answer.text.num_prompt_tokens,
        first_token_s=answer.first_token_s,
        total_s=answer.total_s,
    )
