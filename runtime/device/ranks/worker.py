"""A rank other than rank 0: a process that runs each step as it is told. Run with the descriptor of the connection to
the process that has started it.
"""

import os
import socket
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from enginewright.errors import CorruptEngineError, EngineError
from enginewright.runtime.cache.channel import TransferError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.ranks.adapters import AdapterReceiver, adapter_limits
from enginewright.runtime.device.ranks.carriers import channels_of, open_exchanges
from enginewright.runtime.device.ranks.member import RankLostError, Ranks
from enginewright.runtime.device.ranks.messages import (
    MAX_BYTES,
    AdapterData,
    AdapterOrder,
    Failed,
    Order,
    Ping,
    Pipe,
    Pong,
    Ready,
    Start,
    Step,
    decode,
    encode,
)
from enginewright.runtime.engine import Engine

if TYPE_CHECKING:
    from enginewright.runtime.device.cuda.ranked import RankOnGpu


def main() -> None:
    """Runs steps until the connection ends."""
    mine = _Connection(Pipe(socket.socket(fileno=int(sys.argv[1]))))
    start = mine.first()
    who = f"rank {start.rank}"
    orders = mine.orders()  # from now on the process ends with the connection
    try:
        executor = _open(start)
        executor.watch(lambda error: mine.send(_failed(who, error)))
        names = [entry.name for entry in executor.plan.inputs]
        adapters = AdapterReceiver(executor) if isinstance(executor, CpuExecutor) else None
        mine.send(Ready())
        while True:
            match orders.get():
                case Step() as step:
                    executor.run(step.inputs(executor.plan.dims, names))
                case order:
                    assert adapters is not None, "GPUs of several ranks have no adapters"
                    adapters.follow(order)
    except EngineError as error:
        mine.send(_failed(who, error))
    except Exception as error:
        mine.send(Failed(who, type(error).__name__, str(error)))
        raise


def _failed(who: str, error: EngineError) -> Failed:
    return Failed(who, error.what, error.why, error.fix, error.exit_code, isinstance(error, RankLostError))


class _Connection:
    """The connection to the process that has started this one."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()

    def first(self) -> Start:
        """Waits for the first message."""
        return decode(self._pipe.receive(MAX_BYTES), msgspec.msgpack.Decoder(Start))

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message, from any thread."""
        with self._sending:
            self._pipe.send(encode(message))

    def orders(self) -> SimpleQueue[Step | AdapterOrder]:
        """Reads messages in a thread, which ends the process with the connection, also in the middle of a step."""
        orders = SimpleQueue[Step | AdapterOrder]()
        threading.Thread(target=self._read, args=(orders,), name="orders", daemon=True).start()
        return orders

    def _read(self, orders: SimpleQueue[Step | AdapterOrder]) -> None:
        decoder = msgspec.msgpack.Decoder(Order)
        try:
            while True:
                match decode(self._pipe.receive(MAX_BYTES), decoder):
                    case Ping():
                        self.send(Pong())
                    case AdapterData() as order:
                        orders.put(order)
                        self.send(Pong())
                    case order:
                        orders.put(order)
        except (OSError, TransferError):
            os._exit(0)  # nothing needs to be closed: files are mapped, and nobody else reads the shared memory


def _open(start: Start) -> "CpuExecutor | RankOnGpu":
    settings = start.settings
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)  # before threads compute: their memory is then that of these CPUs
    if start.gpu is not None:
        from enginewright.runtime.device.cuda.ranked import open_rank

        return open_rank(start)
    exchanges = open_exchanges(settings.channels, start.rank, start.carriers)
    for carrier in start.carriers:
        for descriptor in (carrier.memory, *carrier.sockets):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
    engine = Engine.open(start.path, "cpu")
    if engine.manifest.content_hash != settings.content_hash:
        raise CorruptEngineError(f"{start.path} is another engine than rank 0 has", "its content hash differs")
    config = RuntimeConfig(isa=settings.isa, threads=start.threads, mmap=settings.mmap, **adapter_limits(settings))
    channels = channels_of(settings.channels, start.rank)
    ranks = Ranks(exchanges, channels, settings.memory_plan, start.rank, settings.layout)
    return CpuExecutor(engine, config, ranks=ranks)


if __name__ == "__main__":
    main()
