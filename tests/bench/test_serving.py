"""Load on a small real server: what is asked, how much at once, what counts as done, and what does not."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.errors import EngineError, UsageError
from enginewright_bench import serving
from enginewright_bench.client import AnswerReader
from enginewright_bench.figures import Goodput, RequestRecord
from enginewright_bench.plot import check_plot, draw
from enginewright_bench.report import describe_serve
from enginewright_bench.serving import (
    Chat,
    Completions,
    ServeConfig,
    ServeReport,
    arrivals,
    run_serve,
)
from enginewright_bench.workload import Lengths, WorkloadConfig
from tests.helpers.bench_server import BenchServer, Say

WORK = WorkloadConfig(num_prompts=6, input_len=Lengths(5, 5), output_len=Lengths(4, 4))


def run(server: BenchServer, work: WorkloadConfig = WORK, **options: Any) -> ServeReport:
    return run_serve(ServeConfig(server.url, work, **{"warm_up": 0} | options))


# --- What is asked


def test_completions_are_asked_for_with_ids_greedy_streamed_and_of_forced_length() -> None:
    with BenchServer() as server:
        report = run(server, replace(WORK, input_len=Lengths(3, 9), output_len=Lengths(1, 7)))
    assert report.model == "tiny", "the server's first"
    assert {seen.path for seen in server.asked} == {"/v1/completions"}
    for seen in server.asked:
        body = dict(seen.body)
        assert all(1000 <= token < 10_000 for token in body.pop("prompt"))
        assert 1 <= body.pop("max_tokens") <= 7
        assert body == {
            "model": "tiny",
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    figures = report.figures
    assert figures.done == 6 and figures.failed == 0 and not figures.errors
    assert figures.prompt_tokens == sum(len(seen.body["prompt"]) for seen in server.asked)
    assert figures.generated_tokens == sum(seen.body["max_tokens"] for seen in server.asked)


def test_a_chat_is_asked_for_with_messages() -> None:
    with BenchServer() as server:
        report = run(server, replace(WORK, ignore_eos=False), endpoint=Chat(), model="other", api_key="secret")
    assert [seen.path for seen in server.seen] == ["/v1/chat/completions"] * 6, "a named model is not looked up"
    for seen in server.asked:
        ((role, content),) = [(message["role"], message["content"]) for message in seen.body["messages"]]
        assert role == "user" and len(content.split()) == 5
        assert seen.body["model"] == "other" and "ignore_eos" not in seen.body
        assert seen.headers["authorization"] == "Bearer secret"
    assert [len(answer.piece_s) for answer in report.answers] == [4] * 6, "what says the role or the end is no piece"
    assert "secret" not in json.dumps(report.to_dict()) + describe_serve(report)


def test_warm_up_does_not_count_and_asks_something_else() -> None:
    with BenchServer() as server:
        report = run(server, warm_up=3)
    prompts = [str(seen.body["prompt"]) for seen in server.asked]
    assert len(prompts) == len(set(prompts)) == 9 and report.figures.done == 6


def test_a_dataset_is_asked_in_the_form_of_the_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "Hello", "max_tokens": 2}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    work = WorkloadConfig(dataset=path, output_len=Lengths(3, 3))
    with BenchServer() as server:
        run(server, work, endpoint=Chat(), max_concurrency=1)
        with pytest.raises(UsageError, match="line 2: has messages; use --endpoint chat"):
            run(server, work)
        path.write_text("[1, 2]\n")
        with pytest.raises(UsageError, match="line 1: has token ids"):
            run(server, work, endpoint=Chat())
        run(server, work, endpoint=Completions(), warm_up=1)
    asked = [(seen.body.get("messages", seen.body.get("prompt")), seen.body["max_tokens"]) for seen in server.asked]
    hello, hi, (warm_up, _), ids = asked
    assert hello == ([{"role": "user", "content": "Hello"}], 2)
    assert hi == ([{"role": "user", "content": "Hi"}], 3)
    assert isinstance(warm_up, str) and ids == ([1, 2], 3)


# --- How much, and when


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_no_more_are_in_flight_than_allowed_and_no_fewer(limit: int) -> None:
    with BenchServer(lambda number, body: Say(until_together=limit)) as server:
        report = run(server, replace(WORK, num_prompts=17), max_concurrency=limit, timeout_s=20.0)
    assert server.max_in_flight == limit, "the server's own count"
    assert report.figures.max_in_flight == limit and report.figures.done == 17


def test_without_limits_all_are_in_flight_at_once() -> None:
    with BenchServer(lambda number, body: Say(until_together=40)) as server:
        report = run(server, replace(WORK, num_prompts=40), timeout_s=20.0)
    assert server.max_in_flight == report.figures.max_in_flight == report.figures.done == 40


def test_arrivals_are_poisson_and_follow_the_seed() -> None:
    config = ServeConfig("http://x", WORK, request_rate=20.0)
    times = arrivals(config, 20_001)
    pauses = np.diff(times)
    assert times == arrivals(config, 20_001) and times[0] == 0
    assert pauses.min() > 0
    assert pauses.mean() == pytest.approx(1 / 20, rel=0.03) and pauses.std() == pytest.approx(1 / 20, rel=0.03)
    assert times[:50] != arrivals(replace(config, workload=replace(WORK, seed=1)), 20_001)[:50]
    assert arrivals(ServeConfig("http://x", WORK), 3) == [0, 0, 0]


def test_no_request_is_sent_before_its_turn() -> None:
    with BenchServer() as server:
        report = run(server, replace(WORK, num_prompts=12), request_rate=100.0)
    assert [answer.due_s for answer in report.answers] == arrivals(report.config, 12)
    assert all(answer.sent_s >= answer.due_s for answer in report.answers)
    assert report.figures.send_delay_ms is not None and report.figures.send_delay_ms.p50 > 0


# --- What comes back


def test_times_are_those_of_the_server() -> None:
    say = Say(first_s=0.05, gap_s=0.02)
    with BenchServer(lambda number, body: say) as server:
        report = run(server, replace(WORK, num_prompts=3), goodput=Goodput(ttft=49), max_concurrency=1)
    for answer in report.answers:
        assert answer.ttft_s >= 0.05 and answer.e2e_s >= 0.05 + 3 * 0.02
        assert answer.tpot_s == pytest.approx(sum(answer.gaps_s) / 3)
        assert answer.due_s <= answer.sent_s < answer.piece_s[0] < answer.piece_s[-1] <= answer.end_s
    assert report.figures.good == 0, "the server is slower than that"


def test_tokens_that_come_together_have_no_gap() -> None:
    with BenchServer(lambda number, body: Say(together=4)) as server:
        report = run(server, replace(WORK, output_len=Lengths(8, 8)))
    for answer in report.answers:
        assert answer.tokens == len(answer.piece_s) == 8 and answer.gaps_s.count(0) >= 6


def test_what_the_server_does_not_count_is_counted_in_pieces() -> None:
    with BenchServer(lambda number, body: Say(usage=False)) as server:
        report = run(server)
    assert report.figures.generated_tokens == 6 * 4 and report.figures.prompt_tokens == 0
    assert report.figures.without_usage == 6 and "without usage" in describe_serve(report)


def test_short_answers_and_cached_prompts_are_told() -> None:
    with BenchServer(lambda number, body: Say(tokens=1 + number % 2 * 3, cached_tokens=2)) as server:
        report = run(server)
    assert report.figures.short_answers == 3 and report.figures.cached_prompt_tokens == 12
    text = describe_serve(report)
    assert "3 of 6 completions are shorter" in text and "12 of 30 prompt tokens" in text


FAULTS: dict[str, tuple[Say, str]] = {
    "HTTP 500": (Say(status=500, body={"error": {"message": "it broke"}}), "it broke"),
    "HTTP 429": (Say(status=429, body={"detail": "too many"}), "too many"),
    "HTTP 502": (Say(status=502, body="<html> bad\n gateway"), "<html> bad gateway"),
    "HTTP 302": (Say(status=302, body="", headers=("Location: /elsewhere",)), ""),
    "connection dropped": (Say(drop_after=2), ""),
    "answer cut short": (Say(cut_after=2), "after 2 pieces"),
    "not an event stream": (Say(content_type="application/json", body={}), "application/json"),
    "error in the stream": (Say(tokens=2, fails={"message": "no memory"}, finish_reason="stop"), "no memory"),
    "finish_reason error": (Say(finish_reason="error"), "after 4 pieces"),
    "timeout": (Say(gap_s=5), "after 1 s"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failed_request_never_counts_as_done(kind: str) -> None:
    say, detail = FAULTS[kind]
    with BenchServer(lambda number, body: say if number % 3 == 1 else Say()) as server:
        report = run(server, max_concurrency=1, timeout_s=1.0 if kind == "timeout" else 60.0)
    figures = report.figures
    assert (figures.done, figures.failed) == (4, 2)
    assert {name: error.count for name, error in figures.errors.items()} == {kind: 2}
    assert detail in figures.errors[kind].example
    assert figures.generated_tokens == 16 and figures.prompt_tokens == 20, "of whole answers alone"
    assert figures.short_answers == 0
    assert f"failed: 2 × {kind}" in describe_serve(report)
    report.check()
    assert {seen.path for seen in server.seen} <= {"/v1/models", "/v1/completions"}, "nothing was followed"


def test_a_run_without_an_answer_is_a_failure() -> None:
    with BenchServer(lambda number, body: Say(status=503, body="busy")) as server:
        report = run(server)
    assert report.figures.done == 0 and "0 done, 6 failed" in describe_serve(report)
    assert json.dumps(report.to_dict())
    with pytest.raises(EngineError, match="no request was completed: HTTP 503: busy"):
        report.check()


def events(*blocks: bytes) -> RequestRecord:
    answer = RequestRecord(9)
    reader = AnswerReader(answer)
    for number, block in enumerate(blocks):
        reader.feed(block, float(number))
    reader.close()
    return answer


def test_events_are_read_however_they_are_cut() -> None:
    stream = (
        b': ping\r\n\r\nevent: x\ndata:{"choices":[{"text":"","finish_reason":""}]}\n\n'
        b'data: {"choices":[{"text":"\xc3\xa4"}],"unknown":[1]}\r\n\r\n'
        b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n'
        b'data: {"choices":null,"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 2, 3, 7, 50, len(stream)):
        answer = events(*[stream[place : place + size] for place in range(0, len(stream), size)])
        assert len(answer.piece_s) == 2 and (answer.prompt_tokens, answer.tokens) == (3, 2)


def test_a_chat_counts_thoughts_and_tokens_without_text_but_not_the_role() -> None:
    def delta(text: str, reason: str = "null") -> bytes:
        return f'data: {{"choices":[{{"delta":{text},"finish_reason":{reason}}}]}}\n\n'.encode()

    answer = events(
        delta('{"role":"assistant","content":""}'),
        delta('{"reasoning_content":"hm"}'),
        delta('{"content":""}'),
        delta('{"role":"assistant","content":"x"}'),
        delta("{}", '"length"'),
    )
    assert answer.piece_s == [1, 2, 3] and answer.tokens == 3
    nothing = events(delta('{"role":"assistant"}'), delta("{}", '"stop"'))
    assert nothing.piece_s == [1], "the end of an answer without text is when it came"


# --- The process of the server


def test_cpu_time_of_the_server_and_its_children() -> None:
    child = "import time\nwhile time.process_time() < 0.3: pass"
    work = f"subprocess.run([sys.executable, '-c', {child!r}])"
    code = f"import subprocess, sys; input(); {work}; print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:

        def say(number: int, body: dict[str, Any]) -> Say:
            if number == 0:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(b"\n")
                process.stdin.flush()
                process.stdout.readline()
            return Say()

        with BenchServer(say) as server:
            report = run(server, server_pid=process.pid)
    finally:
        process.communicate(b"\n")
    assert report.server_cpu_s is not None and 0.25 < report.server_cpu_s < 5
    assert report.tokens_per_cpu_s == pytest.approx(24 / report.server_cpu_s)
    assert "server's CPU time" in describe_serve(report)
    with pytest.raises(UsageError, match=f"--server-pid {process.pid} is not a process"):
        run_serve(replace(report.config, server_pid=process.pid))


def test_a_server_that_ends_has_no_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [1.0, 1.0]

    def cpu_seconds(pid: int) -> float:
        if not times:
            raise UsageError("gone")
        return times.pop()

    monkeypatch.setattr(serving, "cpu_seconds", cpu_seconds)
    with BenchServer() as server:
        assert run(server, server_pid=os.getpid()).server_cpu_s is None


# --- The report


def test_json_has_config_machine_and_no_paths(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "Hello"}\n' * 3)
    with BenchServer() as server:
        report = run(server, WorkloadConfig(dataset=path), request_rate=1000.0, goodput=Goodput(e2e=1e6))
    text = json.dumps(report.to_dict(), allow_nan=False)
    found = json.loads(text)
    assert found["config"]["num_prompts"] == found["done"] == found["good"] == 3
    assert found["config"]["dataset"] == "data.jsonl" and str(tmp_path) not in text and os.getcwd() not in text
    assert found["machine"]["cpu"] and found["machine"]["versions"].keys() == {
        "enginewright",
        "python",
        "numpy",
        "aiohttp",
    }
    assert found["ttft_ms"].keys() == {"mean", "p50", "p90", "p95", "p99", "max"}
    assert "linear interpolation" in found["percentiles"]


@pytest.mark.parametrize("name", ["x.svg", "x.PNG"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_picture_is_drawn(name: str, tokens: int, tmp_path: Path) -> None:
    with BenchServer(lambda number, body: Say() if number else Say(status=500)) as server:
        report = run(server, replace(WORK, output_len=Lengths(tokens, tokens)))
    check_plot(tmp_path / name)
    assert not list(tmp_path.iterdir())
    draw(report, tmp_path / name)
    (path,) = tmp_path.iterdir()
    start = path.read_bytes()[:8]
    assert start.startswith(b"<?xml") if name.endswith("svg") else start == b"\x89PNG\r\n\x1a\n"
