"""Hints of clients for the prefix cache: their forms in each API, what they keep, and that they change no answer."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from enginewright.runtime.cache.eviction import NOT_RETAINED, Retention
from enginewright.runtime.step.sequence import TokenSequence
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, Running, running
from tests.server.test_slices import labels, scrape

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    MESSAGES: {"messages": HELLO, "max_tokens": 1},
}
EPHEMERAL = {"type": "ephemeral"}
HOUR = {**EPHEMERAL, "ttl": "1h"}
TOOL = {"name": "f", "input_schema": {"type": "object"}, "cache_control": HOUR}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server whose KV cache has room for a few prompts of ten blocks."""
    with running(limits={"kv_cache_memory": 1 << 20, "max_model_len": 512}) as opened:
        yield opened


@pytest.fixture
def hints(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[Retention]:
    """Hints of the sequences that reach the scheduler."""
    scheduler, found = server.llm._core._scheduler, list[Retention]()  # type: ignore[union-attr]
    add = scheduler.add

    def noted(sequence: TokenSequence) -> None:
        found.append(sequence.retention)
        add(sequence)

    monkeypatch.setattr(scheduler, "add", noted)
    return found


def block(control: Any, text: str = "x") -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": control}


FORMS: list[tuple[str, dict[str, Any], float]] = [
    *((path, {"cache_control": EPHEMERAL}, 300.0) for path in BODIES),
    *((path, {"cache_control": HOUR}, 3600.0) for path in BODIES),
    *((path, {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, 1800.0) for path in BODIES),
    *((path, {"prompt_cache_retention": "24h"}, 3600.0) for path in BODIES),
    *((path, {"prompt_cache_retention": "in_memory", "prompt_cache_key": "mine"}, 0.0) for path in BODIES),
    *((path, {"session_id": "mine"}, 300.0) for path in BODIES),
    (CHAT, {"cache_control": {**EPHEMERAL, "ttl": 12.8}}, 60.0),
    (CHAT, {"cache_control": {**EPHEMERAL, "ttl": 0}}, 0.0),
    (CHAT, {"cache_control": None, "session_id": None}, 0.0),
    (CHAT, {"prompt_cache_options": {"mode": "explicit"}}, 0.0),
    (CHAT, {"retention_directives": [{"start": 0, "end": None, "priority": 70, "duration": 12.8}]}, 60.0),
    (CHAT, {"retention_directives": [{"start": 0, "duration": 5.0}, {"priority": 1}]}, 3600.0),
    (CHAT, {"messages": [{"role": "user", "content": "x", "cache_control": EPHEMERAL}]}, 300.0),
    (CHAT, {"messages": [{"role": "user", "content": [block(EPHEMERAL), block(HOUR), block(EPHEMERAL)]}]}, 3600.0),
    (MESSAGES, {"system": [block(EPHEMERAL)]}, 300.0),
    (MESSAGES, {"messages": [{"role": "user", "content": [block({**EPHEMERAL, "scope": "global"})]}]}, 300.0),
    (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "none"}}, 3600.0),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}, 0.0),
    (CHAT, {"cache_control": HOUR, "priority": 100}, 0.0),
    (CHAT, {"session_id": "mine", "priority": 10}, 300.0),
]


@pytest.mark.parametrize(("path", "keys", "ttl_s"), FORMS)
def test_forms_of_hints(server: Running, hints: list[Retention], path: str, keys: dict[str, Any], ttl_s: float) -> None:
    answer = server.post(path, BODIES[path] | keys)
    assert answer.status == 200 and "x-enginewright-warning" not in answer.headers, (answer.body, answer.headers)
    assert hints == [Retention.of(ttl_s, "")] and (hints[0] is NOT_RETAINED) == (ttl_s == 0)


def test_a_tool_result_and_its_arguments(server: Running, hints: list[Retention]) -> None:
    """A result may have a mark; arguments of calls are no place for one."""
    call = {
        "type": "tool_use",
        "id": "a",
        "name": "f",
        "input": {"cache_control": 5, "content": [{"cache_control": 7}]},
    }
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block(HOUR)]}
    messages = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert server.post(MESSAGES, {"messages": messages, "max_tokens": 1}).status == 200
    assert [hint.ttl_s for hint in hints] == [3600.0]


def test_the_header_of_a_session(server: Running, hints: list[Retention]) -> None:
    for session in ("mine", "\xff", "x" * 500):
        assert server.post(COMPLETIONS, BODIES[COMPLETIONS], {"X-Session-Id": session}).status == 200
    assert server.post(COMPLETIONS, BODIES[COMPLETIONS], {"X-Session-Id": ""}).status == 200
    assert [hint.ttl_s for hint in hints] == [300, 300, 300, 0]


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"cache_control": {**EPHEMERAL, "ttl": "soon"}}, "cache_control.ttl"),
        ({"cache_control": {**EPHEMERAL, "ttl": -1}}, "cache_control.ttl"),
        ({"cache_control": {"type": "eternal"}}, "cache_control.type"),
        ({"messages": [{"role": "user", "content": [block(HOUR), block(5)]}]}, "messages[0].content[1].cache_control"),
        ({"tools": [{"cache_control": {**EPHEMERAL, "ttl": []}}]}, "tools[0].cache_control.ttl"),
        ({"prompt_cache_options": {"ttl": "1d"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_retention": "for ever"}, "prompt_cache_retention"),
        ({"retention_directives": [{"duration": -3.0}]}, "retention_directives[0].duration"),
    ],
)
def test_what_is_no_hint_is_refused(server: Running, keys: dict[str, Any], param: str) -> None:
    answer = server.post(CHAT, BODIES[CHAT] | keys)
    assert answer.status == 400 and answer.json["error"]["param"] == param, answer.body


def test_hints_keep_a_prompt_and_change_no_answer(server: Running) -> None:
    """Floods of other prompts evict a prompt without a hint, and not one with it; all answers have the same bits."""
    (group,) = server.llm.engine.plan.caches
    (capacity,) = server.llm.memory_plan.num_blocks
    prompt = [7] + [5] * (4 * group.block_size)  # type: ignore[union-attr]
    options: Any = {"max_tokens": 6, "logprobs": 3, "seed": 1, "temperature": 1.0, "ignore_eos": True}

    def answer(**hint: Any) -> tuple[Any, int]:
        found = server.complete(prompt, **options, **hint)
        (choice,) = found["choices"]
        return (choice["text"], choice["logprobs"]), found["usage"]["prompt_tokens_details"]["cached_tokens"]

    def flood(**hint: Any) -> list[str]:
        prompts = ([first] + [9] * (10 * group.block_size) for first in range(20, 20 + capacity // 5))  # type: ignore[union-attr]
        return [server.complete(one, max_tokens=2, **hint)["choices"][0]["text"] for one in prompts]

    expected, _ = answer()
    others = flood()
    assert answer() == (expected, 0)
    assert flood() == others
    assert answer(cache_control=HOUR) == (expected, 0)
    assert flood() == others
    kept, found = answer()
    assert kept == expected and found == 4 * group.block_size  # type: ignore[union-attr]
    assert scrape(server)["prefix_cache_retained_blocks", labels()] >= 4
    before = scrape(server)["prefix_cache_early_evictions_total", labels()]
    assert flood(cache_control=HOUR) == others, "one that hints everything"
    assert answer() == (expected, 0), "it has used up the part of its tenant"
    assert scrape(server)["prefix_cache_early_evictions_total", labels()] > before
