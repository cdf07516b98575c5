"""Requests in, pieces of completions out, one step at a time: the engine without threads.

core = EngineCore(engine, config)
core.add(core.request(prompt, params, sink))
while core.has_work:
    for request, delta in core.step(): …
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import msgspec

from enginewright.adapter_file import AdapterFile
from enginewright.errors import UsageError
from enginewright.runtime.cache.eviction import NOT_RETAINED, Retention
from enginewright.runtime.cache.store import ReadEntries
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.adapters import Adapters, check_adapter
from enginewright.runtime.core.beam_scorer import BeamScorer
from enginewright.runtime.core.beam_search import BeamSearch
from enginewright.runtime.core.completion import Completion
from enginewright.runtime.core.deferred_rows import DeferredRows
from enginewright.runtime.core.drafting import Drafting
from enginewright.runtime.core.kv_transfer import KvTransfer
from enginewright.runtime.core.prompts import check_prompt
from enginewright.runtime.core.request import OutputSink, Request
from enginewright.runtime.core.request_kinds import BestOf, LiveSequences, Outputs, Plain, RequestKind
from enginewright.runtime.core.stats import Stats, StepCounts
from enginewright.runtime.core.storage import Stores, open_kv_events, prompt_s
from enginewright.runtime.device.adapters import num_slots
from enginewright.runtime.device.devices import open_executor
from enginewright.runtime.engine import Engine
from enginewright.runtime.grammar.grammars import Grammars
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.request import SamplingRequest, TokenRules, new_seed
from enginewright.runtime.sampling.sampler import SampledRows, SampledToken, Sampler
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.sampling.token_mask import Grammar
from enginewright.runtime.scheduler.adapters import AdapterSlots
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.speculation.methods import config_of_model, open_speculator, with_method
from enginewright.runtime.step.inputs import StepOutputs
from enginewright.runtime.step.prompt_cost import PromptCost
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_cost import StepCost
from enginewright.runtime.step.step_goal import StepGoal
from enginewright.runtime.step.step_plan import LogitRows, RowPurpose, StepPlan
from enginewright.runtime.step.work_class import DEFAULT_WORK, WorkClass
from enginewright.runtime.text.detokenizer import Detokenizer, StopMatcher, StopStrings

# Seconds that a step without work waits for stores, before it returns so that new requests can be added.
STORES_WAIT_S = 0.005


class StepInFlight(msgspec.Struct, frozen=True):
    """A step that has begun, and whose sampled tokens have not been read yet."""

    plan: StepPlan  # the plan of the step
    began: float  # time.perf_counter at which its planning began, in seconds
    work: float  # cost of its tokens by PromptCost; 0 where steps are not measured
    # Its outputs and sampled tokens, which a device may still be computing. None: stages are computing it, and nothing
    # has been sampled.
    results: tuple[StepOutputs, SampledRows] | None


class EngineCore:
    """Runs the steps of an engine that generates text.

    `request`, `open_adapter`, `walks`, `compile` and `stats` may be called from any thread, all other methods from a
    single one.

    Args:
        engine: the engine.
        config: limits; see RuntimeConfig.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self.engine = engine
        config = with_method(engine, config)
        self._config = config
        self._opened = ExitStack()  # closes what this object has opened, the last first
        try:
            self._open(engine, config)
        except BaseException:
            self._opened.close()
            raise

    def _open(self, engine: Engine, config: RuntimeConfig) -> None:
        """Opens all parts of the core. If this fails, the caller closes those that are in `self._opened`."""
        self._adapters = Adapters(engine, config)
        self._eos_token_ids = engine.eos_token_ids  # and tokenizer: read now, since the file may be changed later
        self.executor = self._opened.enter_context(closing(open_executor(engine, config_of_model(engine, config))))
        read_tokenizer = partial(engine.file.read_section, "tokenizer.json")
        self._grammars = Grammars(read_tokenizer, engine.plan.vocab_size, self._eos_token_ids, config.grammar_memory)
        self._opened.callback(self._grammars.close)
        self._sampler = Sampler(self.executor.draw)
        self._prompt_cost = PromptCost(engine.plan)
        # Time of a step by its work; None where neither a goal nor a store needs it.
        self._step_cost = StepCost.of(engine) if config.itl_slo_ms or config.has_stores else None
        goal = StepGoal(config.itl_slo_ms / 1e3, self._step_cost) if self._step_cost and config.itl_slo_ms else None
        limits = self.executor.memory_plan.limits
        self._speculator = open_speculator(engine, config, self.executor)
        if self._speculator is not None:
            self._opened.callback(self._speculator.close)
        # Stages compute several steps at a time. With a speculator they wait for each other: draft tokens depend on all
        # tokens before them, and on the inputs of the step that has just ended.
        self._pipeline = self.executor.pipeline
        overlaps = self._pipeline is not None and self._speculator is None
        self._num_under_way = self._pipeline.num_stages if self._pipeline is not None and overlaps else 1
        self._scheduler = Scheduler(
            engine.plan.caches,
            limits,
            self.executor.memory_plan.num_blocks,
            prefix_caching=config.enable_prefix_caching,
            chunk=config.prefill_chunk_size,
            cost=self._prompt_cost.at,
            goal=goal,
            adapters=self._adapter_slots(),
            num_under_way=self._num_under_way,
        )
        self._drafting = Drafting(self._scheduler, self._sampler, self._speculator, limits.sequences)
        self._deferred = DeferredRows(self._scheduler, engine.plan.vocab_size)
        if config.has_stores or config.kv_role is not None:
            self._scheduler.use_memory(self.executor.place_memory)
        # Moves prompts between servers; None where each server computes its own.
        self.transfer = KvTransfer(engine, config, self.executor, self._scheduler) if config.kv_role else None
        if self.transfer is not None:
            self._opened.callback(self.transfer.close)
        self._live = LiveSequences(self._scheduler, self._speculator, self.transfer)
        self._in_flight: deque[StepInFlight] = deque()
        self._counts = StepCounts(self._scheduler, self.executor.memory_plan)
        self._num_generated = 0  # tokens since the start
        self._step_ended = 0.0  # time.perf_counter at which the last step ended, in seconds
        self._kv_events = open_kv_events(engine, config, self._scheduler)
        if self._kv_events is not None:
            self._opened.callback(self._kv_events.close)
        self._stores: Stores | None = None
        if config.has_stores:
            assert self._step_cost is not None
            seconds = partial(prompt_s, self._step_cost, self._prompt_cost)
            self._stores = self._opened.enter_context(
                closing(Stores(engine, config, self.executor, self._scheduler, seconds))
            )

    @property
    def max_loras(self) -> int | None:
        """Maximum number of adapters in a step; None without `enable_lora`."""
        return num_slots(self.engine, self._config) if self._config.enable_lora else None

    def _adapter_slots(self) -> AdapterSlots | None:
        """Slots of the executor for adapters; None without `enable_lora`."""
        if self.max_loras is None:
            return None
        return AdapterSlots(self.max_loras, self.executor.load_adapter, self.executor.unload_adapter)

    @property
    def _steps_ahead(self) -> int:
        """Number of steps that begin before the step in flight ends.

        With a speculator it is 0: draft tokens depend on all tokens before them, and save more time than running ahead.
        """
        if self._pipeline is not None:
            return self._num_under_way - 1
        return 0 if self._speculator is not None else self.executor.steps_ahead

    def close(self) -> None:
        """Releases memory, processes and files."""
        self._live.clear()
        self._opened.close()

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        return self.executor.memory_plan.max_model_len

    @property
    def has_work(self) -> bool:
        """True as long as `step` has something to do."""
        return self._scheduler.num_unfinished > 0 or len(self._in_flight) > 0 or bool(self._deferred)

    def stats(self) -> Stats:
        """Statistics of the engine; the numbers may be one step apart from each other."""
        speculation = None if self._speculator is None else self._speculator.stats()
        stores = self._stores
        grammars = self._grammars.stats()
        transfer = None if self.transfer is None else self.transfer.stats()
        return self._counts.stats(
            generated_tokens=self._num_generated,
            speculation=speculation,
            disk=None if stores is None else stores.disk_stats(),
            remote=None if stores is None else stores.remote_stats(),
            grammars=grammars,
            transfer=transfer,
        )

    def compile(self, wanted: StructuredOutputsParams) -> "Future[None]":
        """Compiles a grammar ahead of `request`, which would wait for it.

        Returns:
            A future that ends when the grammar is compiled, or with the error that `request` would raise.
        """
        return self._grammars.compile(wanted)

    def walks(self, params: SamplingParams) -> Sequence[Grammar]:
        """Creates the grammar of each completion of a request, after `compile` has compiled it.

        A grammar that was evicted from memory meanwhile is compiled again later.
        """
        wanted = params.structured_outputs
        return () if wanted is None else self._grammars.walks(wanted, params.num_candidates)

    def open_adapter(self, path: Path) -> AdapterFile:
        """Returns the adapter of a file, for `request`; it may be called in any thread.

        Raises:
            UsageError: there is no such file, or the adapter does not fit the engine or its limits.
            EngineError: the file cannot be read.
        """
        return self._adapters.get(path)

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: OutputSink,
        cache_salt: str = "",
        grammars: Sequence[Grammar | None] = (),
        work: WorkClass = DEFAULT_WORK,
        *,
        retention: Retention = NOT_RETAINED,
        fetched: ReadEntries | None = None,
        leases_prompt: bool = False,
        adapter: AdapterFile | None = None,
    ) -> Request:
        """Creates a request that can be added.

        Args:
            prompt: token ids.
            params: sampling parameters.
            sink: gets the deltas of its answer.
            cache_salt: the request shares the prefix cache only with requests of the same salt.
            grammars: a grammar for each of its completions, from `walks`; empty: the grammar of
                params.structured_outputs, if any, is compiled here.
            work: priority and tenant of the request.
            retention: hint for what the request leaves in the prefix cache.
            fetched: blocks of its prompt that another server has computed.
            leases_prompt: true if its prompt is leased to another server when its only completion has ended.
            adapter: adapter that it is computed with, which fits the engine; None: the engine's own weights.

        Raises:
            UsageError: the prompt, the parameters or the adapter are not possible with this engine.
            EngineError: the engine's tokenizer cannot be used for structured outputs.
        """
        params = params.clone()  # the caller may change them later
        if leases_prompt:
            _check_lease(params, self.transfer)
        adapter_from = 0
        if adapter is not None:
            check_adapter(adapter, self.engine, self._config)
            adapter_from = adapter.first_position(prompt)
        vocab_size, ends = self.engine.plan.vocab_size, () if params.ignore_eos else self._eos_token_ids
        check_prompt(prompt, vocab_size, self.max_model_len)
        max_total_tokens = self.max_model_len
        if params.max_tokens is not None:  # for 0 tokens, one is sampled and left out of the answer
            max_total_tokens = min(max_total_tokens, len(prompt) + max(params.max_tokens, 1))
        request = Request(params, sink, len(prompt), time.perf_counter(), leases_prompt=leases_prompt)
        rules = TokenRules(params, vocab_size, ends)
        if params.use_beam_search:
            scorer = self._beam_scorer(request, max_total_tokens)
            sampling = SamplingRequest(params, prompt, vocab_size, rules=rules, logprobs=scorer.num_candidates)
            first = TokenSequence(
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_tokens=max_total_tokens,
                request=sampling,
                cache_salt=cache_salt,
                work=work,
                retention=retention,
                adapter=adapter,
                adapter_from=adapter_from,
                is_beam=True,
            )
            first.cache.fetched = fetched
            request.completions.append(Completion(params, 0, first, self._detokenizer(request, prompt), None))
            return request
        logprobs = params.logprobs
        if params.num_candidates > params.n:
            logprobs = params.logprobs or 0  # the best completions are chosen by log-probability
        if params.structured_outputs is not None and not grammars:
            self._grammars.compile(params.structured_outputs).result()
            grammars = self.walks(params)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(prompt)
        seed, matcher = new_seed(), StopMatcher(params.stop) if params.stop else None
        for index, grammar in enumerate(grammars or [None] * params.num_candidates):
            sampling = SamplingRequest(params, prompt, vocab_size, ends, index, seed, grammar, rules, logprobs)
            sequence = TokenSequence(
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_tokens=max_total_tokens,
                stop_token_ids=frozenset((*ends, *params.stop_token_ids)),
                request=sampling,
                scores_prompt=params.prompt_logprobs is not None and index == 0 and len(prompt) > 1,
                cache_salt=cache_salt,
                sibling_of=request.completions[0].sequence if index else None,
                work=work,
                retention=retention,
                adapter=adapter,
                adapter_from=adapter_from,
            )
            stops = StopStrings(matcher, include=params.include_stop_str_in_output) if matcher else None
            detokenizer = self._detokenizer(request, prompt)
            request.completions.append(Completion(params, index, sequence, detokenizer, stops))
        request.completions[0].sequence.cache.fetched = fetched
        return request

    def _detokenizer(self, request: Request, prompt: Sequence[int]) -> Detokenizer:
        return Detokenizer(self.engine.tokenizer, prompt, skip_special_tokens=request.params.skip_special_tokens)

    def _beam_scorer(self, request: Request, max_total_tokens: int) -> BeamScorer:
        """Creates the scorer that chooses the beams of a request.

        Args:
            request: the request.
            max_total_tokens: maximum number of tokens of prompt and answer together.

        Raises:
            UsageError: the search needs more of the likeliest tokens than the sampler gives on this device.
        """
        params, max_top_logprobs = request.params, self.executor.max_top_logprobs
        ends = (*(() if params.ignore_eos else self._eos_token_ids), *params.stop_token_ids)
        max_tokens = max_total_tokens - request.num_prompt_tokens
        scorer = BeamScorer(params.num_candidates, max_tokens, params.length_penalty, params.early_stopping, ends)
        if min(scorer.num_candidates, self.engine.plan.vocab_size) > max_top_logprobs:
            name = "n" if params.best_of is None else "best_of"
            rule = f"{name} must be at most {max_top_logprobs - len(set(ends))} with use_beam_search"
            raise UsageError(rule, f"a row of logits gives the {max_top_logprobs} likeliest tokens on this device")
        return scorer

    def _kind(self, request: Request) -> RequestKind:
        params, first = request.params, request.completions[0].sequence
        if params.use_beam_search:
            prompt = first.token_ids[: request.num_prompt_tokens]
            scorer = self._beam_scorer(request, first.max_tokens)
            return BeamSearch(request, self._live, scorer, partial(self._detokenizer, request, prompt))
        return BestOf(request, self._live) if params.num_candidates > params.n else Plain(request, self._live)

    def add(self, request: Request) -> None:
        """Queues a request that `request` has created."""
        self._kind(request).begin()

    def propose(self, completion: Completion, draft_tokens: Sequence[int]) -> None:
        """Lets the next step verify draft tokens of a completion, as many as its limits allow.

        A draft token is accepted if it is the token that is sampled at its position, so the answer is the same with or
        without it, bit by bit. The call does nothing while a step is in flight.

        Args:
            completion: the completion.
            draft_tokens: token ids that may come next.
        """
        if completion.sequence.is_running and not self._in_flight:
            self._scheduler.propose(completion.sequence, draft_tokens)

    def abort(self, request: Request) -> Outputs:
        """Ends all unfinished completions of a request, and frees their blocks; returns the last deltas."""
        kind = self._live.kinds.get(request)
        return [] if kind is None else [(request, delta) for delta in kind.abort()]

    def step(self) -> Outputs:
        """Begins one step and ends one; returns the deltas of the step that has ended.

        A step ends in the same call, or in a later one where the executor runs ahead or has stages. If a step has
        grammars and runs ahead, the step before it ends while its layers run. A sequence whose grammar is late is
        deferred.
        """
        outputs: Outputs = []
        if self._deferred:
            self._commit_deferred(outputs)
        began, plan = time.perf_counter(), self._scheduler.schedule()
        if plan is not None:
            self._run(plan, began, outputs)
        if len(self._in_flight) > (self._steps_ahead if plan is not None else 0):
            self._commit(self._in_flight.popleft(), outputs)
        elif plan is None:
            self._scheduler.wait_for_stores(STORES_WAIT_S)
        return outputs

    def _run(self, plan: StepPlan, began: float, outputs: Outputs) -> None:
        """Begins a step.

        Args:
            plan: the plan of the step.
            began: time.perf_counter at which its planning began, in seconds.
            outputs: gets the deltas of the step before, if that has to end first.
        """
        has_grammar = plan.rows.has_grammar
        work = 0.0 if self._step_cost is None else self._prompt_cost.of(plan.inputs.arrays["positions"])
        step = StepInFlight(plan, began, work, None)
        if has_grammar:
            self._drafting.prepare_masks(plan.rows)
        if self._pipeline is not None:
            self._pipeline.begin(plan.inputs)
        else:
            results = self.executor.run(plan.inputs)
            if has_grammar and self._in_flight:
                self._commit_rows(self._in_flight.popleft(), outputs)
            step = self._sample(step, results)
        self._in_flight.append(step)

    def _sample(self, step: StepInFlight, results: StepOutputs) -> StepInFlight:
        """Begins to sample the tokens of a step.

        Args:
            step: the step.
            results: its outputs.
        """
        plan = step.plan
        if plan.rows.has_grammar:
            elapsed_s = time.perf_counter() - step.began
            rows = self._deferred.defer_late(plan.rows, results.logits, elapsed_s)
            plan = msgspec.structs.replace(plan, rows=rows)
        sampled = self._sampler.begin(results.logits, plan.rows.requests)
        return StepInFlight(plan, step.began, step.work, (results, sampled))

    def _commit(self, step: StepInFlight, outputs: Outputs) -> None:
        """Ends a step, and proposes draft tokens for the next one."""
        results = self._commit_rows(step, outputs)
        proposes = self._speculator is not None or step.plan.rows.has_grammar
        if proposes and (self._pipeline is not None or not self._in_flight):
            self._drafting.propose(step.plan, results, time.perf_counter() - step.began)

    def _commit_rows(self, step: StepInFlight, outputs: Outputs) -> StepOutputs:
        """Ends a step: waits for its tokens, and hands them out. Returns its outputs."""
        if step.results is None:
            assert self._pipeline is not None, "other executors give their outputs at once"
            step = self._sample(step, self._pipeline.collect())
        assert step.results is not None, "_sample has set them"
        results, begun = step.results
        plan, sampled = step.plan, self._sampler.end(begun)
        rows = plan.rows
        beams = [(row.sequence, sampled[i]) for i, row in rows.other.items() if row.purpose is RowPurpose.SEARCH]
        if rows.has_rows_without_token or rows.has_grammar:
            sampled = self._hand_out_scores(rows, sampled)
        now = time.perf_counter()
        step_s = now - max(step.began, self._step_ended)  # the step before may have run until then
        self._step_ended = now
        if self._step_cost is not None:
            self._step_cost.learn(step.work, step_s)
        self._counts.add(plan.inputs.sizes.tokens, step_s)
        accepted = self._drafting.verify(rows, sampled)
        self._scheduler.commit(plan, accepted)
        self._hand_out(rows.sequences, accepted, now, outputs)
        for sequence, token in beams:
            self._hand_out([sequence], [(token,)], now, outputs)
        return results

    def _commit_deferred(self, outputs: Outputs) -> None:
        """Hands out the tokens of deferred sequences whose masks are ready."""
        for rows, sampled in self._deferred.sample_ready():
            (sequence,) = rows.sequences
            accepted = self._drafting.verify(rows, self._hand_out_scores(rows, sampled))
            self._scheduler.resume(sequence, accepted[0])
            self._hand_out(rows.sequences, accepted, time.perf_counter(), outputs)
            self._drafting.propose_forced(sequence)

    def _hand_out(
        self,
        sequences: Sequence[TokenSequence],
        accepted: Sequence[tuple[SampledToken, ...]],
        now: float,
        outputs: Outputs,
    ) -> None:
        """Passes the tokens of each sequence on to its request."""
        receivers, num_generated = self._live.receivers, 0
        for sequence, tokens in zip(sequences, accepted, strict=True):
            kind = receivers.get(sequence)
            if kind is not None:  # otherwise it has ended meanwhile
                num_generated += kind.on_sampled(sequence, tokens, now, outputs)
        self._num_generated += num_generated

    def _hand_out_scores(self, rows: LogitRows, sampled: list[SampledToken]) -> list[SampledToken]:
        """Passes the log-probabilities of prompt tokens on to the requests.

        A completion whose prompt has NaN log-probabilities fails with its first token.

        Args:
            rows: rows of logits of a step.
            sampled: a token of each row.

        Returns:
            The tokens of the rows that sample or verify.
        """
        tokens: list[SampledToken] = []
        for row, token in zip(rows.rows, sampled, strict=True):
            kind = self._live.receivers.get(row.sequence)
            match row.purpose:
                case RowPurpose.SCORE_PROMPT:
                    if kind is not None:
                        kind.request.prompt_logprobs[row.index] = token
                case RowPurpose.SAMPLE:
                    failed = kind is not None and kind.has_nan_prompt(row.sequence)
                    tokens.append(SampledToken(0, is_nan=True) if failed else token)
                case RowPurpose.VERIFY:
                    tokens.append(token)
        return tokens


def _check_lease(params: SamplingParams, transfer: KvTransfer | None) -> None:
    """Raises UsageError if the prompt of a request cannot be leased to another server."""
    if transfer is None or not transfer.leases_prompts:
        raise UsageError("kv_transfer_params ask for a lease", "this server's --kv-role is not prefill or both")
    if params.num_candidates > 1 or params.use_beam_search:
        raise UsageError("kv_transfer_params lease the prompt of one answer", "n is more than 1, or beams are searched")
