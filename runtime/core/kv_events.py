"""What others are told of the KV cache over ZeroMQ, in the messages of vLLM: routers follow which blocks are where.

A message has three parts: a topic, a sequence number (8 bytes, big-endian), and MessagePack's [time, events, 0]. An
event is a map with a "type". Who has missed some asks the replay socket from a number on. The form is of June 2026:
https://github.com/vllm-project/vllm/blob/main/vllm/distributed/kv_events.py
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

MAX_QUEUED = 10_000  # batches that wait to be sent; sending blocks for nobody, so they are few
MAX_KEPT = 10_000  # batches that can be asked for again
MAX_KEPT_BYTES = 64 << 20  # likewise
LINGER_MS = 500  # for the last message to leave at the end
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
RANK = 0  # an engine runs on one device
# The name that consumers rank highest: the memory that steps read from, also where that is a CPU's.
MEDIUM = "GPU"


def block_hash(key: bytes) -> int:
    """What a block is called: the last 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


class KvEventSender:
    """Sends events in a thread of its own.

    The first event, and the last one, say that no blocks are there: those of who was at this address before are gone.
    So does one in the place of batches that were lost, which leaves subscribers with less than there is, never more.

    Args:
        endpoint: of the PUB socket: bound if it has * or ::, or is ipc://, otherwise connected to.
        replay: of the ROUTER socket, bound; None: nothing can be asked for again.
        topic: first part of each message.
        groups: of the plan.
        block_size: tokens of a block that has a key.

    Raises:
        EngineError: pyzmq is not installed.
        UsageError: an address cannot be had.
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
        """Send what a step has done, soon. The caller waits for nothing."""
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(events)
        else:
            self._num_lost += 1
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what is left."""
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
            self._context.destroy()  # once what is left has been sent, or has lingered

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
        """Send again what is kept from a number on, and an end. Who asks wrongly, or does not read, gets nothing."""
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
            "lora_name": None,
            "extra_keys": self._extra_keys(event),
            "group_idx": event.group,
            **self._kinds[event.group],
        }

    def _extra_keys(self, event: BlocksStored) -> list[list[str] | None]:
        """What the blocks' hashes depend on beside tokens, a block: a salt stands with the first one of a sequence."""
        salted: list[list[str] | None] = [[event.cache_salt]] if event.parent is None and event.cache_salt else [None]
        return salted + [None] * (len(event.keys) - 1)


def _kind(group: CacheGroup) -> dict[str, Any]:
    """How an event says what a group caches."""
    if not isinstance(group, PagedCache):
        return {"kv_cache_spec_kind": "mamba"}
    latent = "latent" in group.parts
    if group.window:
        kind = "sliding_window_mla" if latent else "sliding_window"
        return {"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": group.window}
    return {"kv_cache_spec_kind": "mla_attention" if latent else "full_attention"}
