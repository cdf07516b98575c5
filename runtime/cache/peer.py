"""Entries that servers share in the memory of one of them, over the connections of `channel.py`.

After the handshake, a client sends one request:

    client → server   frame: FIND, and names
    server → client   frame: a byte for each, 1 if there is a content

    client → server   frame: GET, and names
    server → client   a frame with each content, empty if there is none

    client → server   frame: PUT, and a name
    client → server   frame: the content
    server → client   an empty frame

Contents are encrypted before they come here (`remote.py`).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from threading import Lock

from enginewright.runtime.cache.channel import Channel, ChannelServer, Facts, RefusedError, TransferError
from enginewright.runtime.cache.remote import NAME_BYTES, StoreError

FIND, GET, PUT = b"?", b"<", b">"
MAX_NAMES = 1 << 16  # of one request


class MemoryBlobs:
    """Contents in this process's memory. Where they take more than the capacity, the least recently used are removed.

    Args:
        capacity_bytes: maximum size of all contents.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._contents: OrderedDict[bytes, bytes | bytearray] = OrderedDict()  # the least recently used first
        self._lock = Lock()
        self.num_bytes = 0  # of all contents

    def find(self, names: Sequence[bytes]) -> Sequence[bool]:
        """Says for each name if there is a content."""
        return [name in self._contents for name in names]

    def get(self, names: Sequence[bytes]) -> Iterator[bytes | bytearray | None]:
        """Reads the content of each name; None if there is none."""
        for name in names:
            with self._lock:
                if name in self._contents:
                    self._contents.move_to_end(name)
                content = self._contents.get(name)
            yield content

    def put(self, name: bytes, content: bytes | bytearray) -> None:
        """Writes a content."""
        with self._lock:
            self.num_bytes += len(content) - len(self._contents.pop(name, b""))
            self._contents[name] = content
            while self.num_bytes > self._capacity_bytes:
                self.num_bytes -= len(self._contents.popitem(last=False)[1])

    def close(self) -> None:
        """Drops all contents."""
        with self._lock:
            self._contents.clear()
            self.num_bytes = 0


class PeerServer:
    """Serves contents of this process's memory to other servers, in threads of its own.

    Args:
        host: address to listen on.
        port: TCP port; 0 takes any free one.
        secret: the secret that clients have to know.
        facts: all that the bytes of a block depend on.
        blobs: the contents.
        max_bytes: maximum size of a content.

    Raises:
        UsageError: the address is not available.
    """

    def __init__(self, host: str, port: int, secret: bytes, facts: Facts, blobs: MemoryBlobs, max_bytes: int) -> None:
        self._blobs, self._max_bytes = blobs, max_bytes
        self._server = ChannelServer("kv_cache_listen", host, port, secret, facts, self._serve)
        self.port = self._server.port

    def close(self) -> None:
        """Accepts no more connections."""
        self._server.close()

    def _serve(self, channel: Channel) -> None:
        request = bytes(channel.receive(1 + MAX_NAMES * NAME_BYTES))
        what, names = request[:1], _names(request[1:])
        if what == FIND:
            channel.send(bytes(self._blobs.find(names)))
        elif what == GET:
            for content in self._blobs.get(names):
                channel.send(memoryview(content or b""))
        elif what == PUT and len(names) == 1:
            self._blobs.put(names[0], channel.receive(self._max_bytes))
            channel.send(b"")
        else:
            raise TransferError("a client asks for something unknown")


class PeerBlobs:
    """Contents in the memory of another server.

    Args:
        host: its name or address.
        port: its TCP port (`kv_cache_listen`).
        secret: the secret that it knows.
        facts: all that the bytes of a block depend on here.
        max_bytes: maximum size of a content.
    """

    def __init__(self, host: str, port: int, secret: bytes, facts: Facts, max_bytes: int) -> None:
        self._host, self._port, self._secret, self._facts = host, port, secret, facts
        self._max_bytes = max_bytes

    def find(self, names: Sequence[bytes]) -> Sequence[bool]:
        """Says for each name if there is a content."""
        try:
            with closing(self._connect()) as channel:
                channel.send(FIND + b"".join(names))
                found = channel.receive(len(names))
                if len(found) != len(names):
                    raise TransferError("a peer answers for other names")
                return [bool(byte) for byte in found]
        except (OSError, TransferError, ValueError) as error:
            raise self._failure(error) from error

    def get(self, names: Sequence[bytes]) -> Iterator[bytearray | None]:
        """Reads the content of each name; None if there is none."""
        try:
            with closing(self._connect()) as channel:
                channel.send(GET + b"".join(names))
                for _ in names:
                    yield channel.receive(self._max_bytes) or None
        except (OSError, TransferError, ValueError) as error:
            raise self._failure(error) from error

    def put(self, name: bytes, content: bytes) -> None:
        """Writes a content."""
        try:
            with closing(self._connect()) as channel:
                channel.send(PUT + name)
                channel.send(content)
                channel.receive(0)
        except (OSError, TransferError, ValueError) as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Nothing is open between requests."""

    def _connect(self) -> Channel:
        return Channel.connect(self._host, self._port, self._secret, self._facts)

    def _failure(self, error: Exception) -> StoreError:
        where = f"kv_cache_remote tcp://{self._host}:{self._port}"
        if isinstance(error, RefusedError):
            fix = "Start both servers with the same engine file, release and kv_secret_file."
            return StoreError("refused", f"{where} refuses this server", str(error), fix)
        fix = "See if the other server runs, with --kv-cache-listen at this address."
        return StoreError("unreachable", f"{where} cannot be used", str(error), fix)


def _names(joined: bytes) -> list[bytes]:
    if len(joined) % NAME_BYTES:
        raise TransferError("a client sends a part of a name")
    return [joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)]
