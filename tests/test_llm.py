"""`LLM` and its answers under vLLM's names: what a script that was written for vLLM expects."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright import LLM, SamplingParams
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import UsageError
from enginewright.runtime.engine import Engine
from enginewright.runtime.outputs import RequestOutput
from tests.tiny import MemoryCheckpoint, tiny_config, tiny_model

LIMITS = {"max_model_len": 200, "max_num_seqs": 6, "max_num_batched_tokens": 24, "threads": 1}
LIMITS["kv_cache_memory"] = 1 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("llama", tie_word_embeddings=False)  # a tied tiny model repeats itself whatever it sees
    generation = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7, "top_k": 20}
    checkpoint = replace(MemoryCheckpoint.of(tiny_model(config), config), generation_config=generation)
    build_engine(checkpoint, BuildConfig(), path := tmp_path_factory.mktemp("llm") / "tiny.engine")
    return path


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with Engine.open(path) as opened:
        yield opened


@pytest.fixture
def llm(engine: Engine) -> Iterator[LLM]:
    with LLM(engine, **LIMITS) as opened:
        yield opened


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def test_a_script_written_for_vllm(path: Path) -> None:
    llm = LLM(model=str(path), max_model_len=64, max_num_seqs=4, enable_prefix_caching=True)
    prompts = ["Hello, my name is", "The capital of France is", "Größe 🙂"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=9, logprobs=2, ignore_eos=True)
    outputs = llm.generate(prompts, sampling_params)
    tokenizer = llm.get_tokenizer()
    assert [output.prompt for output in outputs] == prompts
    assert len({output.request_id for output in outputs}) == 3
    for output in outputs:
        assert output.finished
        assert output.prompt_token_ids == tokenizer.encode(str(output.prompt))
        (generated,) = output.outputs
        assert (generated.index, generated.finish_reason, generated.stop_reason) == (0, "length", None)
        whole = tokenizer.decode([*output.prompt_token_ids, *generated.token_ids])
        assert str(output.prompt) + generated.text == whole
        assert generated.logprobs is not None and len(generated.logprobs) == len(generated.token_ids) == 9
        chosen = [entry[token] for token, entry in zip(generated.token_ids, generated.logprobs, strict=True)]
        assert generated.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
        assert all(entry.logprob < 0 and isinstance(entry.decoded_token, str) for entry in chosen)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k) == (0.7, 20)
    llm.close()


def test_each_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    text = "What is the capital of France?"
    ids = llm.get_tokenizer().encode(text)
    forms: list[Any] = [
        text,
        {"prompt": text},
        ids,
        {"prompt_token_ids": ids},
        tuple(ids),
        np.array(ids),
        {"prompt": ids},
    ]
    together = llm.generate(forms, GREEDY)
    assert [output.prompt_token_ids for output in together] == [ids] * len(forms)
    assert [output.prompt for output in together] == [text, text, None, None, None, None, None]
    assert len({tuple(tokens) for tokens in tokens_of(together)}) == 1
    for form in forms:
        (alone,) = llm.generate(form, GREEDY)
        assert alone.outputs == together[0].outputs
    assert llm.generate([], GREEDY) == [] == llm.generate((), None)


def test_parameters_for_all_or_for_each(llm: LLM) -> None:
    each = [replace(GREEDY, max_tokens=count) for count in (3, 9, 1)]
    assert [len(tokens) for tokens in tokens_of(llm.generate([[5], [6, 7], [8]], each))] == [3, 9, 1]
    for wrong in (each[:2], [*each, GREEDY], []):
        with pytest.raises(UsageError, match=f"{len(wrong)} sampling_params for 3 prompts"):
            llm.generate([[5], [6, 7], [8]], wrong)
    assert llm.stats().generated_tokens == 13, "of a refused batch nothing was computed"


def test_defaults_are_the_models_own(llm: LLM) -> None:
    """Sampling, as its generation_config.json says; until it ends, or to the longest that fits."""
    outputs = llm.generate([[5, 6, 7]] * 6)
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) > 1, "it draws"
    for output in outputs:
        (choice,) = output.outputs
        ended = choice.token_ids[-1] in (1, 2)
        assert choice.finish_reason == ("stop" if ended else "length")
        assert ended or len(choice.token_ids) == 200 - 3
        assert (choice.logprobs, choice.cumulative_logprob) == (None, None)


def test_what_ends_an_answer_is_named(llm: LLM) -> None:
    (x,), (y,) = (llm.get_tokenizer().encode(letter, add_special_tokens=False) for letter in "xy")

    def ended(bias: dict[int, float], **ends: Any) -> tuple[str, int, str | None, int | str | None]:
        params = SamplingParams(temperature=0, max_tokens=6, logit_bias=bias, **ends)
        (choice,) = llm.generate("a", params)[0].outputs
        return choice.text, len(choice.token_ids), choice.finish_reason, choice.stop_reason

    assert ended({x: 100.0}, stop=["no", "xxx"]) == ("", 3, "stop", "xxx")
    assert ended({x: 100.0}, stop="xx", include_stop_str_in_output=True) == ("xx", 2, "stop", "xx")
    assert ended({y: 100.0}, stop_token_ids=[x, y]) == ("", 1, "stop", y)
    assert ended({x: 100.0}, stop_token_ids=[y], stop=["y"]) == ("xxxxxx", 6, "length", None)
    assert ended({2: 100.0}, stop=["y"]) == ("", 1, "stop", None), "an end of text is nobody's stop"
    assert ended({2: 100.0}, ignore_eos=True, stop_token_ids=[2]) == ("", 1, "stop", 2)


def test_one_conversation_or_several(llm: LLM) -> None:
    first = [{"role": "user", "content": "Hello"}]
    second = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Who?"}]
    tokenizer = llm.get_tokenizer()
    rendered = [tokenizer.encode(tokenizer.render_chat(one), add_special_tokens=False) for one in (first, second)]
    (one,), two = llm.chat(first, GREEDY), llm.chat([first, second], [GREEDY, replace(GREEDY, max_tokens=5)])
    assert [one.prompt_token_ids, *(output.prompt_token_ids for output in two)] == [rendered[0], *rendered]
    assert tokens_of([one]) == tokens_of(llm.generate(rendered[0], GREEDY)) == tokens_of(two[:1])
    assert len(two[1].outputs[0].token_ids) == 5
    with pytest.raises(UsageError, match="1 sampling_params for 2 prompts"):
        llm.chat([first, second], [GREEDY])
    assert llm.chat([]) == []


def test_limits_that_are_none(engine: Engine) -> None:
    def refused(**limits: Any) -> str:
        with pytest.raises(UsageError) as error:
            LLM(engine, **LIMITS | limits)
        return str(error.value)

    assert "did you mean max_num_seqs?" in refused(max_num_seq=3)
    assert "no limit called gpu_memory_utilization" in refused(gpu_memory_utilization=0.9)
    assert "kv_cache_memory" in refused(gpu_memory_utilization=0.9), "what there is"
    assert "at least 1" in refused(max_num_seqs=0)
    assert "prefill_chunk_size" in refused(prefill_chunk_size=0)
    assert "built for" in refused(max_model_len=10_000)


def test_outputs_stand_in_the_order_of_prompts(llm: LLM) -> None:
    """Whichever ends first."""
    prompts = [[5 + n] * (n % 5 + 1) for n in range(20)]
    params = [replace(GREEDY, max_tokens=40 - 2 * n) for n in range(20)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(tokens) for tokens in tokens_of(outputs)] == [40 - 2 * n for n in range(20)]
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 20))


def test_a_bar_leaves_a_line_behind(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5], [6]], GREEDY, use_tqdm=True)
    llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=True)
    said = capsys.readouterr()
    assert said.err == "[2 of 2 answers, 40 tokens]\n[1 of 1 answers, 20 tokens]\n" and not said.out
    llm.generate([[5], [6]], GREEDY)
    assert capsys.readouterr() == ("", "")
