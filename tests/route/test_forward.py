"""Requests and their answers through the proxy, with two real replicas."""

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.helpers.fleet import Routing, routing
from tests.helpers.serving import (
    CHAT,
    COMPLETIONS,
    HELLO,
    Running,
    exactly,
    head_of,
    named_events,
    read_all,
    running,
    wait_until,
)

LONG = {"ignore_eos": True, "max_tokens": 4000}  # takes seconds, if it is not aborted
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Running]]:
    with running(kind="calls tools at once") as first, running(kind="calls tools at once") as second:
        yield [first, second]


@pytest.fixture(scope="module")
def proxy(replicas: list[Running]) -> Iterator[Routing]:
    with routing(*(replica.port for replica in replicas)) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(proxy: Routing) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def claude(proxy: Routing) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{proxy.port}", api_key="none", max_retries=0) as opened:
        yield opened


def test_chats_are_those_of_a_replica(proxy: Routing, replicas: list[Running]) -> None:
    body = {"messages": HELLO, "max_tokens": 8, "ignore_eos": True}
    through, direct = proxy.post(CHAT, body), replicas[0].post(CHAT, body)
    assert through.status == direct.status == 200
    assert through.json["choices"] == direct.json["choices"]
    added = {"x-request-id"}
    assert set(through.headers) == set(direct.headers) | added


def test_streams_come_as_they_are_written(proxy: Routing) -> None:
    rest = proxy.begin(COMPLETIONS, {"prompt": "a", "ignore_eos": True, "max_tokens": 400})
    events = rest().events  # the first event came before the last one was computed
    assert events[-1] == "[DONE]" and len(events) > 10
    whole = proxy.complete("a", max_tokens=400)["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole


def test_tools(client: openai.OpenAI) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    options: dict[str, Any] = {"extra_body": {"structured_outputs": exactly(call)}, "tools": [WEATHER]}
    whole = client.chat.completions.create(model="tiny", messages=HELLO, **options)  # type: ignore[call-overload]
    stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **options)  # type: ignore[call-overload]
    deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["weather"]
    assert [call.function.name for call in deltas if call.function.name] == ["weather"]


def test_messages_of_anthropic(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": HELLO}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        assert [part.type for part in stream.get_final_message().content] == [part.type for part in whole.content]
    assert claude.messages.count_tokens(model="tiny", messages=HELLO).input_tokens > 0  # type: ignore[arg-type]


def test_responses_are_continued_where_they_are_kept(client: openai.OpenAI, proxy: Routing) -> None:
    """Load and prefixes would send each turn anywhere: only one replica can continue it."""
    before = proxy.attempts()
    for _ in range(4):
        first = client.responses.create(model="tiny", input="Hello", max_output_tokens=4)
        second = client.responses.create(model="tiny", input="More", max_output_tokens=4, previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert client.responses.retrieve(first.id).id == first.id
        assert client.responses.input_items.list(second.id).data
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="no longer kept"):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="no longer kept"):
            client.responses.create(model="tiny", input="More", previous_response_id=first.id)
    assert all(now > then for now, then in zip(proxy.attempts(), before, strict=True))  # both had some


def test_models_are_merged(proxy: Routing, replicas: list[Running]) -> None:
    merged, direct = (one.ask("GET", "/v1/models").json for one in (proxy, replicas[0]))
    assert [card["id"] for card in merged["data"]] == ["tiny"] and set(merged) == set(direct)
    assert proxy.ask("GET", "/v1/models/tiny").json["id"] == "tiny"
    assert proxy.ask("GET", "/v1/models/other").status == 404


def test_errors_are_those_of_a_replica(proxy: Routing, replicas: list[Running]) -> None:
    for path, body in (
        (CHAT, {"messages": HELLO, "temperature": -1}),
        (CHAT, {"messages": HELLO, "model": "other"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": -1}),
        (COMPLETIONS, b"{"),
    ):
        through, direct = proxy.post(path, body), replicas[0].post(path, body)
        assert (through.status, through.body) == (direct.status, direct.body) and 400 <= through.status < 500


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/metrics", 405),
        ("GET", CHAT, 405),
        ("GET", "/v1/models/../../metrics", 404),
        ("GET", "/v1/models/%2e%2e/%2e%2e/metrics", 404),
        ("GET", "//127.0.0.1:1/v1/models", 404),
    ],
)
def test_only_known_paths_are_passed_on(proxy: Routing, method: str, path: str, status: int) -> None:
    before = proxy.attempts()
    answer = proxy.ask(method, path, {} if method == "POST" else None)
    assert answer.status == status and answer.error
    assert proxy.attempts() == before


def test_a_whole_url_goes_to_a_replica(proxy: Routing) -> None:
    before = sum(proxy.attempts())
    assert proxy.ask("GET", "http://127.0.0.1:1/version").json == proxy.ask("GET", "/version").json
    assert sum(proxy.attempts()) == before + 2


def test_a_host_that_is_not_ours_is_refused(proxy: Routing) -> None:
    assert proxy.ask("GET", "/v1/models", headers={"Host": "evil.example"}).status == 403


def test_request_ids(proxy: Routing) -> None:
    given = proxy.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "mine"})
    made = [proxy.ask("GET", path).headers["x-request-id"] for path in ("/health", "/v1/models", "/none")]
    assert given.headers["x-request-id"] == "mine" and len({*made}) == 3
    assert proxy.ask("GET", "/health", headers={"X-Request-Id": "x" * 65}).headers["x-request-id"] != "x" * 65


def test_bodies_and_heads_are_limited(replicas: list[Running]) -> None:
    with routing(replicas[0].port, max_body_bytes=1000) as proxy:
        assert proxy.post(CHAT, {"messages": [{"role": "user", "content": "x" * 1000}]}).status == 413
        assert proxy.ask("POST", CHAT, b"{}", {"Content-Type": "text/plain"}).status == 415
        with proxy.connect() as connection:
            connection.sendall(head_of("GET /v1/models", "X: " + "x" * (70 << 10)))
            assert read_all(connection).startswith(b"HTTP/1.1 431")
        assert proxy.attempts() == [0]


@pytest.mark.parametrize("value", [b"a\x01b", b"\xe9", b"\x7f", b"a\tb"], ids=repr)
def test_odd_headers_harm_no_replica(proxy: Routing, value: bytes) -> None:
    with proxy.connect() as connection:
        connection.sendall(
            b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Odd: " + value + b"\r\nConnection: close\r\n\r\n"
        )
        assert read_all(connection)[:12] in (b"HTTP/1.1 200", b"HTTP/1.1 400")
    assert [replica.num_ejections for replica in proxy.fleet.replicas] == [0, 0]


@pytest.mark.parametrize(
    "path", [b"/v1/models/%ff", b"/v1/models/\xe9", b"/v1/models/a?b=%00&\xe9", b"/v1/models/a%0d%0a"]
)
def test_odd_paths_harm_no_replica(proxy: Routing, path: bytes) -> None:
    with proxy.connect() as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_all(connection)[:12] in (b"HTTP/1.1 404", b"HTTP/1.1 400")
    assert [replica.num_ejections for replica in proxy.fleet.replicas] == [0, 0]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_stops_the_replica(proxy: Routing, replicas: list[Running], stream: bool) -> None:
    def aborted() -> int:
        return sum(replica.service.metrics.finished["abort"] for replica in replicas)

    before = aborted()
    with proxy.connect() as connection:
        proxy.send(connection, COMPLETIONS, {"prompt": "a", "stream": stream, **LONG})
        wait_until(lambda: any(replica.llm.stats().num_running for replica in replicas))
    wait_until(lambda: all(replica.is_idle() for replica in replicas))
    wait_until(lambda: aborted() == before + 1)
    assert [replica.num_ejections for replica in proxy.fleet.replicas] == [0, 0]


def test_a_conversation_stays_and_new_ones_are_spread(replicas: list[Running]) -> None:
    with routing(*(replica.port for replica in replicas)) as proxy:
        homes = []
        for number in range(4):
            messages = [{"role": "user", "content": f"{number} {'word ' * 40}"}]
            before = proxy.attempts()
            for _ in range(3):
                answer = proxy.chat(messages, max_tokens=4)["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "word " * 40}]
            homes.append([now - then for now, then in zip(proxy.attempts(), before, strict=True)])
        assert sorted(homes) == [[0, 3], [0, 3], [3, 0], [3, 0]]
        assert (
            0
            < sum(one.matched_chunks for one in proxy.fleet.replicas)
            < sum(one.prompt_chunks for one in proxy.fleet.replicas)
        )


def test_a_hot_prefix_does_not_drown_a_replica(replicas: list[Running]) -> None:
    """All have one long prompt: its replica gets no more than max_lead beyond the other."""
    body = {"prompt": "word " * 300, "stream": True, **LONG}
    with routing(*(replica.port for replica in replicas), max_lead=2) as proxy:
        proxy.complete(body["prompt"], max_tokens=1)
        clients = []
        for count in range(1, 7):
            clients.append(connection := socket.create_connection(("127.0.0.1", proxy.port)))
            proxy.send(connection, COMPLETIONS, body)
            wait_until(lambda count=count: sum(len(one.running) for one in proxy.fleet.replicas) == count)  # type: ignore[misc]
        loads = sorted(len(one.running) for one in proxy.fleet.replicas)
        for connection in clients:
            connection.close()
    assert sum(loads) == 6 and 0 < loads[1] - loads[0] <= 3


def test_metrics(proxy: Routing) -> None:
    proxy.complete("a", max_tokens=1)
    text = proxy.ask("GET", "/metrics").body.decode()
    name = f"http://127.0.0.1:{proxy.config.replicas[0].rpartition(':')[2]}"
    for line in (
        f'enginewright_route_replica_up{{replica="{name}"}} 1.0',
        f'enginewright_route_attempts_total{{outcome="200",replica="{name}"}} ',
        'enginewright_route_requests_total{route="/v1/completions",status="200"} ',
        "enginewright_route_first_byte_seconds_count ",
        "process_resident_memory_bytes ",
    ):
        assert line in text, text


def test_a_drain(replicas: list[Running]) -> None:
    """A stream goes on, new requests are refused, and what is left at the end gets an error event of its API."""
    with routing(replicas[0].port, drain_seconds=0.5) as proxy:
        bodies = {
            COMPLETIONS: {"prompt": "a", **LONG},
            "/v1/messages": {"messages": HELLO, "max_tokens": 4000, "ignore_eos": True},
            "/v1/responses": {"input": "Hello", "max_output_tokens": 4000, "ignore_eos": True},
        }
        rests = [proxy.begin(path, body) for path, body in bodies.items()]
        before = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
        before.connect()
        with replicas[0].held_steps() as free:
            proxy.end()
            wait_until(lambda: proxy.fleet.draining)
            before.request("GET", "/health")
            health = before.getresponse()
            assert health.status == 503 and json.loads(health.read())["status"] == "server_shutdown"
            assert proxy.post(COMPLETIONS, {"prompt": "a"}).error["code"] == "server_shutdown"
            answers = [rest() for rest in rests]
            free.set()
        assert answers[0].events[-1]["error"]["code"] == "server_shutdown"
        assert named_events(answers[1])[-1]["error"]["type"] == "overloaded_error"
        last = named_events(answers[2])[-1]
        assert (last["type"], last["code"]) == ("error", "server_shutdown")
        assert [event["sequence_number"] for event in named_events(answers[2])] == list(
            range(last["sequence_number"] + 1)
        )
        before.close()
