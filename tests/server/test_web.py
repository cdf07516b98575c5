"""TLS and CORS of the server."""

import json
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Sequence
from http.client import HTTPSConnection
from pathlib import Path

import pytest

from enginewright.errors import UsageError
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.tls import Tls
from tests.helpers.odd_files import make_sparse
from tests.helpers.serving import COMPLETIONS, Running, process, running, wait_until

SITE = "https://chat.example.com"
QUESTION = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
SERVER = {"allowed_origins": (SITE,), "api_keys": ("secret",)}


def certificate(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A self-signed certificate of localhost, and its key."""
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    command = ("openssl", "req", "-x509", *ec, "-days", "2", "-subj", f"/CN={name}", *(options or ("-noenc",)))
    command = (*command, "-addext", "subjectAltName=DNS:localhost", "-out", str(paths[0]), "-keyout", str(paths[1]))
    subprocess.run(command, check=True, capture_output=True)
    return paths


def test_tls(tmp_path: Path) -> None:
    """Requests and streams over HTTPS; a certificate that is replaced is served after SIGHUP, a wrong one is not."""
    cert, key = certificate(tmp_path, "first")
    with process(ssl_certfile=str(cert), ssl_keyfile=str(key)) as opened:
        assert opened.stderr is not None
        line = opened.stderr.readline()
        assert line.startswith("serving tiny at https://127.0.0.1:"), line
        port = int(line.split("https://127.0.0.1:")[1].split("/")[0])

        def complete(stream: bool) -> bytes:
            connection = HTTPSConnection("localhost", port, context=ssl.create_default_context(cafile=str(cert)))
            body = {"prompt": "a", "max_tokens": 4, "ignore_eos": True, "stream": stream}
            connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200
            return response.read()

        def common_name() -> str:
            context = ssl.create_default_context(cafile=str(cert))
            connection = HTTPSConnection("localhost", port, context=context)
            try:
                connection.connect()
            except ssl.SSLCertVerificationError:
                return "another"
            finally:
                connection.close()
            return "the one in the file"

        assert json.loads(complete(stream=False))["usage"]["completion_tokens"] == 4
        assert complete(stream=True).endswith(b"data: [DONE]\n\n")
        with socket.create_connection(("127.0.0.1", port)) as plain:
            secure = ssl.create_default_context(cafile=str(cert)).wrap_socket(plain, server_hostname="localhost")
            secure.sendall(b"no HTTP\r\n\r\n")
            assert secure.recv(1000).startswith(b"HTTP/1.1 400 ")
        os.replace(certificate(tmp_path, "second")[1], key)  # the key alone: it is not the certificate's
        opened.send_signal(signal.SIGHUP)
        line = opened.stderr.readline()
        assert "the certificate was not replaced" in line and "is not the key of" in line
        assert common_name() == "the one in the file"
        certificate(tmp_path, "first")
        assert common_name() == "another"
        opened.send_signal(signal.SIGHUP)
        wait_until(lambda: common_name() == "the one in the file")


def test_files_that_are_no_certificate(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "other")
    locked = certificate(tmp_path, "locked", "-passout", "pass:word")
    text = tmp_path / "text.pem"
    text.write_text("no PEM")
    fifo, sparse = tmp_path / "fifo.pem", tmp_path / "sparse.pem"
    os.mkfifo(fifo)
    make_sparse(sparse)
    wrong: Sequence[tuple[Path, Path | None, str]] = (
        (tmp_path / "none.crt", key, "none.crt cannot be read: no such file"),
        (cert, tmp_path / "none.key", "none.key cannot be read: no such file"),
        (tmp_path, key, "cannot be read: it is a folder"),
        (fifo, key, "fifo.pem cannot be read: it is not a regular file"),
        (cert, fifo, "fifo.pem cannot be read: it is not a regular file"),
        (sparse, key, "sparse.pem cannot be read: it has more than 4,194,304 bytes"),
        (cert, other, "other.key is not the key of .*one.crt"),
        (text, key, "are no certificate and key"),
        (cert, None, "are no certificate and key"),
        (*locked, "the TLS key has a password"),
    )
    for certfile, keyfile, message in wrong:
        with pytest.raises(UsageError, match=message):
            Tls(certfile, keyfile)
    with pytest.raises(UsageError, match="ssl_keyfile needs ssl_certfile"):
        ServerConfig(ssl_keyfile=key)


def cors_of(headers: object) -> dict[str, str]:
    assert isinstance(headers, dict)
    return {name: value for name, value in headers.items() if name.startswith("access-control-")}


def test_pages_of_allowed_sites_may_ask(server: Running) -> None:
    """A question comes without a key; the answer of the request itself is readable, errors too."""
    may = server.ask("OPTIONS", COMPLETIONS, headers={"Origin": SITE, **QUESTION})
    assert (may.status, may.body) == (204, b"")
    assert cors_of(may.headers) == {
        "access-control-allow-origin": SITE,
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": "authorization,x-stainless-os",
        "access-control-max-age": "600",
        "access-control-expose-headers": "X-Request-Id, X-Enginewright-Warning, Retry-After",
    }
    for key, status in ("secret", 200), ("wrong", 401):
        answer = server.ask("GET", "/v1/models", headers={"Origin": SITE, "Authorization": f"Bearer {key}"})
        assert answer.status == status and answer.headers["access-control-allow-origin"] == SITE
        assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", f"{SITE}.evil", "null", f"{SITE}:8443", "http://chat.example.com"]
)
def test_pages_of_other_sites_may_not(server: Running, origin: str) -> None:
    may = server.ask("OPTIONS", COMPLETIONS, headers={"Origin": origin, **QUESTION})
    assert may.status == 401 and not cors_of(may.headers)
    answer = server.ask("GET", "/health", headers={"Origin": origin})
    assert answer.status == 200 and not cors_of(answer.headers) and answer.headers["vary"] == "Origin"


def test_nothing_is_allowed_by_default() -> None:
    with running() as server:
        answer = server.ask("OPTIONS", COMPLETIONS, headers={"Origin": SITE, **QUESTION})
    assert answer.status == 405 and not cors_of(answer.headers)


@pytest.mark.parametrize("origin", ["*", "chat.example.com", f"{SITE}/", "https://Chat.example.com", "null"])
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(UsageError, match=r"allowed_origins has .*\n?.*Name each site"):
        ServerConfig(allowed_origins=(origin,))
