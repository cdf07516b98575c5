"""`LLM` from many threads, and how it ends: closed, dropped, interrupted, broken."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright import LLM, SamplingParams
from enginewright.errors import EngineDeadError, NotEnoughMemoryError
from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.inputs import StepInputs
from tests.api.conftest import LIMITS
from tests.helpers.llm import is_idle, tokens_of
from tests.helpers.serving import wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=190)
WAIT_S = 30  # for what takes milliseconds; a test that waits so long has found that something never comes


class Gate:
    """Lets an engine's steps through one by one, or all."""

    def __init__(self, llm: LLM) -> None:
        self._may, self._open, self.waits = threading.Semaphore(0), False, threading.Event()
        self.step = llm._core.executor.run
        llm._core.executor.run = self  # type: ignore[method-assign]

    def __call__(self, inputs: StepInputs) -> Any:
        if not self._open:
            self.waits.set()
            assert self._may.acquire(timeout=WAIT_S)
        return self.step(inputs)

    def let(self, steps: int) -> None:
        self._may.release(steps)

    def open(self) -> None:
        self._open = True
        self._may.release(1)


def begun(call: Callable[[], Any]) -> Callable[[], Any]:
    """Starts a call in another thread. Returns what waits for its result or error; if there is none, the test fails."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    def wait() -> Any:
        thread.join(WAIT_S)
        assert found, "it hangs"
        return found[0]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return wait


def outcome(call: Callable[[], Any]) -> Any:
    return begun(call)()


def texts_and_tokens(deltas: list[Delta]) -> tuple[str, list[int]]:
    return "".join(delta.text for delta in deltas), [token.token for delta in deltas for token in delta.tokens]


def test_many_threads_ask_at_once(engine: Engine, llm: LLM) -> None:
    """Batches and streams, more than run at a time; each thread gets what it would get alone."""
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 300, length).tolist() for length in random.integers(1, 60, 48).tolist()]
    params = [replace(GREEDY, temperature=n % 2 * 0.9, seed=n, max_tokens=5 + n % 13) for n in range(48)]
    with LLM(engine, **LIMITS | {"enable_prefix_caching": False}) as plain:
        expected = [plain.generate(prompt, one)[0].outputs[0] for prompt, one in zip(prompts, params, strict=True)]

    def ask(thread: int) -> list[tuple[str, list[int]]]:
        mine = slice(thread * 6, thread * 6 + 6)
        if thread % 2:
            outputs = [output.outputs[0] for output in llm.generate(prompts[mine], params[mine])]
            return [(one.text, one.token_ids) for one in outputs]
        streams = [llm.stream(prompt, one) for prompt, one in zip(prompts[mine], params[mine], strict=True)]
        return [texts_and_tokens(list(stream)) for stream in streams]

    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):  # the second time, from the prefix cache
            found = [one for each in pool.map(ask, range(8)) for one in each]
            assert found == [(one.text, one.token_ids) for one in expected]
    wait_until(lambda: is_idle(llm))


@pytest.mark.parametrize("choices", [1, 3])
def test_a_stream_that_is_closed_is_over(llm: LLM, choices: int) -> None:
    gate = Gate(llm)
    stream = llm.stream([5] * 40, replace(LONG, n=choices))
    gate.let(2 + 3)  # the prompt takes two steps
    assert len([next(stream) for _ in range(2)]) == 2
    stream.close()
    stream.close()
    assert next(stream, None) is None
    gate.open()
    wait_until(lambda: is_idle(llm))
    assert llm.stats().generated_tokens < 60


def test_an_interrupt_ends_all_of_a_batch(llm: LLM) -> None:
    """An interrupt ends waiting requests of the batch too; requests of other threads go on."""
    other = llm.stream([9] * 9, replace(GREEDY, max_tokens=150))

    def interrupt(done: int, written: int) -> None:
        if written > 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5 + n] * 20 for n in range(30)], replace(LONG, max_tokens=100, n=2), on_progress=interrupt)
    assert len(texts_and_tokens(list(other))[1]) == 150
    wait_until(lambda: is_idle(llm))
    assert llm.stats().generated_tokens < 2000


def test_close_ends_what_runs_and_what_waits(engine: Engine) -> None:
    llm = LLM(engine, **LIMITS | {"max_num_seqs": 2})
    gate = Gate(llm)
    stream, siblings = llm.stream([5], LONG), llm.stream([6] * 30, replace(LONG, n=2))
    batch = begun(lambda: llm.generate([[7], [8], [9]], LONG))
    gate.let(3)
    deltas = [next(stream) for _ in range(3)]
    wait_until(lambda: llm.stats().num_running + llm.stats().num_waiting == 6)
    closing = begun(llm.close)
    wait_until(lambda: llm._thread.error is not None)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([5], GREEDY)
    gate.open()
    assert closing() is None
    assert {(one.outputs[0].finish_reason, one.finished) for one in batch()} == {("abort", True)}
    assert [len(delta.tokens) for delta in deltas] == [1, 1, 1]
    assert outcome(lambda: list(stream))[-1].finish_reason == "abort"
    ends = [(delta.index, delta.finish_reason) for delta in outcome(lambda: list(siblings)) if delta.finish_reason]
    assert sorted(ends) == [(0, "abort"), (1, "abort")]
    assert llm.stats().kv_usage == 0.0


def test_nothing_is_taken_after_the_end(path: Path) -> None:
    with LLM(path, **LIMITS) as llm:
        pass
    asks: list[Callable[[], Any]] = [
        lambda: llm.generate("a", GREEDY),
        lambda: llm.chat([{"role": "user", "content": "a"}], GREEDY),
        lambda: llm.stream("a", GREEDY),
    ]
    for ask in asks:
        with pytest.raises(EngineDeadError, match="closed"):
            ask()
    llm.close()
    assert llm.stats().num_running == 0


def test_the_opener_of_an_engine_closes_it(path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is closed once, by its opener, after the thread that reads it has ended; also if it cannot run."""
    closed: list[Engine] = []
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    for model, owned in ((engine, False), (path, True)):
        llm = LLM(model, **LIMITS)
        stream = llm.stream([5], LONG)
        llm.close()
        assert closed == ([llm.engine] if owned else [])
        assert not llm._thread._thread.is_alive()
        stream.close()
        llm.close()
    assert len(closed) == 1
    with pytest.raises(NotEnoughMemoryError):
        LLM(path, **LIMITS | {"kv_cache_memory": 1})
    assert len(closed) == 2
    with pytest.raises(NotEnoughMemoryError):
        LLM(engine, **LIMITS | {"kv_cache_memory": 1})
    assert len(closed) == 2


def test_one_that_is_dropped_ends_its_thread(engine: Engine) -> None:
    llm = LLM(engine, **LIMITS)
    thread = llm._thread._thread
    stream = llm.stream([5], LONG)
    del llm
    gc.collect()
    assert thread.is_alive() and len(texts_and_tokens(list(stream))[1]) == 190, "a stream keeps it"
    del stream
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_fault_in_one_request_is_its_own(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The fault is a tokenizer that cannot decode a token that one of the requests has sampled."""
    expected = tokens_of(llm.generate([[5], [6, 7]], GREEDY))
    add, seen = llm._core.add, []

    def add_with_fault(request: Any) -> None:
        detokenizer = request.completions[-1].detokenizer
        push = detokenizer.push

        def fails(token: int) -> str:
            seen.append(token)
            if len(seen) == 4:
                raise ValueError("no such character")
            return str(push(token))

        if request.num_prompt_tokens == 3:
            detokenizer.push = fails
        add(request)

    llm._core.add = add_with_fault  # type: ignore[method-assign]
    outputs = llm.generate([[5], [9, 9, 9], [6, 7]], GREEDY)
    (failed,) = outputs[1].outputs
    assert (failed.finish_reason, failed.token_ids) == ("error", seen)
    assert tokens_of([outputs[0], outputs[2]]) == expected
    assert "no such character" in caplog.text
    seen.clear()
    siblings = llm.generate([9, 9, 9], replace(GREEDY, n=2))[0].outputs
    assert [choice.finish_reason for choice in siblings] == ["length", "error"], "the other choice goes on"
    assert tokens_of(llm.generate([5], GREEDY)) == expected[:1]
    wait_until(lambda: is_idle(llm))


def test_everybody_hears_of_an_engine_that_dies(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(engine, **LIMITS | {"max_num_seqs": 2})
    gate = Gate(llm)
    stream, waits = llm.stream([5], LONG), llm.stream([6] * 30, replace(LONG, n=2))
    batch = begun(lambda: llm.generate([[7], [8], [9]], LONG))
    gate.let(2)
    deltas = [next(stream), next(stream)]
    wait_until(lambda: llm.stats().num_running + llm.stats().num_waiting == 6)

    def breaks(inputs: StepInputs) -> None:
        raise MemoryError("out of it")

    gate.step = breaks
    gate.open()
    assert all(delta.finish_reason is None for delta in deltas)
    waiting = [batch(), outcome(lambda: list(stream)), outcome(lambda: list(waits))]
    later = [outcome(lambda: llm.generate("a", GREEDY)), outcome(lambda: llm.stream("a", GREEDY))]
    for error in (*waiting, *later):
        assert isinstance(error, EngineDeadError) and "MemoryError: out of it" in str(error)
    assert "out of it" in caplog.text, "the log has the cause"
    assert outcome(llm.close) is None
