"""Requests and chunks in Dynamo's form. They are checked with Dynamo itself in tests/long/test_dynamo.py."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from enginewright.dynamo import form
from enginewright.errors import EngineError, UsageError
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.core.outputs import GRAMMAR, NAN_LOGITS, Delta
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.step.work_class import WorkClass
from tests.helpers.serving import LIMITS, tiny_engine

# The parts of a request of ai-dynamo 1.6.1 for a chat without options.
STOPS = ("max_tokens", "stop", *form.STOP_TOKENS, "min_tokens", "ignore_eos", "max_thinking_tokens")
SAMPLING = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k"),
    *("min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output", "guided_decoding"),
)
OUTPUT = (*form.OUTPUT_OPTIONS, "formatted_prompt", "return_tokens_as_token_ids")


def request(**given: Any) -> dict[str, Any]:
    """A request with some options. given: of any of its parts, by name; or a part's own entries."""
    parts = {"stop_conditions": STOPS, "sampling_options": SAMPLING, "output_options": OUTPUT}
    plain = {part: dict.fromkeys(names) for part, names in parts.items()}
    body: dict[str, Any] = {"model": "tiny", "token_ids": [5, 6], "eos_token_ids": [2], "routing": {}, **plain}
    for name, value in given.items():
        part = next((part for part, names in parts.items() if name in names), None)
        (body if part is None else body[part])[name] = value
    return body


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(tiny_engine()) as engine:
        yield engine


def test_a_plain_request_has_the_models_own_parameters(engine: Engine) -> None:
    assert form.sampling_params(request(), engine) == SamplingParams(temperature=0.0, max_tokens=None)
    assert form.sampling_params({"token_ids": [5]}, engine) == SamplingParams(temperature=0.0, max_tokens=None)


def test_options_become_sampling_parameters(engine: Engine) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["x"],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
    }
    assert form.sampling_params(request(**given), engine) == SamplingParams(**given)


def test_stop_tokens_are_those_that_do_not_end_a_text_anyway(engine: Engine) -> None:
    hidden = [*engine.eos_token_ids, 9]
    given = request(stop_token_ids_hidden=hidden, stop_token_ids_visible=[8, 9], stop_token_ids=[7])
    assert form.sampling_params(given, engine).stop_token_ids == (7, 8, 9)


@pytest.mark.parametrize(
    "guided", [{"json": {"type": "object"}}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'start: "a"'}]
)
def test_guided_decoding(engine: Engine, guided: dict[str, Any]) -> None:
    others = {"backend": "xgrammar", "structural_tag": None, "whitespace_pattern": None}
    params = form.sampling_params(request(guided_decoding=guided | others), engine)
    assert params.structured_outputs == StructuredOutputsParams(**guided)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n": 2}, "n is 2: Dynamo ends an answer with its first choice"),
        ({"max_thinking_tokens": 5}, "max_thinking_tokens"),
        ({"guided_decoding": {"structural_tag": {"begin": "<a>"}}}, "structural_tag"),
        ({"guided_decoding": {"regex": "a", "choice": ["a"]}}, "must have one of"),
        ({"temperature": "hot"}, "temperature"),
        *(({key: {"a": 1}}, f"{key} is not supported") for key in form.REFUSED),
    ],
)
def test_what_an_engine_does_not_do_is_refused_by_name(engine: Engine, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        form.sampling_params(request(**given), engine)


def test_routing() -> None:
    assert (form.cache_salt(request()), form.work_class(request())) == ("", WorkClass())
    routed = request(routing={"cache_salt": "a", "priority": 3, "priority_jump": 3.0})
    assert (form.cache_salt(routed), form.work_class(routed)) == ("a", WorkClass(-3))


def test_a_prompt_is_handed_over() -> None:
    assert form.remote_prefix(request()) is None
    assert form.remote_prefix(request(prefill_result={"disaggregated_params": {"kv_transfer_params": None}})) is None
    params = {"do_remote_prefill": True}
    handed = request(prefill_result={"disaggregated_params": {"kv_transfer_params": params}})
    assert form.remote_prefix(handed) == params


def test_chunks() -> None:
    assert form.chunk_of(Delta(0, "a", (SampledToken(4),))) == {"index": 0, "token_ids": [4]}
    tokens = (SampledToken(4, -0.5, ((4, -0.5), (9, -1.0))), SampledToken(7, -2.0, ((8, -0.25), (7, -2.0))))
    assert form.chunk_of(Delta(0, "ab", tokens, "stop", 7)) == {
        "index": 0,
        "token_ids": [4, 7],
        "log_probs": [-0.5, -2.0],
        "top_logprobs": [
            [
                {"rank": 1, "token_id": 4, "token": None, "logprob": -0.5},
                {"rank": 2, "token_id": 9, "token": None, "logprob": -1.0},
            ],
            [
                {"rank": 1, "token_id": 8, "token": None, "logprob": -0.25},
                {"rank": 2, "token_id": 7, "token": None, "logprob": -2.0},
            ],
        ],
        "finish_reason": "stop",
    }
    assert form.chunk_of(Delta(0, "", (), "abort")) == {"index": 0, "token_ids": [], "finish_reason": "cancelled"}


def test_failed_answers() -> None:
    with pytest.raises(UsageError, match="grammar takes too long"):
        form.chunk_of(Delta(0, "", (), "error", GRAMMAR))
    with pytest.raises(EngineError, match="the answer has failed: nan_logits") as raised:
        form.chunk_of(Delta(0, "", (), "error", NAN_LOGITS))
    assert not isinstance(raised.value, UsageError)


def test_the_last_part_of_an_answer() -> None:
    """Its counts, and the log-probabilities of the prompt: of the token itself, and of the likeliest one."""
    prompt = list(range(40, 80))

    async def answered() -> list[dict[str, Any]]:
        llm, parts = AsyncLLM(tiny_engine(), **LIMITS), []
        try:
            for logprobs in (None, None, 1):
                params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0, prompt_logprobs=logprobs)
                prepared = llm.submit(prompt, params)
                async for _ in prepared:
                    pass
                parts.append(form.last_part(prepared.request, 3))
        finally:
            await llm.close()
        return parts

    first, again, scored = asyncio.run(answered())
    counts = {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43}
    assert first == {"completion_usage": counts | {"prompt_tokens_details": {"cached_tokens": 0}}}
    assert again["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    none, *entries = scored["engine_data"]["prompt_logprobs"]
    assert none is None and len(entries) == 39
    for token, entry in zip(prompt[1:], entries, strict=True):
        ranked = [one for one in entry.values() if "rank" in one]
        assert str(token) in entry and len(entry) <= 2 and [one["rank"] for one in ranked] == [1]
        assert ranked[0]["logprob"] == max(one["logprob"] for one in entry.values()) < 0
