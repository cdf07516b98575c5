"""A machine other than node 0 (`engine worker`): it joins node 0, starts its ranks, and passes steps on to them."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from enginewright.runtime import env
from enginewright.runtime.cache.channel import Channel, Facts, TransferError
from enginewright.runtime.device.ranks.member import RankLostError
from enginewright.runtime.device.ranks.mesh import Listener, connect, facts_of, join, pairs_with, ranks_of_node
from enginewright.runtime.device.ranks.messages import (
    MAX_BYTES,
    AdapterData,
    Assemble,
    Failed,
    Order,
    Ping,
    Pong,
    Ready,
    decode,
    encode,
)
from enginewright.runtime.device.ranks.processes import start_processes
from enginewright.runtime.device.ranks.watch import Member, Watch
from enginewright.runtime.engine import Engine

RETRY_S = 1.0  # seconds between two tries to reach node 0


def work(
    path: Path,
    master_addr: str,
    master_port: int,
    node_rank: int,
    secret: bytes,
    threads: int | None,
    announce: Callable[[str], None],
) -> None:
    """Computes with the groups of node 0, one after the other, until the process is interrupted.

    Args:
        path: path of the engine file.
        master_addr: address of node 0.
        master_port: its TCP port.
        node_rank: number of this machine, from 1.
        secret: the secret of all machines.
        threads: threads of each rank; None: those of the environment, of node 0, or the cores here for all ranks here.
        announce: called with a line for people at each change.

    Raises:
        NodeRefusedError: node 0 does not want this machine.
        EngineError: the engine cannot be opened here.
    """
    where = f"node 0 at {master_addr}:{master_port}"
    is_waiting = False
    while True:
        with Engine.open(path, "cpu") as engine:
            facts = facts_of(engine)
        with _Membership(path, node_rank, secret, facts, threads) as member:
            if not member.join(master_addr, master_port):
                if not is_waiting:
                    announce(f"waiting for {where}")
                is_waiting = True
                time.sleep(RETRY_S)
                continue
            is_waiting = False
            announce(f"node {node_rank} has joined {where}")
            try:
                member.serve(lambda: announce(f"node {node_rank} is ready"))
            except RankLostError as error:
                announce(f"the group of {where} has failed: {error}")
            except (OSError, TransferError):
                announce(f"{where} has ended its group")


class _Membership:
    """This machine's part of one group, from joining it to its end."""

    def __init__(self, path: Path, node: int, secret: bytes, facts: Facts, threads: int | None) -> None:
        self._path, self._node, self._secret, self._facts, self._threads = path, node, secret, facts, threads
        self._channel: Channel | None = None
        self._listener: Listener | None = None
        self._watch: Watch | None = None
        self._sending = threading.Lock()

    def __enter__(self) -> "_Membership":
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._channel is not None:
            self._channel.shutdown()
        if self._watch is not None:
            self._watch.close()
        if self._channel is not None:
            self._channel.close()

    def join(self, host: str, port: int) -> bool:
        """Joins node 0. Returns False if it cannot be reached now."""
        self._host, self._port = host, port
        self._channel = join(host, port, self._node, self._secret, self._facts, self._listen)
        return self._channel is not None

    def _listen(self, channel: Channel) -> int:
        """Listens at the address by which node 0 is reached, and returns the port."""
        if self._listener is not None and self._listener.host != channel.here:
            self._listener.close()
            self._listener = None
        if self._listener is None:
            self._listener = Listener("engine worker", channel.here, 0, self._secret, self._facts)
        return self._listener.port

    def serve(self, ready: Callable[[], None]) -> None:
        """Starts the ranks of this machine once all machines are there, and passes messages on until the group ends.

        Args:
            ready: called when the ranks have opened their parts of the engine.

        Raises:
            OSError, TransferError, RankLostError: the group has ended.
        """
        assert self._channel is not None, "join has returned True"
        channel = self._channel
        order = decode(channel.receive(MAX_BYTES), msgspec.msgpack.Decoder(Assemble))
        watch = self._watch = self._start(order)
        try:
            watch.wait_until_ready(lambda: channel.has_ended)
            ready()
            self._send(Ready())
            decoder = msgspec.msgpack.Decoder(Order)
            while True:
                content = channel.receive(MAX_BYTES)
                match decode(content, decoder):
                    case Ping():
                        self._send(Pong())
                    case AdapterData():
                        watch.forward(bytes(content))
                        self._send(Pong())
                    case _:
                        watch.forward(bytes(content))
        except (OSError, TransferError) as error:
            raise watch.failure or error from error

    def _start(self, order: Assemble) -> Watch:
        assert self._listener is not None, "join has called _listen"
        settings, nodes = order.settings, ((self._host, self._port), *order.nodes[1:])
        own = ranks_of_node(self._node, len(nodes), settings.layout.size)
        self._listener.expect(order.group, pairs_with(settings.channels, own, range(own.stop, settings.layout.size)))
        carriers = connect(nodes, self._node, settings, order.group, self._secret, self._facts, self._listener)
        threads = self._threads or env.num_threads() or settings.threads
        try:
            suffix = f" on node {self._node}"
            processes = start_processes(replace(settings, threads=threads), str(self._path), own, carriers, suffix)
        finally:
            carriers.close()  # the processes have them now
        return Watch(processes, lambda: None, self._failed)

    def _failed(self, member: Member | None, failed: Failed) -> None:
        """Tells node 0 that the group has failed here."""
        with suppress(OSError):  # node 0 has gone
            self._send(failed if member is None else replace(failed, who=member.name))

    def _send(self, message: msgspec.Struct) -> None:
        assert self._channel is not None, "join has returned True"
        with self._sending:
            self._channel.send(encode(message))
