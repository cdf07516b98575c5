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
from typing import NamedTuple

import msgspec

from enginewright.errors import UsageError
from enginewright.rank_layout import Channel as RankChannel
from enginewright.runtime.cache.channel import (
    Channel,
    ChannelServer,
    DiffersError,
    Facts,
    RefusedError,
    TransferError,
    release_hash,
)
from enginewright.runtime.device.ranks.carriers import Carriers
from enginewright.runtime.device.ranks.member import RankLostError
from enginewright.runtime.device.ranks.messages import Accepted, Join, Link, Refused, Settings, decode, encode
from enginewright.runtime.engine import Engine

logger = logging.getLogger(__name__)

MAGIC = b"ew-tp-02"  # first bytes of each connection
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


class Pair(NamedTuple):
    """A rank of another machine and one of this machine, which exchange over a channel."""

    channel: int  # index of the channel
    theirs: int  # rank of the other machine
    own: int  # rank of this machine


def pairs_with(channels: Sequence[RankChannel], own: range, others: range) -> list[Pair]:
    """Lists the connections of this machine's ranks with others.

    Args:
        channels: all channels of the group.
        own: ranks of this machine.
        others: ranks of other machines.
    """
    return [
        Pair(index, theirs, rank)
        for index, channel in enumerate(channels)
        for theirs in channel.ranks
        if theirs in others
        for rank in channel.ranks
        if rank in own
    ]


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
        self._missing: set[Pair] = set()  # ranks that are not connected
        self._links: dict[Pair, socket.socket] = {}  # those that are
        self._server = ChannelServer(option, host, port, secret, facts, self._serve, MAGIC)
        self.host, self.port = host, self._server.port

    def expect(self, group: bytes, pairs: Sequence[Pair]) -> None:
        """Accepts connections between ranks from now on.

        Args:
            group: the group's name.
            pairs: ranks that connect, each with the one of this machine that it connects to.
        """
        with self._changed:
            self._group, self._missing = group, set(pairs)
            self._changed.notify_all()

    def links(self, until: float) -> Mapping[Pair, socket.socket]:
        """Waits until all ranks have connected that `expect` has named.

        Args:
            until: time.monotonic at which they have to have, in seconds.

        Raises:
            RankLostError: some have not.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._missing, max(until - time.monotonic(), 0)):
                names = ", ".join(str(rank) for rank in sorted({pair.theirs for pair in self._missing}))
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
            pair = Pair(message.channel, message.from_rank, message.to_rank)
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
            if (link.channel, link.from_rank, link.to_rank) not in self._missing:
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
    nodes: Sequence[tuple[str, int]],
    node: int,
    settings: Settings,
    group: bytes,
    secret: bytes,
    facts: Facts,
    server: Listener,
) -> Carriers:
    """Connects the ranks of this machine with each other, and with those of the other ones.

    Args:
        nodes: address and port of each machine.
        node: number of this one.
        settings: the same for all ranks.
        group: the group's name.
        secret: the secret of all machines.
        facts: all that they must have in common.
        server: this machine's port, which expects the group.

    Returns:
        The carriers of the ranks of this machine. They are the caller's to close.

    Raises:
        RankLostError: one of the others cannot be reached, or does not connect.
    """
    size = settings.layout.size
    own = ranks_of_node(node, len(nodes), size)
    carriers = Carriers(settings.channels)
    until = time.monotonic() + LINK_TIMEOUT_S
    try:
        carriers.share_memory(own)
        carriers.connect_own(own)
        for pair in pairs_with(settings.channels, own, range(own.start)):
            where = nodes[pair.theirs * len(nodes) // size]
            connection = _link(*where, Link(group, pair.own, pair.theirs, pair.channel), secret, facts)
            carriers.put(pair.channel, pair.own, pair.theirs, connection)
        for pair, connection in server.links(until).items():
            carriers.put(pair.channel, pair.own, pair.theirs, connection)
    except BaseException:
        carriers.close()
        raise
    return carriers


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
