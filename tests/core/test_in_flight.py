"""Many requests, one KV cache that holds a tenth of them: every answer is, bit for bit, what it would be alone."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.api.llm import LLM
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.core.outputs import RequestOutput
from enginewright.runtime.device.memory_plan import limits_of, sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from tests.helpers.engines import built_tiny
from tests.helpers.prompts import random_prompts

# A tied tiny model repeats itself whatever it sees.
LONG = {"max_position_embeddings": 2048, "tie_word_embeddings": False}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LIMITS = {"max_model_len": 160, "max_num_seqs": 32, "max_num_batched_tokens": 64, "threads": 1}
Answers = list[tuple[list[int], str, str | None]]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])  # the second has a sliding window
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.open(built_tiny(request.param, **LONG)) as opened:
        yield opened


def answers(outputs: list[RequestOutput]) -> Answers:
    return [(choice.token_ids, choice.text, choice.finish_reason) for each in outputs for choice in each.outputs]


def alone(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> Answers:
    with LLM(engine, **LIMITS | {"enable_prefix_caching": False}) as llm:
        return [
            one for prompt, each in zip(prompts, params, strict=True) for one in answers(llm.generate(prompt, each))
        ]


def kv_bytes(engine: Engine, lengths: list[int], share: float) -> int:
    """A share of what sequences of these lengths would take together, and at least one of the longest."""
    length, limits = limits_of(engine.plan, runtime_config(**LIMITS))
    groups = engine.plan.caches
    whole = sum(sequence_bytes(groups, one, limits.tokens) for one in lengths)
    return max(int(whole * share), sequence_bytes(groups, length, limits.tokens))


def wait_until_idle(llm: LLM) -> None:
    end = time.monotonic() + 60
    while (stats := llm.stats()).num_running + stats.num_waiting:
        assert time.monotonic() < end, stats
        time.sleep(0.002)
    assert llm.stats().kv_usage == 0.0, "blocks leaked"


def mixed(count: int = 80) -> tuple[list[list[int]], list[SamplingParams]]:
    random = np.random.default_rng(1)
    lengths = random.integers(1, 40, count).tolist()  # much shorter than completions: memory runs out on the way
    params = [
        replace(GREEDY, temperature=n % 3 * 0.8, seed=n, max_tokens=int(random.integers(50, 118))) for n in range(count)
    ]
    return random_prompts(lengths, seed=1), params


@pytest.fixture(scope="module")
def mixed_alone(engine: Engine) -> Answers:
    return alone(engine, *mixed())


@pytest.mark.parametrize("caching", [True, False])
def test_many_requests_in_memory_for_a_tenth(engine: Engine, mixed_alone: Answers, caching: bool) -> None:
    prompts, params = mixed()
    lengths = [len(prompt) + (one.max_tokens or 0) for prompt, one in zip(prompts, params, strict=True)]
    memory = kv_bytes(engine, lengths, 0.1)
    with LLM(engine, **LIMITS | {"kv_cache_memory": memory, "enable_prefix_caching": caching}) as llm:
        together = answers(llm.generate(prompts, params))
        assert llm.stats().num_preemptions > 0, "memory was not short"
        wait_until_idle(llm)
    assert together == mixed_alone
    assert {reason for _, _, reason in together} == {"length"}


def test_prompts_of_one_token_have_no_log_probabilities_also_after_preemptions(engine: Engine) -> None:
    prompts = [[7 + index] for index in range(16)]
    params = [replace(GREEDY, max_tokens=100, prompt_logprobs=1)] * len(prompts)
    memory = kv_bytes(engine, [101] * len(prompts), 0.2)
    with LLM(engine, **LIMITS | {"kv_cache_memory": memory}) as llm:
        found = llm.generate(prompts, params)
        assert llm.stats().num_preemptions > 0, "memory was not short"
    assert [output.prompt_logprobs for output in found] == [[None]] * len(prompts)
    assert {output.outputs[0].finish_reason for output in found} == {"length"}


def test_the_same_with_random_aborts(engine: Engine, mixed_alone: Answers) -> None:
    """An aborted request has generated a prefix of its completion; the others do not change."""
    prompts, params = mixed()
    lengths = [len(prompt) + (one.max_tokens or 0) for prompt, one in zip(prompts, params, strict=True)]
    random = np.random.default_rng(3)
    with LLM(engine, **LIMITS | {"kv_cache_memory": kv_bytes(engine, lengths, 0.1)}) as llm:
        streams = [llm.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        for stream, (tokens, text, _) in zip(streams, mixed_alone, strict=True):
            leave = int(random.integers(0, 100)) if random.random() < 0.4 else None
            written: list[int] = []
            said = ""
            while leave is None or len(written) < leave:
                delta = next(stream, None)
                if delta is None:
                    break
                written += [token.token for token in delta.tokens]
                said += delta.text
            stream.close()
            if leave is None:
                assert (written, said) == (tokens, text)
            else:
                assert tokens[: len(written)] == written and text.startswith(said)
        wait_until_idle(llm)


def beginning_alike(count: int, prefix: int, seed: int = 7) -> list[list[int]]:
    first, *tails = random_prompts([prefix, *(3 + n % 9 for n in range(count))], seed)
    return [first + tail for tail in tails]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_prefix_of_a_thousand_tokens_is_computed_once(engine: Engine, one_by_one: bool) -> None:
    prompts = beginning_alike(20, 1000)
    params = [replace(GREEDY, temperature=n % 2 * 0.9, seed=n, max_tokens=4) for n in range(len(prompts))]
    limits = LIMITS | {"max_model_len": 1100, "max_num_batched_tokens": 256}
    found: dict[bool, tuple[Answers, int, list[int]]] = {}
    for caching in (False, True):
        with LLM(engine, **limits | {"enable_prefix_caching": caching}) as llm:
            outputs = []
            if one_by_one:
                for prompt, one in zip(prompts, params, strict=True):
                    outputs += llm.generate(prompt, one)
            else:
                outputs = llm.generate(prompts, params)
            stats = llm.stats()
            computed = stats.computed_tokens - sum(len(each.outputs[0].token_ids) - 1 for each in outputs)
            found[caching] = answers(outputs), computed, [each.num_cached_tokens for each in outputs]
            assert stats.cached_prompt_tokens == sum(found[caching][2])
    (without, all_tokens, none), (shared, computed, hits) = found[False], found[True]
    assert shared == without, "the same text, cache on or off"
    assert all_tokens == sum(map(len, prompts)) and not any(none)
    assert computed <= 0.1 * all_tokens, "two of them would have computed it"
    assert hits[0] == 0 and min(hits[1:]) >= 992


def test_a_conversation_goes_on_where_it_was(engine: Engine) -> None:
    """The second turn finds the first one's prompt and answer."""
    with LLM(engine, **LIMITS) as llm, LLM(engine, **LIMITS | {"enable_prefix_caching": False}) as plain:
        (first,) = llm.generate(random_prompts([50])[0], replace(GREEDY, max_tokens=30))
        turn = [*first.prompt_token_ids, *first.outputs[0].token_ids, 5, 6, 7]
        (second,) = llm.generate(turn, GREEDY)
        assert second.num_cached_tokens == 64, "of 79 tokens, two blocks of 32 are full"
        assert answers([second]) == answers(plain.generate(turn, GREEDY))
        (other,) = llm.generate(turn, GREEDY, cache_salt="another tenant")
        assert other.num_cached_tokens == 0 and answers([other]) == answers([second])


def test_a_cache_that_is_too_small_forgets_and_stays_right(engine: Engine) -> None:
    prompts = [prompt for seed in range(6) for prompt in beginning_alike(5, 70, seed)]
    order = np.random.default_rng(0).permutation(len(prompts)).tolist()
    params = [GREEDY] * len(prompts)
    with LLM(engine, **LIMITS | {"kv_cache_memory": kv_bytes(engine, [90] * 3, 1), "max_num_seqs": 2}) as llm:
        found: dict[int, Any] = {}
        for n in [*order, *reversed(order)]:
            found[n] = answers(llm.generate(prompts[n], GREEDY))[0]
        assert llm.stats().cached_prompt_tokens > 0
    assert [found[n] for n in range(len(prompts))] == alone(engine, prompts, params)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 100])
def test_several_answers_to_one_prompt(engine: Engine, length: int) -> None:
    """Each is the same whatever their number, the cache, and the other requests; the prompt is computed about once."""
    (prompt,) = random_prompts([length], seed=length)
    sampled = replace(GREEDY, temperature=1.2, seed=11, max_tokens=40)
    ask = partial(LLM, engine, **LIMITS)
    with ask() as llm:
        four = answers(llm.generate(prompt, replace(sampled, n=4)))
        computed = llm.stats().computed_tokens
    assert computed <= length + 39 + 3 * 40
    assert len({tuple(tokens) for tokens, _, _ in four}) == 4, "each draws for itself"
    with ask(enable_prefix_caching=False) as llm:
        assert answers(llm.generate(prompt, replace(sampled, n=2))) == four[:2]
        assert answers(llm.generate(prompt, sampled)) == four[:1]
        greedy = answers(llm.generate(prompt, replace(GREEDY, n=3)))
        assert greedy == answers(llm.generate(prompt, GREEDY)) * 3
    others = random_prompts([90, 40, 110, 7, 80], seed=2)
    with LLM(engine, **LIMITS | {"kv_cache_memory": kv_bytes(engine, [150] * 3, 1)}) as llm:
        crowd = llm.generate([*others, prompt, *others], [*[sampled] * 5, replace(sampled, n=4), *[sampled] * 5])
        assert answers([crowd[5]]) == four
        wait_until_idle(llm)
