"""KV cache events over ZeroMQ, in vLLM's format: routers learn from them which engine caches which blocks.

A message has three parts: a topic, a sequence number (8 bytes, big-endian), and [time, events, 0] as MessagePack. An
event is a map with a "type". A subscriber that has missed messages requests them by number from the replay socket. The
format is that of June 2026: https://github.com/vllm-project/vllm/blob/main/vllm/distributed/kv_events.py
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from enginewright.errors import EngineError, UsageError
from enginewright.plan import CacheGroup, PagedCache
from enginewright.runtime.cache.events import BlocksRemoved, BlocksStored, CacheEvent

logger = logging.getLogger(__name__)

MAX_QUEUED = 10_000  # batches that wait to be sent; few in practice, since sending never waits for a subscriber
MAX_KEPT = 10_000  # batches that are kept for replays
MAX_KEPT_BYTES = 64 << 20  # bytes of batches that are kept for replays
LINGER_MS = 500  # milliseconds that the last messages get to leave when the socket closes
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
RANK = 0  # an engine runs on one device
# The name that consumers rank highest. It stands for the memory that steps read from, even on a CPU.
MEDIUM = "GPU"


def block_hash(key: bytes) -> int:
    """Hash of a block in messages: the last 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


class KvEventSender:
    """Sends events in a thread of its own.

    The first event and the last one say that no blocks are cached, so that subscribers forget the blocks of an earlier
    engine at this address. The same event replaces lost batches: subscribers may then know fewer blocks than there are,
    but never more.

    Args:
        endpoint: address of the PUB socket: bound if it contains * or ::, or is ipc://, otherwise connected to.
        replay: address of the ROUTER socket, which is bound; None: no replays.
        topic: first part of each message.
        groups: cache groups of the plan.
        block_size: number of tokens of a block that has a key.

    Raises:
        EngineError: pyzmq is not installed.
        UsageError: an address is not available.
    """

    def __init__(
        self, endpoint: str, replay: str | None, topic: str, groups: Sequence[CacheGroup], block_size: int
    ) -> None:
        try:
            import zmq
        except ImportError as error:
            raise EngineError(
                "KV events cannot be sent", "pyzmq is not installed", "pip install 'enginewright[events]'"
            ) from error
        self._zmq: Any = zmq
        self._topic, self._block_size = topic.encode(), block_size
        self._kinds = [_kind(group) for group in groups]
        self._queue: deque[list[CacheEvent]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_sent = self._num_lost = self._kept_bytes = 0
        self._is_closing = False
        self._context = zmq.Context()
        try:
            binds = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
            self._publisher = self._open(zmq.PUB, endpoint, binds=binds)
            self._replay: Any = None if replay is None else self._open(zmq.ROUTER, replay, binds=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, events: list[CacheEvent]) -> None:
        """Queues the events of a step, which the thread sends soon; returns at once."""
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(events)
        else:
            self._num_lost += 1
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Sends the queued events, and ends the thread."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _open(self, kind: int, address: str, *, binds: bool) -> Any:
        verb = "listen at" if binds else "connect to"
        fix = "Use an address such as tcp://*:5557 to listen, or tcp://router:5557 to connect."
        port = address.rpartition(":")[2]
        if address.startswith("tcp://") and not (port == "*" or (port.isdecimal() and int(port) < 65536)):
            raise UsageError(f"KV events cannot {verb} {address}", f"its port is {port!r}", fix)  # ZeroMQ takes any
        opened = self._context.socket(kind)
        opened.linger, opened.sndhwm = LINGER_MS, MAX_KEPT + 1  # a whole replay fits
        try:
            (opened.bind if binds else opened.connect)(address)
        except self._zmq.ZMQError as error:
            raise UsageError(f"KV events cannot {verb} {address}", str(error).lower(), fix) from error
        return opened

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        self._send([{"type": "AllBlocksCleared"}])
        try:
            while not self._is_closing or self._queue:
                ready = dict(poller.poll())
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    self._send_queued()
                if self._replay in ready:
                    self._answer_replay()
            self._send([{"type": "AllBlocksCleared"}])
        finally:
            self._context.destroy()  # after the remaining messages were sent, or LINGER_MS

    def _send_queued(self) -> None:
        while self._queue:
            self._send([self._event(event) for event in self._queue.popleft()])
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            logger.warning("%d batches of KV events were lost: subscribers hear that no blocks are there", lost)
            self._send([{"type": "AllBlocksCleared"}])

    def _send(self, events: list[dict[str, Any]]) -> None:
        number, batch = self._num_sent, msgspec.msgpack.encode((time.time(), events, RANK))
        self._num_sent += 1
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
        if self._replay is None:
            return
        self._kept.append((number, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_replay(self) -> None:
        """Sends the kept batches from the requested number on, and an end marker.

        A client that sends a malformed request, or does not read its messages, gets nothing.
        """
        request = self._replay.recv_multipart()
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            logger.warning("a replay of KV events was asked for in a wrong form: it takes 8 bytes")
            return
        client, first = request[0], int.from_bytes(request[2], "big")
        for number, batch in self._kept:
            if number >= first:
                self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), batch))
        self._replay.send_multipart((client, b"", END_OF_REPLAY, b""))

    def _event(self, event: CacheEvent) -> dict[str, Any]:
        hashes = [block_hash(key) for key in event.keys]
        if isinstance(event, BlocksRemoved):
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM, "group_idx": event.group}
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None if event.parent is None else block_hash(event.parent),
            "token_ids": event.token_ids,
            "block_size": self._block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": event.adapter,
            "extra_keys": self._extra_keys(event),
            "group_idx": event.group,
            **self._kinds[event.group],
        }

    def _extra_keys(self, event: BlocksStored) -> list[list[str] | None]:
        """For each block, the inputs of its hash other than tokens: a sequence's first block has the salt, if any."""
        salted: list[list[str] | None] = [[event.cache_salt]] if event.parent is None and event.cache_salt else [None]
        return salted + [None] * (len(event.keys) - 1)


def _kind(group: CacheGroup) -> dict[str, Any]:
    """Fields of an event that describe a cache group."""
    if not isinstance(group, PagedCache):
        return {"kv_cache_spec_kind": "mamba"}
    latent = "latent" in group.parts
    if group.window:
        kind = "sliding_window_mla" if latent else "sliding_window"
        return {"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": group.window}
    return {"kv_cache_spec_kind": "mla_attention" if latent else "full_attention"}
