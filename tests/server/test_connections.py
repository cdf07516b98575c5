"""Connections that are held, flooded or used out of turn: each one ends, and others are served meanwhile."""

import asyncio
import json
import logging
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path

import pytest

from enginewright.errors import EngineError
from enginewright.runtime.server import wire
from enginewright.runtime.server.connections import MAX_SURPLUS, ConnectionLimit
from enginewright.runtime.server.wire import LimitedHttp
from tests.helpers.serving import COMPLETIONS, Running, head_of, port_of, process, read_all, running, wait_until

JSON = "Content-Type: application/json"
LONG = {"ignore_eos": True, "max_tokens": 4000}  # takes seconds, if it is not aborted
HEALTH = head_of("GET /health")


def post_of(body: object) -> bytes:
    data = json.dumps(body).encode()
    return head_of(f"POST {COMPLETIONS}", JSON, f"Content-Length: {len(data)}") + data


def read_answer(connection: socket.socket) -> bytes:
    """One answer that has a length, from a connection that may go on."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(1 << 16)
        assert piece, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def read_to_end(connection: socket.socket) -> bytes:
    connection.settimeout(30)
    try:
        return read_all(connection)
    except TimeoutError:
        raise AssertionError("the connection stays open") from None


def is_served(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        with suppress(ConnectionError):
            connection.sendall(head_of("GET /v1/models", "Connection: close"))
        return b" 200 " in read_all(connection)[:20]


def trickle(connection: socket.socket, data: bytes) -> bytes:
    """Send the same again and again until the server ends the connection; what it has said.

    Once it has closed its side, sending goes on: the connection must be given up, not only its answers.
    """
    connection.settimeout(0.01)
    said = list[bytes]()

    def is_given_up() -> bool:
        try:
            connection.sendall(data)
            with suppress(TimeoutError):
                said.append(connection.recv(1 << 16))
        except ConnectionError:
            return True
        return False

    wait_until(is_given_up)
    with suppress(ConnectionError):
        said.append(connection.recv(1 << 16))  # an answer that was not read before the connection was given up
    return b"".join(said)


@pytest.fixture
def protocols(monkeypatch: pytest.MonkeyPatch) -> list[LimitedHttp]:
    """The server's ends of connections that are made during the test, in their order."""
    made, connection_made = list[LimitedHttp](), LimitedHttp.connection_made

    def note(protocol: LimitedHttp, transport: asyncio.BaseTransport) -> None:
        connection_made(protocol, transport)
        made.append(protocol)

    monkeypatch.setattr(LimitedHttp, "connection_made", note)
    return made


@pytest.mark.parametrize("data", [b"\r\n", b"G"], ids=["line ends", "a request that never ends"])
def test_nothing_but_a_request_ends_the_wait_for_one(
    server: Running, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(wire, "KEEP_ALIVE_S", 0.3)
    with server.connect() as connection:
        connection.sendall(HEALTH)
        assert b" 200 " in read_answer(connection).splitlines()[0]
        monkeypatch.setattr(wire, "MAX_HEAD_S", 0.3)  # of what comes from now on
        trickle(connection, data)


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        (f"POST {COMPLETIONS}", [JSON], 401),
        (f"POST {COMPLETIONS}", [JSON, "Host: twice"], 403),
        ("POST /v1/nothing", [JSON, "Authorization: Bearer key"], 404),
        ("POST /v1/models", [JSON, "Authorization: Bearer key"], 405),
        (f"POST {COMPLETIONS}", ["Content-Type: text/plain", "Authorization: Bearer key"], 415),
        ("GET /health", [], 200),
    ],
)
@pytest.mark.parametrize("length", ["Content-Length: 100000", "Transfer-Encoding: chunked"])
def test_an_answer_before_the_body_ends_the_connection(
    guarded: Running, monkeypatch: pytest.MonkeyPatch, request_line: str, headers: list[str], status: int, length: str
) -> None:
    monkeypatch.setattr(wire, "LINGER_S", 0.2)
    with guarded.connect() as connection:
        connection.sendall(head_of(request_line, *headers, length))
        said = trickle(connection, b"1\r\nx\r\n")
        assert f" {status} ".encode() in said.splitlines()[0], said
        assert b"connection: close" in said


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running(api_keys=("key",)) as opened:
        yield opened


def test_an_early_answer_reaches_a_client_that_is_still_sending(
    guarded: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "LINGER_S", 60.0)  # a busy machine takes long to send it all
    body = b"x" * (4 << 20)
    with guarded.connect() as connection:
        connection.sendall(head_of(f"POST {COMPLETIONS}", JSON, f"Content-Length: {len(body)}"))
        connection.recv(1, socket.MSG_PEEK)  # the answer is there
        for _ in range(3):  # and what would close the connection with it, in the next turns of the event loop, has run
            guarded.call(int)
        try:
            connection.sendall(body)
            said = connection.recv(1 << 16)
        except ConnectionError:
            said = b"the connection was reset"
        assert b" 401 " in said.splitlines()[0] and said.endswith(b"}}")


def test_a_body_that_comes_after_the_answer_began_is_no_reason_to_close(guarded: Running) -> None:
    """A refused request's connection stays open if its body arrives completely, which is the usual case."""
    with guarded.connect() as connection:
        for _ in range(2):
            connection.sendall(post_of({"prompt": "x"}))
            said = read_answer(connection)
            assert b" 401 " in said.splitlines()[0] and b"connection: close" not in said


def test_a_body_that_stops_before_its_end_is_given_up(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_S", 0.3)
    monkeypatch.setattr(wire, "LINGER_S", 0.2)
    with server.connect() as connection:
        connection.sendall(head_of(f"POST {COMPLETIONS}", JSON, "Transfer-Encoding: chunked"))
        said = trickle(connection, b"1\r\nx\r\n")
        assert b" 408 " in said.splitlines()[0] and b"connection: close" in said


@pytest.mark.parametrize(
    "more",
    [post_of({"prompt": "b", "max_tokens": 1}), HEALTH, b"no HTTP at all\r\n\r\n", b"\r\n" + HEALTH],
    ids=["the same", "another", "nonsense", "after a line end"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["in one piece", "apart"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_before_the_answer_is_dropped(
    server: Running, protocols: list[LimitedHttp], more: bytes, apart: bool, stream: bool
) -> None:
    first = post_of({"prompt": "a", "stream": stream, "max_tokens": 200, "ignore_eos": True})
    before = server.llm.stats().prompt_tokens
    with server.connect() as connection:
        if apart:
            with server.held_steps():
                connection.sendall(first)
                wait_until(lambda: server.llm.step_s > 0)
                connection.sendall(more)
                wait_until(lambda: protocols[0]._drops_input)
        else:
            connection.sendall(first + more)
        said = read_to_end(connection)
    assert said.count(b"HTTP/1.1 ") == 1 and b" 200 " in said.splitlines()[0], said[-500:]
    if not stream:
        assert b"connection: close" in said and json.loads(said.partition(b"\r\n\r\n")[2])["usage"]
    else:
        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert server.llm.stats().prompt_tokens - before < 10, "one prompt was read"


def test_a_line_end_after_a_body_is_no_request(server: Running) -> None:
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(post_of({"prompt": "a", "max_tokens": 1}) + b"\r\n")
            assert b" 200 " in read_answer(connection).splitlines()[0]


@pytest.mark.parametrize("number", [2, 20])
def test_requests_in_a_row_end_with_their_client(server: Running, number: int) -> None:
    before = server.llm.stats().generated_tokens
    aborted = server.service.metrics.finished["abort"]
    with server.held_steps():
        with server.connect() as connection:
            connection.sendall(post_of({"prompt": "a", **LONG}) * number)
            wait_until(lambda: server.llm.step_s > 0)
        wait_until(lambda: server.llm.stats().num_waiting > 0)  # the step under way ends before it is aborted
    wait_until(server.is_idle)
    assert server.service.metrics.finished["abort"] == aborted + 1
    assert server.llm.stats().generated_tokens - before < 10


def test_a_client_that_reads_nothing_is_given_up(
    server: Running, monkeypatch: pytest.MonkeyPatch, protocols: list[LimitedHttp]
) -> None:
    monkeypatch.setattr(wire, "STALL_S", 0.1)
    aborted = server.service.metrics.finished["abort"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post_of({"prompt": "a", "stream": True, "logprobs": 20, "n": 8, **LONG}))
        wait_until(lambda: bool(protocols) and protocols[0].flow is not None and protocols[0].flow.write_paused)
        with server.held_steps():  # or it might end before it is given up
            wait_until(lambda: server.llm.stats().num_waiting > 0)
        wait_until(lambda: server.service.metrics.finished["abort"] == aborted + 8)
        wait_until(server.is_idle)


def test_a_client_that_reads_slowly_is_not_given_up(server: Running, protocols: list[LimitedHttp]) -> None:
    """The client's answer is in buffers long before; the deadline passes several times while the client reads."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post_of({"prompt": "a", "logprobs": 20, "n": 8, **LONG, "max_tokens": 2000}))
        data = bytearray(connection.recv(1000))
        length = int(re.search(rb"content-length: (\d+)", data)[1])  # type: ignore[index]
        assert length > 5 << 20, "more than the buffers of sockets"
        (protocol,) = protocols

        def num_unsent() -> int:
            return protocol.transport.get_write_buffer_size() + wire._queued_bytes(protocol.transport)

        wait_until(lambda: protocol.deadline < inf)  # the end of the answer is in a buffer
        for _ in range(20):
            before = server.call(num_unsent)
            while server.call(num_unsent) >= before:
                data += connection.recv(1 << 15)
            server.call(protocol.expire)
            assert not protocol.transport.is_closing()
        whole = data.index(b"\r\n\r\n") + 4 + length
        while len(data) < whole:
            piece = connection.recv(1 << 20)
            assert piece, "it was given up"
            data += piece
    assert len(data) == whole and json.loads(data[-length:])["usage"]["completion_tokens"] == 8 * 2000


def test_beyond_the_limit_connections_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wire, "LINGER_S", 60.0)  # a busy machine takes long to ask
    with caplog.at_level(logging.WARNING), running(max_connections=4) as server, ExitStack() as stack:
        held = [stack.enter_context(server.connect()) for _ in range(4)]
        for connection in held:
            connection.sendall(HEALTH)
            assert b" 200 " in read_answer(connection).splitlines()[0]
        for data in (post_of({"prompt": "x"}), head_of("GET /v1/models"), head_of("POST /health"), b"no HTTP\r\n\r\n"):
            with server.connect() as connection:
                connection.sendall(data)
                said = read_to_end(connection)
                assert b" 503 " in said.splitlines()[0] and b"retry-after: 1\r\n" in said and b"close" in said
                assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for path in ("/health", "/health?x=1", "/metrics"):  # who watches the server is told that it lives
            with server.connect() as connection:
                connection.sendall(head_of(f"GET {path}"))
                said = read_to_end(connection)
                assert b" 200 " in said.splitlines()[0] and b"connection: close" in said
        monkeypatch.setattr(wire, "LINGER_S", 0.2)
        crowd = [stack.enter_context(server.connect()) for _ in range(3 * MAX_SURPLUS)]
        wait_until(lambda: server.service.metrics.rejected[503] == 4 + len(crowd))
        for connection in crowd:
            assert b" 200 " not in read_to_end(connection)
        for connection in held:  # those who were there are served as before
            connection.sendall(HEALTH)
            assert b" 200 " in read_answer(connection).splitlines()[0]
        held[0].close()  # there is a place again, though some of the others have not left
        wait_until(lambda: is_served(server.port))
        assert [record.getMessage() for record in caplog.records] == [
            "4 connections are open, and no more are taken: new ones get a 503 (--max-connections)"
        ]


def test_descriptors_do_not_run_out() -> None:
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
    with process(few, drain_seconds=0) as opened, ExitStack() as stack:
        port = port_of(opened)

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))

        first = connect()
        max_files = 0
        for _ in range(3):
            crowd = [connect() for _ in range(300)]
            said = read_to_end(crowd[-1])  # it is answered, or closed at once: all before it have been seen
            max_files = max(max_files, len(list(Path(f"/proc/{opened.pid}/fd").iterdir())))
            assert said == b"" or b" 503 " in said.splitlines()[0]
            first.sendall(HEALTH)
            assert b" 200 " in read_answer(first).splitlines()[0], "who was there first is served"
            for connection in crowd:
                connection.close()
            wait_until(lambda: is_served(port))
        assert 100 < max_files < 240
        opened.terminate()
        _, log = opened.communicate(timeout=20)
        assert opened.returncode == 0 and len(log.splitlines()) <= 1, log[:2000]


def test_more_connections_than_open_files() -> None:
    with pytest.raises(EngineError, match=r"limit of open files is \d+: .*not 100000000") as caught:
        ConnectionLimit(100_000_000, Counter())
    assert "ulimit -n" in caught.value.fix and "--max-connections" in caught.value.fix
    assert ConnectionLimit(5, Counter()).count == 5 and ConnectionLimit(None, Counter()).count > 5
