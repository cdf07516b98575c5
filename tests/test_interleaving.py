"""Answers that are asked for while others are being read: one KV cache, and nobody's text changes."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import UsageError
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from enginewright.runtime.generate import Generator, default_params
from enginewright.runtime.sampling import SamplingParams
from tests.tiny import MemoryCheckpoint, tiny_config, tiny_model

LIMITS = RuntimeConfig(max_model_len=200, max_num_seqs=3, max_num_batched_tokens=24, threads=1, kv_cache_memory=1 << 20)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [np.random.default_rng(4).integers(3, 300, length).tolist() for length in (5, 70, 33, 61, 2, 40)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = tiny_config("gemma3_text", tie_word_embeddings=False)  # a tied tiny model repeats itself whatever it sees
    checkpoint = MemoryCheckpoint.of(tiny_model(config), config)
    checkpoint = replace(checkpoint, generation_config={"temperature": 0.6, "top_p": 0.9})
    path = tmp_path_factory.mktemp("interleaving") / "tiny.engine"
    build_engine(checkpoint, BuildConfig(), path)
    with Engine.open(path) as opened:
        yield opened


@pytest.fixture
def generator(engine: Engine) -> Generator:
    return Generator(engine, LIMITS)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[tuple[int, ...]]:
    return [Generator(engine, LIMITS).generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


def test_streams_read_in_turns(generator: Generator, alone: list[tuple[int, ...]]) -> None:
    streams = {index: generator.stream(prompt, GREEDY) for index, prompt in enumerate(PROMPTS)}
    read: list[list[int]] = [[] for _ in PROMPTS]
    while streams:
        for index, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[index]
            elif delta.token is not None:
                read[index].append(delta.token.token)
    assert [tuple(tokens) for tokens in read] == alone


def test_a_batch_while_a_stream_rests(generator: Generator, alone: list[tuple[int, ...]]) -> None:
    stream = generator.stream(PROMPTS[0], GREEDY)
    deltas = [next(stream) for _ in range(3)]
    calls: list[tuple[int, int]] = []
    results = generator.generate(PROMPTS[1:], GREEDY, lambda done, written: calls.append((done, written)))
    assert [result.token_ids for result in results] == alone[1:]
    assert calls[-1] == (len(PROMPTS) - 1, 20 * (len(PROMPTS) - 1)), "the stream's tokens are not the batch's"
    deltas += stream
    assert tuple(delta.token.token for delta in deltas if delta.token) == alone[0]


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stream_that_is_left_gives_its_blocks_back(
    generator: Generator, alone: list[tuple[int, ...]], after: int
) -> None:
    whole = generator._scheduler.num_free_blocks
    for _ in range(8):
        stream = generator.stream(PROMPTS[1], replace(GREEDY, max_tokens=None))
        for _ in range(after):
            next(stream)
        assert (generator._scheduler.num_free_blocks != whole) == (after > 0)
        del stream
        assert generator._scheduler.num_free_blocks == whole and generator._scheduler.num_unfinished == 0
    assert generator.generate([PROMPTS[1]], GREEDY)[0].token_ids == alone[1]


def test_a_batch_that_is_interrupted_gives_its_blocks_back(generator: Generator, alone: list[tuple[int, ...]]) -> None:
    whole = generator._scheduler.num_free_blocks

    def interrupt(done: int, written: int) -> None:
        if written > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(PROMPTS, GREEDY, interrupt)
    assert generator._scheduler.num_free_blocks == whole and generator._scheduler.num_unfinished == 0
    assert [result.token_ids for result in generator.generate(PROMPTS, GREEDY)] == alone


def test_times_are_each_answers_own(generator: Generator) -> None:
    """One that ends first says so, although the batch goes on."""
    start, ends = time.perf_counter(), list[float]()

    def note(done: int, written: int) -> None:
        while len(ends) < done:
            ends.append(time.perf_counter() - start)

    each = [replace(GREEDY, max_tokens=1), replace(GREEDY, max_tokens=100)]
    short, long = generator.generate(PROMPTS[:2], each, note)
    assert 0 < short.first_token_s <= short.total_s <= ends[0]
    assert 0 < long.first_token_s < long.total_s <= ends[1]


def test_a_stream_refuses_before_it_is_read(generator: Generator) -> None:
    with pytest.raises(UsageError, match="limit of 200"):
        generator.stream([5] * 200, GREEDY)
    with pytest.raises(UsageError, match="several answers"):
        generator.stream([5], replace(GREEDY, n=2))


def test_stop_strings_wait_for_min_tokens(generator: Generator) -> None:
    (token,) = generator.engine.tokenizer.encode("x", add_special_tokens=False)
    params = replace(GREEDY, logit_bias={token: 100.0}, stop=("xx",))
    (stopped,) = generator.generate([[5]], params)
    assert (stopped.text, len(stopped.token_ids), stopped.finish_reason) == ("", 2, "stop")
    (stopped,) = generator.generate([[5]], replace(params, min_tokens=5))
    assert (stopped.text, len(stopped.token_ids), stopped.finish_reason) == ("xxxxx", 7, "stop")
    (whole,) = generator.generate([[5]], replace(params, min_tokens=20))
    assert (whole.text, whole.finish_reason) == ("x" * 20, "length")


def test_whoever_samples_gets_the_models_own_settings(engine: Engine) -> None:
    assert default_params(engine).temperature == 0.0
    asked = default_params(engine, temperature=1.2)
    assert (asked.temperature, asked.top_p) == (1.2, 0.9)
    assert default_params(engine, top_k=5).temperature == 0.6


def test_numpy_token_ids_are_token_ids(generator: Generator) -> None:
    assert generator.encode(np.array([5, 6, 7], np.int32).tolist()) == generator.encode(list(np.array([5, 6, 7])))
