"""Generation: prompts in, text out, one at a time or many together."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.sampling import SampledToken, Sampler, SamplingParams, SamplingRequest
from enginewright.runtime.scheduler import Scheduler, Text
from enginewright.runtime.tokenizer import Detokenizer, StopStrings

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
    asked: float
    first_token_s: float = 0.0
    pieces: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)


def default_params(engine: Engine, **given: Any) -> SamplingParams:
    """The model's own sampling defaults (generation_config.json), overridden by what is given and not None."""
    given = {name: value for name, value in given.items() if value is not None}
    config = engine.generation_config
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": None}
    if config.get("do_sample"):
        defaults["temperature"] = config.get("temperature") or 1.0
        defaults |= {name: config[name] for name in ("top_k", "top_p", "min_p") if config.get(name) is not None}
    elif any(name in given for name in SAMPLED_BY):
        defaults["temperature"] = 1.0
    if config.get("repetition_penalty") is not None:
        defaults["repetition_penalty"] = config["repetition_penalty"]
    return SamplingParams(**defaults | given)


class Generator:
    """An engine with memory to run in.

    Args:
        config: limits; see RuntimeConfig.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig | None = None) -> None:
        self.engine = engine
        self.executor = CpuExecutor(engine, config)
        self._sampler = Sampler()

    def encode(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a text, of a conversation (messages with role and content), or the ids themselves.

        Raises:
            UsageError: no token, an id that is none, or more than fit the longest sequence.
        """
        if isinstance(prompt, str):
            ids = self.engine.tokenizer.encode(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self.engine.tokenizer.encode_chat([message for message in prompt if isinstance(message, Mapping)])
        else:
            ids = [token for token in prompt if isinstance(token, int)]
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
        scheduler = self._scheduler()
        asked = [self._ask(self.encode(prompt), one) for prompt, one in zip(prompts, each, strict=True)]
        for answer in asked:
            scheduler.add(answer.text)
        answers = {id(answer.text): answer for answer in asked}
        done = written = 0
        for deltas in self._steps(scheduler, answers):
            written += len(deltas)
            done += sum(delta.finish_reason is not None for _, delta in deltas)
            if on_progress is not None:
                on_progress(done, written)
        return [_result(answer) for answer in asked]

    def stream(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], params: SamplingParams
    ) -> Iterator[Delta]:
        """One answer, token by token."""
        answer = self._ask(self.encode(prompt), params)
        scheduler = self._scheduler()
        scheduler.add(answer.text)
        for deltas in self._steps(scheduler, {id(answer.text): answer}):
            for _, delta in deltas:
                yield delta

    def _scheduler(self) -> Scheduler:
        return Scheduler(self.engine.plan.kv_groups, self.executor.envelope)

    def _ask(self, prompt: list[int], params: SamplingParams) -> _Answer:
        longest = self.executor.envelope.max_model_len
        whole = longest if params.max_tokens is None else min(longest, len(prompt) + params.max_tokens)
        ends = () if params.ignore_eos else self.engine.eos_token_ids
        request = SamplingRequest(params, prompt, self.engine.plan.vocab_size, ends)
        text = Text(list(prompt), len(prompt), whole, frozenset((*ends, *params.stop_token_ids)), request)
        detokenizer = Detokenizer(self.engine.tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)
        stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        return _Answer(text, detokenizer, stops, time.perf_counter())

    def _steps(self, scheduler: Scheduler, answers: Mapping[int, _Answer]) -> Iterator[list[tuple[_Answer, Delta]]]:
        while (plan := scheduler.schedule()) is not None:
            sampled = self._sampler.sample(self.executor.run(plan), plan.requests)
            scheduler.commit(plan, sampled)
            deltas = []
            for part, token in zip(plan.drawing, sampled, strict=True):
                answer = answers[id(part.text)]
                delta = self._take(answer, token)
                if answer.stops.found and part.text.finish_reason is None:
                    scheduler.finish(part.text, "stop")
                    delta = replace(delta, finish_reason="stop")
                deltas.append((answer, delta))
            self.executor.scrub(scheduler.take_poisoned())
            yield deltas

    def _take(self, answer: _Answer, token: SampledToken) -> Delta:
        """The text that a token adds, and how the answer ended if it did."""
        reason = answer.text.finish_reason
        if not answer.tokens:
            answer.first_token_s = time.perf_counter() - answer.asked
        if token.is_nan:
            piece = ""
        else:
            answer.tokens.append(token)
            ended_by_token = reason == "stop"  # an end-of-text token is no text
            piece = "" if ended_by_token else answer.stops.push(answer.detokenizer.push(token.token))
        if reason is not None and not answer.stops.found:
            piece += answer.stops.push(answer.detokenizer.flush())
            piece += "" if answer.stops.found else answer.stops.flush()
        answer.pieces.append(piece)
        return Delta(piece, None if token.is_nan else token, reason)


def _result(answer: _Answer) -> GenerationResult:
    return GenerationResult(
        text="".join(answer.pieces),
        token_ids=tuple(answer.text.token_ids[answer.text.num_prompt_tokens :]),
        tokens=tuple(answer.tokens),
        finish_reason=answer.text.finish_reason or "error",
        num_prompt_tokens=answer.text.num_prompt_tokens,
        first_token_s=answer.first_token_s,
        total_s=time.perf_counter() - answer.asked,
    )
