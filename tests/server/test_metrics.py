"""Values of /metrics, read as a scraper reads them."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginewright import __version__
from enginewright.errors import UsageError
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.metrics import Histogram, token_bounds
from tests.helpers.serving import COMPLETIONS, LENGTH, LIMITS, Running, running, tiny_engine, wait_until

P = "enginewright_"
REQUEST_TIMES = [f"request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode", "inference")]


@pytest.fixture
def server() -> Iterator[Running]:
    with running(served_model_names=('a "quoted\\ name"',)) as opened:
        yield opened


def scrape(server: Running, **headers: str) -> dict[tuple[str, str], float]:
    """Reads (name, value of the label other than model_name) → value; the process and the build have own tests."""
    answer = server.ask("GET", "/metrics", headers=headers)
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    values = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation and family.type != "unknown"
        if family.name.startswith("process_") or family.name in (P + "build_info", P + "cache_config_info"):
            continue
        assert family.name.startswith(P)
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == 'a "quoted\\ name"'
            values[sample.name, "".join(labels.values())] = sample.value
    return values


def test_an_idle_server_has_all_of_them_at_zero(server: Running) -> None:
    values = scrape(server)
    names = {name for name, _ in values}
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_sum",
        *(name + "_count" for name in REQUEST_TIMES),
        "request_time_per_output_token_seconds_bucket",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "request_max_num_generation_tokens_bucket",
        "request_params_max_tokens_bucket",
        "request_params_n_bucket",
        "iteration_tokens_total_bucket",
    ):
        assert P + name in names
    assert values.pop((P + "engine_open", "")) == 1.0
    assert set(values.values()) == {0.0}


def test_counts(server: Running) -> None:
    prompt = list(range(3, 103))
    server.complete(prompt, n=2, max_tokens=10)
    server.complete(prompt, max_tokens=5, stream=True)
    stopped = server.complete(prompt, max_tokens=5, stop_token_ids=list(range(3, 67)), logit_bias={"5": 100})
    assert stopped["choices"][0]["finish_reason"] == "stop"
    server.post(COMPLETIONS, {"prompt": 5})
    server.ask("GET", "/nothing")
    values = scrape(server)
    tokens = 2 * 10 + 5 + 1
    assert values[P + "generation_tokens_total", ""] == tokens
    assert values[P + "prompt_tokens_total", ""] == values[P + "prefix_cache_queries_total", ""] == 300
    assert 100 < values[P + "prefix_cache_hits_total", ""] < 200
    assert values[P + "request_success_total", "length"] == 3
    assert values[P + "request_success_total", "stop"] == 1
    assert values[P + "request_success_total", "abort"] == 0
    assert values[P + "request_rejected_total", "400"] == values[P + "request_rejected_total", "404"] == 1
    together = tokens - 4 - values[P + "inter_token_latency_seconds_count", ""]
    assert 0 <= together <= tokens - 4, "tokens that came with a first one have no time of their own"
    for name, count in (
        ("time_to_first_token_seconds", 4),
        ("inter_token_latency_seconds", tokens - 4 - together),
        ("e2e_request_latency_seconds", 4),
    ):
        assert values[P + name + "_count", ""] == values[P + name + "_bucket", "+Inf"] == count
        assert 0 <= values[P + name + "_sum", ""] < 60
        buckets = [value for (key, _), value in values.items() if key == P + name + "_bucket"]
        assert buckets == sorted(buckets) and len(buckets) > 10


def test_what_a_request_was(server: Running) -> None:
    server.complete(list(range(3, 103)), n=2, max_tokens=10)
    server.complete([[5] * 7, [6] * 7], max_tokens=1)
    server.chat()
    stopped = server.complete([8] * 3, stop_token_ids=list(range(3, 67)), logit_bias={"5": 100}, max_tokens=4)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    values = scrape(server)
    chat_tokens = values[P + "prompt_tokens_total", ""] - 100 - 14 - 3
    assert chat_tokens > 0
    for name, count, total in (
        ("request_prompt_tokens", 5, 100 + 14 + chat_tokens + 3),
        ("request_generation_tokens", 6, 20 + 2 + 8 + 1),
        ("request_max_num_generation_tokens", 5, 10 + 2 + 8 + 1),
        ("request_params_max_tokens", 5, 10 + 2 + 8 + 4),
        ("request_params_n", 5, 2 + 2 + 1 + 1),
    ):
        assert (values[P + name + "_count", ""], values[P + name + "_sum", ""]) == (count, total), name
    assert values[P + "request_prompt_tokens_bucket", "10.0"] == 3


def test_phases_of_a_request(server: Running) -> None:
    for n in (1, 1, 3):
        server.complete(list(range(3, 103)), n=n, max_tokens=10)
    server.complete([5], max_tokens=1)
    values = scrape(server)
    queue, prefill, decode, inference = (values[P + name + "_sum", ""] for name in REQUEST_TIMES)
    assert all(values[P + name + "_count", ""] == 4 for name in REQUEST_TIMES)
    assert min(queue, prefill, decode) > 0 and prefill + decode == pytest.approx(inference)
    assert queue + inference < values[P + "e2e_request_latency_seconds_sum", ""]
    assert values[P + "request_time_per_output_token_seconds_count", ""] == 3, "one token has none after it"
    assert values[P + "request_time_per_output_token_seconds_sum", ""] == pytest.approx(decode / 9)


def test_what_leaves_has_no_phases(server: Running) -> None:
    with server.held_steps(once=lambda llm: llm.stats().generated_tokens > 2):
        with server.connect() as connection:
            server.send(connection, COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "ignore_eos": True})
            server.until_held()
        wait_until(lambda: server.llm.stats().num_waiting > 0)  # for the step under way to end, to be aborted
    wait_until(server.is_idle)
    values = scrape(server)
    assert all(values[P + name + "_count", ""] == 0 for name in (*REQUEST_TIMES, "request_prompt_tokens"))


def test_tokens_of_steps(server: Running) -> None:
    server.complete(list(range(3, 100)), max_tokens=10)  # steps of 64 and 33, then nine of one
    values = scrape(server)
    name = P + "iteration_tokens_total"
    assert (values[name + "_count", ""], values[name + "_sum", ""]) == (11, 106)
    bounds = ("1.0", "8.0", "32.0", "64.0", "16384.0", "+Inf")
    assert [values[name + "_bucket", bound] for bound in bounds] == [9, 9, 9, 11, 11, 11]


def test_a_request_waits_in_the_queue_until_it_is_admitted() -> None:
    with Engine.open(tiny_engine()) as engine:
        core = EngineCore(engine, runtime_config(**LIMITS | {"max_num_seqs": 1}))
        try:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            first, second = (core.request([5, 6, 7], params, lambda _: None) for _ in range(2))
            core.add(first)
            core.add(second)
            assert first.queue_s is None
            while core.has_work:
                core.step()
        finally:
            core.close()
    assert first.queue_s is not None and first.first_token_s is not None and first.total_s is not None
    assert second.queue_s is not None and second.first_token_s is not None
    assert 0 < first.queue_s < first.first_token_s < first.total_s
    assert (
        first.arrived_at + first.total_s < second.arrived_at + second.queue_s < second.arrived_at + second.first_token_s
    )


def test_the_process_and_the_build(server: Running) -> None:
    text = server.ask("GET", "/metrics").body.decode()
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    (build,) = families[P + "build_info"]
    content_hash = server.llm.engine.manifest.content_hash
    expected = {"model_name": 'a "quoted\\ name"', "version": __version__, "content_hash": content_hash}
    assert build.labels == expected and build.value == 1
    values = {name: samples[0].value for name, samples in families.items() if name.startswith("process_")}
    assert 1 << 24 < values["process_resident_memory_bytes"] < values["process_virtual_memory_bytes"]
    assert values["process_cpu_seconds"] == pytest.approx(sum(os.times()[:2]), abs=1)
    assert 3 < values["process_open_fds"] < values["process_max_fds"]
    assert time.time() - 86400 < values["process_start_time_seconds"] < time.time()


def test_bounds_of_token_counts() -> None:
    assert token_bounds(1) == [1]
    assert token_bounds(99) == [1, 2, 5, 10, 20, 50]
    assert token_bounds(100) == [1, 2, 5, 10, 20, 50, 100]
    assert token_bounds(LENGTH)[-1] == 2000


def test_histograms() -> None:
    values = Histogram((1, 2.5))
    for value, times in ((0.5, 1), (1, 2), (2, 3), (2.6, 4)):
        values.observe(value, times)
    assert values.buckets() == ([("1.0", 3), ("2.5", 6), ("+Inf", 10)], 0.5 + 2 + 6 + 2.6 * 4)


def test_what_runs_and_what_leaves(server: Running) -> None:
    with server.held_steps(once=lambda llm: llm.stats().num_running == 3):
        with server.connect() as connection:
            server.send(connection, COMPLETIONS, {"prompt": "a", "n": 3, "max_tokens": 4000, "ignore_eos": True})
            server.until_held()
            assert scrape(server)[P + "num_requests_running", ""] == 3
            assert 0 < scrape(server)[P + "kv_cache_usage_perc", ""] <= 1
        wait_until(lambda: server.llm.stats().num_waiting > 0)  # for the step under way to end, to be aborted
    wait_until(lambda: scrape(server)[P + "request_success_total", "abort"] == 3)
    wait_until(lambda: scrape(server)[P + "num_requests_running", ""] == 0)  # once the step that runs is done


def test_openmetrics_for_those_who_ask(server: Running) -> None:
    answer = server.ask("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")


def samples_of(server: Running) -> list[tuple[str, dict[str, str], float]]:
    text = server.ask("GET", "/metrics").body.decode()
    families = text_string_to_metric_families(text)
    return [(one.name, one.labels, one.value) for family in families for one in family.samples]


def test_names_of_vllm_stand_next_to_ours() -> None:
    with running(metrics_compat="vllm") as server:
        server.complete([5, 6, 7], max_tokens=4)
        found = samples_of(server)
    theirs = {(name, *sorted(labels.items())): value for name, labels, value in found if name.startswith("vllm:")}
    ours = {
        (name.replace(P, "vllm:", 1), *sorted({**labels, "engine": "0"}.items())): value
        for name, labels, value in found
        if name.startswith(P)
    }
    assert theirs.items() <= ours.items()
    one = (("engine", "0"), ("model_name", "tiny"))
    assert theirs["vllm:prompt_tokens_total", *one] == 3 and theirs["vllm:num_requests_running", *one] == 0
    names = {name for name, *_ in theirs}
    for name in (
        "kv_cache_usage_perc",
        "time_to_first_token_seconds_bucket",
        "request_success_total",
        "iteration_tokens_total_sum",
    ):
        assert f"vllm:{name}" in names
    without = {f"vllm:{name}" for name in ("engine_open", "build_info", "request_rejected_total")}
    assert not without & names


def test_config_of_the_cache(server: Running) -> None:
    (found,) = [labels for name, labels, _ in samples_of(server) if name == P + "cache_config_info"]
    assert int(found["num_gpu_blocks"]) == server.llm.memory_plan.num_blocks[0]
    (group,) = server.llm.engine.plan.caches
    assert int(found["block_size"]) == group.block_size  # type: ignore[union-attr]
    assert not [name for name, *_ in samples_of(server) if name.startswith("vllm:")]


def test_names_of_nobody_are_refused() -> None:
    with pytest.raises(UsageError, match=r"metrics_compat is 'tgi'.*it must be vllm"):
        ServerConfig(metrics_compat="tgi")


USAGES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 5, "n": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 5},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
}


def usages(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every "usage" in a response, wherever it is, but those of what goes on."""
    if isinstance(value, dict):
        if isinstance(found := value.get("usage"), dict) and "phases" in found:
            yield found
        for inner in value.values():
            yield from usages(inner)


@pytest.mark.parametrize("path", USAGES)
def test_usage_says_what_each_phase_took(server: Running, path: str) -> None:
    """The times in `usage` are those that `/metrics` counts."""
    for number, stream in enumerate((False, True), start=1):
        before = scrape(server)
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        if path in ("/v1/responses", "/v1/messages"):
            options.pop("stream_options", None)
        answer = server.post(path, {"ignore_eos": True, **USAGES[path], **options})
        assert answer.status == 200, answer.body
        lines = (
            [line[6:] for line in answer.body.splitlines() if line.startswith(b"data: {")] if stream else [answer.body]
        )
        (usage,) = (found for line in lines for found in usages(json.loads(line)))
        wait_until(lambda count=number: scrape(server)[f"{P}request_prefill_time_seconds_count", ""] == count)
        after = scrape(server)
        counted = {
            phase: after[name, ""] - before[name, ""]
            for phase in ("queue", "prefill", "decode")
            for name in (f"{P}request_{phase}_time_seconds_sum",)
        }
        assert usage["phases"] == pytest.approx({f"{phase}_s": seconds for phase, seconds in counted.items()}, abs=2e-6)
        assert usage["phases"]["prefill_s"] > 0 and usage["phases"]["decode_s"] > 0


def test_phases_of_several_prompts_are_those_of_the_slowest(server: Running) -> None:
    usage = server.complete(["Hello", "Hello, who are you?"], max_tokens=20)["usage"]
    wait_until(lambda: scrape(server)[f"{P}request_decode_time_seconds_count", ""] == 2)
    phases, values = usage["phases"], scrape(server)
    sums = {name: values[f"{P}request_{name}_time_seconds_sum", ""] for name in ("queue", "prefill", "decode")}
    assert all(0 <= phases[f"{name}_s"] <= seconds + 1e-6 for name, seconds in sums.items())
    assert sum(phases.values()) >= sum(sums.values()) / 2 - 1e-5
