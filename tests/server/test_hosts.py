"""The Host header: a page that points its own name at this machine is not answered (DNS rebinding)."""

from typing import Any

import pytest

from enginewright.errors import UsageError
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.hosts import HostCheck
from tests.helpers.serving import CHAT, HELLO, Answer, Running, read_all, running

OWN = ("localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:65535", "localhost:")
OTHERS = (
    "",
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil.example/localhost",
    "evil.example@localhost",
    "localhost:8000:8000",
    "localhost:x",
    "localhost,evil.example",
    "localhost evil.example",
    "localhost/health?",
    "0.0.0.0",
    "127.0.0.2",
    "2130706433",
    "::1",
    "[::1",
    "[::2]",
    "localhost\xff",
    "\xff",
)


def ask(server: Running, *hosts: str, request: str = "GET /health") -> Answer:
    """A request with these Host headers, by hand."""
    headers = [f"Host: {host}" for host in hosts]
    with server.connect() as connection:
        connection.sendall("\r\n".join([f"{request} HTTP/1.1", "Connection: close", *headers, "", ""]).encode("latin1"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    return Answer(int(head.split()[1]), {}, body)


@pytest.mark.parametrize("host", OWN)
def test_own_names(server: Running, host: str) -> None:
    assert ask(server, host).status == ask(server, host, request="GET /v1/models").status == 200


@pytest.mark.parametrize("hosts", [(), ("localhost", "localhost"), *zip(OTHERS)], ids=str)
def test_other_names(server: Running, hosts: tuple[str, ...]) -> None:
    before = server.service.metrics.rejected[403]
    for request in ("GET /health", "GET /v1/models", "GET /metrics", f"POST {CHAT}", "GET /nothing"):
        answer = ask(server, *hosts, request=request)
        assert answer.status == 403 and answer.error["code"] == "host_not_allowed", request
        assert answer.error["type"] == "invalid_request_error" and "evil" not in answer.error["message"]
    assert server.service.metrics.rejected[403] == before + 5
    assert server.ask("POST", CHAT, {"messages": HELLO, "max_tokens": 1}).status == 200


def test_a_name_is_looked_at_before_a_key() -> None:
    with running(api_keys=("key",)) as server:
        assert ask(server, "evil.example", request="GET /v1/models").status == 403
        assert ask(server, "localhost", request="GET /v1/models").status == 401


def test_allowed_names() -> None:
    with running(allowed_hosts=("Models.Example", "fd00::5")) as server:
        for host in ("models.example", "MODELS.example:443", "[fd00::5]:1", "localhost", "127.0.0.1:80"):
            assert ask(server, host).status == 200, host
        for host in ("example", "a.models.example", "models.example.evil"):
            assert ask(server, host).status == 403, host


def test_servers_for_other_machines_answer_to_any_name() -> None:
    with running(host="0.0.0.0") as server:
        for hosts in ((), ("evil.example",), ("a", "b")):
            assert ask(server, *hosts).status == 200
    with running(host="0.0.0.0", allowed_hosts=("models.example",)) as server:
        assert [ask(server, host).status for host in ("models.example", "127.0.0.1", "evil.example")] == [200, 200, 403]
        assert ask(server).status == 403


def test_the_bound_host_is_a_name() -> None:
    def refuses(check: HostCheck, host: bytes) -> bool:
        try:
            check.check({"headers": [(b"host", host)]})
        except ApiError:
            return True
        return False

    check = HostCheck("127.0.0.5", "workstation", ())
    assert [refuses(check, host) for host in (b"127.0.0.5:1", b"workstation", b"localhost")] == [False] * 3
    assert refuses(check, b"other")
    assert refuses(HostCheck("::1", "::1", ()), b"other") and not refuses(HostCheck("::1", "::1", ()), b"[::1]:8000")
    assert not refuses(HostCheck("192.0.2.1", "192.0.2.1", ()), b"other")


@pytest.mark.parametrize("name", ["", "http://localhost", "localhost:8000", "a/b", "*", "a b", "[::1]:80"])
def test_names_that_are_none(name: str) -> None:
    wrong: Any = {"allowed_hosts": (name,)}
    with pytest.raises(UsageError, match="allowed_hosts"):
        ServerConfig(**wrong)
