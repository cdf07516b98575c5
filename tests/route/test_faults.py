"""Replicas that are gone, busy, hang or lie."""

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from enginewright.errors import UsageError
from enginewright.route import forward, replica, reply
from enginewright.route.config import RouteConfig
from tests.helpers.command import run_engine
from tests.helpers.fleet import EVENTS, FakeReplica, Routing, chunk, routing, whole
from tests.helpers.serving import (
    CHAT,
    COMPLETIONS,
    HELLO,
    Running,
    free_port,
    head_of,
    named_events,
    read_all,
    running,
    wait_until,
)

PROMPT = {"prompt": "a", "max_tokens": 2}
BUSY = b'{"error":{"message":"busy","type":"rate_limit_error","param":null,"code":"overloaded"}}'


@pytest.fixture(scope="module")
def good() -> Iterator[Running]:
    with running() as opened:
        yield opened


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here needs to wait for a replica that does not return."""
    monkeypatch.setattr(forward, "RETURN_S", 0.0)


def first_choice(proxy: Routing, port: int) -> None:
    """Makes one replica the first choice, as long as nothing runs."""
    for one in proxy.fleet.replicas:
        proxy.call(one.outcomes.update, {"test": 0 if one.url.port == port else 1000})


def send(data: bytes) -> Any:
    return lambda connection, head: connection.sendall(data)


NO_ANSWERS = {
    "no byte": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    "no event": EVENTS + chunk(b'data: {"id'),
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a long head": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    "a failure": whole(500),
    "a proxy's error": whole(502),
    "a drain": whole(503),
    "a drain of Anthropic's API": whole(529),
    "too busy": whole(429, BUSY, b"Retry-After: 7"),
    "no such model": whole(404),
}


@pytest.mark.parametrize("data", NO_ANSWERS.values(), ids=NO_ANSWERS)
def test_another_replica_answers(good: Running, data: bytes) -> None:
    with FakeReplica(send(data)) as bad, routing(bad.port, good.port) as proxy:
        first_choice(proxy, bad.port)
        assert proxy.post(COMPLETIONS, PROMPT).status == 200
        assert len(bad.heads) == 1


def test_a_replica_that_does_not_listen_is_left_out(good: Running) -> None:
    with routing(free_port(), good.port) as proxy:
        assert [one.is_healthy for one in proxy.fleet.replicas] == [False, True]
        assert proxy.post(COMPLETIONS, PROMPT).status == 200
        assert proxy.ask("GET", "/health").json == {"status": "ok", "replicas": 1}
        assert [card["id"] for card in proxy.ask("GET", "/v1/models").json["data"]] == ["tiny"]


def test_a_replica_that_ends_is_taken_out_and_returns(good: Running) -> None:
    with FakeReplica(send(whole(200))) as other, routing(other.port, good.port) as proxy:
        other.health = whole(503)
        wait_until(lambda: len(proxy.fleet.healthy) == 1)
        for _ in range(3):
            assert proxy.post(COMPLETIONS, PROMPT).status == 200
        assert other.heads == []
        other.health = whole(200)
        wait_until(lambda: len(proxy.fleet.healthy) == 2)
        first_choice(proxy, other.port)
        assert proxy.post(COMPLETIONS, PROMPT).body == b"{}"
        assert proxy.fleet.replicas[0].num_ejections == 1


def test_no_replica() -> None:
    with routing(free_port(), free_port()) as proxy:
        for path, body, status in ((CHAT, {"messages": HELLO}, 503), ("/v1/messages", {"messages": HELLO}, 529)):
            answer = proxy.post(path, body)
            assert answer.status == status and answer.headers["retry-after"] == "1"
        assert proxy.post(CHAT, {"messages": HELLO}).error["code"] == "no_replica"
        assert proxy.ask("GET", "/v1/models").error["code"] == "no_replica"
        assert proxy.ask("GET", "/health").status == 503


def test_a_request_waits_for_a_replica_that_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "RETURN_S", 60.0)
    with FakeReplica(send(whole(200))) as only, routing(only.port) as proxy:
        only.health = whole(503)
        wait_until(lambda: not proxy.fleet.healthy)
        with proxy.connect() as connection:
            proxy.send(connection, COMPLETIONS, PROMPT)
            wait_until(lambda: len(proxy.fleet.live) == 1)
            only.health = whole(200)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_too_busy_is_passed_on_when_all_are() -> None:
    busy = send(whole(429, BUSY, b"Retry-After: 7"))
    with FakeReplica(busy) as first, FakeReplica(busy) as second, FakeReplica(send(whole(503))) as third:
        with routing(first.port, second.port, third.port) as proxy:
            answer = proxy.post(COMPLETIONS, PROMPT)
        assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, BUSY, "7")
        assert len(first.heads) == len(second.heads) == 1


def test_a_request_that_kills_replicas_kills_two_at_most() -> None:
    with FakeReplica(send(b"")) as first, FakeReplica(send(b"")) as second, FakeReplica(send(b"")) as third:
        with routing(first.port, second.port, third.port) as proxy:
            assert proxy.post(COMPLETIONS, PROMPT).error["code"] == "replica_lost"
            wait_until(lambda: len(proxy.fleet.healthy) == 3)  # and nothing was ejected for good
            assert proxy.post("/v1/messages", {"messages": HELLO}).json["error"]["type"] == "api_error"
        assert sum(len(one.heads) for one in (first, second, third)) == 4


CHUNKS = b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}\n\n'


def test_a_stream_that_breaks_ends_with_an_error_event(good: Running) -> None:
    """The half of an event before the break is not sent, and no other replica is asked."""
    with FakeReplica(send(EVENTS + chunk(CHUNKS + b'data: {"id"'))) as bad, routing(bad.port, good.port) as proxy:
        first_choice(proxy, bad.port)
        events = proxy.post(CHAT, {"messages": HELLO, "stream": True}).events
        assert events[0]["id"] == "x" and events[1]["error"]["code"] == "replica_lost" and len(events) == 2
        wait_until(lambda: len(proxy.fleet.healthy) == 2)
        first_choice(proxy, bad.port)
        url = f"http://127.0.0.1:{proxy.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="m", messages=HELLO, stream=True)  # type: ignore[call-overload]
            with pytest.raises(openai.APIError, match="was lost"):
                list(stream)


def test_a_message_that_breaks_ends_with_an_error_event() -> None:
    start = b'event: ping\ndata: {"type":"ping"}\n\n'
    with FakeReplica(send(EVENTS + chunk(start))) as bad, routing(bad.port) as proxy:
        events = named_events(proxy.post("/v1/messages", {"messages": HELLO, "stream": True}))
        assert [event["type"] for event in events] == ["ping", "error"] and events[1]["error"]["type"] == "api_error"
        wait_until(lambda: len(proxy.fleet.healthy) == 1)
        url = f"http://127.0.0.1:{proxy.port}"
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.messages.create(model="m", max_tokens=4, messages=HELLO, stream=True)  # type: ignore[call-overload]
            with pytest.raises(anthropic.APIStatusError, match="was lost"):
                list(stream)


def test_a_response_that_breaks_ends_with_an_error_event() -> None:
    start = b'event: response.x\ndata: {"type":"response.x","sequence_number":0}\n\n'
    with FakeReplica(send(EVENTS + chunk(start))) as bad, routing(bad.port) as proxy:
        events = named_events(proxy.post("/v1/responses", {"input": "Hello", "stream": True}))
        assert [(event["type"], event["sequence_number"]) for event in events] == [("response.x", 0), ("error", 1)]
        wait_until(lambda: len(proxy.fleet.healthy) == 1)
        url = f"http://127.0.0.1:{proxy.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            found = list(client.responses.create(model="m", input="Hello", stream=True))
        assert found[-1].type == "error" and found[-1].code == "replica_lost"


@pytest.mark.parametrize("cuts", [1, 7])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"], ids=repr)
def test_events_are_whole_however_they_are_cut(cuts: int, end: bytes) -> None:
    events = b"".join(b'data: {"n":%d}' % number + end for number in range(20))
    pieces = [events[start : start + cuts] for start in range(0, len(events), cuts)]
    answer = EVENTS + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"
    with FakeReplica(send(answer)) as only, routing(only.port) as proxy:
        assert proxy.post(CHAT, {"messages": HELLO, "stream": True}).body == events


@pytest.mark.parametrize("stream", [True, False])
def test_endless_answers_are_given_up(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(reply, "MAX_ANSWER_BYTES", 1 << 20)
    monkeypatch.setattr(replica.read_whole, "__defaults__", (1 << 20,))

    def endless(connection: socket.socket, head: bytes) -> None:
        connection.sendall(EVENTS if stream else EVENTS.replace(b"event-stream", b"plain"))
        while True:
            connection.sendall(chunk(b"x" * 65536))

    with FakeReplica(endless) as only, routing(only.port) as proxy:
        assert proxy.post(CHAT, {"messages": HELLO}).error["code"] == "replica_lost"
        assert proxy.fleet.replicas[0].is_healthy


def test_a_replica_that_hangs_is_given_up(good: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has not begun goes elsewhere; a stream that has begun ends with an error event."""
    monkeypatch.setattr(replica, "HEALTH_TIMEOUT_S", 1.0)
    hangs = threading.Event()

    def hang(connection: socket.socket, head: bytes) -> None:
        if b"/chat/" in head:
            connection.sendall(EVENTS + chunk(CHUNKS))
        assert hangs.wait(60)

    with FakeReplica(hang) as bad, routing(bad.port, good.port) as proxy, proxy.connect() as connection:
        first_choice(proxy, bad.port)
        rest = proxy.begin(CHAT, {"messages": HELLO})
        wait_until(lambda: len(bad.heads) == 1)
        proxy.call(proxy.fleet.replicas[1].outcomes.update, {"test": 5000})
        proxy.send(connection, COMPLETIONS, {"prompt": "b" * 600, "max_tokens": 2})
        bad.health = None
        assert rest().events[-1]["error"]["code"] == "replica_lost"
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert not proxy.fleet.replicas[0].is_healthy
        hangs.set()


def test_connection_headers_are_not_passed_on() -> None:
    given = ("Connection: close, X-Hop", "X-Hop: 1", "TE: trailers", "Proxy-Authorization: secret", "Upgrade: h2c",
             "Authorization: Bearer key", "X-Api-Key: key", "X-Priority: batch", "Accept-Encoding: gzip")  # fmt: skip
    answer = whole(200, b"{}", b"Keep-Alive: timeout=1", b"X-Enginewright-Warning: w", b"Server: s")
    with FakeReplica(send(answer)) as only, routing(only.port) as proxy, proxy.connect() as connection:
        connection.sendall(head_of("GET /version", *given))
        got = read_all(connection).lower()
        names = {line.partition(b":")[0].lower() for line in only.heads[0].split(b"\r\n")[1:-2]}
    assert names == {b"host", b"authorization", b"x-api-key", b"x-priority", b"x-request-id"}
    assert b"x-enginewright-warning: w\r\n" in got and b"keep-alive" not in got and b"server:" not in got


def test_a_compressed_body_is_passed_on_plain(good: Running) -> None:
    body = gzip.compress(json.dumps(PROMPT).encode())
    with routing(good.port) as proxy:
        assert proxy.ask("POST", COMPLETIONS, body, {"Content-Encoding": "gzip"}).status == 200


def test_redirects_and_cookies_stay_with_the_client(good: Running) -> None:
    answer = whole(307, b"{}", b"Location: http://127.0.0.1:1/", b"Set-Cookie: a=b")
    with FakeReplica(send(answer)) as only, routing(only.port) as proxy:
        assert proxy.post(COMPLETIONS, PROMPT).status == 307
        proxy.post(COMPLETIONS, PROMPT)
        assert b"cookie" not in only.heads[1].lower()


@pytest.mark.parametrize(
    "urls",
    [
        (), ("127.0.0.1:8000",), ("ftp://a:1",), ("http://",), ("http://user:secret@a:1",), ("http://a:1/x",),
        ("http://a:1?b",), ("http://a:1", "http://a:1/v1"), ("http://[::1",), ("http://a:99999",),
    ],
)  # fmt: skip
def test_urls_that_are_no_replica(urls: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        RouteConfig(urls)


@pytest.mark.parametrize(
    "options", [{"max_lead": -1}, {"drain_seconds": float("inf")}, {"max_connections": 0}, {"ssl_keyfile": Path("x")}]
)
def test_settings_that_are_not_valid(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RouteConfig(("http://a:1",), **options)


def test_the_command_refuses_what_is_no_url() -> None:
    result = run_engine("route", "localhost:8000")
    assert result.exit_code == 2 and "no URL of a replica" in result.output and "http://10.0.0.5:8000" in result.output
