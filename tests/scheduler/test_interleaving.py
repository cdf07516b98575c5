"""Requests that arrive while other completions are being read: one KV cache, and no text changes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import UsageError
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.core.params import default_params
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from tests.helpers.llm import is_idle
from tests.helpers.serving import wait_until
from tests.helpers.tiny import MemoryCheckpoint

LIMITS = {"max_model_len": 200, "max_num_seqs": 3, "max_num_batched_tokens": 24, "threads": 1}
LIMITS["kv_cache_memory"] = 1 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [np.random.default_rng(4).integers(3, 300, length).tolist() for length in (5, 70, 33, 61, 2, 40)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    # A tied tiny model repeats itself whatever it sees.
    checkpoint = MemoryCheckpoint.tiny("gemma3_text", tie_word_embeddings=False)
    checkpoint = replace(checkpoint, generation_config={"temperature": 0.6, "top_p": 0.9})
    path = tmp_path_factory.mktemp("interleaving") / "tiny.engine"
    build_engine(checkpoint, BuildConfig(), path)
    with Engine.open(path) as opened:
        yield opened


@pytest.fixture
def llm(engine: Engine) -> Iterator[LLM]:
    with LLM(engine, **LIMITS) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[int]]:
    with LLM(engine, **LIMITS | {"enable_prefix_caching": False}) as llm:
        return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def tokens_of(deltas: Iterable[Delta]) -> list[int]:
    return [token.token for delta in deltas for token in delta.tokens]


def test_streams_read_in_turns(llm: LLM, alone: list[list[int]]) -> None:
    streams = {index: llm.stream(prompt, GREEDY) for index, prompt in enumerate(PROMPTS)}
    read: list[list[int]] = [[] for _ in PROMPTS]
    while streams:
        for index, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[index]
            else:
                read[index] += tokens_of([delta])
    assert read == alone


def test_a_batch_while_a_stream_rests(llm: LLM, alone: list[list[int]]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    deltas = [next(stream) for _ in range(3)]
    calls: list[tuple[int, int]] = []
    results = llm.generate(PROMPTS[1:], GREEDY, on_progress=lambda done, written: calls.append((done, written)))
    assert [result.outputs[0].token_ids for result in results] == alone[1:]
    assert calls[-1] == (len(PROMPTS) - 1, 20 * (len(PROMPTS) - 1)), "the stream's tokens are not the batch's"
    assert tokens_of([*deltas, *stream]) == alone[0]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stream_that_is_left_gives_its_blocks_back(llm: LLM, alone: list[list[int]], after: int) -> None:
    for _ in range(8):
        stream = llm.stream(PROMPTS[1], replace(GREEDY, max_tokens=None))
        for _ in range(after):
            next(stream)
        del stream
        wait_until(lambda: is_idle(llm))
    assert llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids == alone[1]


def test_a_batch_that_is_interrupted_gives_its_blocks_back(llm: LLM, alone: list[list[int]]) -> None:
    def interrupt(done: int, written: int) -> None:
        if written > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, on_progress=interrupt)
    wait_until(lambda: is_idle(llm))
    assert [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)] == alone


def test_times_are_each_answers_own(llm: LLM) -> None:
    """One that ends first says so, although the batch goes on."""
    each = [replace(GREEDY, max_tokens=1), replace(GREEDY, max_tokens=100)]
    short, long = (output.metrics for output in llm.generate(PROMPTS[:2], each))
    assert 0 < short.first_token_s <= short.total_s < long.total_s
    assert 0 < long.first_token_s < long.total_s


def test_a_stream_refuses_before_it_is_read(llm: LLM) -> None:
    with pytest.raises(UsageError, match="context length is 200"):
        llm.stream([5] * 200, GREEDY)
    with pytest.raises(UsageError, match="307"):
        llm.stream([5], replace(GREEDY, stop_token_ids=(307,)))


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    (token,) = llm.engine.tokenizer.encode("x", add_special_tokens=False)
    params = replace(GREEDY, logit_bias={token: 100.0}, stop=("xx",))

    def answer(params: SamplingParams) -> tuple[str, int, str | None, int | str | None]:
        (output,) = llm.generate([5], params)[0].outputs
        return output.text, len(output.token_ids), output.finish_reason, output.stop_reason

    assert answer(params) == ("", 2, "stop", "xx")
    assert answer(replace(params, min_tokens=5)) == ("xxxxx", 7, "stop", "xx")
    assert answer(replace(params, min_tokens=20)) == ("x" * 20, 20, "length", None)


def test_samplers_get_the_models_own_settings(engine: Engine) -> None:
    assert default_params(engine).temperature == 0.0
    asked = default_params(engine, temperature=1.2)
    assert (asked.temperature, asked.top_p) == (1.2, 0.9)
    assert default_params(engine, top_k=5).temperature == 0.6


def test_numpy_token_ids_are_token_ids(llm: LLM) -> None:
    assert llm.encode(list(np.array([5, 6, 7], np.int32))) == [5, 6, 7]
