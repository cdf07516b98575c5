"""Clients that leave, crowds, faults of the engine, and the end: nothing is kept for clients that no longer wait."""

import asyncio
import json
import re
import signal
import socket
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from enginewright.errors import CorruptEngineError, EngineError
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.server import wire
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.hosting import Shutdown, bind
from enginewright.runtime.server.serve import host, serve
from tests.helpers.serving import (
    CHAT,
    COMPLETIONS,
    HELLO,
    NAN_TOKEN,
    Answer,
    Running,
    head_of,
    port_of,
    process,
    read_all,
    running,
    tiny_engine,
    wait_until,
)

LONG = {"ignore_eos": True, "max_tokens": 4000}  # takes seconds, if it is not aborted
SLOW = {"max_num_seqs": 2, "enable_prefix_caching": False}


def generated(server: Running) -> int:
    return int(server.llm.stats().generated_tokens)


def has_begun(llm: AsyncLLM) -> bool:
    """The first two completions of an engine are being written."""
    return llm.stats().num_running == 2 and llm.stats().generated_tokens > 10


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_is_aborted(server: Running, stream: bool, reset: bool, n: int) -> None:
    before, aborted = generated(server), server.service.metrics.finished["abort"]

    def all_have_begun(llm: AsyncLLM) -> bool:
        return llm.stats().num_running == 2 * n and llm.stats().generated_tokens > before + 10

    with server.held_steps(once=all_have_begun):
        with server.connect() as connection:
            server.send(connection, COMPLETIONS, {"prompt": ["a", "b"], "stream": stream, "n": n, **LONG})
            server.until_held()
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_until(lambda: server.llm.stats().num_waiting > 0)  # for the step under way to end, to be aborted
    wait_until(server.is_idle)
    assert generated(server) - before < 2 * n * 100
    assert server.service.metrics.finished["abort"] == aborted + 2 * n


def test_clients_that_leave_the_queue() -> None:
    with running(limits=SLOW) as server, server.connect() as first, server.connect() as second:
        server.send(first, COMPLETIONS, {"prompt": ["a", "b"], **LONG})
        wait_until(lambda: server.llm.stats().num_running == 2)
        server.send(second, CHAT, {"messages": HELLO, **LONG})
        wait_until(lambda: server.llm.stats().num_waiting == 1)
        second.close()
        wait_until(lambda: (server.llm.stats().num_waiting, server.llm.stats().num_running) == (0, 2))
        wait_until(lambda: len(server.service.live) == 1)
        first.close()


@pytest.mark.parametrize(
    "part", [b"POST", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"]
)
def test_clients_that_leave_before_their_request_is_there(server: Running, part: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(part)
    with server.connect() as connection:
        connection.sendall(part + b"Content-Length: 100\r\n\r\n{")
    assert server.complete("x")


def test_a_slow_reader_gets_all_of_it(server: Running) -> None:
    """A slow reader delays neither the engine nor other clients; deltas that wait for it are merged."""
    whole = server.complete("a", max_tokens=3000)["choices"][0]["text"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", server.port))
        options = {"prompt": "a", "stream": True, "max_tokens": 3000, "ignore_eos": True, "logprobs": 5}
        before = generated(server)
        server.send(connection, COMPLETIONS, options)
        wait_until(lambda: generated(server) == before + 3000)
        assert server.complete("b")
        wait_until(lambda: server.llm.stats().num_running == 0)
        data = b""
        while b"data: [DONE]" not in data:
            data += connection.recv(1 << 20)
    pieces = re.findall(rb"data: ({.*})\n", data)
    answer = Answer(200, {"content-type": "text/event-stream"}, b"".join(b"data: %s\n\n" % one for one in pieces))
    assert "".join(event["choices"][0]["text"] for event in answer.events) == whole
    assert len(pieces) < 3000, "deltas were merged"


def test_a_crowd_is_turned_away() -> None:
    with running(max_num_waiting=3, limits=SLOW) as server, ThreadPoolExecutor(20) as pool:
        with server.held_steps(once=has_begun), server.connect() as first:
            server.send(first, COMPLETIONS, {"prompt": ["a", "b"], **LONG})
            wait_until(lambda: server.service.admission.num_answers == 0 and has_begun(server.llm))
            asked = [pool.submit(server.post, COMPLETIONS, {"prompt": "c", "max_tokens": 1}) for _ in range(12)]
            wait_until(lambda: sum(one.done() for one in asked) == 12 - 5)
            for one in asked:
                if one.done():
                    answer = one.result()
                    assert answer.status == 429 and int(answer.headers["retry-after"]) >= 1
                    assert answer.error["type"] == "rate_limit_error" and answer.error["code"] == "overloaded"
            wait_until(lambda: server.llm._encoder._work_queue.qsize() == 0)  # of the five, on a busy machine
            assert server.service.admission.num_answers == 5
        answers = [one.result().status for one in asked]
        assert sorted(answers) == [200] * 5 + [429] * 7
        assert server.service.metrics.rejected[429] == 7
        many = server.post(COMPLETIONS, {"prompt": "c", "n": 6})
        assert many.status == 400 and "6 answers" in many.error["message"]


def test_long_prompts_are_turned_away() -> None:
    with running(max_waiting_tokens=1000, limits=SLOW) as server, ThreadPoolExecutor(20) as pool:
        with server.held_steps(once=has_begun), server.connect() as first:
            server.send(first, COMPLETIONS, {"prompt": ["a", "b"], **LONG})
            wait_until(lambda: server.service.admission.num_tokens == 0 and has_begun(server.llm))
            alone = pool.submit(server.post, COMPLETIONS, {"prompt": [5] * 2000, "max_tokens": 1})
            wait_until(lambda: server.service.admission.num_tokens == 2000)
            for prompt in ("c", [5], "word " * 500):
                assert server.post(COMPLETIONS, {"prompt": prompt}).status == 429
        assert alone.result().status == 200
        assert server.complete("c")


def test_a_text_that_waits_counts_by_its_tokens() -> None:
    text = "東京" * 50
    with running(limits=SLOW) as server, server.connect() as first, server.connect() as second:
        count = len(server.llm.engine.tokenizer.encode(text))
        assert count > len(text)
        with server.held_steps(once=has_begun):
            server.send(first, COMPLETIONS, {"prompt": ["a", "b"], **LONG})
            wait_until(lambda: server.service.admission.num_tokens == 0 and has_begun(server.llm))
            server.send(second, COMPLETIONS, {"prompt": text})
            wait_until(lambda: server.service.admission.num_tokens == count)
        first.close()


def test_nan_ends_one_request_and_no_other() -> None:
    with running(kind="NaN") as server, ThreadPoolExecutor(4) as pool:
        others = {"ignore_eos": True, "logit_bias": {str(NAN_TOKEN): -100}, "max_tokens": 300}
        good = [pool.submit(server.post, COMPLETIONS, {"prompt": text, **others}) for text in "ab"]
        whole = server.post(COMPLETIONS, {"prompt": [5, NAN_TOKEN, 6]})
        assert whole.status == 500
        assert (whole.error["type"], whole.error["code"]) == ("server_error", "nan_logits")
        stream = server.post(COMPLETIONS, {"prompt": [5, NAN_TOKEN, 6], "stream": True})
        assert stream.status == 500, "nothing had been sent"
        late = {"stream": True, "temperature": 1, "seed": 24, **LONG}  # draws the token after hundreds of others
        *pieces, error = server.post(COMPLETIONS, {"prompt": "x", **late}).events
        assert pieces and "choices" in pieces[0] and error["error"]["code"] == "nan_logits"
        assert all(one.result().status == 200 for one in good)
        assert server.service.metrics.finished["error"] == 3


def test_a_dead_engine_fails_what_runs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with running() as server, ThreadPoolExecutor(4) as pool:
        with server.held_steps(once=lambda llm: llm.stats().num_running == 2):
            stream = server.begin(CHAT, {"messages": HELLO, **LONG})
            whole = pool.submit(server.post, COMPLETIONS, {"prompt": "a", **LONG})
            wait_until(lambda: server.llm.stats().num_running == 2)
            server.llm._core.executor.run = None  # type: ignore[method-assign, assignment]
        assert whole.result().status == 500 and whole.result().error["code"] == "engine_dead"
        assert stream().events[-1]["error"]["code"] == "engine_dead"
        health = server.ask("GET", "/health")
        assert health.status == 503 and health.json["status"] == "engine_dead"
        new = server.post(CHAT, {"messages": HELLO})
        assert new.status == 503 and new.error["type"] == "server_error"
        assert server.ask("GET", "/v1/models").status == server.ask("GET", "/metrics").status == 200
        assert not server.service.live
        assert "the engine's thread has ended" in caplog.text


def test_draining() -> None:
    with running(drain_seconds=60) as server, ThreadPoolExecutor(4) as pool:
        options = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
        with server.held_steps(once=lambda llm: llm.stats().num_running == 2):
            whole = pool.submit(server.post, COMPLETIONS, options)
            stream = pool.submit(server.post, COMPLETIONS, {**options, "stream": True})
            wait_until(lambda: server.llm.stats().num_running == 2)
            server.end()
            wait_until(lambda: server.service.draining)
            health, new = server.ask("GET", "/health"), server.post(CHAT, {"messages": HELLO})
        assert (health.status, health.json["status"]) == (503, "server_shutdown")
        assert new.status == 503 and new.error["code"] == "server_shutdown" and new.headers["retry-after"] == "60"
        assert whole.result().json["usage"]["completion_tokens"] == 1500
        assert stream.result().events[-1] == "[DONE]"
        server._thread.join(30)
        assert not server._thread.is_alive()


@pytest.mark.parametrize("twice", [True, False])
def test_what_is_not_drained_is_told(twice: bool) -> None:
    with running(drain_seconds=60 if twice else 0.2, limits=SLOW) as server, ThreadPoolExecutor(4) as pool:
        options = {"prompt": ["a", "b"], **LONG}
        with server.held_steps(once=has_begun):
            stream = server.begin(COMPLETIONS, options)
            wait_until(lambda: has_begun(server.llm))
            waits = pool.submit(server.post, COMPLETIONS, {**options, "stream": True})
            whole = pool.submit(server.post, COMPLETIONS, options)
            wait_until(lambda: server.llm.stats().num_waiting == 4)
            server.end()
            if twice:
                wait_until(lambda: server.service.draining)
                server.end()
            wait_until(lambda: server.llm.stats().num_waiting == 4 + 6)  # all are to be aborted
        *pieces, error = stream().events
        assert pieces and error["error"]["code"] == "server_shutdown"
        for answer in (whole.result(), waits.result()):
            assert answer.status == 503 and answer.error["code"] == "server_shutdown"
        server._thread.join(30)
        assert not server._thread.is_alive()


def answer_of(port: int, options: dict[str, Any], into: list[bytes]) -> None:
    body = json.dumps({"prompt": "a", "stream": True, "ignore_eos": True, **options}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{COMPLETIONS}", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        while data := response.read1():
            into.append(data)


def asked_of(port: int, path: str) -> Answer:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return Answer(response.status, {}, response.read())


def num_generated(port: int) -> float:
    found = re.search(rb"^enginewright_generation_tokens_total{.*} (.*)$", asked_of(port, "/metrics").body, re.M)
    return 0 if found is None else float(found[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: int) -> None:
    with process() as opened:
        port, got = port_of(opened), list[bytes]()
        reader = threading.Thread(target=answer_of, args=(port, {"max_tokens": 2000}, got))
        reader.start()
        wait_until(lambda: bool(got))
        opened.send_signal(number)
        reader.join()
        assert b"".join(got).endswith(b"data: [DONE]\n\n")
        out, rest = opened.communicate(timeout=60)
        assert (opened.returncode, out, rest) == (0, "", "")


SLOW_STEPS = """
import time
from enginewright.runtime.device.cpu.executor import CpuExecutor
run = CpuExecutor.run
CpuExecutor.run = lambda self, plan: time.sleep(0.02) or run(self, plan)
"""


def test_a_second_signal_ends_at_once() -> None:
    with process(SLOW_STEPS) as opened:
        port, got = port_of(opened), list[bytes]()
        reader = threading.Thread(target=answer_of, args=(port, {"max_tokens": 4000, "n": 2}, got))
        reader.start()
        wait_until(lambda: bool(got))
        opened.send_signal(signal.SIGTERM)
        wait_until(lambda: asked_of(port, "/health").status == 503)
        opened.send_signal(signal.SIGTERM)
        _, rest = opened.communicate(timeout=60)
        assert (opened.returncode, rest) == (0, "")
        reader.join()
        assert b'"server_shutdown"' in b"".join(got)


def test_a_client_that_stands_still_does_not_hold_the_end_up() -> None:
    """One does not read its answer, one has not sent its request."""
    with process(drain_seconds=0.1) as opened, socket.socket() as reader, socket.socket() as writer:
        port = port_of(opened)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = json.dumps({"prompt": "a", "stream": True, "logprobs": 20, **LONG}).encode()
        head = ("POST /v1/completions", "Content-Type: application/json")
        whole, part = (head_of(*head, f"Content-Length: {length}") for length in (len(body), 10))
        for client, data in ((reader, whole + body), (writer, part + b"{")):
            client.settimeout(30)
            client.connect(("127.0.0.1", port))
            client.sendall(data)
        assert reader.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: num_generated(port) > 1000)  # many of them in buffers, which hold nobody up either
        opened.send_signal(signal.SIGTERM)
        _, rest = opened.communicate(timeout=60)
        assert (opened.returncode, rest) == (0, "")


def test_heads_must_come(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_HEAD_S", 0.2)
    for data in (b"", b"GET /health HTTP/1.1\r\n"):
        with server.connect() as connection:
            connection.sendall(data)
            assert connection.recv(100) == b"", "it was closed"


def test_bodies_must_come(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_S", 0.2)
    with server.connect() as connection:
        connection.sendall(
            head_of("POST /v1/completions", "Content-Type: application/json", "Content-Length: 9") + b"{"
        )
        assert b" 408 " in read_all(connection).splitlines()[0]


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with process(port=port) as opened:
            _, said = opened.communicate(timeout=20)
        assert opened.returncode == EngineError.exit_code
        assert f"cannot listen at 127.0.0.1, port {port}" in said and "in use" in said and "--port" in said


@pytest.mark.parametrize("name", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_of_others(name: str) -> None:
    with pytest.raises(EngineError, match=f"cannot listen at {re.escape(name)}"):
        serve(tiny_engine(), ServerConfig(host=name, port=0))


def test_an_engine_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "no.engine"
    path.write_bytes(b"nothing")
    before = sys.getswitchinterval()
    with pytest.raises(CorruptEngineError):
        serve(path, ServerConfig(port=0))
    assert sys.getswitchinterval() == before


def test_an_address_that_another_takes_meanwhile() -> None:
    """Two may bind one address; the second one to listen loses."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(EngineError, match="in use"), running() as server:
                asyncio.run(host(server.engines, second, Shutdown(), lambda: None))
