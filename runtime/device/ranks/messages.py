"""Messages between rank 0, which has the scheduler, and the processes and machines of the other ranks, in msgpack.

A process gets one `Start`, then a `Step` for each step, and answers the first one with `Ready`. Now and then it gets a
`Ping`, which it answers at once, also during a step. It says `Failed` before it ends by an error. Between two steps it
may get an adapter (adapters.py). Another machine gets `Assemble` in place of `Start`, and passes steps and adapters on
to its processes.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from enginewright.adapter_file import SiteEntry
from enginewright.plan import StepSizes
from enginewright.rank_layout import Channel, RankLayout
from enginewright.runtime.cache.channel import TransferError, limit_sends
from enginewright.runtime.device.memory_plan import MemoryPlan
from enginewright.runtime.step.inputs import StepInputs

LENGTH_BYTES = 8
MAX_BYTES = 1 << 28  # maximum size of a message, in bytes

Wanted = TypeVar("Wanted")


class Settings(msgspec.Struct, frozen=True):
    """The same for all ranks of a group."""

    content_hash: str  # hash of the engine file's content, so that all ranks have the same weights
    layout: RankLayout  # arrangement of the ranks
    channels: tuple[Channel, ...]  # all connections of ranks
    memory_plan: MemoryPlan  # sizes of the memory of rank 0
    isa: str  # instruction set, or architecture of GPUs, on which the bits of results depend
    threads: int | None  # threads of a rank; None: its machine decides
    mmap: bool  # as in RuntimeConfig
    max_loras: int = 0  # number of slots for adapters; 0: the engine is opened without adapters
    max_lora_rank: int = 64  # as in RuntimeConfig


class Carrier(msgspec.Struct, frozen=True, array_like=True):
    """The end of a channel that a rank gets."""

    channel: int  # index of the channel in Settings
    memory: int | None  # descriptor of the memory over which its ranks exchange; None: they exchange over sockets
    sockets: tuple[int, ...] = ()  # descriptors of the sockets to the ranks of the channel, and -1 at its own place


class Start(msgspec.Struct, frozen=True):
    """Everything that a process needs to open its part of an engine."""

    settings: Settings  # the same for all ranks
    path: str  # path of the engine file
    rank: int  # the rank that gets the message
    threads: int  # its threads
    cpus: tuple[int, ...]  # CPUs to run on; (): any
    carriers: tuple[Carrier, ...]  # its ends of channels; () on a GPU
    gpu: int | None = None  # number of the rank's GPU; None: it computes on the CPU
    group: bytes = b""  # name by which GPUs find each other


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Another machine asks to be part of a group."""

    node: int  # its number
    port: int  # TCP port where machines with higher numbers reach it


class Link(msgspec.Struct, frozen=True, tag="link"):
    """A rank connects to another one. After the reply the connection is that of their exchanges."""

    group: bytes  # the group's name, so that nothing of an earlier group is taken for one of this group
    from_rank: int  # the rank that connects
    to_rank: int  # the rank that it connects to
    channel: int  # index of the channel in Settings


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Reply to Join and Link."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The other reply to Join and Link, after which the connection ends."""

    why: str  # the reason
    is_final: bool = True  # False if it may be otherwise in a moment


class Assemble(msgspec.Struct, frozen=True, tag="assemble"):
    """All machines are there: everything that one of them needs to connect its ranks, and to start them."""

    settings: Settings  # the same for all ranks
    group: bytes  # the group's name
    nodes: tuple[tuple[str, int], ...]  # address and port of each machine; the first is not used


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process or machine waits for steps."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Asks if a process or machine is still there."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Reply to Ping."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A process or machine is of no more use."""

    who: str  # the process or machine
    what: str  # parts of an EngineError: what has failed
    why: str = ""  # the reason
    fix: str = ""  # what to do
    exit_code: int = 1  # exit code of the command
    is_lost: bool = False  # True if it has failed only because another one has, or cannot be reached


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The inputs of a step."""

    counts: tuple[int, ...]  # sizes by the plan's dimensions
    arrays: tuple[tuple[tuple[int, ...], bytes], ...]  # shape and int32 numbers of each input, in the plan's order
    copies: tuple[list[tuple[int, int]], ...]  # as in StepInputs, and so the next
    new_blocks: tuple[list[int], ...]

    @staticmethod
    def of(inputs: StepInputs, names: Sequence[str]) -> "Step":
        """Makes the message of a step.

        Args:
            inputs: inputs of the step.
            names: names of the plan's inputs.
        """
        arrays = (np.ascontiguousarray(inputs.arrays[name]) for name in names)
        return Step(
            inputs.sizes.counts,
            tuple((array.shape, array.tobytes()) for array in arrays),
            inputs.copies,
            inputs.new_blocks,
        )

    def inputs(self, dims: tuple[str, ...], names: Sequence[str]) -> StepInputs:
        """Makes the inputs of the step.

        Args:
            dims: names of the plan's dimensions.
            names: names of the plan's inputs.
        """
        arrays = {
            name: np.frombuffer(data, np.int32).reshape(shape)
            for name, (shape, data) in zip(names, self.arrays, strict=True)
        }
        return StepInputs(StepSizes(dims, self.counts), arrays, self.copies, self.new_blocks)


class AdapterData(msgspec.Struct, frozen=True, array_like=True, tag="adapter_data"):
    """Bytes of an adapter, before its LoadAdapter. A process or machine answers it like a Ping, which may have no time
    between the messages of a large adapter.
    """

    content: memoryview  # some bytes of a section
    is_last: bool  # True if the section ends with them


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Loads the adapter, whose sections have come before, into a slot."""

    slot: int  # the slot, which no step uses
    name: str  # its name, for errors
    sites: tuple[SiteEntry, ...]  # sites that it changes, in the order of its sections


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Empties a slot that no step uses."""

    slot: int  # the slot


AdapterOrder = AdapterData | LoadAdapter | UnloadAdapter
Reply = Ready | Pong | Failed  # messages to rank 0, or from a process to its machine
Order = Step | Ping | AdapterOrder  # messages from rank 0 after the first one


class Frames(Protocol):
    """A connection that carries messages: a Pipe, or to another machine a Channel."""

    def send(self, content: bytes) -> None:
        """Sends a message. Raises OSError if the connection has ended."""
        ...

    def receive(self, max_bytes: int) -> bytes | bytearray:
        """Waits for a message. Raises OSError or TransferError if the connection has ended."""
        ...

    def shutdown(self) -> None:
        """Ends the connection for both ends, also for a thread that waits in `receive`."""
        ...

    def close(self) -> None:
        """Closes the connection, on which no thread waits."""
        ...


class Pipe:
    """Messages over a socket to another process of this machine, each after its length.

    Args:
        connection: the socket. The pipe closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        limit_sends(connection)

    def send(self, content: bytes) -> None:
        """Sends a message. Raises OSError if the connection has ended, or the other end takes no more bytes."""
        self._socket.sendall(len(content).to_bytes(LENGTH_BYTES, "little") + content)

    def receive(self, max_bytes: int) -> bytearray:
        """Waits for a message. Raises OSError or TransferError if the connection has ended."""
        size = int.from_bytes(self._exactly(LENGTH_BYTES), "little")
        if size > max_bytes:
            raise TransferError("a message is too long", f"{size} bytes where at most {max_bytes} belong")
        return self._exactly(size)

    def shutdown(self) -> None:
        """Ends the connection for both ends, also for a thread that waits in `receive`."""
        with suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection, on which no thread waits."""
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise TransferError("the connection has ended")
            view = view[count:]
        return data


def encode(message: msgspec.Struct) -> bytes:
    """The msgpack of a message."""
    return msgspec.msgpack.encode(message)


def decode(content: bytes | bytearray, decoder: msgspec.msgpack.Decoder[Wanted]) -> Wanted:
    """Reads a message. Raises TransferError if it is another one than the decoder reads."""
    try:
        return decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise TransferError("something has come that is no message of ranks", str(error)) from error
