"""`AsyncLLM`: many coroutines on one event loop, readers of any pace, and requests that end at any moment."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.errors import EngineDeadError, UsageError
from enginewright.runtime.api.async_llm import AsyncEngineArgs, AsyncLLM, AsyncRequest
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.core.outputs import CompletionOutput, Delta, RequestOutput
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import RequestOutputKind, SamplingParams
from enginewright.runtime.step.inputs import StepInputs
from tests.api.conftest import LIMITS
from tests.helpers.engines import built_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=150)
WAIT_S = 30  # for what takes milliseconds
Read = tuple[str, list[int], str | None]  # text, tokens and finish_reason of a choice


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def path(request: pytest.FixtureRequest) -> Path:
    return built_tiny(request.param, tie_word_embeddings=False)


def lone(engine: Engine, prompts: list[Any], params: list[SamplingParams]) -> list[list[Read]]:
    """The choices of each prompt, asked one after another."""
    with LLM(engine, **LIMITS | {"enable_prefix_caching": False}) as llm:
        outputs = [llm.generate(prompt, one)[0].outputs for prompt, one in zip(prompts, params, strict=True)]
        return [[(one.text, one.token_ids, one.finish_reason) for one in choices] for choices in outputs]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a test in an event loop; one that hangs fails."""
    asyncio.run(asyncio.wait_for(test(), 2 * WAIT_S))


@asynccontextmanager
async def opened(engine: Engine, *, paced: bool = False, **limits: Any) -> AsyncIterator[AsyncLLM]:
    """paced: readers have their turn between two steps. Else, a tiny engine may be done before they look."""
    llm, loop = AsyncLLM(engine, **LIMITS | limits), asyncio.get_running_loop()
    step = llm._core.executor.run

    async def turns() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    def after_readers(inputs: StepInputs) -> Any:
        asyncio.run_coroutine_threadsafe(turns(), loop).result(WAIT_S)
        return step(inputs)

    if paced:
        llm._core.executor.run = after_readers  # type: ignore[method-assign]
    try:
        yield llm
    finally:
        await llm.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.001)


async def idle(llm: AsyncLLM) -> None:
    """Waits until all blocks are back."""
    await until(lambda: (llm.stats().num_running, llm.stats().num_waiting, llm.stats().kv_usage) == (0, 0, 0.0))


async def read(asked: AsyncRequest, pause_s: float = 0.0) -> list[list[Delta]]:
    looks = []
    async for deltas in asked:
        looks.append(deltas)
        if pause_s:
            await asyncio.sleep(pause_s)
    return looks


def joined(looks: list[list[Delta]], index: int = 0) -> Read:
    deltas = [delta for look in looks for delta in look if delta.index == index]
    assert all(delta.finish_reason is None for delta in deltas[:-1]), "nothing comes after the end"
    tokens = [token.token for delta in deltas for token in delta.tokens]
    return "".join(delta.text for delta in deltas), tokens, deltas[-1].finish_reason


def mixed(count: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, 300, length).tolist() for length in random.integers(1, 60, count).tolist()]
    each = [replace(GREEDY, temperature=n % 2 * 0.9, seed=n, max_tokens=3 + n % 17, n=1 + n % 3) for n in range(count)]
    return prompts, each


def test_many_coroutines(engine: Engine) -> None:
    """Each coroutine gets the completions that it would get alone, whatever its pace, while others come and go."""
    prompts, params = mixed(40)
    expected = lone(engine, prompts, params)

    async def test() -> None:
        async def ask(index: int) -> None:
            await asyncio.sleep(index % 7 * 0.002)
            asked = llm.submit(prompts[index], params[index])
            assert asked.num_prompt_tokens == len(prompts[index])
            looks = await read(asked, index % 4 * 0.003)
            assert [joined(looks, choice) for choice in range(params[index].n)] == expected[index]
            indices = [[delta.index for delta in look] for look in looks]
            assert all(look and look == sorted(set(look)) for look in indices), "a delta a choice, in their order"

        async with opened(engine) as llm:
            await asyncio.gather(*(ask(index) for index in range(40)))
            await idle(llm)
            assert llm.stats().generated_tokens == sum(len(tokens) for choices in expected for _, tokens, _ in choices)

    run(test)


def test_a_slow_reader_gets_what_came_meanwhile(engine: Engine) -> None:
    params = replace(GREEDY, n=3, temperature=0.9, seed=4, logprobs=2)
    (expected,) = lone(engine, [[5, 6, 7]], [params])

    async def test() -> None:
        async with opened(engine, paced=True) as llm:
            quick, slow = llm.submit([5, 6, 7], params), llm.submit([5, 6, 7], params)
            looks = await read(quick)
            assert len(looks) > 3
            await idle(llm)
            (late,) = await read(slow)
            assert [joined([late], index) for index in range(3)] == expected
            assert [joined(looks, index) for index in range(3)] == expected
            for index in range(3):
                drawn = [token for look in looks for delta in look if delta.index == index for token in delta.tokens]
                assert late[index].tokens == tuple(drawn), "log-probabilities, too"
            assert await read(slow) == [], "it is over"

    run(test)


def test_cached_tokens_are_known_with_the_first_delta(engine: Engine) -> None:
    async def test() -> None:
        async with opened(engine) as llm:
            await read(llm.submit([5] * 70, GREEDY))
            again, other = llm.submit([5] * 70, GREEDY), llm.submit([5] * 70, GREEDY, cache_salt="other")
            await anext(again)
            await anext(other)
            assert (again.num_cached_tokens, other.num_cached_tokens) == (64, 0)
            again.abort()
            other.abort()
            await idle(llm)

    run(test)


@pytest.mark.parametrize("choices", [1, 2])
def test_abort_at_any_moment(engine: Engine, choices: int) -> None:
    """A request is aborted while waiting, in its prompt, in the middle or at the end; its output so far is a prefix."""
    prompts = [np.random.default_rng(n).integers(3, 300, 5 + 9 * n).tolist() for n in range(12)]
    params = [replace(GREEDY, n=choices, temperature=0.9, seed=n) for n in range(12)]
    expected = lone(engine, prompts, params)

    async def test() -> None:
        aborted = 0
        async with opened(engine, paced=True, max_num_seqs=4) as llm:
            for after in (0, 1, 2, 5, 19, 20):
                bystander = llm.submit([9, 8, 7], LONG)
                asked = [llm.submit(*one) for one in zip(prompts, params, strict=True)]

                async def leave(index: int, asked: AsyncRequest, after: int = after) -> None:
                    nonlocal aborted
                    looks: list[list[Delta]] = []
                    while sum(len(delta.tokens) for look in looks for delta in look) < after * choices:
                        looks.append(await anext(asked))
                    for _ in range(index % 3):
                        asked.abort()
                    looks += await read(asked)
                    for choice, (text, tokens, reason) in enumerate(expected[index]):
                        said, drawn, ended = joined(looks, choice)
                        aborted += ended == "abort"
                        if ended == "abort":
                            assert index % 3 and text.startswith(said) and tokens[: len(drawn)] == drawn != tokens
                        else:
                            assert (said, drawn, ended) == (text, tokens, reason)
                    asked.abort()

                await asyncio.gather(*(leave(*one) for one in enumerate(asked)))
                bystander.abort()
                await idle(llm)
        assert aborted > 10

    run(test)


def test_abort_reaches_those_that_wait(engine: Engine) -> None:
    async def test() -> None:
        async with opened(engine, paced=True, max_num_seqs=1) as llm:
            first, second = llm.submit([5], LONG), llm.submit([6], replace(LONG, n=2))
            await anext(first)
            second.abort()
            (ends,) = await read(second)
            assert [(delta.index, delta.finish_reason) for delta in ends] == [(0, "abort"), (1, "abort")]
            assert joined(await read(first))[2] == "length"

    run(test)


def lone_output(engine: Engine, **changes: Any) -> CompletionOutput:
    with LLM(engine, **LIMITS) as llm:
        return llm.generate("Größe 🙂", replace(GREEDY, **changes))[0].outputs[0]


def test_generate_gives_the_answer_so_far(engine: Engine) -> None:
    whole = lone_output(engine, logprobs=1)

    async def test() -> None:
        async with opened(engine, paced=True) as llm:
            outputs: list[RequestOutput] = []
            async for output in llm.generate("Größe 🙂", replace(GREEDY, logprobs=1), "my name"):
                outputs.append(output)
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert len(outputs) > 3
            for before, after in pairwise(outputs):
                (shorter,), (longer,) = before.outputs, after.outputs
                assert longer.text.startswith(shorter.text)
                assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids != longer.token_ids
            assert outputs[-1].outputs == [whole]
            last = outputs[-1]
            assert (last.request_id, last.prompt) == ("my name", "Größe 🙂")
            assert last.prompt_token_ids == await llm.encode("Größe 🙂")
            assert 0 < last.metrics.first_token_s < last.metrics.total_s
            names = [output.request_id for _ in range(2) async for output in llm.generate([5], GREEDY)]
            assert len(set(names)) == 2

    run(test)


def test_generate_gives_what_is_new_or_the_end_alone(engine: Engine) -> None:
    params = replace(GREEDY, logprobs=1, n=2, temperature=0.9, seed=3)
    with LLM(engine, **LIMITS) as lone:
        (whole,) = lone.generate("Größe 🙂", params)

    async def test() -> None:
        async with opened(engine, paced=True) as llm:

            async def outputs(kind: RequestOutputKind) -> list[RequestOutput]:
                own = replace(params, output_kind=kind)
                return [output async for output in llm.generate("Größe 🙂", own)]

            (final,) = await outputs(RequestOutputKind.FINAL_ONLY)
            assert final.finished and final.outputs == whole.outputs
            deltas = await outputs(RequestOutputKind.DELTA)
            assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True] and len(deltas) > 3
            for choice in whole.outputs:
                pieces = [one for output in deltas for one in output.outputs if one.index == choice.index]
                assert "".join(piece.text for piece in pieces) == choice.text
                assert [token for piece in pieces for token in piece.token_ids] == choice.token_ids
                assert [entry for piece in pieces for entry in piece.logprobs or []] == choice.logprobs
                assert [piece.finished() for piece in pieces] == [False] * (len(pieces) - 1) + [True]
                assert pieces[-1].cumulative_logprob == choice.cumulative_logprob

    run(test)


def test_parameters_are_those_of_the_moment_of_asking(engine: Engine) -> None:
    """Changed while the prompt is being tokenized, they are for later requests."""

    async def test() -> None:
        async with opened(engine) as llm:
            params = replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
            answer = asyncio.ensure_future(anext(llm.generate("a", params)))
            await asyncio.sleep(0)
            params.max_tokens = 3
            assert len((await answer).outputs[0].token_ids) == 20

    run(test)


def test_from_arguments_to_shutdown(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        args = AsyncEngineArgs(engine, **LIMITS, enforce_eager=True)  # type: ignore[arg-type]
        args.max_model_len = "100"  # type: ignore[attr-defined]
        llm = AsyncLLM.from_engine_args(args)
        assert llm.max_model_len == 100 and "enforce_eager" in caplog.text
        asked = llm.submit([5], replace(GREEDY, max_tokens=90))
        first = await anext(asked)  # perhaps all of it
        llm.shutdown()
        llm.shutdown()
        assert not llm.is_alive
        assert joined([first, *await read(asked)])[2] in ("abort", "length"), "what ran has ended"
        for prompt in ("a", [5]):
            with pytest.raises(EngineDeadError, match="closed"):
                await anext(llm.generate(prompt, GREEDY))

    before = set(threading.enumerate())
    run(test)
    assert set(threading.enumerate()) <= before


def test_arguments_of_a_wrong_type(engine: Engine) -> None:
    with pytest.raises(UsageError, match="event loop"):
        AsyncLLM(engine, **LIMITS)
    with pytest.raises(UsageError, match="AsyncEngineArgs"):
        AsyncLLM.from_engine_args({"model": engine})  # type: ignore[arg-type]

    async def test() -> None:
        with pytest.raises(UsageError, match="no limit called max_seqs"):
            AsyncLLM(engine, **LIMITS, max_seqs=5)
        with pytest.raises(UsageError, match="data_parallel_size=2 is not implemented"):
            AsyncLLM.from_engine_args(AsyncEngineArgs(engine, data_parallel_size=2))
        async with opened(engine) as llm:
            given: list[tuple[Any, Any, dict[str, Any]]] = [
                (5, GREEDY, {}),
                ("a", {"temperature": 0}, {}),
                ("a", [GREEDY], {}),
                ("a", GREEDY, {"cache_salt": 5}),
                ({"prompt": "a", "cache_salt": "\ud800"}, GREEDY, {}),
                ("a", GREEDY, {"lora_request": 5}),
                ("a", GREEDY, {"max_tokens": 5}),
            ]
            for prompt, params, options in given:
                with pytest.raises(UsageError):
                    await anext(llm.generate(prompt, params, **options))
            salted: Any = {"prompt_token_ids": [5 + n for n in range(65)], "cache_salt": "x"}
            cached = [output.num_cached_tokens for _ in range(2) async for output in llm.generate(salted, GREEDY)]
            assert cached[0] == 0 < cached[-1]

    run(test)


@pytest.mark.parametrize("way", ["cancel", "break", "raise"])
def test_leaving_generate_ends_it(engine: Engine, way: str) -> None:
    async def consume(llm: AsyncLLM, some: asyncio.Event) -> None:
        async for output in llm.generate([5, 6], LONG):
            if len(output.outputs[0].token_ids) > 5:
                some.set()
                if way == "break":
                    break
                if way == "raise":
                    raise ConnectionResetError

    async def test() -> None:
        async with opened(engine, paced=True) as llm:
            events = [asyncio.Event() for _ in range(5)]
            tasks = [asyncio.create_task(consume(llm, some)) for some in events]
            for some in events:
                await some.wait()
            for task in tasks:
                if way == "cancel":
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await idle(llm)
            assert llm.stats().generated_tokens < 5 * 150

    run(test)


def test_a_reader_that_is_cancelled_loses_nothing(engine: Engine) -> None:
    """A look may be given up, as wait_for does, and taken again."""
    ((expected,),) = lone(engine, [[5, 6]], [LONG])

    async def test() -> None:
        async with opened(engine, paced=True) as llm:
            asked, looks, given_up = llm.submit([5, 6], LONG), [], 0
            while True:
                look = asyncio.ensure_future(anext(asked))
                await asyncio.sleep(0)
                look.cancel()  # unless it has found something at once
                try:
                    looks.append(await look)
                except asyncio.CancelledError:
                    given_up += 1
                except StopAsyncIteration:
                    break
            assert given_up and joined(looks) == expected

    run(test)


def test_what_is_wrong_with_a_request_is_said_at_once(engine: Engine) -> None:
    async def test() -> None:
        async with opened(engine) as llm:
            for prompt, params in (([], GREEDY), ([5] * 200, GREEDY), ([307], GREEDY)):
                with pytest.raises(UsageError):
                    llm.submit(prompt, params)
            with pytest.raises(UsageError, match="307"):
                llm.submit([5], replace(GREEDY, stop_token_ids=(307,)))
            with pytest.raises(UsageError, match="of one kind"):
                await llm.encode([5, "a"])  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="maximum context length is 200"):
                async for _ in llm.generate([5] * 200, GREEDY):
                    pass
            assert joined(await read(llm.submit([5], GREEDY)))[2] == "length"

    run(test)


def test_close_ends_everything(engine: Engine) -> None:
    async def test() -> None:
        async with opened(engine, max_num_seqs=2) as llm:
            step = llm._core.executor.run

            def until_closed(inputs: StepInputs) -> Any:
                while llm.is_alive:
                    time.sleep(0.001)
                return step(inputs)

            llm._core.executor.run = until_closed  # type: ignore[method-assign]
            await closes(llm)

    async def closes(llm: AsyncLLM) -> None:
        asked = [llm.submit([5 + n], replace(LONG, n=1 + n % 2)) for n in range(5)]
        readers = [asyncio.create_task(read(one)) for one in asked[:-1]]
        await until(lambda: llm.stats().num_running > 0)
        await llm.close()
        for index, looks in enumerate([*await asyncio.gather(*readers), await read(asked[-1])]):
            assert [joined(looks, choice)[2] for choice in range(1 + index % 2)] == ["abort"] * (1 + index % 2)
        assert not llm.is_alive and llm.stats().kv_usage == 0.0
        with pytest.raises(EngineDeadError, match="closed"):
            llm.submit([5], GREEDY)

    before = set(threading.enumerate())
    run(test)
    assert set(threading.enumerate()) <= before


def test_everybody_hears_of_an_engine_that_dies(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Readers that wait, readers that come later with deltas still to be read, and those who ask later."""

    async def test() -> None:
        async with opened(engine, paced=True, max_num_seqs=2) as llm:
            step, left = llm._core.executor.run, 5

            def breaks(inputs: StepInputs) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise RuntimeError("the machine is on fire")
                return step(inputs)

            llm._core.executor.run = breaks  # type: ignore[method-assign]
            asked = [llm.submit([5 + n], replace(LONG, n=1 + n % 2)) for n in range(4)]
            readers = [asyncio.create_task(read(one)) for one in asked[1:]]
            for error in await asyncio.gather(*readers, return_exceptions=True):
                assert isinstance(error, EngineDeadError) and "RuntimeError: the machine is on fire" in str(error)
            assert 0 < len((await anext(asked[0]))[0].tokens) <= 5, "what came before"
            for _ in range(2):
                with pytest.raises(EngineDeadError):
                    await anext(asked[0])
            asked[0].abort()
            assert not llm.is_alive
            with pytest.raises(EngineDeadError, match="RuntimeError"):
                llm.submit([5], GREEDY)
            with pytest.raises(EngineDeadError, match="RuntimeError"):
                async for _ in llm.generate("a", GREEDY):
                    pass

    run(test)
    assert "the machine is on fire" in caplog.text
