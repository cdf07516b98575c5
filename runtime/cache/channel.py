"""An authenticated connection between two servers, over which KV blocks or the messages of ranks move.

Both ends prove by HMACs that they know one secret, and derive a key for each direction of this connection from it and
from two random challenges. A frame is its length, its content, and an HMAC of its number and its content, so nothing
can be altered, repeated or left out on the way. Contents are not encrypted: they belong in a private network. A frame
holds bytes in a fixed layout, or JSON; nothing in it is ever executed.

    client → server   MAGIC, 32 random bytes
    server → client   32 random bytes
    client → server   frame: the client's facts as JSON
    server → client   frame: the names of the facts that differ, as a JSON list; if there is one, the connection ends
    then frames of `leases.py`, `peer.py` or `device/ranks/nodes.py`
"""

import hmac
import json
import logging
import os
import select
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from enginewright import _cpu
from enginewright.errors import EngineError, UsageError
from enginewright.regular_file import read_regular

logger = logging.getLogger(__name__)

MAGIC = b"ew-kv-01"  # first bytes of a connection for KV blocks
TIMEOUT_S = 5.0  # maximum seconds without a byte from the other end
MAX_CONNECTION_S = 30.0  # maximum seconds of a connection
HASH_BYTES = 32
MAX_FACTS_BYTES = 4096
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 4096
MAX_CLIENTS = 64  # connections to a server at a time
SEND_TIMEOUT_S = 8  # maximum seconds until a kept connection takes more bytes
# Seconds after which the system asks if the other machine is there, between questions, and their number.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))

Facts = Mapping[str, str]  # all that both ends must have in common, each by its name


class TransferError(EngineError):
    """The other end is not reachable, does not know the secret, differs, or breaks the protocol."""


class RefusedError(TransferError):
    """The other end does not know the secret, or it differs."""


class DiffersError(RefusedError):
    """The other end knows the secret, but has other facts."""


class Channel:
    """One end of a connection, once both have proved that they know the secret.

    Args:
        connection: the socket. The channel closes it.
        own_key: key of the frames that are sent.
        other_key: key of the frames that are received.
        until: time.monotonic at which the connection has to be over, in seconds; None: there is no limit.
    """

    def __init__(self, connection: socket.socket, own_key: bytes, other_key: bytes, until: float | None) -> None:
        self._socket, self._until = connection, until
        self._own_key, self._other_key = own_key, other_key
        self._num_sent = self._num_received = 0

    @classmethod
    def connect(cls, host: str, port: int, secret: bytes, facts: Facts, magic: bytes = MAGIC) -> "Channel":
        """Connects to a server.

        Args:
            host: its name or address.
            port: its TCP port.
            secret: the secret that both know.
            facts: all that both must have in common.
            magic: first bytes of the protocol.

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
            connection.sendall(magic + challenge)
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
            raise DiffersError(f"{where} does not fit here", f"it has another {', '.join(differing)}")
        return channel

    @classmethod
    def accept(cls, connection: socket.socket, secret: bytes, facts: Facts, magic: bytes = MAGIC) -> "Channel":
        """Accepts a connection.

        Args:
            connection: the socket.
            secret: the secret that both know.
            facts: all that both must have in common.
            magic: first bytes of the protocol.

        Raises:
            TransferError: the client does not know the secret, has other facts, or is none of this protocol.
            OSError: the connection is lost.
        """
        until = time.monotonic() + MAX_CONNECTION_S
        if _receive(connection, len(magic), until) != magic:
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
            raise TransferError("it does not fit", f"it has another {', '.join(differing)}")
        return channel

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def release(self) -> socket.socket:
        """Ends the channel, and returns its connection, which waits without a limit; a ChannelServer leaves it open."""
        connection = socket.socket(fileno=self._socket.detach())
        connection.settimeout(None)
        return connection

    def keep(self) -> None:
        """Lets the connection last without a limit. It ends if the other machine is gone, or takes no more bytes."""
        self._socket, self._until = self.release(), None
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        limit_sends(self._socket)

    def shutdown(self) -> None:
        """Ends the connection for both ends, also for a thread that waits in `receive`."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def here(self) -> str:
        """This machine's address."""
        return str(self._socket.getsockname()[0])

    @property
    def there(self) -> str:
        """The other machine's address."""
        return str(self._socket.getpeername()[0])

    @property
    def has_ended(self) -> bool:
        """True if the other end has closed the connection, and nothing is left to be received."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        try:
            return bool(waiting.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def send(self, content: bytes | memoryview) -> None:
        """Sends a frame."""
        tag = _tag(self._own_key, self._num_sent, content)
        self._num_sent += 1
        if self._until is not None:
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
        facts: all that clients must have in common with this server.
        serve: serves one client until it returns or raises.
        magic: first bytes of the protocol.

    Raises:
        UsageError: the address is not available.
    """

    def __init__(
        self,
        option: str,
        host: str,
        port: int,
        secret: bytes,
        facts: Facts,
        serve: Callable[[Channel], None],
        magic: bytes = MAGIC,
    ) -> None:
        self._option, self._secret, self._facts, self._serve_client = option, secret, facts, serve
        self._magic = magic
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
        where = "which has gone"
        try:
            where = str(connection.getpeername()[0])
            _send_at_once(connection)
            self._serve_client(Channel.accept(connection, self._secret, self._facts, self._magic))
        except (OSError, TransferError, ValueError) as error:
            logger.warning("a client of %s is refused, %s: %s", self._option, where, error)
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


def read_secret(option: str, path: str) -> bytes:
    """Reads the secret that servers share.

    Args:
        option: the option that has named its file.
        path: path of the file.

    Raises:
        UsageError: the file cannot be read, or is too short.
    """
    try:
        secret = read_regular(Path(path), MAX_SECRET_BYTES).strip()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be read", error.strerror or "") from error
    if len(secret) < MIN_SECRET_BYTES:
        fix = "Make one: openssl rand -hex 32 > FILE, and copy it to each server."
        raise UsageError(f"the secret in {path} is shorter than {MIN_SECRET_BYTES} bytes", fix=fix)
    return bytes(secret)


def release_hash() -> str:
    """Hash of this release's compiled code, on which the bits of what it computes depend."""
    with open(_cpu.__file__, "rb") as code:
        return file_digest(code, "sha256").hexdigest()


def limit_sends(connection: socket.socket) -> None:
    """Lets sending over a connection without a timeout fail if the other end takes no bytes for SEND_TIMEOUT_S."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))


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


def _receive(connection: socket.socket, size: int, until: float | None) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        if until is not None:
            _wait_less(connection, until)
        count = connection.recv_into(view)
        if not count:
            raise TransferError("the connection has ended in the middle of a frame")
        view = view[count:]
    return content
