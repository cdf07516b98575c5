"""Steps that do not end: /health says so, requests are turned away, and the process ends all the same."""

import logging
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from enginewright.runtime.api.engine_thread import EngineThread
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, head_of, port_of, process, running, wait_until

PROMPT = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}


def test_a_step_that_does_not_end_is_known(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with running(step_timeout=300) as server, ThreadPoolExecutor(2) as pool, server.held_steps() as free:
        first = pool.submit(server.post, COMPLETIONS, PROMPT)
        wait_until(lambda: server.llm.step_s > 0)
        assert server.ask("GET", "/health").status == 200, "it has only begun"
        monkeypatch.setattr(EngineThread, "step_s", property(lambda thread: 0.0 if free.is_set() else 301.0))
        wait_until(lambda: server.ask("GET", "/health").status == 503)
        health = server.ask("GET", "/health")
        assert health.json["status"] == "engine_stalled" and "300 s" in health.json["reason"]
        for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, PROMPT)):
            refused = server.post(path, body)
            assert (refused.status, refused.error["code"]) == (503, "engine_stalled")
            assert refused.headers["retry-after"] == "1"
        assert server.ask("GET", "/metrics").status == 200 and not first.done()
        for _ in range(3):
            server.call(server.service.watch)  # it must not say so each time
        free.set()
        wait_until(lambda: server.ask("GET", "/health").status == 200)
        assert first.result().json["usage"]["completion_tokens"] == 3, "who waited is answered"
        assert server.complete("b", max_tokens=2)
    levels = [record.levelno for record in caplog.records if record.name.endswith("server.service")]
    assert levels == [logging.ERROR, logging.WARNING], caplog.text


def test_a_limit_of_zero_is_none() -> None:
    with running(step_timeout=0) as server, ThreadPoolExecutor(1) as pool:
        with server.held_steps():
            first = pool.submit(server.post, COMPLETIONS, PROMPT)
            wait_until(lambda: server.llm.step_s > 0.3)
            assert server.ask("GET", "/health").status == 200
        assert first.result().status == 200


def test_no_step_is_under_way_between_requests_or_in_a_dead_engine() -> None:
    with running() as server:
        assert server.complete("a") and server.llm.step_s == 0
        server.llm._core.executor.run = None  # type: ignore[method-assign, assignment]
        assert server.post(COMPLETIONS, PROMPT).status == 500
        assert server.llm.step_s == 0


HANGING = """
import sys, threading
from enginewright.runtime.{module} import {name}
from enginewright.runtime.server import hosting, serve
serve.__globals__.update(CLOSE_S=0.5)
hosting.LAST_WORDS_S = 0.2
def hang(self, *arguments, **options):
    print("it hangs", file=sys.stderr, flush=True)
    threading.Event().wait()
{name}.{method} = hang
"""


@pytest.mark.parametrize(
    ("module", "name", "method", "says"),
    [
        ("device.cpu.executor", "CpuExecutor", "run", "a step of the engine has lasted "),
        ("text.tokenizer", "Tokenizer", "encode", "a prompt is being tokenized"),
    ],
)
def test_what_hangs_for_ever_does_not_outlive_a_signal(module: str, name: str, method: str, says: str) -> None:
    with process(HANGING.format(module=module, name=name, method=method), drain_seconds=0.1) as opened:
        port = port_of(opened)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            body = b'{"prompt": "a"}'
            connection.sendall(
                head_of(f"POST {COMPLETIONS}", "Content-Type: application/json", "Content-Length: 15") + body
            )
            assert opened.stderr is not None and opened.stderr.readline() == "it hangs\n"
            opened.send_signal(signal.SIGTERM)
            wait_until(lambda: opened.poll() is not None)
        _, said = opened.communicate()
        assert opened.returncode == 1
        assert said.startswith(f"engine: the server ends by force: {says}") and len(said.splitlines()) == 1
