"""`LLM` and its answers under vLLM's names: what a script that was written for vLLM expects."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright import LLM, CompletionOutput, SamplingParams, TextPrompt, TokensPrompt
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import UsageError
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.prompts import Conversation
from enginewright.runtime.engine import Engine
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.api.conftest import LIMITS
from tests.helpers.llm import tokens_of
from tests.helpers.tiny import MemoryCheckpoint

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A tied tiny model repeats itself whatever it sees.
    generation = {"eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7, "top_k": 20}
    checkpoint = replace(MemoryCheckpoint.tiny("llama", tie_word_embeddings=False), generation_config=generation)
    build_engine(checkpoint, BuildConfig(), path := tmp_path_factory.mktemp("llm") / "tiny.engine")
    return path


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
    assert "no limit called cuda_graph_sizes: there are max_model_len" in refused(cuda_graph_sizes=[1])
    assert "at least 1" in refused(max_num_seqs=0)
    assert "max_num_seqs is 2.5" in refused(max_num_seqs=2.5)
    assert "max_model_len is True" in refused(max_model_len=True)
    assert "kv_cache_memory: 'much' is not a size in bytes" in refused(kv_cache_memory="much")
    assert "enable_prefix_caching is 'no'" in refused(enable_prefix_caching="no")
    assert "device is 0" in refused(device=0)
    assert "isa is 2" in refused(isa=2)
    assert "prefill_chunk_size" in refused(prefill_chunk_size=0)
    assert "built for" in refused(max_model_len=10_000)


def test_a_number_may_be_a_text(engine: Engine) -> None:
    with LLM(engine, **LIMITS | {"kv_cache_memory": "1m", "max_num_seqs": np.int64(5), "max_model_len": None}) as llm:
        assert 0.9 * 2**20 < llm.memory_plan.kv_bytes <= 2**20
        assert (llm.memory_plan.limits.sequences, llm.max_model_len) == (5, engine.plan.max_seq_len)


def test_what_is_no_engine(tmp_path: Path) -> None:
    for model in (None, 5, b"a.engine", "a\0b", ["a.engine"]):
        with pytest.raises(UsageError, match="path of an engine file"):
            LLM(model)  # type: ignore[arg-type]


def test_options_of_vllm_without_effect(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Each option is noted once at a harmless value, and refused at others."""
    harmless: dict[str, list[Any]] = {
        "data_parallel_size": [1],
        "dtype": ["auto", "bfloat16"],
        "enforce_eager": [True, False],
        "trust_remote_code": [True, False],
        "seed": [0, 42, None],
        "gpu_memory_utilization": [0.9, 1],
        "swap_space": [0, 4, 0.5],
        "max_logprobs": [20],
        "disable_log_stats": [True],
        "tokenizer": [None],
        "revision": [None],
        "quantization": [None],
        "max_seq_len_to_capture": [8192],
        "block_size": [16, None],
        "enable_chunked_prefill": [True, False],
        "compilation_config": [0, {"level": 3}],
    }
    for number in range(3):
        caplog.clear()
        given = {name: values[number] for name, values in harmless.items() if number < len(values)}
        with LLM(engine, **LIMITS, **given) as llm:
            assert llm.max_model_len == 200
        assert len(caplog.messages) == len(given)
        for name, said in zip(given, caplog.messages, strict=True):
            assert said.startswith(f"{name}={given[name]!r} has no effect: ")
    matters: dict[str, list[Any]] = {
        "data_parallel_size": [2, True, "1"],
        "dtype": ["float16"],
        "enforce_eager": ["yes"],
        "trust_remote_code": ["no"],
        "seed": ["x", 1.5j],
        "gpu_memory_utilization": [1.5, "0.9"],
        "swap_space": [-1, "4"],
        "max_logprobs": [21],
        "tokenizer": ["other"],
        "revision": ["main"],
        "quantization": ["awq"],
        "cpu_offload_gb": [4],
        "speculative_config": [{"method": "ngram"}],
        "hf_overrides": [{"rope": 1}],
    }
    for name, values in matters.items():
        for value in values:
            with pytest.raises(UsageError, match=f"{name}=.* is not implemented: "):
                LLM(engine, **LIMITS, **{name: value})


def test_arguments_of_calls_without_effect(llm: LLM) -> None:
    turn = [{"role": "user", "content": "a"}]
    plain = llm.chat(turn, GREEDY)
    off: dict[str, Any] = {"lora_request": None, "chat_template": None, "tools": None, "continue_final_message": False}
    assert tokens_of(llm.chat(turn, GREEDY, False, **off)) == tokens_of(plain)
    assert tokens_of(llm.generate([5], GREEDY, lora_request=None, priority=None))
    assert tokens_of(llm.generate([5], GREEDY, priority=[7])) == tokens_of(llm.generate([5], GREEDY))
    for name, value in {"tools": [{}], "chat_template": "{{ x }}", "lora_request": 1, "max_tokens": 3}.items():
        with pytest.raises(UsageError, match=name):
            llm.chat(turn, GREEDY, **{name: value})
        with pytest.raises(UsageError, match=name):
            llm.generate([5], GREEDY, **{name: value})


WRONG_PROMPTS: list[Any] = [
    5,
    None,
    b"bytes",
    [b"bytes"],
    [None],
    [["a", "b"]],
    [5, "a"],
    [[5, 6.5]],
    {1, 2},
    iter(["a"]),
    np.array(5),
    {},
    {"prompt": 5},
    {"prompt": {"prompt": "a"}},
    {"prompt_token_ids": "text"},
    {"prompt_token_ids": 5},
    {"prompt": "a", "prompt_token_ids": [5]},
    {"prompt": "a", "multi_modal_data": {}},
    {"prompt": "a", "cache_salt": 5},
    {"prompt": "a", "cache_salt": "\ud800"},
    [{"role": "user", "content": "a"}],
    [[{"role": "user", "content": 5}]],
]


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=lambda prompt: re.sub(" at 0x.*", "", str(prompt)))
def test_a_prompt_of_a_wrong_type(llm: LLM, prompt: Any) -> None:
    with pytest.raises(UsageError):
        llm.generate(prompt, GREEDY)
    assert llm.stats().num_steps == 0
    assert len(llm.generate("a", GREEDY)) == 1, "the engine goes on"


def test_other_arguments_of_a_wrong_type(llm: LLM) -> None:
    for params in ({"temperature": 0}, "greedy", 5, [None, {"temperature": 0}], {GREEDY.n}):
        with pytest.raises(UsageError, match="SamplingParams"):
            llm.generate([[5], [6]], params)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="SamplingParams"):
            llm.stream([5], params)  # type: ignore[arg-type]
    for salt in (5, None, "\ud800", b"salt"):
        with pytest.raises(UsageError, match="cache_salt"):
            llm.generate([5], GREEDY, cache_salt=salt)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="on_progress is 5"):
        llm.generate([5], GREEDY, on_progress=5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="chat_template_kwargs is 5"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template_kwargs=5)  # type: ignore[arg-type]


WRONG_MESSAGES: list[tuple[Any, str]] = [
    ("hi", "a list of messages is wanted"),
    ({"role": "user", "content": "hi"}, "a list of messages is wanted"),
    (None, "a list of messages is wanted"),
    (["hi"], "a message is 'hi'"),
    ([["hi"]], "a message is 'hi'"),
    ([{"role": "user", "content": "a"}, "hi"], "a message is 'hi'"),
    ([5], "a message is 5"),
    ([[]], "has no message"),
    ([{}], r"messages\[0\].role is None"),
    ([{"role": 5, "content": "a"}], r"messages\[0\].role is 5"),
    ([{"role": [], "content": "a"}], r"messages\[0\].role is \[\]"),
    ([{"role": "poet", "content": "a"}], "there are system, developer, user, assistant, tool"),
    ([{"role": "user"}], r"messages\[0\].content is None"),
    ([{"role": "user", "content": ["a"]}], r"messages\[0\].content\[0\] is 'a'"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "reads text alone"),
    ([{"role": "user", "content": [{"type": "text", "text": None}]}], "reads text alone"),
]


@pytest.mark.parametrize(("messages", "said"), WRONG_MESSAGES, ids=str)
def test_messages_of_a_wrong_type(llm: LLM, messages: Any, said: str) -> None:
    """A text must not become a conversation of its letters."""
    with pytest.raises(UsageError, match=said):
        llm.chat(messages, GREEDY)
    assert llm.stats().num_steps == 0


def test_parts_and_roles_of_messages(llm: LLM) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    shown = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}]
    render = llm.get_tokenizer().render_chat
    for turn in (True, False):
        ids = llm.get_tokenizer().encode(render(shown, add_generation_prompt=turn), add_special_tokens=False)
        (output,) = llm.chat(given, GREEDY, add_generation_prompt=turn)
        assert output.prompt_token_ids == ids
        (again,) = llm.generate(Conversation(given, turn), GREEDY)
        assert again.prompt_token_ids == ids
    assert given[1]["content"] is parts, "what the caller has is left as it was"


def test_names_for_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    files = MemoryCheckpoint({}, {}).tokenizer
    source = "{{ messages[0].content }}{% if thinking %} thinks{% endif %}{{ bos_token }}"
    monkeypatch.setattr(llm.engine, "tokenizer", Tokenizer(files.tokenizer_json, {"bos_token": "<|begin|>"}, source))
    turn = [{"role": "user", "content": "x"}]

    def prompt(**kwargs: Any) -> str:
        (output,) = llm.chat(turn, GREEDY, chat_template_kwargs=kwargs)
        return llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)

    assert (prompt(), prompt(thinking=True)) == ("x<|begin|>", "x thinks<|begin|>")
    for name in ("messages", "add_generation_prompt", "chat_template", "tokenize", "tools", "documents", "bos_token"):
        with pytest.raises(UsageError, match=f"chat_template_kwargs cannot set {name}"):
            prompt(**{name: None})


def test_a_prompt_with_its_own_salt(llm: LLM) -> None:
    """Prompts share what was computed with those of the same salt, and the prompt's own goes before the call's."""
    ids = [5 + n % 50 for n in range(70)]

    def cached(prompt: Any, **salt: str) -> int:
        return llm.generate(prompt, GREEDY, **salt)[0].num_cached_tokens

    assert cached(TokensPrompt(prompt_token_ids=ids)) == 0 < cached(TokensPrompt(prompt_token_ids=ids))
    assert cached(TokensPrompt(prompt_token_ids=ids, cache_salt="a")) == 0 < cached(ids, cache_salt="a")
    assert cached(TokensPrompt(prompt_token_ids=ids, cache_salt="b"), cache_salt="a") == 0
    text = "What is the capital of France? " * 3
    assert cached(TextPrompt(prompt=text, cache_salt="c")) == 0 < cached(text, cache_salt="c")


def test_parameters_may_be_changed(llm: LLM) -> None:
    """Changed parameters take effect, and ones that make no sense are refused before anything runs."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=30)
    params.max_tokens, params.temperature, params.n, params.stop = 2, 0.9, 3, ["zz"]
    assert [len(tokens) for tokens in tokens_of(llm.generate([7], params))] == [2, 2, 2]
    steps = llm.stats().num_steps
    params.min_tokens = 3
    with pytest.raises(UsageError, match="min_tokens must be between 0 and 2, not 3"):
        llm.generate([[7], [8]], [GREEDY, params])
    params.min_tokens, params.stop = 0, 5  # type: ignore[assignment]
    with pytest.raises(UsageError, match="stop must be strings"):
        llm.stream([7], params)
    assert llm.stats().num_steps == steps
    with pytest.raises(AttributeError, match="temprature"):
        params.temprature = 0.5  # type: ignore[attr-defined]


def test_a_request_has_parameters_of_its_own(engine: Engine) -> None:
    """Changed after it was submitted, they are for the next one."""
    core = EngineCore(engine, runtime_config(**LIMITS))
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=9, stop=["zz"], logit_bias={2: 100.0})
    core.add(core.request([5], params, lambda _: None))
    deltas = []
    while core.has_work:
        deltas += [delta for _, delta in core.step()]
        params.min_tokens = 0
        params.logit_bias = {}
    assert [len(delta.tokens) for delta in deltas] == [1] * 10
    assert (deltas[-1].tokens[0].token, deltas[-1].finish_reason) == (2, "stop")
    core.close()


def test_a_choice_says_whether_it_is_finished(llm: LLM) -> None:
    (output,) = llm.generate([5], GREEDY)
    assert output.finished is True and output.prompt_logprobs is None
    assert output.outputs[0].finished() is True and not CompletionOutput(0).finished()


def test_outputs_stand_in_the_order_of_prompts(llm: LLM) -> None:
    """Outputs are in the order of prompts, whichever ends first."""
    prompts = [[5 + n] * (n % 5 + 1) for n in range(20)]
    params = [replace(GREEDY, max_tokens=40 - 2 * n) for n in range(20)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(tokens) for tokens in tokens_of(outputs)] == [40 - 2 * n for n in range(20)]
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 20))


def test_a_bar_leaves_a_line(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5], [6]], GREEDY, use_tqdm=True)
    llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=True)
    said = capsys.readouterr()
    assert said.err == "[2 of 2 answers, 40 tokens]\n[1 of 1 answers, 20 tokens]\n" and not said.out
    llm.generate([[5], [6]], GREEDY)
    assert capsys.readouterr() == ("", "")
