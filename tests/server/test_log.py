"""The server's log: a line for each request, throughput, warnings and tracebacks; as text and JSON, never too much."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from enginewright.errors import UsageError
from enginewright.runtime.server import log
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.log import FORMATS, LineHandler, RequestLog, Throughput, as_json, log_to
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, NAN_TOKEN, read_all, running, tiny_engine, wait_until

LONG = {"ignore_eos": True, "max_tokens": 4000}
COMMON = ["ts", "level", "event", "request_id", "client_request_id", "session_id", "status", "code"]
FIGURES = ["model", "prompt_tokens", "cached_tokens", "output_tokens", "n", "queue_s", "first_token_s", "total_s"]
FIGURES += ["tokens_per_s", "finish_reasons"]


@contextmanager
def logged(level: str = "info", form: str = "json") -> Iterator[list[str]]:
    """Lines that are logged within; they are there when it is left."""
    source, target = os.pipe()
    lines = list[str]()
    with open(source) as stream:
        reader = threading.Thread(target=lambda: lines.extend(stream.read().splitlines()))
        reader.start()
        try:
            with log_to(target, level, form):
                yield lines
        finally:
            os.close(target)
            reader.join()


def events(lines: list[str], event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, lines) if line["event"] == event]


def test_a_line_a_request() -> None:
    with logged() as lines, running() as server:
        body = {"prompt": list(range(3, 103)), "n": 2, "max_tokens": 10, "ignore_eos": True}
        whole = server.post(COMPLETIONS, body, {"X-Request-Id": "mine-1", "X-Session-Id": "session-1"})
        again = server.complete([list(range(3, 103)), [5] * 7], stop_token_ids=[9], logit_bias={"9": 100})
        stream = server.chat(stream=True)
    assert whole.headers["x-request-id"] == "mine-1"
    first, second, third = (json.loads(line) for line in lines)
    for line in (first, second, third):
        assert list(line) == COMMON + FIGURES and line["level"] == "info" and line["event"] == "request"
        assert datetime.fromisoformat(line["ts"]).tzinfo is not None and line["ts"].endswith("Z")
        assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["total_s"] < 60
        assert line["tokens_per_s"] == pytest.approx(line["output_tokens"] / line["total_s"], rel=0.05)
        assert (line["status"], line["code"], line["model"]) == (200, None, server.service.models[0])
    assert (first["request_id"], first["client_request_id"]) == (whole.json["id"], "mine-1")
    assert (first["session_id"], second["session_id"]) == ("session-1", None)
    assert (first["prompt_tokens"], first["output_tokens"], first["n"]) == (100, 20, 2)
    assert first["cached_tokens"] == 0 and first["finish_reasons"] == {"length": 2}
    assert (second["request_id"], second["client_request_id"]) == (again["id"], None)
    assert (second["prompt_tokens"], second["output_tokens"], second["n"]) == (107, 2, 1)
    assert 50 < second["cached_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert second["finish_reasons"] == {"stop": 2}
    assert third["request_id"] == stream[0]["id"] and third["output_tokens"] == 8


def test_text() -> None:
    with logged(form="text") as lines, running(served_model_names=("two words",)) as server:
        server.complete("a", max_tokens=3, n=2)
        server.ask("GET", "/no%20such%0Aroute%C2%9B")
    request, refused = lines
    number = r"\d+\.\d+"
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info request request_id=cmpl-[0-9a-f]{24} status=200 "
        rf'model="two words" prompt_tokens=2 cached_tokens=0 output_tokens=6 n=2 queue_s={number} '
        rf"first_token_s={number} total_s={number} tokens_per_s={number} finish_reasons=length:2",
        request,
    ), request
    assert refused.endswith(r' info refused status=404 method=GET path="/no such\nroute\u009b"')


def test_nothing_of_prompts_answers_or_keys() -> None:
    secret = "Xyzzy"
    with (
        logged("debug") as lines,
        running(kind="fails at one message", api_keys=(secret + "key",)) as server,
    ):
        key = {"Authorization": f"Bearer {secret}key"}
        chat = {"messages": [{"role": "user", "content": secret}]}
        assert server.post(COMPLETIONS, {"prompt": secret, "stop": secret, "max_tokens": 4}, key).status == 200
        assert server.post(CHAT, chat, key).status == 400, "its template fails"
        assert server.post(CHAT, chat, {"Authorization": f"Bearer {secret}"}).status == 401
        assert server.post(COMPLETIONS + f"?key={secret}", {"prompt": [secret], "other": secret}, key).status == 200
        assert server.post(COMPLETIONS, f'{{"prompt": "{secret}'.encode(), key).status == 400
        assert server.ask("GET", "/health").status == 200
    assert len(events(lines, "request")) == 2 and len(events(lines, "refused")) == 3
    assert [line["keys"] for line in events(lines, "unused")] == ["other is an unknown key"]
    (health,) = events(lines, "http")
    assert list(health) == ["ts", "level", "event", "client_request_id", "method", "path"]
    assert (health["level"], health["method"], health["path"]) == ("debug", "GET", "/health")
    assert secret not in "".join(lines)


def test_what_is_not_used() -> None:
    """A line a request, however many keys it has, that holds nothing of their values."""
    body = {
        "prompt": "a",
        "max_tokens": 1,
        "a\n\x1b[31m": "value",
        "user": "value",
        **dict.fromkeys("bcdefghij", "value"),
    }
    for form in FORMATS:
        with logged(form=form) as lines, running() as server:
            answer = server.post(COMPLETIONS, body, {"X-Request-Id": "r"})
        unused, request = lines
        if form == "json":
            line = json.loads(unused)
            assert list(line) == ["ts", "level", "event", "request_id", "client_request_id", "keys"]
            assert line["level"] == "info" and line["request_id"] == json.loads(request)["request_id"]
            assert line["keys"] == answer.headers["x-enginewright-warning"]
            assert line["keys"].startswith(r'"a\n\u001b[31m" is an unknown key') and line["keys"].endswith(
                "; and 2 more"
            )
        assert unused.isprintable() and "value" not in unused


def test_refusals() -> None:
    with logged() as lines, running(api_keys=("key",)) as server:
        key = {"Authorization": "Bearer key", "X-Request-Id": "r"}
        assert server.post(COMPLETIONS, {"prompt": "a"}, {"X-Request-Id": "a b"}).headers["x-request-id"] == "a b"
        assert server.ask("GET", "/nothing", headers=key).headers["x-request-id"] == "r"
        assert server.post(CHAT, {"messages": HELLO, "temperature": -1}, key).headers["x-request-id"] == "r"
        assert server.post(COMPLETIONS, {"prompt": [5] * 5000}, key).status == 400
        assert server.ask("GET", "/v1/models", headers=key).headers["x-request-id"] == "r"
    found = events(lines, "refused")
    assert len(found) == len(lines) == 4
    for line, status, code, path in zip(
        found,
        (401, 404, 400, 400),
        ("invalid_api_key", None, None, "context_length_exceeded"),
        (COMPLETIONS, "/nothing", CHAT, COMPLETIONS),
        strict=True,
    ):
        assert list(line) == [*COMMON, "method", "path"] and line["level"] == "info"
        assert (line["status"], line["code"], line["path"]) == (status, code, path)
    assert [line["client_request_id"] for line in found] == ["a b", "r", "r", "r"]
    assert found[0]["request_id"] is None and found[3]["request_id"].startswith("cmpl-")


@pytest.mark.parametrize("given", [["x" * 65], ["\x80"], ["a\tb"], ["a", "b"], [""]])
def test_request_ids_that_are_none(given: list[str]) -> None:
    with logged() as lines, running() as server, server.connect() as connection:
        named = "".join(f"X-Request-Id: {one}\r\n" for one in given)
        connection.sendall(
            f"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{named}\r\n".encode("latin-1")
        )
        head = read_all(connection).partition(b"\r\n\r\n")[0].lower()
    assert head.startswith(b"http/1.1 404") and b"x-request-id" not in head
    assert json.loads(lines[0])["client_request_id"] is None


def test_the_longest_request_id() -> None:
    with logged() as lines, running() as server:
        assert server.ask("GET", "/nothing", headers={"X-Request-Id": "x" * 64}).headers["x-request-id"] == "x" * 64
    assert json.loads(lines[0])["client_request_id"] == "x" * 64


def test_failures_are_warnings() -> None:
    with logged("warning") as lines, running(kind="NaN") as server:
        server.complete("x", max_tokens=1)
        server.ask("GET", "/nothing")
        assert server.post(COMPLETIONS, {"prompt": [5, NAN_TOKEN, 6]}).status == 500
        late = {"stream": True, "temperature": 1, "seed": 24, **LONG}  # draws the token after hundreds of others
        assert server.post(COMPLETIONS, {"prompt": "x", **late}).status == 200
    early, late_line = (json.loads(line) for line in lines)
    for line in (early, late_line):
        assert list(line) == COMMON + FIGURES
        assert (line["level"], line["event"], line["status"]) == ("warning", "request", 500)
        assert line["code"] == "nan_logits" and line["finish_reasons"] == {"error": 1}
    assert late_line["output_tokens"] > early["output_tokens"] == 0


def test_clients_that_leave() -> None:
    with logged() as lines, running() as server:
        with server.held_steps(once=lambda llm: llm.stats().generated_tokens > 10):
            with server.connect() as connection:
                server.send(connection, COMPLETIONS, {"prompt": "a", "n": 2, **LONG})
                server.until_held()
            wait_until(lambda: server.llm.stats().num_waiting > 0)  # for the step under way to end, to be aborted
        with server.connect() as connection:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
            connection.sendall(head.encode())
    (request,) = events(lines, "request")
    assert (request["status"], request["code"], request["level"]) == (499, "client_gone", "info")
    assert request["finish_reasons"] == {"abort": 2} and request["output_tokens"] >= 0
    assert all(line["status"] == 499 for line in events(lines, "gone")), "unless it left before its head was read"


def test_clients_that_leave_in_their_body() -> None:
    """On every kind of route: a line each, and no traceback of a crash."""
    paths = [COMPLETIONS, CHAT, f"{CHAT}/render", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]
    paths += ["/v1/embeddings", "/tokenize", "/detokenize", "/rerank"]
    with logged() as lines, running() as server:

        def num_tasks() -> int:
            return server.call(lambda: len(asyncio.all_tasks(server._loop)))  # type: ignore[no-any-return]

        before = num_tasks()
        for path in paths:
            with server.connect() as connection:
                fields = "Content-Type: application/json\r\nContent-Length: 9\r\nExpect: 100-continue\r\n"
                connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode())
                assert connection.recv(100).startswith(b"HTTP/1.1 100"), "its body is awaited"
        wait_until(lambda: num_tasks() <= before)
    found = list(map(json.loads, lines))
    assert {(line["event"], line.get("status"), line.get("code")) for line in found} == {("gone", 499, "client_gone")}
    assert len(found) == len(paths)


def test_the_end_is_no_warning() -> None:
    with logged() as lines, running(drain_seconds=0) as server, server.connect() as connection:
        with server.held_steps(once=lambda llm: llm.stats().generated_tokens > 2):
            server.send(connection, COMPLETIONS, {"prompt": "a", **LONG})
            server.until_held()
            server.end()
            wait_until(lambda: server.llm.stats().num_waiting > 0)  # for the step under way to end, to be aborted
        assert b"server_shutdown" in read_all(connection)
    (line,) = events(lines, "request")
    assert (line["level"], line["status"], line["code"]) == ("info", 503, "server_shutdown")


def test_tracebacks() -> None:
    with logged("error") as lines, running() as server:
        server.llm._core.executor.run = None  # type: ignore[method-assign, assignment]
        assert server.post(COMPLETIONS, {"prompt": "a"}).status == 500
        wait_until(lambda: not server.llm.is_alive)
    (line,) = (json.loads(line) for line in lines)
    assert list(line) == ["ts", "level", "event", "message", "logger", "traceback"]
    assert (line["level"], line["event"]) == ("error", "log")
    assert (
        line["message"] == "the engine's thread has ended"
        and line["logger"] == "enginewright.runtime.api.engine_thread"
    )
    assert line["traceback"].startswith("Traceback (") and "TypeError: 'NoneType'" in line["traceback"]


def test_what_uvicorn_and_asyncio_say_comes_in_the_same_form() -> None:
    with logged(form="text") as lines:
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("uvicorn.error").exception("Exception in ASGI application\n")
        logging.getLogger("asyncio").info("nobody needs to know")
    assert lines[0].endswith(" error Exception in ASGI application logger=uvicorn.error")
    assert lines[1] == "  Traceback (most recent call last):" and lines[-1] == "  ValueError: why", "indented"


def test_no_text_begins_a_line_of_its_own() -> None:
    """Names are escaped; lines of an exception or a longer message are indented, and keep no control sequence of a
    terminal.
    """
    forged = "x\n2026-01-01T00:00:00.000Z info request \x1b[31m\x9b"
    for form in "text", "json":
        with logged(form=form) as lines:
            logging.getLogger("enginewright.x").warning(
                "%s and %s: %s", Path(forged), forged, UsageError(forged, forged)
            )
            try:
                raise ValueError(forged)
            except ValueError:
                logging.getLogger("enginewright.x").exception("it has failed")
        assert all(line.isprintable() for line in lines)
        assert [line[:2] for line in lines if line[:2] != "  "] == (["20"] * 2 if form == "text" else ['{"'] * 2)
        assert not [line for line in lines if line.startswith("2026-01-01")]
        shown = r"x\n2026-01-01T00:00:00.000Z info request \x1b[31m\x9b"
        assert f"{shown} and {shown}: {shown}: x" in (lines[0] if form == "text" else json.loads(lines[0])["message"])


def test_halves_of_characters_are_written_as_escapes() -> None:
    """A client's text may be in an exception; pytest itself could not report a record with one."""
    error = ValueError("\ud800")
    record = logging.LogRecord("name", logging.ERROR, "path", 1, "\udc00", (), (ValueError, error, None))
    assert log._message(record) == {"message": r"\udc00", "logger": "name", "traceback": r"ValueError: \ud800"}


def test_logging_is_left_as_it_was() -> None:
    root, ours = logging.getLogger(), logging.getLogger("enginewright")
    before = root.handlers[:], root.level, ours.level
    with logged("debug"):
        assert ours.isEnabledFor(logging.DEBUG) and len(root.handlers) == len(before[0]) + 1
    assert (root.handlers, root.level, ours.level) == before
    assert not any(thread.name == "log" for thread in threading.enumerate())


def test_a_flood_of_refusals_is_a_count() -> None:
    with logged() as lines, running() as server:
        for _ in range(log.MAX_LIKE_LINES + 5):
            server.ask("GET", "/nothing")
        for _ in range(7):
            server.post(COMPLETIONS, {"prompt": 5})
        server.complete("a", max_tokens=1)
    assert len(events(lines, "refused")) == log.MAX_LIKE_LINES and len(events(lines, "request")) == 1
    (suppressed,) = events(lines, "suppressed")
    assert {**suppressed, "ts": ""} == {
        "ts": "",
        "level": "warning",
        "event": "suppressed",
        "what": "refused",
        "lines": 12,
        "counts": {"404": 5, "400": 7},
    }


@contextmanager
def handler(window_s: float = 1000) -> Iterator[tuple[LineHandler, int]]:
    """A handler that writes to a pipe, and the pipe's other end."""
    source, target = os.pipe()
    opened = LineHandler(target, as_json, window_s)
    logger = logging.getLogger("enginewright")
    logger.addHandler(opened)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # pytest would format them all
    try:
        yield opened, source
    finally:
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        logger.removeHandler(opened)
        opened.close()
        for fd in (source, target):
            os.close(fd)


def refuse(status: int) -> None:
    line = RequestLog({"type": "http", "method": "GET", "path": "/", "headers": []})
    line.failed(ApiError(status, "no"))
    line.write()


def parsed(source: int) -> Queue[dict[str, Any]]:
    """A queue of the JSON lines that come out of a pipe, read from now on."""
    lines = Queue[dict[str, Any]]()

    def read() -> None:
        with open(os.dup(source)) as stream:
            for line in stream:
                lines.put(json.loads(line))

    threading.Thread(target=read, daemon=True).start()
    return lines


def test_the_count_comes_when_the_window_ends_whatever_else_happens() -> None:
    for window_s in (0.5, 4, 30):  # the shortest that does not end too early here
        with handler(window_s) as (_, source):
            lines = parsed(source)
            for _ in range(log.MAX_LIKE_LINES):
                refuse(429)
            for _ in range(log.MAX_LIKE_LINES):
                assert lines.get(timeout=20)["event"] == "refused"
            refuse(429)  # it alone does not get to the thread that writes
            last = lines.get(timeout=20 + window_s)
        if last["event"] != "refused":
            break
    assert last["counts"] == {"429": 1}


def test_each_window_has_its_lines() -> None:
    with handler(window_s=0.2) as (_, source):
        lines = parsed(source)
        for _ in range(2):
            for _ in range(1000):
                refuse(429)
            num_written = num_counted = 0
            while num_written + num_counted < 1000:
                line = lines.get(timeout=20)
                num_counted += line["counts"]["429"] if line["event"] == "suppressed" else 0
                num_written += line["event"] == "refused"
            assert num_counted > 0 and num_written >= log.MAX_LIKE_LINES


def test_a_flood_of_warnings_is_a_count() -> None:
    """Warnings are counted by the line of code that they come from; another one is not counted with them."""
    logger = logging.getLogger("enginewright.here")
    with logged() as lines:
        for number in range(1000):
            logger.warning("flood %d", number)
        logger.warning("another")
    messages = [line["message"] for line in events(lines, "log")]
    assert messages == [*(f"flood {number}" for number in range(log.MAX_LIKE_LINES)), "another"]
    (suppressed,) = events(lines, "suppressed")
    assert suppressed["lines"] == 1000 - log.MAX_LIKE_LINES and suppressed["what"].startswith("enginewright.here:")


def test_who_does_not_read_the_log_holds_nobody_up() -> None:
    """However much the pipe takes: 64 KiB on most machines, more on some."""
    with handler() as (opened, source):
        total = 0

        def write() -> None:
            nonlocal total
            # A queue that is full before the pipe is loses lines too, and says so as soon as it has room again.
            while opened._num_lost < 1000:
                log.log_event(logging.INFO, "test", {"number": total})
                total += 1

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(30)
        assert not writer.is_alive()
        lines = parsed(source)
        wait_until(lambda: opened._lines.qsize() == 0)
        log.log_event(logging.INFO, "test", {"number": -1})
        written, lost = [], []
        while (line := lines.get(timeout=20)).get("number") != -1:
            if line["event"] == "lost":
                assert line["level"] == "warning"
                lost.append(line["lines"])
            else:
                written.append(line["number"])
        assert written == sorted(set(written)) and written[0] == 0
        assert len(written) + sum(lost) == total and lost[-1] >= 1000


def test_a_log_that_nobody_reads_does_not_hold_the_end_up() -> None:
    with handler() as (opened, source):
        for _ in range(5000):
            log.log_event(logging.INFO, "test", {"text": "x" * 100})
        opened.close()
        assert opened._thread.is_alive(), "it could not write"
        lines = parsed(source)
        assert all(lines.get(timeout=20)["event"] == "test" for _ in range(5000))


def test_a_log_whose_reader_is_gone() -> None:
    source, target = os.pipe()
    os.close(source)
    opened = LineHandler(target, as_json)
    for number in range(1, 4):
        opened.handle(logging.LogRecord("x", logging.INFO, "", 0, "a message", None, None))
        wait_until(lambda: opened._lines.qsize() == 0 and opened._num_lost > 0)
        assert opened._thread.is_alive(), number
    opened.close()
    assert not opened._thread.is_alive()
    os.close(target)


def test_throughput() -> None:
    with logged() as lines, running() as server:
        throughput = Throughput(server.llm.stats, server.service.live, interval_s=0.02)
        server.service.throughput = throughput
        assert throughput._timer is None
        server.complete(list(range(3, 103)), max_tokens=2000)
        wait_until(lambda: throughput._timer is None)
        num_before = server.llm.stats().num_steps
        server.complete(list(range(3, 103)), max_tokens=1)
        wait_until(lambda: throughput._timer is None)
    assert num_before < server.llm.stats().num_steps
    found = events(lines, "throughput")
    figures = ["prompt_tokens_per_s", "generated_tokens_per_s", "running", "waiting", "kv_usage", "prefix_hit_rate"]
    assert all(list(line) == ["ts", "level", "event", *figures] and line["level"] == "info" for line in found)
    times = [datetime.fromisoformat(line["ts"]) for line in found]
    assert all((later - one).total_seconds() > 0.015 for one, later in pairwise(times))
    reading = [line for line in found if line["prompt_tokens_per_s"]]
    assert [line["prefix_hit_rate"] for line in reading] == [0, pytest.approx(0.96, abs=0.05)]
    assert {line["prefix_hit_rate"] for line in found if line not in reading} == {None}
    busy = [line for line in found if line["running"]]
    assert busy and all(0 < line["kv_usage"] <= 1 for line in busy)
    assert any(line["generated_tokens_per_s"] > 10 for line in busy)


def test_no_throughput_where_nobody_reads_it() -> None:
    with logged("warning") as lines, running() as server:
        server.complete("a", max_tokens=1)
        assert server.service.throughput._timer is None
    assert lines == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_command(form: str) -> None:
    command = [sys.executable, "-m", "enginewright.cli", "run", str(tiny_engine()), "--port", "0", "--threads", "1"]
    with subprocess.Popen([*command, "--log-format", form], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            ready = server.stderr.readline()
            message = json.loads(ready)["message"] if form == "json" else ready
            found = re.match(r"serving tiny at (http://127\.0\.0\.1:\d+/v1) \(", message)
            assert found, ready
            body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
            request = urllib.request.Request(found[1] + "/completions", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request).close()
            server.send_signal(signal.SIGTERM)
            rest = server.stderr.read().splitlines()
            assert server.wait(20) == 0 and len(rest) == 1
        finally:
            server.kill()
    if form == "json":
        assert json.loads(ready)["event"] == "ready" and json.loads(rest[0])["event"] == "request"
    else:
        assert " info request request_id=cmpl-" in rest[0]


def test_bytes_that_are_no_request_are_logged_and_counted() -> None:
    with logged() as lines, running() as server:
        for data in (b"no HTTP at all\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * (1 << 20)):
            with server.connect() as connection:
                with suppress(ConnectionError):
                    connection.sendall(data)
                read_all(connection)
        rejected = dict(server.service.metrics.rejected)
    assert rejected == {400: 1, 431: 1}
    found = events(lines, "refused")
    assert [line["status"] for line in found] == [400, 431]
    assert all(list(line) == [*COMMON, "method", "path"] and line["path"] is None for line in found)
