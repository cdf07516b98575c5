"""Requests in, pieces of completions out, one step at a time: the engine without threads.

core = EngineCore(engine, config)
core.add(core.request(prompt, params, sink))
while core.has_work:
    for request, delta in core.step(): …
"""

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from enginewright.errors import EngineError
from enginewright.runtime.detokenizer import Detokenizer, StopMatcher, StopStrings
from enginewright.runtime.devices import open_executor
from enginewright.runtime.engine import Engine
from enginewright.runtime.grammars import Grammars
from enginewright.runtime.memory_plan import RuntimeConfig
from enginewright.runtime.outputs import DETOKENIZER, GRAMMAR, NAN_LOGITS, Delta
from enginewright.runtime.prompt_cost import PromptCost
from enginewright.runtime.prompts import check_prompt
from enginewright.runtime.sampling import (
    SampledRows,
    SampledToken,
    Sampler,
    SamplingParams,
    SamplingRequest,
    TokenRules,
    new_seed,
)
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.sequence import TokenSequence
from enginewright.runtime.stats import STEP_TOKENS, Stats
from enginewright.runtime.step_plan import StepPlan
from enginewright.runtime.token_mask import Grammar

logger = logging.getLogger(__name__)


# Where a request's deltas go. An error is the last thing that comes: the engine is dead.
OutputSink = Callable[[Delta | EngineError], None]


@dataclass(eq=False, slots=True)
class Completion:
    """One choice of a request, in the making."""

    request: "Request"
    index: int  # which of the n choices
    sequence: TokenSequence
    detokenizer: Detokenizer
    stops: StopStrings | None  # None: the request names no stop string

    @property
    def finished(self) -> bool:
        return self.sequence.finish_reason is not None


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its n completions."""

    params: SamplingParams
    sink: OutputSink
    num_prompt_tokens: int
    arrived_at: float  # by time.perf_counter
    completions: list[Completion] = field(default_factory=list)
    first_token_s: float | None = None  # since it arrived; None: not yet
    total_s: float | None = None  # likewise
    prompt_logprobs: list[SampledToken | None] = field(default_factory=list)  # by position, if they were asked for

    @property
    def queue_s(self) -> float | None:
        """Until its first completion left the queue for the first time."""
        admitted_at = self.completions[0].sequence.admitted_at
        return None if admitted_at is None else admitted_at - self.arrived_at

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; 0 as long as nobody knows."""
        return self.completions[0].sequence.num_cached_tokens or 0

    @property
    def finished(self) -> bool:
        return all(completion.finished for completion in self.completions)


class StepInFlight(msgspec.Struct, frozen=True):
    """A step that has begun, and whose tokens have not been read."""

    plan: StepPlan
    rows: SampledRows


class EngineCore:
    """An engine with memory to run in. `request` and `stats` may be called from any thread, all else from one.

    Args:
        config: limits; see RuntimeConfig.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self.engine = engine
        self._eos_token_ids = engine.eos_token_ids  # and tokenizer: read now, as the file may be changed later
        self.executor = open_executor(engine, config)
        self._grammars = Grammars(engine.tokenizer, engine.plan.vocab_size, self._eos_token_ids)
        self._sampler = Sampler(self.executor.draw)
        self._scheduler = Scheduler(
            engine.plan.caches,
            self.executor.memory_plan,
            prefix_caching=config.enable_prefix_caching,
            chunk=config.prefill_chunk_size,
            cost=PromptCost(engine.plan).at,
        )
        self._completions: dict[TokenSequence, Completion] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._num_steps = self._num_computed = self._num_generated = 0
        self._step_sizes = [0] * (len(STEP_TOKENS) + 1)

    def close(self) -> None:
        """Give back what it runs in."""
        self._grammars.close()
        self.executor.close()

    @property
    def max_model_len(self) -> int:
        return self.executor.memory_plan.max_model_len

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_unfinished > 0 or len(self._in_flight) > 0

    def stats(self) -> Stats:
        """What is going on; its numbers may be a step apart from each other."""
        scheduler = self._scheduler
        blocks = zip(scheduler.num_free_blocks, self.executor.memory_plan.num_blocks, strict=True)
        return Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            kv_usage=max(1 - free / count for free, count in blocks),
            num_steps=self._num_steps,
            step_sizes=tuple(self._step_sizes),
            num_preemptions=scheduler.num_preemptions,
            computed_tokens=self._num_computed,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_prompt_tokens=scheduler.num_cached_prompt_tokens,
            generated_tokens=self._num_generated,
        )

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: OutputSink,
        cache_salt: str = "",
        grammars: Sequence[Grammar | None] = (),
    ) -> Request:
        """A request that can be added.

        Args:
            grammars: one for each of its completions, or none, which leaves it to params.structured_outputs.

        Raises:
            UsageError: prompt or parameters ask for what this engine cannot do.
            EngineError: its tokenizer is of no use for structured outputs.
        """
        params = params.clone()  # whoever has given them may change them later
        plan, ends = self.engine.plan, () if params.ignore_eos else self._eos_token_ids
        check_prompt(prompt, plan.vocab_size, self.max_model_len)
        whole = self.max_model_len
        if params.max_tokens is not None:  # where none is wanted, the one that is sampled is left out (_take)
            whole = min(whole, len(prompt) + max(params.max_tokens, 1))
        request = Request(params, sink, len(prompt), time.perf_counter())
        seed = new_seed()
        rules = TokenRules(params, plan.vocab_size, ends)
        matcher = StopMatcher(params.stop) if params.stop else None
        if params.structured_outputs is not None:
            grammars = self._grammars.compile(params.structured_outputs, params.n)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(prompt)
        for index, grammar in zip(range(params.n), grammars or [None] * params.n, strict=True):
            sequence = TokenSequence(
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_tokens=whole,
                stop_token_ids=frozenset((*ends, *params.stop_token_ids)),
                request=SamplingRequest(params, prompt, plan.vocab_size, ends, index, seed, grammar, rules),
                every_logit=params.prompt_logprobs is not None and index == 0,
                cache_salt=cache_salt,
                sibling_of=request.completions[0].sequence if index else None,
            )
            detokenizer = Detokenizer(self.engine.tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)
            stops = StopStrings(matcher, include=params.include_stop_str_in_output) if matcher else None
            request.completions.append(Completion(request, index, sequence, detokenizer, stops))
        return request

    def add(self, request: Request) -> None:
        for completion in request.completions:
            self._completions[completion.sequence] = completion
            self._scheduler.add(completion.sequence)

    def propose(self, completion: Completion, guesses: Sequence[int]) -> None:
        """Tokens that may come next, one behind the other: the next step verifies as many as there is room for.

        A guess is right where it is the token that is sampled there, so the answer is the same bits with or without. To
        be called between steps, where none of its tokens is in flight.
        """
        if completion.sequence.is_running and not self._in_flight:
            self._scheduler.propose(completion.sequence, guesses)

    def abort(self, request: Request) -> list[tuple[Request, Delta]]:
        """End what goes on of a request; its blocks are free again."""
        deltas = []
        for completion in request.completions:
            if self._completions.pop(completion.sequence, None) is not None:
                self._scheduler.finish(completion.sequence, "abort")
                deltas.append((request, Delta(completion.index, "", (), "abort")))
        return deltas

    def step(self) -> list[tuple[Request, Delta]]:
        """Begin one step of all that has arrived, and end one; what that added.

        A step ends at once, or, where the executor runs ahead, once the next one has begun; where a grammar says what
        may come next, once its layers run, before it samples.
        """
        plan, deltas = self._scheduler.schedule(), list[tuple[Request, Delta]]()
        if plan is not None:
            outputs = self.executor.run(plan)
            if self._in_flight and plan.has_grammar:
                deltas = self._end(self._in_flight.popleft())
            self._in_flight.append(StepInFlight(plan, self._sampler.begin(outputs.logits, plan.requests)))
            if len(self._in_flight) <= self.executor.steps_ahead:
                return deltas
        return deltas + self._end(self._in_flight.popleft()) if self._in_flight else deltas

    def _end(self, step: StepInFlight) -> list[tuple[Request, Delta]]:
        plan, sampled = step.plan, self._sampler.end(step.rows)
        if plan.prompt_rows:
            sampled = self._take_prompt_rows(plan, sampled)
        accepted = self._accept(plan, sampled) if plan.verifying else list(zip(sampled, strict=True))
        now = time.perf_counter()
        self._scheduler.commit(plan, accepted)
        self._num_steps += 1
        num_tokens = plan.sizes.tokens
        self._num_computed += num_tokens
        self._step_sizes[bisect_left(STEP_TOKENS, num_tokens)] += 1
        deltas, several = [], bool(plan.verifying)
        for sequence, tokens in zip(plan.sampling, accepted, strict=True):
            completion = self._completions.get(sequence)
            if completion is None:  # it has ended meanwhile
                continue
            request = completion.request
            try:
                if sequence.finish_reason is None and completion.stops is None:
                    text = completion.detokenizer.push(tokens[0].token)
                    if several:
                        text += "".join([completion.detokenizer.push(token.token) for token in tokens[1:]])
                    delta = Delta(completion.index, text, tokens)
                else:
                    delta = self._take(completion, tokens)
            except Exception:
                logger.exception("a token could not be turned into text; its request has failed, and no other")
                self._scheduler.finish(sequence, "error")
                sequence.finish_reason = "error"
                delta = Delta(completion.index, "", _numbers(tokens), "error", DETOKENIZER)
            if request.first_token_s is None:
                request.first_token_s = now - request.arrived_at
            if delta.finish_reason is not None:
                del self._completions[sequence]
                if request.finished:
                    request.total_s = now - request.arrived_at
            deltas.append((request, delta))
        self._num_generated += sum(len(delta.tokens) for _, delta in deltas) if several else len(deltas)
        if plan.has_grammar and not self._in_flight:
            self._propose_forced(plan)
        return deltas

    def _propose_forced(self, plan: StepPlan) -> None:
        """Tokens that grammars leave no choice about are guesses that are right: they take no step each."""
        for sequence in plan.sampling:
            grammar = sequence.request.grammar if sequence.request is not None else None
            if grammar is not None and grammar.forced and sequence.is_running:
                self._scheduler.propose(sequence, grammar.forced)

    @staticmethod
    def _accept(plan: StepPlan, sampled: list[SampledToken]) -> list[tuple[SampledToken, ...]]:
        """The tokens of each sequence of `plan.sampling`: one, and another behind each guess that was right."""
        accepted, rows = [], iter(sampled)
        for sequence in plan.sampling:
            own = tuple(islice(rows, 1 + len(sequence.guesses)))
            count = 1
            for token, guess in zip(own, sequence.guesses, strict=False):
                if token.is_nan or token.token != guess or guess in sequence.stop_token_ids:
                    break
                count += 1
            for token in own[1:count]:
                if not token.is_nan and sequence.request is not None:
                    sequence.request.accept(token.token)
            accepted.append(own[:count])
        return accepted

    def _take_prompt_rows(self, plan: StepPlan, sampled: list[SampledToken]) -> list[SampledToken]:
        """Keep what a step says of the tokens of prompts; the rest, which is for `plan.sampling`.

        A completion whose prompt has NaN log-probabilities fails with its first token.
        """
        for row, sequence, position in plan.prompt_rows:
            if sequence in self._completions:  # it has not ended meanwhile
                self._completions[sequence].request.prompt_logprobs[position] = sampled[row]
                sequence.every_logit = position + 1 < sequence.num_prompt_tokens
        prompt_rows = {row for row, _, _ in plan.prompt_rows}
        rest = [token for row, token in enumerate(sampled) if row not in prompt_rows]
        row = 0
        for sequence in plan.sampling:
            completion = self._completions.get(sequence)
            scored = completion.request.prompt_logprobs if completion is not None and completion.index == 0 else ()
            if any(token is not None and token.is_nan for token in scored):
                rest[row] = SampledToken(0, is_nan=True)
            row += 1 + len(sequence.guesses)
        return rest

    def _take(self, completion: Completion, tokens: tuple[SampledToken, ...]) -> Delta:
        """What tokens add of which one is the last, or in a completion with stop strings."""
        if completion.request.params.max_tokens == 0 and not tokens[-1].is_nan:
            return Delta(completion.index, "", (), "length")
        sequence, stops, text = completion.sequence, completion.stops, ""
        num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
        for later in reversed(range(len(tokens))):  # how many come behind
            token = tokens[-1 - later]
            text += self._text(completion, token, num_output - later, None if later else sequence.finish_reason)
            if stops is not None and stops.found is not None:
                self._scheduler.finish(sequence, "stop")
                sequence.finish_reason = "stop"  # even if it was its last token
                return Delta(completion.index, text, _numbers(tokens[: len(tokens) - later]), "stop", stops.found)
        stop_reason: int | str | None = None
        if sequence.finish_reason == "error":
            grammar = sequence.request.grammar if sequence.request is not None else None
            stop_reason = GRAMMAR if grammar is not None and grammar.failed else NAN_LOGITS
        elif sequence.finish_reason == "stop" and tokens[-1].token in completion.request.params.stop_token_ids:
            stop_reason = tokens[-1].token
        return Delta(completion.index, text, _numbers(tokens), sequence.finish_reason, stop_reason)

    @staticmethod
    def _text(completion: Completion, token: SampledToken, num_output: int, reason: str | None) -> str:
        """What a token adds to the text.

        Args:
            num_output: which token of the completion it is, counted from 1.
            reason: why the completion ends with it, if so.
        """
        stops, text = completion.stops, ""
        if not token.is_nan and reason != "stop":  # an end-of-text token is no text
            text = completion.detokenizer.push(token.token)
        if reason is not None:
            text += completion.detokenizer.flush()
        if stops is None or num_output <= completion.request.params.min_tokens:
            return text
        text = stops.push(text)
        return text if reason is None or stops.found is not None else text + stops.flush()


def _numbers(tokens: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
    """Without one whose logits were NaN, which is the last."""
    return tuple(token for token in tokens if not token.is_nan)
