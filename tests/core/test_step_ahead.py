"""A step that begins before the tokens of the one before are known: every answer is what it would be otherwise."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from enginewright.errors import EngineError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.core.request import Request
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.memory_plan import limits_of, sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken
from tests.helpers.engines import built_tiny
from tests.helpers.ladder import Ladder
from tests.helpers.late_executor import LateExecutor

LIMITS = RuntimeConfig(max_model_len=160, max_num_seqs=8, max_num_batched_tokens=40, threads=1)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.1, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "logprobs": 0},
    {"temperature": 1.5, "presence_penalty": 1.5, "repetition_penalty": 0.8, "logit_bias": {7: 3.0, 250: -5.0}},
    {"temperature": 1.3, "stop_token_ids": tuple(range(3, 40)), "min_tokens": 4},
    {"temperature": 1.3, "stop": ("a", "e", " t"), "min_tokens": 2, "include_stop_str_in_output": True},
    {"temperature": 1.2, "n": 3, "frequency_penalty": 1.0},
    {"temperature": 0.9, "ignore_eos": False, "stop_token_ids": tuple(range(100, 130))},
]


@dataclass(eq=False)
class Ask:
    """A request that arrives before step `at`, and is aborted after `leave` tokens. rises: see Ladder."""

    prompt: list[int]
    params: SamplingParams
    at: int
    leave: int | None
    rises: bool = False
    deltas: list[Delta] = field(default_factory=list)

    def put(self, item: Delta | EngineError) -> None:
        if isinstance(item, EngineError):
            raise item
        self.deltas.append(item)

    def answers(self) -> list[tuple[list[SampledToken], str, str | None, int | str | None]]:
        whole = []
        for index in range(self.params.n):
            own = [delta for delta in self.deltas if delta.index == index]
            assert all(delta.finish_reason is None for delta in own[:-1])
            tokens = [token for delta in own for token in delta.tokens]
            whole.append((tokens, "".join(delta.text for delta in own), own[-1].finish_reason, own[-1].stop_reason))
        return whole


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine of a model that has a sliding window; tests/long has one without."""
    with Engine.open(built_tiny("gemma3_text", tie_word_embeddings=False)) as opened:  # a tied one repeats itself
        yield opened


def asked(seed: int, count: int = 110) -> list[Ask]:
    random = np.random.default_rng(seed)
    shared = random.integers(3, 300, 70).tolist()
    asks = []
    for index in range(count):
        prompt = shared[: random.choice([0, 5, 40, 66])] + random.integers(3, 300, random.integers(1, 12)).tolist()
        max_tokens = int(random.integers(1, 100))
        given = {"ignore_eos": True, "seed": index, "max_tokens": max_tokens, **KINDS[index % len(KINDS)]}
        params = SamplingParams(**given | {"min_tokens": min(max_tokens, given.get("min_tokens", 0))})
        leave = int(random.integers(0, 20)) if random.random() < 0.2 else None
        asks.append(Ask(prompt, params, at=int(random.integers(0, 100)), leave=leave, rises=index % 5 == 0))
    return asks


def run(running: EngineCore, asks: list[Ask]) -> None:
    waiting, step = sorted(asks, key=lambda ask: ask.at), 0
    going: dict[Ask, Request] = {}
    while waiting or running.has_work:
        while waiting and waiting[0].at <= step:
            ask = waiting.pop(0)
            vocab = running.engine.plan.vocab_size
            ladders = [Ladder(vocab, 40 * choice, highest=60) for choice in range(ask.params.n)] if ask.rises else ()
            going[ask] = running.request(ask.prompt, ask.params, ask.put, grammars=ladders)
            running.add(going[ask])
        told = running.step()
        for ask, request in going.items():
            if ask.leave is not None and sum(len(delta.tokens) for delta in ask.deltas) >= ask.leave:
                told += running.abort(request)
        for request, delta in told:
            request.sink(delta)
        step += 1


def opened(engine: Engine, executor: type[CpuExecutor], limits: RuntimeConfig, patch: pytest.MonkeyPatch) -> EngineCore:
    patch.setattr(core, "open_executor", executor)
    return EngineCore(engine, limits)


@pytest.mark.parametrize("caching", [True, False])
def test_answers_are_those_of_one_step_at_a_time(
    engine: Engine, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of requests in little memory, some left early."""
    length, sizes = limits_of(engine.plan, LIMITS)
    memory = sequence_bytes(engine.plan.caches, length, sizes.tokens) * 2
    limits = replace(LIMITS, kv_cache_memory=memory, enable_prefix_caching=caching)
    told = []
    for executor in (CpuExecutor, LateExecutor):
        running, asks = opened(engine, executor, limits, monkeypatch), asked(seed=1)
        run(running, asks)
        stats = running.stats()
        assert stats.num_preemptions > 2 and stats.kv_usage == 0 and not running.has_work
        assert (stats.cached_prompt_tokens > 0) == caching
        told.append([ask.answers() for ask in asks])
        if executor is LateExecutor:
            assert running.executor.num_late > 500
    for index, (ask, now, late) in enumerate(zip(asks, *told, strict=True)):
        if ask.leave is None:
            assert now == late, f"request {index}"
        for (tokens, text, *_), (others, other_text, *_) in zip(now, late, strict=True):  # one may be a step longer
            count = min(len(tokens), len(others))
            assert tokens[:count] == others[:count]
            assert text.startswith(other_text) or other_text.startswith(text)
    reasons = {reason for answers in told[0] for _, _, reason, _ in answers}
    assert reasons == {"stop", "length", "abort"}


def test_a_last_token_is_not_waited_for_in_vain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end by length is known ahead, and computes nothing more; one by a stop token computes one token more."""
    running = opened(engine, LateExecutor, LIMITS, monkeypatch)
    ask = Ask([5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), 0, None)
    run(running, [ask])
    assert running.stats().computed_tokens == 4 + 8
    ((tokens, *_),) = ask.answers()
    first = next(n for n, one in enumerate(tokens) if one.token not in [before.token for before in tokens[:n]] and n)
    params = replace(ask.params, stop_token_ids=(tokens[first].token,))
    run(running, [again := Ask([5, 6, 7, 8], params, 0, None)])
    assert again.answers()[0][0] == tokens[: first + 1] and again.answers()[0][2] == "stop"
    assert running.stats().computed_tokens == 4 + 8 + 4 + first + 1
