"""Generation: the tokens are the model's, alone and in a batch, and answers end where they were asked to."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import UsageError
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.outputs import CompletionOutput, to_dicts
from enginewright.runtime.core.params import default_params
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from tests.helpers.tiny import MemoryCheckpoint
from tests.tolerances import LOGPROB

FAMILIES = ["llama", "gemma3_text"]
LIMITS = {"max_model_len": 200, "max_num_seqs": 8, "max_num_batched_tokens": 24, "threads": 1}
LIMITS["kv_cache_memory"] = 4 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BROKEN_TOKEN = 300  # its embedding is NaN in the engine `broken`


def tiny_engine(folder: Path, family: str, generation: dict[str, Any], nan_row: int | None = None) -> Path:
    checkpoint = MemoryCheckpoint.tiny(family, tie_word_embeddings=False)
    if nan_row is not None:
        table = checkpoint.stored["model.embed_tokens.weight"].clone()
        table[nan_row] = float("nan")
        checkpoint = replace(checkpoint, stored={**checkpoint.stored, "model.embed_tokens.weight": table})
    build_engine(replace(checkpoint, generation_config=generation), BuildConfig(gate=None), folder / f"{family}.engine")
    return folder / f"{family}.engine"


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    defaults = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.25}
    with LLM(tiny_engine(tmp_path_factory.mktemp("generate"), request.param, defaults), **LIMITS) as opened:
        yield opened


@pytest.fixture(scope="module", params=FAMILIES)
def broken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine.open(tiny_engine(tmp_path_factory.mktemp("broken"), request.param, {}, BROKEN_TOKEN)) as engine:
        yield engine


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, BROKEN_TOKEN, length).tolist() for length in lengths]


def last_logits(llm: LLM, ids: list[int]) -> np.ndarray:
    return score(CpuExecutor(llm.engine, RuntimeConfig(**LIMITS)), [ids], last_only=True)[0][0]


def all_of(llm: LLM, prompts: Sequence[Any], params: Any = GREEDY) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate(prompts, params)]


def first_only(llm: LLM, prompt: list[int], **changes: Any) -> CompletionOutput:
    return all_of(llm, [prompt], replace(GREEDY, **changes))[0]


def test_greedy_is_the_largest_logit_of_each_step(llm: LLM) -> None:
    for prompt in prompts_of([1, 2, 33, 61]):
        ids = list(prompt)
        for token in first_only(llm, prompt).token_ids:
            assert token == int(last_logits(llm, ids).argmax())
            ids.append(token)
        assert len(ids) == len(prompt) + 12


def test_answers_are_batch_invariant(llm: LLM) -> None:
    """There are more requests than sequences, prompts in several chunks, and sampled and greedy completions."""
    prompts = prompts_of([1, 70, 5, 31, 32, 33, 2, 100, 17, 64, 3, 40])
    params = [replace(GREEDY, temperature=n % 3 * 0.7, seed=n, max_tokens=n % 7 + 3) for n in range(len(prompts))]
    together = all_of(llm, prompts, params)
    alone = [all_of(llm, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert [result.text for result in together] == [result.text for result in alone]
    assert [len(result.token_ids) for result in together] == [one.max_tokens for one in params]


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    for seed in range(12):
        params = replace(GREEDY, temperature=2.0, seed=seed, max_tokens=30, ignore_eos=False, stop=("e", "ab"))
        (whole,) = all_of(llm, ["Größe 🙂"], params)
        deltas = list(llm.stream("Größe 🙂", params))
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [token.token for delta in deltas for token in delta.tokens] == whole.token_ids
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [whole.finish_reason]


def test_progress_counts_answers_and_tokens(llm: LLM) -> None:
    calls: list[tuple[int, int]] = []
    llm.generate(prompts_of([3, 50, 9]), GREEDY, on_progress=lambda done, written: calls.append((done, written)))
    assert calls == sorted(calls) and calls[-1] == (3, 36)


def test_a_text_ends_at_its_limits(llm: LLM) -> None:
    prompt = prompts_of([150])[0]
    assert len(first_only(llm, prompt, max_tokens=1).token_ids) == 1
    for max_tokens in (None, 50, 1000):
        result = first_only(llm, prompt, max_tokens=max_tokens)
        assert (len(result.token_ids), result.finish_reason) == (50, "length")


def test_tokens_that_end_a_text(llm: LLM) -> None:
    """An end-of-text token, or one that was named, is the last token and no part of the text."""
    prompt = prompts_of([9])[0]
    drawn = first_only(llm, prompt).token_ids
    at = next(n for n, token in enumerate(drawn) if n and token not in drawn[:n])
    expected = llm.engine.tokenizer.decode(drawn[:at])
    named = first_only(llm, prompt, stop_token_ids=(drawn[at],))
    assert (named.token_ids, named.finish_reason) == (drawn[: at + 1], "stop")
    assert named.text.startswith(expected.rstrip("\ufffd")) and len(named.text) <= len(expected)
    forced = {"logit_bias": {2: 100.0}}
    ended = first_only(llm, prompt, ignore_eos=False, **forced)
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([2], "", "stop")
    ignored = first_only(llm, prompt, **forced)
    assert (ignored.token_ids, ignored.finish_reason) == ([2] * 12, "length")
    later = first_only(llm, prompt, ignore_eos=False, min_tokens=5, **forced)
    assert later.token_ids.index(2) == 5 and later.finish_reason == "stop"


def letters(engine: Engine, text: str) -> list[int]:
    """A text as a model would have to write it: one token a letter."""
    return [token for letter in text for token in engine.tokenizer.encode(letter, add_special_tokens=False)]


def test_strings_that_end_a_text(llm: LLM) -> None:
    """Cut at the first of them, also if it takes several tokens, and if it comes with the last one allowed."""
    token = letters(llm.engine, "x")[0]
    forced = {"logit_bias": {token: 100.0}}
    cut = first_only(llm, [5, 6], stop=("xxx",), **forced)
    assert (cut.text, cut.finish_reason, cut.token_ids) == ("", "stop", [token] * 3)
    kept = first_only(llm, [5, 6], stop=("xxx",), include_stop_str_in_output=True, **forced)
    assert (kept.text, kept.finish_reason) == ("xxx", "stop")
    never = first_only(llm, [5, 6], stop=("xxy",), **forced)
    assert (never.text, never.finish_reason) == ("x" * 12, "length"), "what was held back comes at the end"
    last = first_only(llm, [5, 6], stop=("xxx",), max_tokens=3, **forced)
    assert (last.text, last.finish_reason) == ("", "stop"), "the stop string wins over the limit"
    first = first_only(llm, [5, 6], stop=("xxxx", "xx"), **forced)
    assert (first.text, len(first.token_ids)) == ("", 2)


def test_seeds(llm: LLM) -> None:
    def draw(seed: int | None) -> tuple[int, ...]:
        return tuple(first_only(llm, [5, 6, 7], temperature=1.5, seed=seed).token_ids)

    assert draw(1) == draw(1) != draw(2)
    assert draw(None) != draw(None), "no seed is another one each time"


def test_log_probabilities_are_those_of_the_logits(llm: LLM) -> None:
    prompt = prompts_of([20])[0]
    (output,) = llm.generate([prompt], replace(GREEDY, logprobs=4, temperature=0.7, seed=3))
    (result,), ids = output.outputs, list(prompt)
    assert result.logprobs is not None
    for token, named in zip(result.token_ids, result.logprobs, strict=True):
        logits = last_logits(llm, ids).astype(np.float64)
        expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert named[token].logprob == pytest.approx(expected[token], abs=LOGPROB)
        top = sorted((entry.rank, one, entry.logprob) for one, entry in named.items() if entry.rank is not None)
        assert [one for _, one, _ in top] == np.argsort(-expected, kind="stable")[:4].tolist()
        assert [value for _, _, value in top] == pytest.approx(np.sort(expected)[:-5:-1], abs=LOGPROB)
        assert named[token].decoded_token == llm.engine.tokenizer.decode([token], skip_special_tokens=False)
        ids.append(token)
    total = sum(named[token].logprob for token, named in zip(result.token_ids, result.logprobs, strict=True))
    assert result.cumulative_logprob == pytest.approx(total)
    assert [entry["token_id"] for entry in to_dicts(output)[0]["logprobs"]] == result.token_ids
    assert "logprobs" not in to_dicts(llm.generate([prompt], GREEDY)[0])[0]


def test_the_models_own_defaults(llm: LLM) -> None:
    own = default_params(llm.engine)
    assert (own.temperature, own.top_k, own.repetition_penalty, own.max_tokens) == (0.8, 20, 1.25, None)
    given = default_params(llm.engine, temperature=0.0, top_k=None, max_tokens=7, repetition_penalty=1.0)
    assert (given.temperature, given.top_k, given.max_tokens, given.repetition_penalty) == (0.0, 20, 7, 1.0)


def test_defaults_of_a_model_that_names_none(broken: Engine) -> None:
    assert default_params(broken).temperature == 0.0, "greedy"
    assert default_params(broken, seed=3).temperature == 1.0, "a seed asks for sampling"
    assert default_params(broken, seed=3, temperature=0.0).temperature == 0.0
    assert broken.eos_token_ids == (1,), "the tokenizer's own"


def test_prompts_that_cannot_be_meant(llm: LLM) -> None:
    def refused(prompt: Any, **changes: Any) -> str:
        with pytest.raises(UsageError) as error:
            llm.generate([[5], prompt], replace(GREEDY, **changes))
        assert error.value.exit_code == 2
        return str(error.value)

    message = refused([5] * 200)
    assert "200 tokens" in message and "context length is 200" in message
    assert "201 tokens" in refused([5] * 201)
    assert len(all_of(llm, [[5] * 199])[0].token_ids) == 1
    assert "empty" in refused([])
    for token in (-1, 307, 2**40):
        assert "0 to 306" in refused([5, token])
    for mixed in ([5, "a"], [5, 1.5], [{"role": "user", "content": "a"}, 5], [5, None]):
        assert "of one kind" in refused(mixed)
    assert "307" in refused([5], stop_token_ids=(307,))


def test_a_conversation_is_its_template(llm: LLM) -> None:
    ids = llm.encode([{"role": "user", "content": "Hi"}])
    assert llm.engine.tokenizer.decode(ids) == "user: Hi\nassistant: "


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_nan_ends_one_request_and_no_other(broken: Engine, place: int) -> None:
    """The failed request's blocks go to others while it runs (a window's) and after; memory is scarce, so at once."""
    bad = [BROKEN_TOKEN, *prompts_of([150])[0]]
    good = prompts_of([5, 70, 33, 90, 41, 12], seed=1)
    with LLM(broken, **LIMITS) as fine:
        alone = [all_of(fine, [prompt])[0] for prompt in good]
    assert {result.finish_reason for result in alone} == {"length"}
    for memory in (270_000, 320_000, 420_000):
        with LLM(broken, **LIMITS | {"max_num_seqs": 4, "kv_cache_memory": memory}) as llm:
            results = all_of(llm, [*good[:place], bad, *good[place:]])
        failed = results.pop(place)
        assert (failed.finish_reason, failed.text, failed.token_ids) == ("error", "", [])
        assert [result.token_ids for result in results] == [result.token_ids for result in alone]
        assert {result.finish_reason for result in results} == {"length"}


def test_nan_in_the_middle_of_an_answer(broken: Engine) -> None:
    """The text up to there is given; the next request in the same memory knows nothing of it."""
    with LLM(broken, **LIMITS | {"max_num_seqs": 1, "kv_cache_memory": 270_000}) as llm:
        prompt = letters(broken, "abc")
        before = first_only(llm, prompt)
        failed = first_only(llm, prompt, logit_bias={BROKEN_TOKEN: 100.0})
        assert (failed.finish_reason, failed.token_ids) == ("error", [BROKEN_TOKEN])
        assert failed.text == broken.tokenizer.decode([BROKEN_TOKEN])
        deltas = list(llm.stream(prompt, replace(GREEDY, logit_bias={BROKEN_TOKEN: 100.0})))
        assert [delta.finish_reason for delta in deltas] == [None, "error"] and not deltas[-1].tokens
        assert first_only(llm, prompt).token_ids == before.token_ids


def test_a_block_is_zero_before_it_is_used_again(broken: Engine) -> None:
    with LLM(broken, **LIMITS | {"max_num_seqs": 1, "kv_cache_memory": 270_000}) as llm:
        pools = llm._core.executor.pools
        llm.generate([[BROKEN_TOKEN] * 40], GREEDY)
        assert all(((pool.plane(0, "key") & 0x7F80) == 0x7F80).any() for pool in pools), "NaN was written"
        llm.generate([[5] * 100], GREEDY)
        for pool in pools:
            assert not ((pool.plane(0, "key")[:2] & 0x7F80) == 0x7F80).any() and pool.plane(0, "key")[:2].any()
