"""What /metrics says, read as a scraper reads it."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginewright.runtime.server.metrics import Histogram
from tests.serving import COMPLETIONS, Running, running, wait_until

P = "enginewright_"


@pytest.fixture
def server() -> Iterator[Running]:
    with running(served_model_names=('a "quoted\\ name"',)) as opened:
        yield opened


def scrape(server: Running, **headers: str) -> dict[tuple[str, str], float]:
    """(name, the label beside model_name) → value."""
    answer = server.ask("GET", "/metrics", headers=headers)
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    values = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.name.startswith(P) and family.documentation and family.type != "unknown"
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
    ):
        assert P + name in names
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


def test_histograms() -> None:
    values = Histogram((1, 2.5))
    for value, times in ((0.5, 1), (1, 2), (2, 3), (2.6, 4)):
        values.observe(value, times)
    assert values.buckets() == ([("1.0", 3), ("2.5", 6), ("+Inf", 10)], 0.5 + 2 + 6 + 2.6 * 4)


def test_what_runs_and_what_leaves(server: Running) -> None:
    with server.connect() as connection:
        server.send(connection, COMPLETIONS, {"prompt": "a", "n": 3, "max_tokens": 4000, "ignore_eos": True})
        wait_until(lambda: scrape(server)[P + "num_requests_running", ""] == 3)
        assert 0 < scrape(server)[P + "kv_cache_usage_perc", ""] <= 1
    wait_until(lambda: scrape(server)[P + "request_success_total", "abort"] == 3)
    wait_until(lambda: scrape(server)[P + "num_requests_running", ""] == 0)  # once the step that runs is done


def test_openmetrics_for_those_who_ask(server: Running) -> None:
    answer = server.ask("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.body.endswith(b"# EOF\n")
