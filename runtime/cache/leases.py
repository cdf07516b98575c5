"""Prompts' KV blocks that wait for another server, which fetches them once (prefill and decode apart).

After the handshake of `channel.py`, a client fetches one lease:

    client → server   frame: the lease's id
    server → client   frame: its entries, each a group (2 bytes) and a key (32 bytes); none if it is not known
    client → server   frame: the indexes of the entries that it wants, 4 bytes each
    server → client   a frame with the content of each
    client → server   an empty frame: all has arrived, and the lease ends
"""

import logging
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from enginewright.errors import UsageError
from enginewright.runtime.cache.channel import Channel, ChannelServer, Facts, TransferError, sign
from enginewright.runtime.cache.store import Entry, ReadEntries

logger = logging.getLogger(__name__)

LEASE_S = 60.0  # seconds that a lease waits to be fetched
MAX_LEASED_BYTES = 2 << 30  # of all leases; the oldest ones end for a new one
MAX_ENTRIES = 1 << 20  # of one lease
ID_BYTES = 16
ENTRY = struct.Struct("<H32s")
FETCHERS = 4  # threads that fetch leases


class RemotePrefix(msgspec.Struct, frozen=True):
    """The blocks of a prompt that another server has computed."""

    host: str  # name or address of that server
    port: int  # TCP port where it serves its leases
    lease: str  # id of the lease, in hexadecimal digits

    def to_params(self, secret: bytes) -> dict[str, Any]:
        """The form in which routers pass it on: vLLM's `kv_transfer_params`.

        It is signed, so that a client can make no server connect to others.
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.lease,
            "remote_block_ids": [],
            "remote_host": self.host,
            "remote_port": self.port,
            "signature": sign(secret, self._text),
        }

    @classmethod
    def of_params(cls, params: Mapping[str, Any], secret: bytes) -> "RemotePrefix":
        """Reads what `to_params` has made.

        Raises:
            UsageError: it was not made by a server with the same secret.
        """
        try:
            remote = msgspec.convert(
                {"host": params["remote_host"], "port": params["remote_port"], "lease": params["remote_engine_id"]}, cls
            )
            is_signed = sign(secret, remote._text) == params["signature"]
        except (KeyError, msgspec.ValidationError) as error:
            raise UsageError("kv_transfer_params are not those of a prefill server", str(error)) from error
        if not is_signed:
            raise UsageError("kv_transfer_params are not signed by a server with this one's secret")
        return remote

    @property
    def _text(self) -> str:
        return f"{self.host}\n{self.port}\n{self.lease}"


class _Lease(msgspec.Struct, frozen=True):
    contents: "Future[dict[Entry, bytes]]"  # content of each entry, once a device has computed it
    num_bytes: int  # size of the contents
    ends: float  # time.monotonic after which it cannot be fetched, in seconds


class LeaseServer:
    """Keeps leases in memory and serves them over TCP, in threads of its own.

    Args:
        host: address to listen on.
        port: TCP port; 0 takes any free one.
        secret: the secret that clients have to know.
        facts: all that the bytes of a block depend on.
        lease_s: seconds that a lease waits to be fetched.

    Raises:
        UsageError: the address is not available.
    """

    def __init__(self, host: str, port: int, secret: bytes, facts: Facts, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._leases: OrderedDict[str, _Lease] = OrderedDict()  # the oldest first
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, "kv-lease")
        self.num_bytes = 0  # of all leases
        self.num_sent_bytes = 0  # since the start
        self.num_expired = 0  # leases that nobody has fetched in time, or that ended for others
        self._server = ChannelServer("kv_listen", host, port, secret, facts, self._serve)
        self.port = self._server.port

    def hold(self, entries: Mapping[Entry, Callable[[], bytes]], num_bytes: int) -> RemotePrefix:
        """Begins a lease.

        Args:
            entries: returns the content of each entry; called in another thread.
            num_bytes: size of all contents.
        """
        contents = self._reader.submit(lambda: {entry: content() for entry, content in entries.items()})
        lease = os.urandom(ID_BYTES).hex()
        with self._lock:
            now = time.monotonic()
            self._leases[lease] = _Lease(contents, num_bytes, now + self._lease_s)
            self.num_bytes += num_bytes
            for old, one in list(self._leases.items()):
                if old != lease and (one.ends < now or self.num_bytes > MAX_LEASED_BYTES):
                    self._end(old)
                    self.num_expired += 1
        return RemotePrefix(self._server.host, self.port, lease)

    def close(self) -> None:
        """Ends all leases and connections."""
        self._server.close()
        self._reader.shutdown(cancel_futures=True)
        self._leases.clear()

    def _end(self, lease: str) -> None:
        ended = self._leases.pop(lease, None)
        if ended is not None:
            self.num_bytes -= ended.num_bytes

    def _serve(self, channel: Channel) -> None:
        """Serves one client until it has fetched a lease, or breaks the protocol."""
        lease = bytes(channel.receive(ID_BYTES)).hex()
        with self._lock:
            held = self._leases.get(lease)
        contents = {} if held is None or held.ends < time.monotonic() else held.contents.result()
        entries = list(contents)
        channel.send(b"".join([ENTRY.pack(*entry) for entry in entries]))
        for (index,) in struct.iter_unpack("<I", channel.receive(4 * len(entries))):
            if index >= len(entries):
                raise TransferError("a client asks for an entry that its lease does not have")
            content = contents[entries[index]]
            with self._lock:  # before it is sent, so that a client that has all finds all counted
                self.num_sent_bytes += len(content)
            channel.send(content)
        channel.receive(0)
        with self._lock:
            self._end(lease)


class LeaseFetcher:
    """Fetches leases of other servers, in threads of its own.

    Args:
        secret: the secret that these servers know.
        facts: all that the bytes of a block depend on here.
        place_bytes: size of a block or slot of each cache group.
    """

    def __init__(self, secret: bytes, facts: Facts, place_bytes: Sequence[int]) -> None:
        self._secret, self._facts, self._place_bytes = secret, facts, place_bytes
        self._threads = ThreadPoolExecutor(FETCHERS, "kv-fetch")
        self._lock = threading.Lock()
        self.num_received_bytes = 0  # since the start
        self.num_failures = 0  # leases that could not be fetched

    def fetch(self, remote: RemotePrefix, present: Collection[Entry]) -> "Future[ReadEntries]":
        """Begins to fetch a lease.

        Args:
            remote: the lease.
            present: entries that are not needed.

        Returns:
            A future of the entries; a failure is logged, and gives none, so that the prompt is computed.
        """
        return self._threads.submit(self._fetch, remote, present)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(cancel_futures=True)

    def _fetch(self, remote: RemotePrefix, present: Collection[Entry]) -> ReadEntries:
        began, contents = time.perf_counter(), dict[Entry, bytes | memoryview]()
        try:
            channel = Channel.connect(remote.host, remote.port, self._secret, self._facts)
            try:
                self._read(channel, remote, present, contents)
            finally:
                channel.close()
        except (OSError, TransferError, struct.error) as error:
            with self._lock:
                self.num_failures += 1
            logger.warning("a prompt's KV blocks were not fetched, and are computed: %s", error)
            contents = {}
        with self._lock:
            self.num_received_bytes += sum(map(len, contents.values()))
        return ReadEntries(contents, time.perf_counter() - began)

    def _read(
        self,
        channel: Channel,
        remote: RemotePrefix,
        present: Collection[Entry],
        contents: dict[Entry, bytes | memoryview],
    ) -> None:
        channel.send(bytes.fromhex(remote.lease))
        entries = [(group, key) for group, key in ENTRY.iter_unpack(channel.receive(MAX_ENTRIES * ENTRY.size))]
        if not entries:
            raise TransferError("the lease has ended, or was fetched before")
        if any(group >= len(self._place_bytes) for group, _ in entries):
            raise TransferError("a lease has blocks of a cache group that this engine does not have")
        wanted = [index for index, entry in enumerate(entries) if entry not in present]
        channel.send(b"".join([index.to_bytes(4, "little") for index in wanted]))
        for index in wanted:
            size = self._place_bytes[entries[index][0]]
            content = channel.receive(size)
            if len(content) != size:
                raise TransferError("a block has another size", f"{len(content)} bytes, not {size}")
            contents[entries[index]] = memoryview(content)
        channel.send(b"")
