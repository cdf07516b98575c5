"""Connects the ranks of several machines, each with each.

A machine listens on one port, where those with higher numbers connect to its ranks. Each connection begins with the
handshake of `channel.py`, by which both ends know that the other one has the secret, the engine and the release. Then
comes one message:

    Join, from a machine to node 0: it is part of the group from then on, if node 0 accepts it
    Link, from a rank to another one: it is refused if it is not of this group; then both exchange over the connection
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import msgspec

from enginewright.errors import UsageError
from enginewright.runtime.cache.channel import (
    Channel,
    ChannelServer,
    DiffersError,
    Facts,
    RefusedError,
    TransferError,
    release_hash,
)
from enginewright.runtime.device.ranks.member import RankLostError
from enginewright.runtime.device.ranks.messages import Accepted, Join, Link, Refused, decode, encode
from enginewright.runtime.engine import Engine

logger = logging.getLogger(__name__)

MAGIC = b"ew-tp-01"  # first bytes of each connection
MAX_GREETING_BYTES = 4096  # maximum size of a Join, a Link, and their replies
LINK_TIMEOUT_S = 60.0  # maximum seconds until all ranks of a group are connected
REFUSED_S = 3.0  # seconds in which a refusal that is not final may change

Greeting = Join | Link
Answer = Accepted | Refused


class NodeRefusedError(UsageError):
    """Node 0 does not want this machine in its group."""


def facts_of(engine: Engine) -> Facts:
    """All that machines must have in common to compute together, by the names under which they refuse each other.

    Args:
        engine: the engine.
    """
    return {"engine file": engine.manifest.content_hash, "release": release_hash()}


def ranks_of_node(node: int, nodes: int, size: int) -> range:
    """The ranks of a machine.

    Args:
        node: its number.
        nodes: number of machines.
        size: number of ranks.
    """
    here = size // nodes
    return range(node * here, (node + 1) * here)


class Listener:
    """The port of a machine where others join it, and connect to its ranks.

    Args:
        option: the option that has named the address.
        host: address to listen on.
        port: TCP port; 0 takes any free one.
        secret: the secret of all machines.
        facts: all that they must have in common.
        join: answers another machine, and keeps the channel if it accepts it; None if this is not node 0.

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
        join: Callable[[Channel, Join], Answer] | None = None,
    ) -> None:
        self._join = join
        self._changed = threading.Condition()  # of all that follows
        self._group = b""  # the group's name; empty: it is not known yet
        self._missing: set[tuple[int, int]] = set()  # pairs of a rank and one of this machine that are not connected
        self._links: dict[tuple[int, int], socket.socket] = {}  # those that are
        self._server = ChannelServer(option, host, port, secret, facts, self._serve, MAGIC)
        self.host, self.port = host, self._server.port

    def expect(self, group: bytes, pairs: Sequence[tuple[int, int]]) -> None:
        """Accepts connections between ranks from now on.

        Args:
            group: the group's name.
            pairs: ranks that connect, each with the one of this machine that it connects to.
        """
        with self._changed:
            self._group, self._missing = group, set(pairs)
            self._changed.notify_all()

    def links(self, until: float) -> Mapping[tuple[int, int], socket.socket]:
        """Waits until all ranks have connected that `expect` has named.

        Args:
            until: time.monotonic at which they have to have, in seconds.

        Raises:
            RankLostError: some have not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._missing, max(until - time.monotonic(), 0)):
                names = ", ".join(str(rank) for rank in sorted({first for first, _ in self._missing}))
                fix = "See if the machines reach each other on all ports."
                raise RankLostError(f"ranks {names} have not connected", f"within {LINK_TIMEOUT_S:g} s", fix)
            links, self._links = self._links, {}
            return links

    def close(self) -> None:
        """Accepts no more connections, and ends those that `links` has not returned."""
        self._server.close()
        with self._changed:
            for link in self._links.values():
                link.close()
            self._links.clear()
            self._missing.clear()
            self._group = self._group or b"closed"
            self._changed.notify_all()

    def _serve(self, channel: Channel) -> None:
        message = decode(channel.receive(MAX_GREETING_BYTES), msgspec.msgpack.Decoder(Greeting))
        if isinstance(message, Link):
            answer = self._check(message)
        elif self._join is None:
            answer = Refused("this machine is not node 0")
        else:
            answer = self._join(channel, message)  # which sends the answer itself if it accepts
            if isinstance(answer, Accepted):
                return
        channel.send(encode(answer))
        if isinstance(answer, Refused):
            raise TransferError(answer.why)
        assert isinstance(message, Link)
        with self._changed:
            pair = (message.from_rank, message.to_rank)
            if pair not in self._missing:
                return  # the group has ended meanwhile
            self._missing.remove(pair)
            self._links[pair] = channel.release()
            self._changed.notify_all()

    def _check(self, link: Link) -> Answer:
        with self._changed:
            self._changed.wait_for(lambda: self._group, LINK_TIMEOUT_S)  # the other machine may know it earlier
            if link.group != self._group:
                return Refused("a rank of another group connects")
            if (link.from_rank, link.to_rank) not in self._missing:
                return Refused(f"rank {link.from_rank} does not belong to rank {link.to_rank}, or is there already")
        return Accepted()


def ask(channel: Channel, message: Greeting) -> Answer:
    """Sends the first message of a connection, and returns the reply.

    Raises:
        OSError, TransferError: the connection has ended.
    """
    channel.send(encode(message))
    answer: Answer = decode(channel.receive(MAX_GREETING_BYTES), msgspec.msgpack.Decoder(Answer))
    return answer


def connect(
    nodes: Sequence[tuple[str, int]], node: int, size: int, group: bytes, secret: bytes, facts: Facts, server: Listener
) -> list[list[socket.socket | None]]:
    """Connects the ranks of this machine with each other, and with those of the other ones.

    Args:
        nodes: address and port of each machine.
        node: number of this one.
        size: number of ranks.
        group: the group's name.
        secret: the secret of all machines.
        facts: all that they must have in common.
        server: this machine's port, which expects the group.

    Returns:
        For each rank of this machine, sockets to all ranks, and None at its own place.

    Raises:
        RankLostError: one of the others cannot be reached, or does not connect.
    """
    own = ranks_of_node(node, len(nodes), size)
    sockets: list[list[socket.socket | None]] = [[None] * size for _ in own]
    until = time.monotonic() + LINK_TIMEOUT_S
    try:
        for first, second in combinations(own, 2):
            sockets[first - own.start][second], sockets[second - own.start][first] = socket.socketpair()
        for lower in range(node):
            for theirs in ranks_of_node(lower, len(nodes), size):
                for rank in own:
                    sockets[rank - own.start][theirs] = _link(*nodes[lower], Link(group, rank, theirs), secret, facts)
        for (theirs, rank), link in server.links(until).items():
            sockets[rank - own.start][theirs] = link
    except BaseException:
        close_all(sockets)
        raise
    return sockets


def close_all(sockets: Sequence[Sequence[socket.socket | None]]) -> None:
    """Closes the sockets of all ranks."""
    for one in sockets:
        for link in one:
            if link is not None:
                link.close()


def _link(host: str, port: int, link: Link, secret: bytes, facts: Facts) -> socket.socket:
    what = f"rank {link.from_rank} cannot connect to rank {link.to_rank} at {host}:{port}"
    try:
        channel = Channel.connect(host, port, secret, facts, MAGIC)
    except TransferError as error:
        raise RankLostError(what, str(error)) from error
    try:
        answer = ask(channel, link)
        if isinstance(answer, Refused):
            raise RankLostError(what, answer.why)
        return channel.release()
    except (OSError, TransferError) as error:
        channel.close()
        raise RankLostError(what, str(error)) from error
    except BaseException:
        channel.close()
        raise


def join(
    host: str, port: int, node: int, secret: bytes, facts: Facts, own_port: Callable[[Channel], int]
) -> Channel | None:
    """Joins the group of node 0, unless it cannot be reached now.

    Args:
        host: address of node 0.
        port: its TCP port.
        node: number of this machine.
        secret: the secret of all machines.
        facts: all that they must have in common.
        own_port: gives the port of this machine, at the address by which the channel has reached node 0.

    Returns:
        The channel; None if nobody listens there, or node 0 is about to close.

    Raises:
        NodeRefusedError: node 0 refuses this machine, also REFUSED_S later.
    """
    until = time.monotonic() + REFUSED_S
    where = f"node 0 at {host}:{port} refuses this machine, node {node}"
    while True:
        final, why = False, ""
        try:
            channel = Channel.connect(host, port, secret, facts, MAGIC)
        except DiffersError as error:
            raise NodeRefusedError(where, error.why, "Use the same engine file and release on all machines.") from error
        except RefusedError as error:
            why = error.why
        except TransferError:
            return None
        else:
            try:
                answer = ask(channel, Join(node, own_port(channel)))
            except (OSError, TransferError):
                channel.close()
                return None
            except BaseException:
                channel.close()
                raise
            if isinstance(answer, Accepted):
                channel.keep()
                return channel
            channel.close()
            final, why = answer.is_final, answer.why
        if final or time.monotonic() > until:
            raise NodeRefusedError(where, why)
        time.sleep(1)
