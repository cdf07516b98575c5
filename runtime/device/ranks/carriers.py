"""Carriers of channels: memory that ranks of one machine share, or sockets between ranks of several machines."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from enginewright import _cpu
from enginewright.rank_layout import Channel
from enginewright.runtime.device.ranks.member import TIMEOUT_S
from enginewright.runtime.device.ranks.messages import Carrier

Sockets = list[socket.socket | None]  # those of a rank to the ranks of a channel, and None at its own place


@dataclass
class Carriers:
    """All carriers that the ranks of a machine have, until their processes have them."""

    channels: Sequence[Channel]  # all channels of the group
    memory: dict[int, int] = field(default_factory=dict)  # index of a channel → descriptor of its memory
    sockets: dict[tuple[int, int], Sockets] = field(default_factory=dict)  # index of a channel, rank → sockets

    def share_memory(self, ranks: range) -> None:
        """Makes memory for the channels that have no ranks of other machines.

        Args:
            ranks: ranks of this machine.
        """
        for index, channel in enumerate(self.channels):
            if all(rank in ranks for rank in channel.ranks):
                memory = self.memory[index] = os.memfd_create("enginewright-ranks", os.MFD_CLOEXEC)
                os.ftruncate(memory, _cpu.SharedRanks.bytes_needed(len(channel.ranks), channel.slot_bytes))

    def connect_own(self, ranks: range) -> None:
        """Makes the sockets between ranks of this machine in channels that have ranks of other machines, too."""
        for index, channel in enumerate(self.channels):
            if index in self.memory:
                continue
            own = [rank for rank in channel.ranks if rank in ranks]
            self.sockets |= {(index, rank): [None] * len(channel.ranks) for rank in own}
            for one, other in combinations(own, 2):
                ends = socket.socketpair()
                self.put(index, one, other, ends[0])
                self.put(index, other, one, ends[1])

    def put(self, index: int, rank: int, other: int, connection: socket.socket) -> None:
        """Adds a socket.

        Args:
            index: index of the channel.
            rank: rank of this machine.
            other: the rank at the other end.
            connection: the socket.
        """
        self.sockets[index, rank][self.channels[index].ranks.index(other)] = connection

    def of_rank(self, rank: int) -> tuple[Carrier, ...]:
        """Carriers of all channels of a rank, with descriptors of this process."""
        found = []
        for index, channel in enumerate(self.channels):
            if rank in channel.ranks:
                sockets = self.sockets.get((index, rank), [])
                descriptors = tuple(-1 if one is None else one.fileno() for one in sockets)
                found.append(Carrier(index, self.memory.get(index), descriptors))
        return tuple(found)

    def close(self) -> None:
        """Closes all descriptors."""
        for memory in self.memory.values():
            os.close(memory)
        for one in self.sockets.values():
            for connection in one:
                if connection is not None:
                    connection.close()
        self.memory, self.sockets = {}, {}


def open_exchange(channel: Channel, rank: int, carrier: Carrier) -> Any:
    """Opens the exchange of a rank over a channel.

    Args:
        channel: the channel.
        rank: the rank.
        carrier: its carrier, whose descriptors may be closed afterwards.

    Returns:
        `_cpu.SharedRanks` or `_cpu.SocketRanks`.
    """
    place = channel.ranks.index(rank)
    if carrier.memory is None:
        return _cpu.SocketRanks(carrier.sockets, place, channel.slot_bytes, TIMEOUT_S)
    return _cpu.SharedRanks(carrier.memory, place, len(channel.ranks), channel.slot_bytes, TIMEOUT_S)


def open_exchanges(channels: Sequence[Channel], rank: int, carriers: Sequence[Carrier]) -> dict[str, Any]:
    """Opens all exchanges of a rank, by their purposes.

    Args:
        channels: all channels of the group.
        rank: the rank.
        carriers: its carriers.
    """
    used = [(channels[carrier.channel], carrier) for carrier in carriers]
    return {channel.purpose_for(rank): open_exchange(channel, rank, carrier) for channel, carrier in used}


def channels_of(channels: Sequence[Channel], rank: int) -> dict[str, Channel]:
    """The channels of a rank, by their purposes.

    Args:
        channels: all channels of the group.
        rank: the rank.
    """
    return {channel.purpose_for(rank): channel for channel in channels if rank in channel.ranks}
