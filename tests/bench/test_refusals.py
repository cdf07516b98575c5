"""Refusals of `engine bench serve` before anything is measured: each error says what is wrong, why and what to do."""

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from enginewright.cli import main
from enginewright.errors import EngineError, UsageError
from enginewright_bench import serving
from enginewright_bench.client import checked_url
from enginewright_bench.plot import check_plot
from enginewright_bench.serving import OTHER_FILES, ServeConfig, ServeReport, run_serve
from enginewright_bench.workload import Lengths, WorkloadConfig
from tests.helpers.bench_server import BenchServer, Say
from tests.helpers.serving import free_port

WORK = WorkloadConfig(num_prompts=6, input_len=Lengths(5, 5), output_len=Lengths(4, 4))


def run(server: BenchServer, **options: Any) -> ServeReport:
    return run_serve(ServeConfig(server.url, WORK, **{"warm_up": 0} | options))


@pytest.mark.parametrize("options", [{}, {"model": "tiny", "warm_up": 1}])
def test_a_server_that_is_not_there(options: dict[str, Any]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError) as caught:
        run_serve(ServeConfig(url, WORK, **options))
    assert url.removeprefix("http://") in str(caught.value) and "--base-url" in caught.value.fix


def test_a_model_that_the_server_does_not_have() -> None:
    refusal = Say(status=404, body={"error": {"message": "The model `x` does not exist."}})
    with BenchServer(lambda number, body: refusal) as server, pytest.raises(EngineError) as caught:
        run(server, model="x", warm_up=1)
    text = str(caught.value)
    assert "HTTP 404: The model `x` does not exist." in text and "It has no model x, but tiny, other." in text
    assert len(server.asked) == 1, "nothing is asked after that"


@pytest.mark.parametrize(
    ("models", "piece"),
    [
        (Say(body={"data": []}), "--model"),
        (Say(body="nonsense"), "--model"),
        (Say(status=404, body={}), "--model"),
        (Say(status=401, body={"error": "who are you?"}), "who are you?"),
        (Say(status=307, body={}, headers=("Location: http://127.0.0.1:1/v1/models",)), "307"),
    ],
)
def test_a_server_that_does_not_name_its_model(models: Say, piece: str) -> None:
    with BenchServer() as server:
        server.models = models
        with pytest.raises(EngineError) as caught:
            run(server)
        assert piece in str(caught.value)
        assert run(server, model="tiny").figures.done == 6


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with BenchServer() as server:
        assert run(server).figures.done == 6


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:y", "http://a:b@x", "http://x?y=1", ""]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="--base-url"):
        checked_url(url)


def test_an_address_may_end_with_v1() -> None:
    assert checked_url("http://x:1/v1/") == checked_url("http://x:1/") == checked_url("http://x:1") == "http://x:1"
    assert checked_url("https://x/api/v1") == "https://x/api"


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        ({"request_rate": 0.0}, "--request-rate is 0"),
        ({"request_rate": float("nan")}, "--request-rate is nan"),
        ({"max_concurrency": 0}, "--max-concurrency is 0"),
        ({"warm_up": -1}, "--warm-up is -1"),
        ({"timeout_s": float("inf")}, "--timeout is inf"),
    ],
)
def test_numbers_that_make_no_sense(options: dict[str, Any], piece: str) -> None:
    with pytest.raises(UsageError, match=piece):
        ServeConfig("http://x", WORK, **options)


def test_more_connections_than_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.resource, "getrlimit", lambda which: (OTHER_FILES + 5, 1 << 20))
    with BenchServer() as server:
        with pytest.raises(UsageError, match="6 requests at once") as caught:
            run(server)
        assert "--max-concurrency 5" in caught.value.fix and not server.seen
        assert run(server, max_concurrency=5).figures.done == 6


@pytest.mark.parametrize("arguments", [("offline", "x.engine"), ("profile", "x.engine"), ("serve",)])
def test_the_extra_is_asked_for_when_it_is_missing(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("enginewright_bench."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "enginewright_bench", None)
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2 and "needs enginewright_bench, which is not installed" in result.stderr
    assert "pip install 'enginewright[bench]'" in result.stderr


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").touch()
    for name, piece in [
        ("x.pdf", ".svg or .png"),
        ("none/x.svg", "there is no folder"),
        ("folder.svg", "it is a folder"),
        ("file/x.svg", "there is no folder"),
        ("x" * 300 + ".svg", "cannot be written"),
        ("/proc/x.svg", "/proc/x.svg cannot be written"),
    ]:
        with pytest.raises(UsageError, match=piece):
            check_plot(tmp_path / name)
