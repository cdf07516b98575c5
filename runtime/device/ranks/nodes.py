"""Node 0's view of the other machines of a group: they join it, and pass steps on to their ranks."""

import logging
import os
import threading
import time
from collections.abc import Sequence

from enginewright.errors import EngineError
from enginewright.runtime.cache.channel import Channel, read_secret
from enginewright.runtime.config import RAY, RuntimeConfig
from enginewright.runtime.device.ranks.carriers import Carriers
from enginewright.runtime.device.ranks.mesh import Answer, Listener, connect, facts_of, pairs_with, ranks_of_node
from enginewright.runtime.device.ranks.messages import Accepted, Assemble, Join, Refused, Settings, encode
from enginewright.runtime.device.ranks.ray_nodes import RayNodes
from enginewright.runtime.engine import Engine

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 600.0  # maximum seconds until all machines have joined
SILENT_S = 5.0  # seconds of waiting before a warning says for whom
POLL_S = 0.5  # seconds between two looks for machines that have gone again
NAME_BYTES = 32  # random bytes of a group's name
SECRET_BYTES = 32  # random bytes of a secret that no file has

OPTION = "--master-addr"


class Node:
    """Another machine, which has joined (`watch.Member`).

    Args:
        node: its number.
        rank: its first rank.
        channel: the connection to it.
        port: its TCP port for other machines.
    """

    answers_at_start = False

    def __init__(self, node: int, rank: int, channel: Channel, port: int) -> None:
        self.node, self.rank, self.frames, self.port = node, rank, channel, port
        self.host = channel.there
        self.name = f"node {node} ({self.host})"

    def why_ended(self) -> str:
        """Says why its connection has ended, which is not known here."""
        return "it has closed its connection, or cannot be reached"

    def kill(self) -> None:
        """Does nothing: its processes end by themselves when their connections end."""

    def close(self) -> None:
        """Closes the connection."""
        self.frames.close()


class Nodes:
    """The other machines of a group, and the port where they find this one.

    Args:
        engine: the open engine.
        config: limits, with `nnodes` above 1.

    Raises:
        UsageError: the secret cannot be read, or the address is not available.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self._config = config
        self._ray = RayNodes(config) if config.distributed_executor_backend == RAY else None
        if self._ray is None:
            assert config.master_addr is not None and config.secret_file is not None, "RuntimeConfig requires them"
            host, port = config.master_addr, config.master_port
            self._secret = read_secret("--secret-file", config.secret_file)
        else:
            host, port = config.master_addr or self._ray.address, 0  # any free port, since actors are told
            self._secret = os.urandom(SECRET_BYTES)
        self._facts, self._group = facts_of(engine), os.urandom(NAME_BYTES)
        self._changed = threading.Condition()  # of what follows
        self._joined: dict[int, Node] = {}
        self._is_complete = False
        try:
            self._listener = Listener(OPTION, host, port, self._secret, self._facts, self._join)
        except BaseException:
            if self._ray is not None:
                self._ray.close()
            raise
        if self._ray is not None:
            self._ray.start(engine, host, self._listener.port, self._secret)

    def gather(self) -> Sequence[Node]:
        """Waits until all machines have joined.

        Returns:
            The machines, by their numbers from 1. They are the caller's to close.

        Raises:
            EngineError: some of them have not; the message names them.
        """
        began = time.monotonic()
        has_warned = False
        with self._changed:
            while missing := self._missing():
                if self._ray is not None:
                    self._ray.check()
                waited = time.monotonic() - began
                names = ", ".join(f"node {one}" for one in missing)
                if waited > JOIN_TIMEOUT_S:
                    where = f"--master-addr {self._config.master_addr} --master-port {self._config.master_port}"
                    raise EngineError(
                        f"{names} of {self._config.nnodes} machines did not join within {JOIN_TIMEOUT_S:g} s",
                        f"nobody with this number, the secret and the engine has come to {where}",
                        f"Start there: engine worker ENGINE {where} --node-rank {missing[0]} --secret-file FILE",
                    )
                if waited > SILENT_S and not has_warned:
                    has_warned = True
                    where = f"{self._config.master_addr}:{self._config.master_port}"
                    logger.warning("%s: waiting for %s", where, names)
                self._changed.wait(POLL_S)
            self._is_complete = True
            nodes, self._joined = [self._joined[number] for number in sorted(self._joined)], {}
        return nodes

    def assemble(self, nodes: Sequence[Node], settings: Settings) -> Carriers:
        """Connects all ranks with each other, and lets the machines start theirs.

        Args:
            nodes: the machines.
            settings: the same for all ranks.

        Returns:
            The carriers of the ranks of this machine. They are the caller's to close.

        Raises:
            RankLostError: a machine is lost.
        """
        size = settings.layout.size
        own = ranks_of_node(0, self._config.nnodes, size)
        self._listener.expect(self._group, pairs_with(settings.channels, own, range(own.stop, size)))
        addresses = (("", 0), *((one.host, one.port) for one in nodes))
        order = encode(Assemble(settings, self._group, addresses))
        for node in nodes:
            try:
                node.frames.send(order)
            except OSError as error:
                raise EngineError(f"{node.name} has gone", error.strerror or str(error)) from error
        return connect(addresses, 0, settings, self._group, self._secret, self._facts, self._listener)

    def close(self) -> None:
        """Frees the port, and refuses machines that have joined and are not yet the caller's."""
        self._listener.close()
        with self._changed:
            for node in self._joined.values():
                node.close()
            self._joined.clear()

    def end_actors(self) -> None:
        """Ends the actors of a Ray cluster, whose connections nobody watches any more."""
        if self._ray is not None:
            self._ray.close()

    def _missing(self) -> list[int]:
        """Numbers of the machines that are not there, or have gone again."""
        for number in [number for number, node in self._joined.items() if node.frames.has_ended]:
            logger.warning("%s has gone again", self._joined[number].name)
            self._joined.pop(number).close()
        return [number for number in range(1, self._config.nnodes) if number not in self._joined]

    def _join(self, channel: Channel, join: Join) -> Answer:
        count = self._config.nnodes
        with self._changed:
            self._missing()
            if not 0 < join.node < count:
                return Refused(f"there is no node {join.node}: --nnodes is {count}, and this machine is node 0")
            if self._is_complete or join.node in self._joined:
                return Refused(f"node {join.node} has joined already, perhaps from another machine", is_final=False)
            channel.send(encode(Accepted()))
            channel.keep()
            first = ranks_of_node(join.node, count, self._config.num_ranks).start
            self._joined[join.node] = Node(join.node, first, channel, join.port)
            logger.info("%s has joined", self._joined[join.node].name)
            self._changed.notify_all()
        return Accepted()
