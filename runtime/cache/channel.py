"""An authenticated connection between two servers, over which KV blocks move.

Both ends prove by HMACs that they know one secret, and derive a key for each direction of this connection from it and
from two random challenges. A frame is its length, its content, and an HMAC of its number and its content, so nothing
can be altered, repeated or left out on the way. Contents are not encrypted: they belong in a private network. A frame
holds bytes in a fixed layout, or JSON; nothing in it is ever executed.

    client → server   MAGIC, 32 random bytes
    server → client   32 random bytes
    client → server   frame: the client's facts as JSON
    server → client   frame: the names of the facts that differ, as a JSON list; if there is one, the connection ends
    then frames of `leases.py` or `peer.py`
"""

import hmac
import json
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from enginewright.errors import EngineError, UsageError

logger = logging.getLogger(__name__)

MAGIC = b"ew-kv-01"
TIMEOUT_S = 5.0  # maximum seconds without a byte from the other end
MAX_CONNECTION_S = 30.0  # maximum seconds of a connection
HASH_BYTES = 32
MAX_FACTS_BYTES = 4096
MIN_SECRET_BYTES = 16
MAX_CLIENTS = 64  # connections to a server at a time

Facts = Mapping[str, str]  # all that the bytes of a block depend on, each by its name


class TransferError(EngineError):
    """The other end is not reachable, does not know the secret, differs, or breaks the protocol."""


class RefusedError(TransferError):
    """The other end does not know the secret, or its blocks depend on something else."""


class Channel:
    """One end of a connection, once both have proved that they know the secret.

    Args:
        connection: the socket. The channel closes it.
        own_key: key of the frames that are sent.
        other_key: key of the frames that are received.
        until: time.monotonic at which the connection has to be over, in seconds.
    """

    def __init__(self, connection: socket.socket, own_key: bytes, other_key: bytes, until: float) -> None:
        self._socket, self._until = connection, until
        self._own_key, self._other_key = own_key, other_key
        self._num_sent = self._num_received = 0

    @classmethod
    def connect(cls, host: str, port: int, secret: bytes, facts: Facts) -> "Channel":
        """Connects to a server.

        Args:
            host: its name or address.
            port: its TCP port.
            secret: the secret that both know.
            facts: all that the bytes of a block depend on here.

        Raises:
            TransferError: it is not reachable, does not know the secret, or has other facts.
        """
        where, until = f"{host}:{port}", time.monotonic() + MAX_CONNECTION_S
        try:
            connection = socket.create_connection((host, port), TIMEOUT_S)
        except OSError as error:
            raise TransferError(f"{where} cannot be reached", error.strerror or str(error)) from error
        try:
            _send_at_once(connection)
            challenge = os.urandom(HASH_BYTES)
            connection.sendall(MAGIC + challenge)
            channel = cls(connection, *_keys(secret, challenge, _receive(connection, HASH_BYTES, until)), until)
            channel.send(json.dumps(facts).encode())
            differing = json.loads(channel.receive(MAX_FACTS_BYTES))
        except TransferError as error:
            connection.close()
            raise RefusedError(f"{where} has ended the connection", "its secret may differ, or it is busy") from error
        except OSError as error:
            connection.close()
            raise TransferError(f"{where} does not answer", error.strerror or str(error)) from error
        if differing:
            channel.close()
            raise RefusedError(f"blocks of {where} do not fit here", f"it has another {', '.join(differing)}")
        return channel

    @classmethod
    def accept(cls, connection: socket.socket, secret: bytes, facts: Facts) -> "Channel":
        """Accepts a connection.

        Args:
            connection: the socket.
            secret: the secret that both know.
            facts: all that the bytes of a block depend on here.

        Raises:
            TransferError: the client does not know the secret, has other facts, or is none of this protocol.
            OSError: the connection is lost.
        """
        until = time.monotonic() + MAX_CONNECTION_S
        if _receive(connection, len(MAGIC), until) != MAGIC:
            raise TransferError("a client of another protocol has connected")
        theirs, challenge = _receive(connection, HASH_BYTES, until), os.urandom(HASH_BYTES)
        connection.sendall(challenge)
        client_key, server_key = _keys(secret, theirs, challenge)
        channel = cls(connection, server_key, client_key, until)
        given = json.loads(channel.receive(MAX_FACTS_BYTES))
        names = sorted(facts.keys() | given.keys())
        differing = [name for name in names if facts.get(name) != given.get(name)]
        channel.send(json.dumps(differing).encode())
        if differing:
            raise TransferError("blocks do not fit a client", f"it has another {', '.join(differing)}")
        return channel

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def send(self, content: bytes | memoryview) -> None:
        """Sends a frame."""
        tag = _tag(self._own_key, self._num_sent, content)
        self._num_sent += 1
        _wait_less(self._socket, self._until)
        self._socket.sendall(len(content).to_bytes(8, "little"))
        self._socket.sendall(content)
        self._socket.sendall(tag)

    def receive(self, max_bytes: int) -> bytearray:
        """Receives a frame.

        Args:
            max_bytes: maximum size of its content.

        Raises:
            TransferError: it is longer, was altered, or the connection has ended.
        """
        size = int.from_bytes(_receive(self._socket, 8, self._until), "little")
        if size > max_bytes:
            raise TransferError("a frame is too long", f"{size} bytes where at most {max_bytes} belong")
        content = _receive(self._socket, size, self._until)
        tag = _tag(self._other_key, self._num_received, content)
        self._num_received += 1
        if not hmac.compare_digest(tag, _receive(self._socket, HASH_BYTES, self._until)):
            raise TransferError("a frame was altered on the way, or the secrets differ")
        return content


class ChannelServer:
    """Accepts connections over TCP, and serves each in a thread of its own.

    Args:
        option: the option that has named the address.
        host: address to listen on.
        port: TCP port; 0 takes any free one.
        secret: the secret that clients have to know.
        facts: all that the bytes of a block depend on.
        serve: serves one client until it returns or raises.

    Raises:
        UsageError: the address is not available.
    """

    def __init__(
        self, option: str, host: str, port: int, secret: bytes, facts: Facts, serve: Callable[[Channel], None]
    ) -> None:
        self._option, self._secret, self._facts, self._serve_client = option, secret, facts, serve
        self._clients = threading.BoundedSemaphore(MAX_CLIENTS)
        try:
            self._server = _TcpServer(host, port, self._serve)
        except OSError as error:
            raise UsageError(f"{option} {host}:{port} is not available", error.strerror or str(error)) from error
        self.host, self.port = host, self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name=option, daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, connection: socket.socket) -> None:
        if not self._clients.acquire(blocking=False):
            return
        try:
            _send_at_once(connection)
            self._serve_client(Channel.accept(connection, self._secret, self._facts))
        except (OSError, TransferError, ValueError) as error:
            logger.warning("a client of %s is refused: %s", self._option, error)
        finally:
            self._clients.release()


class _TcpServer(socketserver.ThreadingTCPServer):
    """Calls a function with each connection, in a thread of its own."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, host: str, port: int, serve: Callable[[socket.socket], None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._serve = serve
        super().__init__((host, port), socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        self._serve(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.exception("a client could not be served")


def sign(secret: bytes, text: str) -> str:
    """HMAC of a text, in hexadecimal digits."""
    return hmac.digest(secret, b"text" + text.encode(), sha256).hex()


def _keys(secret: bytes, *challenges: bytes | bytearray) -> tuple[bytes, bytes]:
    """Keys of the client's and of the server's frames."""
    both = b"".join(challenges)
    return hmac.digest(secret, b"client" + both, sha256), hmac.digest(secret, b"server" + both, sha256)


def _tag(key: bytes, number: int, content: Any) -> bytes:
    tag = hmac.new(key, number.to_bytes(8, "little"), sha256)
    tag.update(content)
    return tag.digest()


def _send_at_once(connection: socket.socket) -> None:
    """Lets a TCP connection send parts of frames without waiting for the other end, which would take it 40 ms."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _wait_less(connection: socket.socket, until: float) -> None:
    """Lets the next operation of a socket wait at most TIMEOUT_S, and not beyond `until`."""
    connection.settimeout(max(min(TIMEOUT_S, until - time.monotonic()), 0.001))


def _receive(connection: socket.socket, size: int, until: float) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        _wait_less(connection, until)
        count = connection.recv_into(view)
        if not count:
            raise TransferError("the connection has ended in the middle of a frame")
        view = view[count:]
    return content
