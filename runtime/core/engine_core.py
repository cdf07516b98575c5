"""Requests in, pieces of completions out, one step at a time: the engine without threads.

core = EngineCore(engine, config)
core.add(core.request(prompt, params, sink))
while core.has_work:
    for request, delta in core.step(): …
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginewright.errors import EngineError, UsageError
from enginewright.runtime import env
from enginewright.runtime.cache.disk import DiskStore, identity_of
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.beam_search import Beam, BeamSearch
from enginewright.runtime.core.candidates import BeamGroup, BestOf, failed
from enginewright.runtime.core.kv_events import KvEventSender
from enginewright.runtime.core.outputs import DETOKENIZER, GRAMMAR, NAN_LOGITS, Delta, RequestMetrics, ends_of
from enginewright.runtime.core.prompts import check_prompt
from enginewright.runtime.core.stats import DiskStats, Stats, StepCounts
from enginewright.runtime.device.devices import open_executor
from enginewright.runtime.engine import Engine
from enginewright.runtime.grammar.grammars import Grammars
from enginewright.runtime.sampling.sampling import (
    DroppedRow,
    Logits,
    PromptToken,
    SampledRows,
    SampledToken,
    Sampler,
    SamplingParams,
    SamplingRequest,
    TokenRules,
    new_seed,
)
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.sampling.token_mask import Grammar
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.speculation.methods import config_of_model, open_speculator, with_method
from enginewright.runtime.step.prompt_cost import PromptCost
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_cost import StepCost
from enginewright.runtime.step.step_goal import StepGoal
from enginewright.runtime.step.step_plan import StepOutputs, StepPlan
from enginewright.runtime.step.work_class import DEFAULT_WORK, WorkClass
from enginewright.runtime.text.detokenizer import Detokenizer, StopMatcher, StopStrings

logger = logging.getLogger(__name__)


# Where a request's deltas go. An error is the last thing that comes: the engine is dead.
OutputSink = Callable[[Delta | EngineError], None]


@dataclass(eq=False, slots=True)
class Completion:
    """One choice of a request while it is written. It does not know its request, which would be a reference cycle."""

    params: SamplingParams  # of its request
    index: int  # which of the n choices, or of the best_of that these are chosen from
    sequence: TokenSequence
    detokenizer: Detokenizer
    stops: StopStrings | None  # None: the request names no stop string

    @property
    def finished(self) -> bool:
        return self.sequence.finish_reason is not None


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its n completions, or those that these are chosen from."""

    params: SamplingParams
    sink: OutputSink
    num_prompt_tokens: int
    arrived_at: float  # by time.perf_counter
    completions: list[Completion] = field(default_factory=list)  # of a beam search: of its first beam
    best_of: BestOf | None = None  # None: every completion is a choice
    beams: BeamGroup | None = None  # of a beam search
    first_token_s: float | None = None  # since it arrived; None: not yet
    total_s: float | None = None  # likewise
    prompt_logprobs: list[SampledToken | None] = field(default_factory=list)  # by position, if they were asked for

    @property
    def queue_s(self) -> float | None:
        """Until its first completion left the queue for the first time."""
        admitted_at = self.completions[0].sequence.admitted_at
        return None if admitted_at is None else admitted_at - self.arrived_at

    @property
    def metrics(self) -> RequestMetrics:
        """Its times so far."""
        return RequestMetrics(self.queue_s or 0.0, self.first_token_s or 0.0, self.total_s or 0.0)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; 0 as long as nobody knows."""
        return self.completions[0].sequence.num_cached_tokens or 0

    @property
    def num_guessed_tokens(self) -> int:
        """Guesses of its completions' tokens that were verified."""
        return sum(completion.sequence.num_guessed for completion in self.completions)

    @property
    def num_accepted_tokens(self) -> int:
        """Of these, those that were right."""
        return sum(completion.sequence.num_accepted for completion in self.completions)

    @property
    def finished(self) -> bool:
        if self.beams is not None:
            return self.beams.is_over
        return all(completion.finished for completion in self.completions)


DISK_WAIT_S = 0.005  # that a step waits for the disk where it has nothing else to do; then it looks for new requests

# How long a step waits for what a grammar allows: as a share of what its layers took, and at least.
LATE_SHARE, LATE_S = 0.25, 0.002


class LateRows(msgspec.Struct, frozen=True):
    """A sequence whose grammar was late to say what may come next, and the logits that it is sampled from later."""

    plan: StepPlan  # of this sequence alone
    logits: NDArray[np.float32]  # [its rows, vocab_size]

    @property
    def sequence(self) -> TokenSequence:
        return self.plan.sampling[0]


class StepInFlight(msgspec.Struct, frozen=True):
    """A step that has begun, and whose tokens have not been read."""

    plan: StepPlan
    outputs: StepOutputs
    rows: SampledRows
    began: float  # by time.perf_counter
    work: float  # its tokens, each by its cost; 0 where nobody wants to know


class EngineCore:
    """An engine with memory to run in. `request` and `stats` may be called from any thread, all else from one.

    Args:
        config: limits; see RuntimeConfig.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self.engine = engine
        config = with_method(engine, config)
        self._eos_token_ids = engine.eos_token_ids  # and tokenizer: read now, as the file may be changed later
        self.executor = open_executor(engine, config_of_model(engine, config))
        read_tokenizer = partial(engine.file.read_section, "tokenizer.json")
        self._grammars = Grammars(read_tokenizer, engine.plan.vocab_size, self._eos_token_ids, config.grammar_memory)
        self._sampler = Sampler(self.executor.draw)
        self._late_sampler = Sampler()  # of logits that were kept
        self._cost = PromptCost(engine.plan)
        # What a step takes by its work; None: nobody wants to know.
        self._pace = StepCost.of(engine) if config.itl_slo_ms or config.kv_cache_disk else None
        goal = StepGoal(config.itl_slo_ms / 1e3, self._pace) if self._pace and config.itl_slo_ms else None
        self._scheduler = Scheduler(
            engine.plan.caches,
            self.executor.memory_plan.limits,
            self.executor.memory_plan.num_blocks,
            prefix_caching=config.enable_prefix_caching,
            chunk=config.prefill_chunk_size,
            cost=self._cost.at,
            goal=goal,
        )
        self._speculator = open_speculator(engine, config, self.executor)
        self._completions: dict[TokenSequence, Completion] = {}
        self._requests: dict[TokenSequence, Request] = {}  # of each sequence that has not ended, beams too
        self._in_flight: deque[StepInFlight] = deque()
        self._late: list[LateRows] = []
        self._counts, self._num_generated = StepCounts(self._scheduler, self.executor.memory_plan), 0
        self._step_ended = 0.0
        self._kv_events: KvEventSender | None = None
        if config.kv_events is not None:
            block_size = self._scheduler.shared_block_size
            if block_size is None:
                why = "sequences of this engine share no blocks" if config.enable_prefix_caching else "nothing is kept"
                raise UsageError("kv_events goes with a prefix cache", why, "Leave it out, or enable_prefix_caching.")
            self._kv_events = KvEventSender(
                config.kv_events, config.kv_events_replay, config.kv_events_topic, engine.plan.caches, block_size
            )
            self._scheduler.watch(self._kv_events.put)
        self._disk = None if config.kv_cache_disk is None else self._open_disk(config, config.kv_cache_disk)

    def _open_disk(self, config: RuntimeConfig, capacity_bytes: int) -> DiskStore:
        engine, memory = self.engine, self.executor.place_memory
        if self._scheduler.shared_block_size is None:
            why = "sequences of this engine share no blocks" if config.enable_prefix_caching else "nothing is kept"
            raise UsageError("kv_cache_disk goes with a prefix cache", why, "Leave it out, or enable_prefix_caching.")
        folder = Path(config.kv_cache_dir) if config.kv_cache_dir else env.cache_folder() / "kv"
        identity = identity_of(engine.manifest.content_hash, self.executor.isa, engine.plan.caches)
        store = DiskStore(folder, identity, capacity_bytes, [group.place_bytes for group in memory])
        assert self._pace is not None
        self._scheduler.keep_on_disk(store, memory, partial(_prompt_seconds, self._pace, self._cost))
        return store

    @property
    def _steps_ahead(self) -> int:
        """Guesses follow from all tokens before them, and are worth more than the time between two steps."""
        return 0 if self._speculator is not None else self.executor.steps_ahead

    def close(self) -> None:
        """Give back what it runs in."""
        self._grammars.close()
        if self._speculator is not None:
            self._speculator.close()
        if self._kv_events is not None:
            self._kv_events.close()
        if self._disk is not None:
            self._disk.close()
        self.executor.close()

    @property
    def max_model_len(self) -> int:
        return self.executor.memory_plan.max_model_len

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_unfinished > 0 or len(self._in_flight) > 0

    def stats(self) -> Stats:
        """What is going on; its numbers may be a step apart from each other."""
        speculation = None if self._speculator is None else self._speculator.stats()
        disk = None if self._disk is None else DiskStats(self._disk.num_bytes, self._disk.num_failures)
        grammars = self._grammars.stats()
        return self._counts.stats(
            generated_tokens=self._num_generated, speculation=speculation, disk=disk, grammars=grammars
        )

    def compile(self, wanted: StructuredOutputsParams) -> "Future[None]":
        """Compile a grammar before `request` does, which waits for it; ends with the error that it would raise."""
        return self._grammars.compile(wanted)

    def walks(self, params: SamplingParams) -> Sequence[Grammar]:
        """For `request`, once its grammar was compiled. One that has been evicted since is compiled again, later."""
        wanted = params.structured_outputs
        return () if wanted is None else self._grammars.walks(wanted, params.num_candidates)

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: OutputSink,
        cache_salt: str = "",
        grammars: Sequence[Grammar | None] = (),
        work: WorkClass = DEFAULT_WORK,
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
        if params.use_beam_search:
            self._search(request, prompt, whole, rules, cache_salt, work)
            return request
        logprobs = params.logprobs
        if params.num_candidates > params.n:
            request.best_of = BestOf(params.n, params.num_candidates)
            logprobs = params.logprobs or 0
        if params.structured_outputs is not None and not grammars:
            self._grammars.compile(params.structured_outputs).result()
            grammars = self.walks(params)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(prompt)
        for index, grammar in enumerate(grammars or [None] * params.num_candidates):
            sampling = SamplingRequest(params, prompt, plan.vocab_size, ends, index, seed, grammar, rules, logprobs)
            sequence = TokenSequence(
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_tokens=whole,
                stop_token_ids=frozenset((*ends, *params.stop_token_ids)),
                request=sampling,
                needs_prompt_logits=params.prompt_logprobs is not None and index == 0,
                cache_salt=cache_salt,
                sibling_of=request.completions[0].sequence if index else None,
                work=work,
            )
            detokenizer = Detokenizer(self.engine.tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)
            stops = StopStrings(matcher, include=params.include_stop_str_in_output) if matcher else None
            request.completions.append(Completion(params, index, sequence, detokenizer, stops))
        return request

    def _search(
        self,
        request: Request,
        prompt: Sequence[int],
        whole: int,
        rules: TokenRules,
        cache_salt: str,
        work: WorkClass,
    ) -> None:
        """Make a request a beam search.

        Args:
            whole: positions of prompt and answer together, at most.

        Raises:
            UsageError: it wants more of the sampler than there is on this device.
        """
        params, vocab_size = request.params, self.engine.plan.vocab_size
        ends = (*(() if params.ignore_eos else self._eos_token_ids), *params.stop_token_ids)
        search = BeamSearch(
            params.num_candidates, whole - len(prompt), params.length_penalty, params.early_stopping, ends
        )
        most = self.executor.max_top_logprobs
        if min(search.num_candidates, vocab_size) > most:
            name = "n" if params.best_of is None else "best_of"
            rule = f"{name} must be at most {most - len(set(ends))} with use_beam_search"
            raise UsageError(rule, f"a row of logits gives the {most} likeliest tokens on this device")
        sampling = SamplingRequest(params, prompt, vocab_size, rules=rules, logprobs=search.num_candidates)
        first = TokenSequence(
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_tokens=whole,
            request=sampling,
            cache_salt=cache_salt,
            work=work,
            is_beam=True,
        )
        request.beams = BeamGroup(search, [first])
        detokenizer = Detokenizer(self.engine.tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)
        request.completions.append(Completion(params, 0, first, detokenizer, None))

    def add(self, request: Request) -> None:
        if request.beams is not None:
            (first,) = request.beams.sequences
            self._requests[first] = request
            self._scheduler.add(first)
            return
        for completion in request.completions:
            self._requests[completion.sequence] = request
            self._completions[completion.sequence] = completion
            self._scheduler.add(completion.sequence)
            if (grammar := _grammar_of(completion.sequence)) is not None:
                grammar.begin()

    def propose(self, completion: Completion, guesses: Sequence[int]) -> None:
        """Tokens that may come next, one behind the other: the next step verifies as many as there is room for.

        A guess is right where it is the token that is sampled there, so the answer is the same bits with or without. To
        be called between steps, where none of its tokens is in flight.
        """
        if completion.sequence.is_running and not self._in_flight:
            self._scheduler.propose(completion.sequence, guesses)

    def abort(self, request: Request) -> list[tuple[Request, Delta]]:
        """End what goes on of a request; its blocks are free again."""
        if request.beams is not None or request.best_of is not None:
            if request.finished:
                return []
            self._end_candidates(request)
            return [(request, delta) for delta in failed(request.params.n, "abort")]
        deltas = []
        for completion in request.completions:
            if completion.sequence in self._completions:
                self._scheduler.finish(completion.sequence, "abort")
                self._forget(completion.sequence)
                deltas.append((request, Delta(completion.index, "", (), "abort")))
        return deltas

    def _end_candidates(self, request: Request) -> None:
        """End all that goes on of a request with candidates."""
        if request.beams is not None:
            request.beams.is_over = True
        sequences = [completion.sequence for completion in request.completions]
        for sequence in sequences if request.beams is None else request.beams.sequences:
            self._scheduler.finish(sequence, "abort")
            if sequence in self._completions:
                self._forget(sequence)
            else:
                self._requests.pop(sequence, None)

    def step(self) -> list[tuple[Request, Delta]]:
        """Begin one step of all that has arrived, and end one; what that added.

        A step ends at once, or, where the executor runs ahead, once the next one has begun; where a grammar says what
        may come next, once its layers run, before it samples. A sequence whose grammar takes long is set aside.
        """
        deltas = self._end_late() if self._late else []
        began, plan = time.perf_counter(), self._scheduler.schedule()
        if plan is not None:
            work = 0.0 if self._pace is None else self._cost.of(plan.inputs["positions"])
            for sequence in plan.verifying if plan.has_grammar else ():
                if (grammar := _grammar_of(sequence)) is not None:
                    grammar.look(sequence.draft_tokens)
            outputs = self.executor.run(plan)
            logits = outputs.logits
            if self._in_flight and plan.has_grammar:
                deltas += self._end(self._in_flight.popleft())
            if plan.has_grammar:
                plan = self._set_aside(plan, logits, time.perf_counter() - began)
            rows = self._sampler.begin(logits, plan.requests)
            self._in_flight.append(StepInFlight(plan, outputs, rows, began, work))
            if len(self._in_flight) <= self._steps_ahead:
                return deltas
        if not self._in_flight:
            if plan is None:
                self._scheduler.wait_for_disk(DISK_WAIT_S)
            return deltas
        last = self._in_flight.popleft()
        deltas += self._end(last)
        if not self._in_flight and (self._speculator is not None or last.plan.has_grammar):
            self._guess(last, time.perf_counter() - began)
        return deltas

    def _set_aside(self, plan: StepPlan, logits: Logits, seconds: float) -> StepPlan:
        """Keep the logits of sequences whose grammars are late; what is left to sample.

        Args:
            seconds: that the step has taken so far.
        """
        until = time.perf_counter() + max(LATE_S, LATE_SHARE * seconds)
        late = [one for one in plan.sampling if not _mask_ready(one, until - time.perf_counter())]
        if not late:
            return plan
        kept = np.asarray(logits)  # a GPU has computed them then, and more grammars may be there
        late = [one for one in late if not _mask_ready(one, 0)]
        requests = list(plan.requests)
        for sequence in late:
            rows = slice(sequence.logits_row, sequence.logits_row + 1 + len(sequence.draft_tokens))
            own = msgspec.structs.replace(
                plan,
                sampling=(sequence,),
                requests=plan.requests[rows],
                ending=(),
                has_unpublished_blocks=sequence.has_unpublished_blocks,
                prompt_rows=(),
                verifying=(sequence,) if sequence.draft_tokens else (),
            )
            self._late.append(LateRows(own, kept[rows].copy()))
            self._scheduler.defer(sequence)
            # Rows stay where they are: a GPU samples all of them, and knows each by its number.
            requests[rows] = [DroppedRow(self.engine.plan.vocab_size)] * len(own.requests)
        return msgspec.structs.replace(
            plan,
            sampling=tuple(one for one in plan.sampling if not one.deferred),
            requests=tuple(requests),
            verifying=tuple(one for one in plan.verifying if not one.deferred),
        )

    def _end_late(self) -> list[tuple[Request, Delta]]:
        """Sample those that were set aside and can be sampled now; where all that runs is late, wait a little."""
        deltas, late = list[tuple[Request, Delta]](), self._late
        if self._scheduler.num_running <= len(late):
            _mask_ready(late[0].sequence, LATE_S)
        self._late = []
        for one in late:
            if one.sequence.finish_reason is not None:
                continue
            if _mask_ready(one.sequence, 0):
                sampled = self._late_sampler.sample(one.logits, one.plan.requests)
                deltas += self._take_up(one.plan, self._take_prompt_rows(one.plan, sampled))
                self._propose_forced(one.sequence)
            else:
                self._late.append(one)
        return deltas

    def _guess(self, step: StepInFlight, seconds: float) -> None:
        """Guess what comes behind a step that took so long."""
        plan = step.plan
        free = [one for one in plan.sampling if one.is_running and not one.is_beam and not self._propose_forced(one)]
        if self._speculator is not None:
            if plan.sizes.tokens == plan.sizes.logit_rows:
                self._speculator.step_took(plan.sizes.tokens, seconds)
            self._speculator.observe(plan, step.outputs)
            self._sampler.settle()  # a draft samples as its requests will
            for sequence, guesses in self._speculator.propose(free, self._num_soon()):
                self._scheduler.propose(sequence, guesses)

    def _num_soon(self) -> int:
        """How many sequences decode once the prompts that are there are read."""
        return min(self._scheduler.num_unfinished, self.executor.memory_plan.limits.sequences)

    def _propose_forced(self, sequence: TokenSequence) -> bool:
        """Tokens that a grammar leaves no choice about are guesses that are right: they take no step each."""
        grammar = _grammar_of(sequence)
        if grammar is None or not grammar.forced or not sequence.is_running:
            return False
        self._scheduler.propose(sequence, grammar.forced)
        return True

    def _forget(self, sequence: TokenSequence) -> None:
        """It has ended."""
        del self._completions[sequence], self._requests[sequence]
        if (grammar := _grammar_of(sequence)) is not None:
            grammar.end()
        if self._speculator is not None:
            self._speculator.end(sequence)

    def _end(self, step: StepInFlight) -> list[tuple[Request, Delta]]:
        plan, sampled = step.plan, self._sampler.end(step.rows)
        if plan.prompt_rows or plan.has_grammar:
            sampled = self._take_prompt_rows(plan, sampled)
        now = time.perf_counter()
        seconds = now - max(step.began, self._step_ended)  # its predecessor may have run until then
        self._step_ended = now
        if self._pace is not None:
            self._pace.learn(step.work, seconds)
        self._counts.add(plan.sizes.tokens, seconds)
        return self._take_up(plan, sampled)

    def _take_up(self, plan: StepPlan, sampled: list[SampledToken]) -> list[tuple[Request, Delta]]:
        """Take up what `plan.sampling` sampled."""
        accepted = self._accept(plan, sampled) if plan.verifying else list(zip(sampled, strict=True))
        now = time.perf_counter()
        self._scheduler.commit(plan, accepted)
        deltas, several, num_generated = list[tuple[Request, Delta]](), bool(plan.verifying), 0
        for sequence, tokens in zip(plan.sampling, accepted, strict=True):
            completion = self._completions.get(sequence)
            if completion is None:  # it has ended meanwhile, or is a beam
                if sequence in self._requests:
                    deltas += self._advance(self._requests[sequence], sequence, tokens[0], now)
                continue
            request = self._requests[sequence]
            try:
                if sequence.finish_reason is None and completion.stops is None:
                    push = completion.detokenizer.push
                    if several:
                        texts = [push(token.token) for token in tokens]
                        delta = Delta(completion.index, "".join(texts), tokens, ends=ends_of(texts))
                    else:
                        delta = Delta(completion.index, push(tokens[0].token), tokens)
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
                self._forget(sequence)
                if request.finished:
                    request.total_s = now - request.arrived_at
            num_generated += len(delta.tokens)
            if request.best_of is None:
                deltas.append((request, delta))
            elif chosen := request.best_of.add(delta):
                self._end_candidates(request)
                deltas += [(request, one) for one in chosen]
        self._num_generated += num_generated
        return deltas

    def _advance(
        self, request: Request, sequence: TokenSequence, sampled: SampledToken, now: float
    ) -> list[tuple[Request, Delta]]:
        """A beam has got its logits; the answers of its request, if they are whole now."""
        group = request.beams
        assert group is not None
        request.first_token_s = request.first_token_s or now - request.arrived_at
        if sampled.is_nan:
            self._end_candidates(request)
            return [(request, delta) for delta in failed(request.params.n, "error", NAN_LOGITS)]
        group.sampled[sequence] = sampled
        if len(group.sampled) < len(group.sequences):
            return []
        if group.advance():
            self._branch(request, group)
            return []
        self._end_candidates(request)
        request.total_s = now - request.arrived_at
        answers = group.search.answers()[: request.params.n]
        deltas = [self._answer(request, index, *answer) for index, answer in enumerate(answers)]
        self._num_generated += sum(len(delta.tokens) for delta in deltas)
        return [(request, delta) for delta in deltas]

    def _branch(self, request: Request, group: BeamGroup) -> None:
        """Let the beams of the next step go on where those of the last one stand."""
        parents, beams, free = group.sequences, group.search.beams, set[TokenSequence]()
        going_on = {beam.parent for beam in beams}
        for place, parent in enumerate(parents):
            if place in going_on:
                free.add(parent)
            else:
                self._scheduler.finish(parent, "abort")
                del self._requests[parent]
        group.sequences = []
        for beam in beams:
            sequence = parents[beam.parent]
            if sequence in free:
                free.remove(sequence)
            else:
                sequence = self._forked(sequence)
                self._requests[sequence] = request
            group.sequences.append(sequence)
        for beam, sequence in zip(beams, group.sequences, strict=True):
            self._scheduler.choose(sequence, beam.tokens[-1].token)

    def _forked(self, parent: TokenSequence) -> TokenSequence:
        child = TokenSequence(
            token_ids=list(parent.token_ids),
            num_prompt_tokens=parent.num_prompt_tokens,
            max_tokens=parent.max_tokens,
            request=copy(parent.request),
            cache_salt=parent.cache_salt,
            work=parent.work,
            is_beam=True,
        )
        self._scheduler.fork(parent, child)
        return child

    def _answer(self, request: Request, index: int, beam: Beam, reason: str) -> Delta:
        """A choice of a beam search, whole."""
        params, last = request.params, beam.tokens[-1].token
        prompt = request.completions[0].sequence.token_ids[: request.num_prompt_tokens]
        detokenizer = Detokenizer(self.engine.tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)
        shown = beam.tokens[:-1] if reason == "stop" else beam.tokens  # an end-of-text token is no text
        text = "".join([detokenizer.push(token.token) for token in shown]) + detokenizer.flush()
        most = params.logprobs or 0
        tokens = tuple(SampledToken(one.token, one.logprob, one.top_logprobs[:most]) for one in beam.tokens)
        return Delta(index, text, tokens, reason, last if reason == "stop" and last in params.stop_token_ids else None)

    def _accept(self, plan: StepPlan, sampled: list[SampledToken]) -> list[tuple[SampledToken, ...]]:
        """The tokens of each sequence of `plan.sampling`: one, and another behind each guess that was right."""
        accepted, rows = [], iter(sampled)
        for sequence in plan.sampling:
            own = tuple(islice(rows, 1 + len(sequence.draft_tokens)))
            count = 1
            for token, guess in zip(own, sequence.draft_tokens, strict=False):
                if token.is_nan or token.token != guess or guess in sequence.stop_token_ids:
                    break
                count += 1
            for token in own[1:count]:
                if not token.is_nan and sequence.request is not None:
                    sequence.request.accept(token.token)
            if self._speculator is not None and sequence.finish_reason is None:
                self._speculator.verified(sequence, len(sequence.draft_tokens), count - 1)
            accepted.append(own[:count])
        return accepted

    def _take_prompt_rows(self, plan: StepPlan, sampled: list[SampledToken]) -> list[SampledToken]:
        """Keep what a step says of the tokens of prompts; what is for `plan.sampling`.

        A completion whose prompt has NaN log-probabilities fails with its first token.
        """
        for row, sequence, position in plan.prompt_rows:
            if sequence in self._completions:  # it has not ended meanwhile
                self._requests[sequence].prompt_logprobs[position] = sampled[row]
                sequence.needs_prompt_logits = position + 1 < sequence.num_prompt_tokens
        pairs = zip(sampled, plan.requests, strict=True)
        rest = [token for token, request in pairs if not isinstance(request, PromptToken | DroppedRow)]
        row = 0
        for sequence in plan.sampling:
            completion = self._completions.get(sequence)
            is_first = completion is not None and completion.index == 0
            scored = self._requests[sequence].prompt_logprobs if is_first else ()
            if any(token is not None and token.is_nan for token in scored):
                rest[row] = SampledToken(0, is_nan=True)
            row += 1 + len(sequence.draft_tokens)
        return rest

    def _take(self, completion: Completion, tokens: tuple[SampledToken, ...]) -> Delta:
        """What tokens add of which one is the last, or in a completion with stop strings."""
        if completion.params.max_tokens == 0 and not tokens[-1].is_nan:
            return Delta(completion.index, "", (), "length")
        sequence, stops, texts = completion.sequence, completion.stops, list[str]()
        num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
        for later in reversed(range(len(tokens))):  # how many come behind
            token = tokens[-1 - later]
            reason = None if later else sequence.finish_reason
            texts.append(self._text(completion, token, num_output - later, reason))
            if stops is not None and stops.found is not None:
                self._scheduler.finish(sequence, "stop")
                sequence.finish_reason = "stop"  # even if it was its last token
                taken = _numbers(tokens[: len(tokens) - later])
                return Delta(completion.index, "".join(texts), taken, "stop", stops.found, ends_of(texts))
        stop_reason: int | str | None = None
        if sequence.finish_reason == "error":
            grammar = _grammar_of(sequence)
            stop_reason = GRAMMAR if grammar is not None and grammar.failed else NAN_LOGITS
        elif sequence.finish_reason == "stop" and tokens[-1].token in completion.params.stop_token_ids:
            stop_reason = tokens[-1].token
        taken, reason = _numbers(tokens), sequence.finish_reason
        return Delta(completion.index, "".join(texts), taken, reason, stop_reason, ends_of(texts[: len(taken)]))

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
        if stops is None or num_output <= completion.params.min_tokens:
            return text
        text = stops.push(text)
        return text if reason is None or stops.found is not None else text + stops.flush()


def _prompt_seconds(pace: StepCost, cost: PromptCost, first: int, end: int) -> float | None:
    """Seconds to compute the positions from `first` up to `end` of a prompt; None: no step was measured yet."""
    if not pace.is_measured:
        return None
    return pace.of_token * cost.of(np.arange(first, end, dtype=np.int32))


def _grammar_of(sequence: TokenSequence) -> Grammar | None:
    return None if sequence.request is None else sequence.request.grammar


def _mask_ready(sequence: TokenSequence, seconds: float) -> bool:
    """Wait for the masks of a sequence, and of its draft tokens, so long at most; True if they are there."""
    grammar = _grammar_of(sequence)
    return grammar is None or grammar.wait(seconds, sequence.draft_tokens)


def _numbers(tokens: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
    """Without one whose logits were NaN, which is the last."""
    return tuple(token for token in tokens if not token.is_nan)
