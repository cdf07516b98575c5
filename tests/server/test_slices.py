"""Metrics by slices of requests, ages, evictions and the ends of structured answers and calls, on a real server."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginewright.errors import UsageError
from enginewright.runtime.cache.pool import Pool
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.server.config import MAX_TENANT_CLASSES, ServerConfig
from enginewright.runtime.server.metrics import Metrics, MetricsPage
from enginewright.runtime.server.slices import Measurements
from enginewright.runtime.server.work import class_name
from tests.helpers.documents import ROOT
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, NAN_TOKEN, Running, exactly, running, wait_until

P = "enginewright_"
SLOW_PAGE = (ROOT / "docs/slow.md").read_text()
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOT_SLICED = ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
Labels = frozenset[tuple[str, str]]


def labels(**values: str) -> Labels:
    return frozenset(values.items())


def scrape(server: Running, **headers: str) -> dict[tuple[str, Labels], float]:
    """Reads (name without its prefix, labels other than model_name) → value, once all requests are counted."""
    wait_until(server.is_idle)
    text = server.ask("GET", "/metrics", headers=headers).body.decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {
        (one.name.removeprefix(P), frozenset((key, value) for key, value in one.labels.items() if key != "model_name")):
        one.value
        for one in samples
    }  # fmt: skip


def by_value(values: Mapping[tuple[str, Labels], float], name: str, slice: str, **others: str) -> dict[str, float]:
    """A metric's value for each value of a slice."""
    return {
        dict(found)["value"]: value
        for (one, found), value in values.items()
        if one == name and labels(slice=slice, **others) <= found
    }


def documented() -> dict[str, list[str]]:
    """The slices and their values, as the page of the documentation lists them."""
    rows = re.findall(r"^\| `(\w+)` \| ((?:`[\w-]+`(?:, )?)+) \|", SLOW_PAGE, re.MULTILINE)
    return {name: re.findall(r"`([\w-]+)`", listed) for name, listed in rows}


@pytest.fixture
def server() -> Iterator[Running]:
    with running(kind="calls tools at once") as opened:
        yield opened


def test_each_slice_counts_each_request_once(server: Running) -> None:
    prompt = list(range(3, 303))  # more than 256 tokens
    server.complete(prompt, max_tokens=10)
    server.complete(prompt, max_tokens=5, stream=True)  # all but its last block is cached
    server.complete([*prompt, *[7] * 2000], max_tokens=2)  # its first 300 tokens are cached, and it has 2,300
    server.complete([[5] * 7, [6] * 7], n=2, max_tokens=3)
    server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 4, "priority": 37})
    server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 4}, {"X-Priority": "best-effort"})
    server.chat(structured_outputs=exactly("Graz"), ignore_eos=False)
    server.chat(tools=TOOLS)
    server.post(COMPLETIONS, {"prompt": 5})
    values = scrape(server)
    assert by_value(values, "sliced_requests_total", "structured") == {"no": 8, "yes": 1}
    assert by_value(values, "sliced_requests_total", "tools") == {"no": 8, "yes": 1}
    assert by_value(values, "sliced_requests_total", "speculation") == {"no": 9}
    cached = by_value(values, "sliced_requests_total", "cached")
    assert cached.pop("over_half") == 1 and cached.pop("up_to_half") >= 1 and cached.pop("none") >= 5 and not cached
    lengths = {"up_to_256": 6, "up_to_2048": 2, "up_to_16384": 1}
    assert by_value(values, "sliced_requests_total", "prompt_tokens") == lengths
    assert by_value(values, "sliced_requests_total", "priority") == {"interactive": 7, "batch": 1, "best-effort": 1}
    assert by_value(values, "sliced_time_to_first_token_seconds_count", "prompt_tokens")["up_to_256"] == 8
    assert by_value(values, "sliced_tokens_total", "prompt_tokens", kind="generation")["up_to_2048"] == 15
    assert by_value(values, "sliced_tokens_total", "prompt_tokens", kind="prompt")["up_to_16384"] == 2300
    assert by_value(values, "sliced_tokens_total", "cached", kind="cached")["none"] == 0
    there = {dict(found)["slice"] for name, found in values if name == "sliced_requests_total"}
    assert there == {*documented()} and "tenant" not in there
    for slice in there:
        sums = Counter[tuple[str, Labels]]()
        for (name, found), value in values.items():
            if name.startswith("sliced_") and ("slice", slice) in found:
                others = frozenset(pair for pair in found if pair[0] not in ("slice", "value"))
                sums[name.removeprefix("sliced_"), others] += value
        for name in NOT_SLICED:
            assert sums[name, labels()] == values[name, labels()] > 0, slice
        for name in ("time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum"):
            assert sums[name, labels()] == pytest.approx(values[name, labels()]), slice
        for phase in ("queue", "prefill", "decode"):
            counted = values[f"request_{phase}_time_seconds_sum", labels()]
            assert sums["phase_seconds_total", labels(phase=phase)] == pytest.approx(counted), slice
        assert sums["requests_total", labels()] == values["request_queue_time_seconds_count", labels()] == 9
        for kind, name in (
            ("prompt", "prompt_tokens_total"),
            ("cached", "prefix_cache_hits_total"),
            ("generation", "generation_tokens_total"),
        ):
            assert sums["tokens_total", labels(kind=kind)] == values[name, labels()] > 0, slice


def test_a_request_that_waits_for_its_grammar_prepares(server: Running) -> None:
    server.chat(structured_outputs={"regex": "(a|b){30}"}, ignore_eos=False, max_tokens=40)
    server.chat()
    seconds = by_value(scrape(server), "sliced_phase_seconds_total", "structured", phase="prepare")
    assert seconds["yes"] > seconds["no"] > 0, "the first grammar starts the processes and makes the trie"


def test_what_leaves_counts_as_far_as_it_came(server: Running) -> None:
    with server.held_steps(once=lambda llm: llm.stats().generated_tokens > 2):
        with server.connect() as connection:
            server.send(connection, COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "ignore_eos": True})
            server.until_held()
        wait_until(lambda: server.llm.stats().num_waiting > 0)  # for the step under way to end, to be aborted
    values = scrape(server)
    assert by_value(values, "sliced_time_to_first_token_seconds_count", "tools") == {"no": 1}
    assert by_value(values, "sliced_requests_total", "tools") == {"no": 0}
    assert by_value(values, "sliced_tokens_total", "tools", kind="prompt")["no"] > 0
    assert by_value(values, "sliced_phase_seconds_total", "tools", phase="decode") == {"no": 0}


@pytest.mark.usefixtures("speculation_pays")
def test_speculation_is_a_slice() -> None:
    with running(limits={"speculate": "ngram"}) as server:
        server.complete([5, 6, 7] * 4, max_tokens=60, temperature=0)
        server.complete([5, 6, 7] * 4, max_tokens=1)  # there is nothing to verify
        values = scrape(server)
    assert by_value(values, "sliced_requests_total", "speculation") == {"yes": 1, "no": 1}
    assert by_value(values, "sliced_tokens_total", "speculation", kind="generation") == {"yes": 60, "no": 1}


def test_classes_of_tenants_are_those_of_the_configuration() -> None:
    with running(api_keys=("a", "b", "c"), tenant_classes=("paid", "free", "free")) as server:
        for key, count in (("a", 1), ("b", 2), ("c", 3)):
            for _ in range(count):
                server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "user": "paid"}, {"X-Api-Key": key})
        values = scrape(server, Authorization="Bearer a")
    assert by_value(values, "sliced_requests_total", "tenant") == {"paid": 1, "free": 5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_keys": ("a", "b"), "tenant_classes": ("paid",)}, "there are 1 tenant_classes and 2 API keys"),
        ({"tenant_classes": ("paid",)}, "there are 1 tenant_classes and 0 API keys"),
        ({"api_keys": ("a",), "tenant_classes": ('x"} 1',)}, "tenant_classes has 'x\"} 1'"),
        ({"api_keys": ("a",), "tenant_classes": ("",)}, "tenant_classes has ''"),
        (
            {"api_keys": tuple("abcdefghi"), "tenant_classes": tuple("abcdefghi")},
            f"there are 9 different tenant_classes: there may be {MAX_TENANT_CLASSES}",
        ),
    ],
)
def test_wrong_classes_of_tenants_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        ServerConfig(**settings)


def test_names_of_priorities() -> None:
    names = {priority: class_name(priority) for priority in (-1000, -1, 0, 9, 10, 99, 100, 1000)}
    assert [*names.values()] == ["interactive"] * 4 + ["batch"] * 2 + ["best-effort"] * 2


def test_there_are_as_many_series_as_the_page_says() -> None:
    metrics = Metrics(Stats, "tiny", "0", 100)
    for slice, values in documented().items():
        for value in values:
            metrics.slices.add({slice: value}, Measurements())
    text = MetricsPage(lambda: [(metrics, True)], Counter()).render("")[0].decode()
    series = [line for line in text.splitlines() if line.startswith(P + "sliced_")]
    each, most = map(int, re.findall(r"Each value has (\d+)\s+series, so an engine has at most (\d+)", SLOW_PAGE)[0])
    assert len(series) == most == each * sum(map(len, documented().values()))
    assert f"and {each} more for each class of tenants, of which there may be {MAX_TENANT_CLASSES}" in SLOW_PAGE


def test_ends_of_structured_answers(server: Running) -> None:
    def ask(**options: Any) -> Any:
        return server.chat(structured_outputs=exactly('{"a": 1}'), ignore_eos=False, **options)

    for stream in (False, True):
        ask(max_tokens=100, stream=stream)
        ask(max_tokens=2, stream=stream)
        ask(max_tokens=100, stop=['"'], stream=stream)
        ask(max_tokens=100, stop=["}"], include_stop_str_in_output=True, stream=stream)
    server.chat(max_tokens=4)
    refused = server.post(CHAT, {"messages": HELLO, "structured_outputs": {"regex": "("}})
    assert refused.status == 400
    assert ends(server) == {"complete": 2, "cut": 6, "failed": 0, "aborted": 0}
    before = server.llm.stats().generated_tokens
    with server.connect() as connection:
        server.send(connection, CHAT, {"messages": HELLO, "structured_outputs": {"regex": "[a-z]{4000}"}})
        wait_until(lambda: server.llm.stats().generated_tokens > before)
    assert ends(server) == {"complete": 2, "cut": 6, "failed": 0, "aborted": 1}


def test_a_stop_token_that_ends_every_answer_cuts_none(server: Running) -> None:
    """Clients name the model's own end, as generation configs list it."""
    (end, *_) = server.llm.engine.eos_token_ids
    answer = server.chat(structured_outputs=exactly("Graz"), ignore_eos=False, max_tokens=50, stop_token_ids=[end])
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["message"]["content"] == "Graz"
    assert ends(server) == {"complete": 1, "cut": 0, "failed": 0, "aborted": 0}


def test_a_structured_answer_fails() -> None:
    with running(kind="NaN") as server:
        body = {"prompt": [NAN_TOKEN], "max_tokens": 5, "structured_outputs": {"choice": ["Graz"]}}
        assert server.post(COMPLETIONS, body).status == 500
        assert ends(server) == {"complete": 0, "cut": 0, "failed": 1, "aborted": 0}


def ends(server: Running) -> dict[str, float]:
    return outcomes(server, "structured_outputs_total")


def outcomes(server: Running, name: str) -> dict[str, float]:
    values = scrape(server)
    return {dict(found)["outcome"]: value for (one, found), value in values.items() if one == name}


APIS: Mapping[str, Mapping[str, Any]] = {
    CHAT: {"messages": HELLO, "tools": TOOLS},
    "/v1/responses": {"input": "Hello", "tools": [{"type": "function", "name": "add"}]},
    "/v1/messages": {"messages": HELLO, "tools": [{"name": "add", "input_schema": {}}]},
}


@pytest.mark.parametrize("path", APIS)
def test_ends_of_tool_calls(server: Running, path: str) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for stream in (False, True):
        for text, tokens in (
            (CALL, 400),
            (f"I add.\n{CALL}\n{CALL}", 400),
            (CALL, 20),
            ("<tool_call>add 1</tool_call>", 400),
            ("I add nothing.", 400),
        ):
            body = {**APIS[path], "structured_outputs": exactly(text), "stream": stream, limit: tokens}
            assert server.post(path, body).status == 200
    assert outcomes(server, "tool_calls_total") == {"parsed": 6, "cut": 2, "malformed": 2}
    assert by_value(scrape(server), "sliced_requests_total", "tools") == {"yes": 10}


def test_ages_of_requests() -> None:
    with running(limits={"max_num_seqs": 1}) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
        with server.held_steps(once=lambda llm: llm.stats().num_running == 1):
            began = time.perf_counter()
            first = pool.submit(server.post, COMPLETIONS, body)
            server.until_held()
            between = time.perf_counter()
            second = pool.submit(server.post, COMPLETIONS, body)
            wait_until(lambda: len(server.service.live) == 2)
            since = time.perf_counter()
            ages, now = ages_of(server), time.perf_counter()
            assert 0 < ages["waiting"] < now - between and since - between < ages["running"] < now - began
        assert first.result().status == second.result().status == 200
        wait_until(server.is_idle)
        assert ages_of(server) == {"waiting": 0, "running": 0}


def ages_of(server: Running) -> dict[str, float]:
    text = server.ask("GET", "/metrics").body.decode()
    found = re.findall(r"^enginewright_oldest_(\w+)_request_seconds\{.*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_evictions_of_the_prefix_cache() -> None:
    """Prompts that share nothing, with a last block that is not full: it is the only one that is not kept."""
    with running(limits={"kv_cache_memory": 1 << 20, "max_model_len": 512}) as server:
        (group,) = server.llm.engine.plan.caches
        (capacity,) = server.llm.memory_plan.num_blocks
        size, kept_blocks, num_prompts = group.block_size, 10, 0  # type: ignore[union-attr]
        evictions = []
        for first in range(3, 3 + 2 * capacity // kept_blocks):
            server.complete([first] + [5] * (kept_blocks * size), max_tokens=1)
            num_prompts += 1
            evictions.append(scrape(server)["prefix_cache_evictions_total", labels()])
    published = [kept_blocks * (1 + place) for place in range(num_prompts)]
    assert evictions == [max(0, count - (capacity - 1)) for count in published] and evictions[-1] > 0


def test_only_content_that_could_be_found_is_evicted() -> None:
    pool = Pool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, pool.tag(first, b"a"))
    pool.tag(second, b"b")  # whose step has not ended
    pool.drop(first)
    pool.drop(second)
    assert pool.num_evictions == 0
    assert pool.take() == first and pool.num_evictions == 1
    assert pool.take() == second and pool.num_evictions == 1


def test_evictions_go_on_when_an_engine_is_opened_again() -> None:
    assert Stats(num_evictions=2).after(Stats(num_evictions=3)).num_evictions == 5
