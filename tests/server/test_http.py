"""HTTP itself: routes, lengths, what is no HTTP, and who may ask."""

import json
import socket
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from enginewright.errors import UsageError
from enginewright.runtime.server import wire
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.wire import MAX_HEAD_BYTES
from tests.helpers.serving import CHAT, COMPLETIONS, Answer, Running, head_of, read_all, running

MAX_BODY = 200_000
JSON = "Content-Type: application/json"
KEYS = ("the first of two", "key-2", "another one")
SERVER = {"max_body_bytes": MAX_BODY}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running(api_keys=KEYS, host="0.0.0.0") as opened:  # there any Host header comes as far as the keys
        yield opened


def test_routes_and_methods(server: Running) -> None:
    for path in ("/page", "/v1", "/v1/completions/", "/v1/chat", "/docs", "/v1/images", "/%2e%2e/etc/passwd"):
        assert server.ask("POST", path, {}).status == 404
        assert server.ask("GET", path).error["type"] == "invalid_request_error"
    for method, path in (("GET", CHAT), ("DELETE", "/v1/models"), ("POST", "/health"), ("PUT", COMPLETIONS)):
        answer = server.ask(method, path)
        assert answer.status == 405 and answer.error and answer.headers["allow"]
    assert server.ask("HEAD", "/health").status == 200


def test_only_json_is_read(server: Running) -> None:
    """A content type that a web page may send to another site without preflight is refused."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = server.ask("POST", COMPLETIONS, {"prompt": "x"}, {"Content-Type": kind})
        assert answer.status == 415 and "application/json" in answer.error["message"]
    assert server.post(COMPLETIONS, {"prompt": "x"}, {"Content-Type": "Application/JSON; charset=utf-8"}).status == 200


def test_long_bodies(server: Running) -> None:
    body = json.dumps({"prompt": "x", "user": ""}).encode()
    assert server.post(COMPLETIONS, body.replace(b'""', b'"' + b"u" * (MAX_BODY - len(body)) + b'"')).status == 200
    with server.connect() as connection:  # said to be too long: refused before it comes
        connection.sendall(head_of(f"POST {COMPLETIONS}", JSON, f"Content-Length: {MAX_BODY + 1}"))
        assert b"413" in read_all(connection).splitlines()[0]
    with server.connect() as connection:  # without a length: refused when it has become too long
        connection.sendall(head_of(f"POST {COMPLETIONS}", JSON, "Transfer-Encoding: chunked"))
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(chunk)
        answer = read_all(connection)
        assert b"413" in answer.splitlines()[0] and b'"body_too_large"' in answer


def compressed(data: bytes, wbits: int = 31) -> bytes:
    """wbits: as of zlib; 31 is gzip, and 15 what HTTP calls deflate."""
    made = zlib.compressobj(wbits=wbits)
    return made.compress(data) + made.flush()


def in_encoding(server: Running, name: str, data: bytes) -> Answer:
    return server.post(COMPLETIONS, data, {"Content-Encoding": name})


def test_compressed_bodies(server: Running) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4, "ignore_eos": True}).encode()
    text = server.complete("x", max_tokens=4)["choices"]
    for name, data in (
        ("gzip", compressed(body)),
        ("GZIP", compressed(body)),
        ("x-gzip", compressed(body)),
        ("deflate", compressed(body, 15)),
        ("identity", body),
        ("", body),
    ):
        assert in_encoding(server, name, data).json["choices"] == text, name
    with server.connect() as connection:  # in pieces of one byte
        data = compressed(body)
        lines = (JSON, "Content-Encoding: gzip", "Transfer-Encoding: chunked", "Connection: close")
        pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in data)
        connection.sendall(head_of(f"POST {COMPLETIONS}", *lines) + pieces + b"0\r\n\r\n")
        assert b" 200 " in read_all(connection).splitlines()[0]
    for name in ("br", "zstd", "gzip, gzip", "\xe9" * 99):
        answer = in_encoding(server, name, compressed(body))
        assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
        assert ascii(name[:40]) in answer.error["message"] and answer.headers["accept-encoding"] == "gzip, deflate"
    whole = compressed(body)
    for data in (b"", body, whole[:-1], whole + b"x", whole + whole, whole[:20] + b"xx" + whole[22:]):
        answer = in_encoding(server, "gzip", data)
        assert (answer.status, answer.error["code"]) == (400, "invalid_encoding"), data


def test_a_compressed_body_is_never_larger_than_the_limit(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb is refused as soon as it is, and so are bytes without end that have nothing in them."""
    made: list[int] = []

    class Counting:
        def __init__(self, wbits: int) -> None:
            self._stream = decompressobj(wbits)

        def decompress(self, data: bytes, max_length: int) -> bytes:
            out = self._stream.decompress(data, max_length)
            made.append(len(out))
            return out

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    decompressobj = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    fits = json.dumps({"prompt": "x", "user": "u" * (MAX_BODY - 27)}).encode()
    assert len(fits) == MAX_BODY and in_encoding(server, "gzip", compressed(fits)).status == 200
    for wbits in (31, 15):
        made.clear()
        answer = in_encoding(server, "gzip", compressed(b" " * (100 << 20), wbits))
        assert (answer.status, answer.error["code"]) == (413, "body_too_large") and sum(made) == MAX_BODY + 1
    empty = zlib.compressobj(wbits=31)
    data = empty.compress(b"") + b"".join(empty.flush(zlib.Z_FULL_FLUSH) or b"" for _ in range(3))
    data += b"\x00\x00\x00\xff\xff" * 10_000  # stored blocks of no bytes
    with server.connect() as connection:
        lines = (JSON, "Content-Encoding: gzip", "Transfer-Encoding: chunked")
        connection.sendall(head_of(f"POST {COMPLETIONS}", *lines))
        with suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"%x\r\n" % len(data) + data + b"\r\n")
                data = b"\x00\x00\x00\xff\xff" * 10_000
        assert b" 413 " in read_all(connection).splitlines()[0]


def test_huge_headers(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LINGER_S", 60.0)  # or a busy machine loses the answer with the connection
    many = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(100))
    one = b"x: " + b"y" * (4 * MAX_HEAD_BYTES) + b"\r\n"
    endless = b"x: " + b"y" * (64 * MAX_HEAD_BYTES)
    url = b"/" + b"y" * (64 * MAX_HEAD_BYTES)
    trailers = b"Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n2\r\n{}\r\n0\r\n" + many
    for data in (
        b"GET /health HTTP/1.1\r\n" + many + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + one + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + endless,
        b"GET " + url,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + trailers,
    ):
        with server.connect() as connection:
            with suppress(ConnectionError):
                connection.sendall(data)
            answer = read_all(connection)
            assert answer.splitlines()[0].split()[1] == b"431", answer[:200]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    fits = b"x: " + b"y" * (MAX_HEAD_BYTES - 100) + b"\r\n"
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + fits + b"\r\n")
        assert b"200" in read_all(connection).splitlines()[0]


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"CONNECT x HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http(server: Running, data: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.splitlines()[0].split()[1] in (b"400", b"403", b"404")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_keep_alive_connection_outlives_errors(server: Running) -> None:
    with server.connect() as connection:
        for _ in range(3):
            server.send(connection, COMPLETIONS, {"prompt": 5})
            answer = b""
            while b'"}}' not in answer and b"null}}" not in answer:
                answer += connection.recv(1 << 16)
            assert b" 400 " in answer.splitlines()[0]


def test_every_route_but_health_wants_a_key(guarded: Running) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("GET", "/x"),
        ("GET", "/docs"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("GET", "/%68ealth"),
        ("GET", "/v1/models/../../health"),
        ("GET", "/health;x"),
        ("DELETE", "/v1/models"),
    ):
        answer = guarded.ask(method, path, headers={"Host": "localhost/health?"})
        assert answer.status == 401, path
        assert answer.error["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/health?x=/v1/models", "/"):  # the page asks for a key itself
        assert guarded.ask("GET", path).status == 200


def test_keys(guarded: Running) -> None:
    for key in KEYS:
        for scheme in ("Bearer", "bearer"):
            assert guarded.ask("GET", "/v1/models", headers={"Authorization": f"{scheme} {key}"}).status == 200
    for value in (
        "",
        "Bearer",
        "Bearer ",
        f"Basic {KEYS[1]}",
        KEYS[1],
        f"Bearer {KEYS[1]}x",
        f"Bearer {KEYS[1][:-1]}",
        "Bearer \xff",
    ):
        answer = guarded.ask("GET", "/v1/models", headers={"Authorization": value})
        assert answer.status == 401 and not any(key in answer.error["message"] for key in KEYS)
    with guarded.connect() as connection:
        twice = [f"Authorization: Bearer {key}" for key in (KEYS[1], "x")]
        connection.sendall(head_of("GET /v1/models", "Connection: close", *twice))
        assert b" 401 " in read_all(connection).splitlines()[0]


def test_those_with_other_keys_share_no_prefix(guarded: Running) -> None:
    def cached(key: str) -> int:
        body = {"prompt": list(range(3, 203)), "max_tokens": 1}
        usage = guarded.post(COMPLETIONS, body, {"Authorization": f"Bearer {key}"}).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(KEYS[0]), cached(KEYS[1])] == [0, 0]
    assert cached(KEYS[0]) > 100 and cached(KEYS[1]) > 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"port": -1},
        {"drain_seconds": -1},
        {"drain_seconds": float("nan")},
        {"max_num_waiting": 0},
        {"max_waiting_tokens": 0},
        {"max_body_bytes": 0},
        {"api_keys": ("",)},
        {"api_keys": ("ключ",)},
        {"api_keys": ("a\nb",)},
        {"served_model_names": ("",)},
        {"served_model_names": ("a\udc80",)},
    ],
)
def test_config(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServerConfig(**wrong)
