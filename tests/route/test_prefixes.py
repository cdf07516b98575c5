"""Prompts are recognized by what they begin with."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewright.route.prefixes import CHUNK_BYTES, MAX_KEYS, PrefixMemory, read_body

TENANT, OTHER = b"a" * 32, b"b" * 32
TURN = "a question of some length, so that each turn of the conversation has chunks of its own " * 3


def keys(body: Any, tenant: bytes = TENANT) -> list[bytes]:
    return read_body(json.dumps(body).encode()).keys(tenant)


def conversation(turns: int) -> list[dict[str, str]]:
    return [{"role": "user" if turn % 2 == 0 else "assistant", "content": f"{turn} {TURN}"} for turn in range(turns)]


@pytest.mark.parametrize("key", ["messages", "input"])
def test_the_next_turn_begins_with_the_keys_of_the_turn_before(key: str) -> None:
    first, second = (keys({"model": "m", key: conversation(turns)}) for turns in (3, 5))
    assert len(second) > len(first) > 2 and second[: len(first)] == first


def test_a_longer_text_begins_with_the_keys_of_the_shorter() -> None:
    first, second = keys({"prompt": TURN}), keys({"prompt": TURN * 2})
    assert len(second) > len(first) > 1 and second[: len(first)] == first


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"tools": [{"type": "function"}]},
        {"cache_salt": "s"},
        {"system": "x"},
        {"instructions": "x"},
    ],
)
def test_what_stands_before_the_messages_changes_all_keys(change: dict[str, Any]) -> None:
    body = {"model": "m", "messages": conversation(3)}
    assert not set(keys(body)) & set(keys({**body, **change}))


def test_tenants_share_no_keys() -> None:
    body = {"messages": conversation(3)}
    assert not set(keys(body)) & set(keys(body, OTHER))


def test_sampling_parameters_change_no_key() -> None:
    body = {"messages": conversation(3)}
    assert keys(body) == keys({"temperature": 0.5, **body, "max_tokens": 7})


def test_the_number_of_keys_is_bounded() -> None:
    assert len(keys({"prompt": "x" * (CHUNK_BYTES * (MAX_KEYS + 10))})) == MAX_KEYS
    assert keys({"prompt": ""}) == keys({}) == keys({"prompt": "short"}) == []


@given(
    st.binary(max_size=300) | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(repr).map(str.encode)
)
def test_any_body_has_keys(data: bytes) -> None:
    body = read_body(data)
    assert isinstance(body.keys(TENANT), list)
    assert body.kept_id is None


def test_a_name_of_a_response_that_is_not_utf_8() -> None:
    assert read_body(b'{"previous_response_id": "\xff"}').kept_id is None


@pytest.mark.parametrize(
    ("value", "kept"), [('"resp_1"', "resp_1"), ("null", None), ("7", None), ('["x"]', None), (r'"\ud800"', None)]
)
def test_the_continued_response(value: str, kept: str | None) -> None:
    assert read_body(f'{{"previous_response_id": {value}}}'.encode()).kept_id == kept
    assert read_body(f'{{"session_id": {value}}}'.encode()).session == kept


def test_a_deep_body_is_no_fault() -> None:
    assert read_body(b'{"messages": ' + b"[" * 100_000).keys(TENANT) == []


def test_memory_forgets_the_least_recently_used_and_ends_first() -> None:
    memory, first, second = PrefixMemory(max_keys=5), [b"1", b"2", b"3"], [b"a", b"b", b"c"]
    memory.remember(first)
    assert (memory.match(first), memory.match([b"1", b"2", b"x"]), memory.match(second)) == (3, 2, 0)
    memory.remember(second)
    assert (memory.match(first), memory.match(second)) == (2, 3)
    memory.remember(first[:2])
    memory.remember([b"z"])
    assert (memory.match(first), memory.match(second)) == (2, 2)


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12), st.integers(1, 9))
def test_memory_finds_what_a_search_from_the_start_finds(prompts: list[list[int]], max_keys: int) -> None:
    memory = PrefixMemory(max_keys)
    for prompt in prompts:
        keys = [bytes(prompt[:count]) for count in range(1, len(prompt) + 1)]  # as chained ones
        expected = next((count for count, key in enumerate(keys) if memory.match([key]) == 0), len(keys))
        assert memory.match(keys) == expected
        memory.remember(keys)
