"""`engine bench` as people meet it: what it prints, where, and its exit codes."""

import json
from pathlib import Path

import pytest

from tests.helpers.bench_server import BenchServer, Say
from tests.helpers.command import run_engine

SMALL = ("--num-prompts", 3, "--input-len", "4:6", "--output-len", 5)


def test_offline_prints_a_table_or_one_json_object(engine_path: Path) -> None:
    options = (*SMALL, "--rounds", 2, "--max_num_seqs", 2, "--threads", 1, "--kv-cache-memory", "8m")
    text = run_engine("bench", "offline", engine_path, *options)
    assert text.exit_code == 0 and "generated tokens/s" in text.stdout and "[round 2 of 2" in text.stderr
    found = json.loads(run_engine("bench", "offline", engine_path, *options, "--json").stdout)
    assert found["config"]["limits"]["max_num_seqs"] == 2
    assert [entry["generated_tokens"] for entry in found["rounds"]] == [15, 15]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_offline_draws_a_picture(engine_path: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    result = run_engine(
        "bench",
        "offline",
        engine_path,
        *SMALL,
        "--rounds",
        2,
        "--threads",
        1,
        "--kv-cache-memory",
        "8m",
        "--plot",
        path,
    )
    assert result.exit_code == 0, result.output
    start = path.read_bytes()[:400]
    assert b"<svg" in start if suffix == "svg" else start.startswith(b"\x89PNG")
    refused = run_engine("bench", "offline", engine_path, *SMALL, "--plot", "x.gif")
    assert refused.exit_code == 2 and "round" not in refused.stderr, "said before the run"


def test_serve_prints_a_table_or_one_json_object(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    with BenchServer(lambda number, body: Say(gap_s=0.001)) as server:
        options = (*SMALL, "--base-url", server.url, "--request-rate", "200", "--goodput", "ttft=60000")
        text = run_engine("bench", "serve", *options, "--plot", path)
        chat = run_engine("bench", "serve", *options, "--endpoint", "chat", "--max-concurrency", 2, "--json")
    assert text.exit_code == 0, text.output
    for piece in ("3 prompts, 4:6 tokens in, 5 out", "3 done, 0 failed", "first token (TTFT)", "sent too late", "p99"):
        assert piece in text.stdout
    assert text.stderr == "" and path.stat().st_size > 1000
    found = json.loads(chat.stdout)
    assert (found["done"], found["good"], found["generated_tokens"]) == (3, 3, 15)
    assert found["config"]["endpoint"] == "chat" and found["config"]["request_rate"] == 200


def test_serve_ends_with_a_failure_if_nothing_was_answered() -> None:
    with BenchServer(lambda number, body: Say(status=500, body="broken")) as server:
        result = run_engine("bench", "serve", *SMALL, "--base-url", server.url, "--warm-up", 0, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["failed"] == 3
    assert result.stderr == "engine: no request was completed: HTTP 500: broken\n"


@pytest.mark.parametrize(
    ("code", "options", "piece"),
    [
        (2, ("--input-len", "9:3"), "--input-len 9:3 is an empty range"),
        (2, ("--request-rate", "-1"), "--request-rate is -1"),
        (2, ("--goodput", "ttft"), "--goodput ttft"),
        (2, ("--base-url", "localhost"), "--base-url localhost"),
        (2, ("--plot", "no/such/folder/x.svg"), "there is no folder"),
        (2, ("--plot", "x.gif"), ".svg or .png"),
        (2, ("--dataset", "no/such/file"), "cannot be read"),
        (2, ("--server-pid", "999999999"), "--server-pid 999999999"),
        (1, (), "cannot be reached"),
    ],
)
def test_what_goes_wrong_is_said_before_the_run(code: int, options: tuple[str, ...], piece: str) -> None:
    result = run_engine("bench", "serve", "--base-url", "http://127.0.0.1:9", *options)
    assert result.exit_code == code, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr and piece in result.stderr
