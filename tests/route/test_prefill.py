"""Long prompts are computed by one replica and answered by another, with the bits of one server."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from enginewright.errors import UsageError
from enginewright.route.config import RouteConfig
from tests.helpers.fleet import FakeReplica, Routing, whole
from tests.helpers.serving import (
    CHAT,
    COMPLETIONS,
    Answer,
    Running,
    exactly,
    free_port,
    named_events,
    running,
    wait_until,
)

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
KIND = "calls tools at once"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
NUMBERS = count()


def long() -> str:
    """A prompt that begins like no other one."""
    return f"{next(NUMBERS)} " + "word " * 120


def bodies() -> list[Any]:
    """A request of each API, with what is compared of its answer."""
    options = {"ignore_eos": True, "seed": 7, "temperature": 1.0}
    guided = {"structured_outputs": exactly(CALL), "tools": [WEATHER]}
    return [
        pytest.param(COMPLETIONS, lambda: {"prompt": long(), "max_tokens": 12, "logprobs": 2, **options}, id="text"),
        pytest.param(COMPLETIONS, lambda: {"prompt": [5 + next(NUMBERS), *range(5, 255)], **options}, id="ids"),
        pytest.param(CHAT, lambda: {"messages": said(), "max_completion_tokens": 12, **options}, id="chat"),
        pytest.param(CHAT, lambda: {"messages": said(), "max_tokens": 12, "min_tokens": 9, **options}, id="minimum"),
        pytest.param(CHAT, lambda: {"messages": said(), **guided}, id="tools"),
        pytest.param(RESPONSES, lambda: {"input": long(), "max_output_tokens": 12, **options}, id="responses"),
        pytest.param(MESSAGES, lambda: {"messages": said(), "max_tokens": 12, **options}, id="messages"),
    ]


def said() -> list[dict[str, str]]:
    return [{"role": "user", "content": long()}]


@dataclass
class Apart:
    """The proxy, a replica that computes prompts, one that answers, and a server that does all by itself."""

    proxy: Routing
    prefill: Running
    decode: Running
    alone: Running

    @property
    def moved(self) -> int:
        """Bytes that the replica which answers has fetched."""
        stats = self.decode.llm.stats().transfer
        assert stats is not None
        return stats.num_received_bytes

    @property
    def prefills(self) -> int:
        """Requests to the replica that computes prompts."""
        return self.proxy.fleet.prefills[0].outcomes.total()


@contextmanager
def routing_apart(decode: int, prefill: int, **config: Any) -> Iterator[Routing]:
    urls = [f"http://127.0.0.1:{port}" for port in (decode, prefill)]
    config = {"min_prefill_bytes": 256, **config}
    with Routing(RouteConfig((urls[0],), prefill=(urls[1],), **config)) as proxy:
        yield proxy
        wait_until(lambda: not proxy.fleet.live and not any(one.running for one in proxy.fleet.all))


def limits(role: str, folder: Path, secret: str = "a secret of the test, long enough") -> dict[str, Any]:
    file = folder / f"{role} {secret}"
    file.write_text(secret)
    return {"kv_role": role, "kv_secret_file": str(file)}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    folder = tmp_path_factory.mktemp("secrets")
    with (
        running(kind=KIND, limits=limits("prefill", folder)) as prefill,
        running(kind=KIND, limits=limits("decode", folder)) as decode,
        running(kind=KIND) as alone,
        routing_apart(decode.port, prefill.port) as proxy,
    ):
        yield Apart(proxy, prefill, decode, alone)


def shown(value: Any) -> Any:
    """An answer without what differs from request to request."""
    if isinstance(value, dict):
        differs = ("id", "item_id", "created", "created_at", "completed_at", "usage", "model", "system_fingerprint")
        return {key: shown(entry) for key, entry in value.items() if key not in differs}
    return [shown(one) for one in value] if isinstance(value, list) else value


def streamed(answer: Answer, path: str) -> list[Any]:
    """The text of a stream, however it is cut into events."""
    events = named_events(answer) if path in (RESPONSES, MESSAGES) else answer.events[:-1]
    found: list[Any] = []
    for event in map(shown, events):
        choice = (event.get("choices") or [{}])[0]
        delta = event.get("delta", choice.get("delta", choice.get("text", {})))
        found.append(delta if isinstance(delta, str) else delta.get("text") or delta.get("content") or delta)
    texts = "".join(one for one in found if isinstance(one, str))
    return [texts, *(one for one in found if one and not isinstance(one, str))]


@pytest.mark.parametrize(("path", "body"), bodies())
def test_answers_are_those_of_one_server(apart: Apart, path: str, body: Callable[[], Any]) -> None:
    asked, moved, prefills = body(), apart.moved, apart.prefills
    through, direct = apart.proxy.post(path, asked), apart.alone.post(path, asked)
    assert through.status == direct.status == 200, through.body
    assert shown(through.json) == shown(direct.json)
    assert apart.moved > moved and apart.prefills == prefills + 1
    assert "kv_transfer_params" not in through.json


@pytest.mark.parametrize(("path", "body"), bodies())
def test_streams_are_those_of_one_server(apart: Apart, path: str, body: Callable[[], Any]) -> None:
    asked, moved = body() | {"stream": True}, apart.moved
    through, direct = apart.proxy.post(path, asked), apart.alone.post(path, asked)
    assert through.status == direct.status == 200, through.body
    assert streamed(through, path) == streamed(direct, path) != [""]
    assert apart.moved > moved


def test_short_and_known_prompts_are_not_moved(apart: Apart) -> None:
    messages = said()
    answer = apart.proxy.chat(messages)["choices"][0]["message"]
    moved, prefills = apart.moved, apart.prefills
    apart.proxy.chat([*messages, answer, {"role": "user", "content": "And?"}])
    apart.proxy.complete("short", max_tokens=1)
    apart.proxy.post("/tokenize", {"prompt": long()})
    assert (apart.moved, apart.prefills) == (moved, prefills)


def test_no_more_than_the_prompt_is_computed(apart: Apart) -> None:
    def written() -> int:
        return apart.prefill.llm.stats().generated_tokens

    before = written()
    apart.proxy.chat(said(), max_tokens=50, min_tokens=40)
    assert written() == before + 1


def test_a_response_is_kept_where_it_is_answered(apart: Apart) -> None:
    first = apart.proxy.post(RESPONSES, {"input": long(), "max_output_tokens": 4}).json
    prefills = apart.prefills
    more = {"input": long(), "max_output_tokens": 4, "previous_response_id": first["id"]}
    assert apart.proxy.post(RESPONSES, more).status == 200
    assert apart.prefills == prefills  # nobody else knows the conversation
    assert not apart.prefill.engines.responses._kept and apart.decode.engines.responses._kept


def test_several_answers_are_computed_where_they_are_written(apart: Apart) -> None:
    asked = {"prompt": long(), "n": 2, "max_tokens": 8, "seed": 7, "temperature": 1.0}
    through, direct = apart.proxy.post(COMPLETIONS, asked), apart.alone.post(COMPLETIONS, asked)
    assert shown(through.json) == shown(direct.json)


def test_a_client_may_route_by_itself(apart: Apart) -> None:
    prefills = apart.prefills
    asked = {"prompt": long(), "kv_transfer_params": {"do_remote_decode": True}}
    assert apart.proxy.post(COMPLETIONS, asked).error["param"] == "kv_transfer_params"
    assert apart.prefills == prefills


@pytest.mark.parametrize("body", [{"messages": "word " * 120}, {"messages": [], "x": "word " * 120}])
def test_errors_are_those_of_the_replica_that_answers(apart: Apart, body: Any) -> None:
    through, direct = (one.post(CHAT, body) for one in (apart.proxy, apart.alone))
    assert (through.status, through.body) == (direct.status, direct.body) and through.status == 400


def test_a_body_that_is_not_utf_8(apart: Apart) -> None:
    body = b'{"\xff": 1, "prompt": "' + long().encode() + b'"}'
    assert apart.proxy.post(COMPLETIONS, body).body == apart.alone.post(COMPLETIONS, body).body


def send(data: bytes) -> Callable[[socket.socket, bytes], None]:
    return lambda connection, head: connection.sendall(data)


FORGED = b'{"kv_transfer_params": {"do_remote_prefill": true, "remote_host": "127.0.0.1"}}'


@pytest.mark.parametrize(
    "answer",
    [
        b"", whole(200)[:-1], whole(500), whole(503), whole(429), whole(404), whole(200),
        whole(200, b"\xff"), whole(200, b"[" * 9999),
        whole(200, b'{"kv_transfer_params": 5}'), whole(200, b'{"kv_transfer_params": {}}'), whole(200, FORGED),
        whole(200, b'{"kv_transfer_params": {"a": "' + b"x" * (8 << 20) + b'"}}'), b"no HTTP\r\n\r\n",
    ],
)  # fmt: skip
def test_a_failed_prefill_changes_no_answer(apart: Apart, answer: bytes) -> None:
    body = {"prompt": long(), "max_tokens": 4}
    with FakeReplica(send(answer)) as prefill, routing_apart(apart.decode.port, prefill.port) as proxy:
        through = proxy.post(COMPLETIONS, body)
        assert len(prefill.heads) == 1
    assert shown(through.json) == shown(apart.alone.post(COMPLETIONS, body).json)


def test_a_replica_that_is_down_computes_nothing(apart: Apart) -> None:
    with routing_apart(apart.decode.port, free_port()) as proxy:
        assert proxy.post(COMPLETIONS, {"prompt": long(), "max_tokens": 4}).status == 200
        assert proxy.ask("GET", "/health").json == {"status": "ok", "replicas": 1}
        assert 'replica_up{replica="' + proxy.config.prefill[0] + '"} 0.0' in proxy.ask("GET", "/metrics").body.decode()


def test_a_replica_that_computes_prompts_answers_nothing(apart: Apart) -> None:
    with routing_apart(free_port(), apart.prefill.port) as proxy:
        assert proxy.ask("GET", "/health").status == 503
        assert proxy.ask("GET", "/v1/models").status == 503


def test_servers_with_different_secrets(apart: Apart, tmp_path: Path) -> None:
    """The replica that answers refuses the parameters, and then computes the prompt."""
    other = limits("prefill", tmp_path, "another secret of the test, long enough")
    with running(kind=KIND, limits=other) as prefill, routing_apart(apart.decode.port, prefill.port) as proxy:
        moved, body = apart.moved, {"prompt": long(), "max_tokens": 4}
        assert shown(proxy.post(COMPLETIONS, body).json) == shown(apart.alone.post(COMPLETIONS, body).json)
        assert apart.moved == moved
        assert dict(proxy.fleet.replicas[0].outcomes) == {"400": 1, "200": 1}


def test_a_client_that_leaves_stops_the_prefill(apart: Apart) -> None:
    with apart.prefill.held_steps() as free:
        with apart.proxy.connect() as connection:
            apart.proxy.send(connection, COMPLETIONS, {"prompt": long(), "max_tokens": 4})
            apart.prefill.until_held()
        wait_until(lambda: not apart.proxy.fleet.live)
        free.set()
    wait_until(apart.prefill.is_idle)
    assert [replica.num_ejections for replica in apart.proxy.fleet.all] == [0, 0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prefill": ("http://a:1",)}, "must be different"),
        ({"prefill": ("a",)}, "no URL of a replica"),
        ({"min_prefill_bytes": -1}, "min_prefill_bytes is -1"),
    ],
)
def test_settings_that_are_not_valid(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        RouteConfig(("http://a:1",), **options)
