"""A rank other than rank 0: a process that runs each step as it is told. Run with the descriptor of the connection to
the process that has started it.
"""

import os
import socket
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from enginewright import _cpu
from enginewright.errors import CorruptEngineError, EngineError
from enginewright.runtime.cache.channel import TransferError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.ranks.member import TIMEOUT_S, RankLostError, Ranks
from enginewright.runtime.device.ranks.messages import (
    MAX_BYTES,
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
    steps = mine.steps()  # from now on the process ends with the connection
    try:
        executor = _open(start)
        executor.watch(lambda error: mine.send(_failed(who, error)))
        names = [entry.name for entry in executor.plan.inputs]
        mine.send(Ready())
        while True:
            executor.run(steps.get().inputs(executor.plan.dims, names))
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

    def steps(self) -> SimpleQueue[Step]:
        """Reads messages in a thread, which ends the process with the connection, also in the middle of a step."""
        steps = SimpleQueue[Step]()
        threading.Thread(target=self._read, args=(steps,), name="steps", daemon=True).start()
        return steps

    def _read(self, steps: SimpleQueue[Step]) -> None:
        decoder = msgspec.msgpack.Decoder(Order)
        try:
            while True:
                match decode(self._pipe.receive(MAX_BYTES), decoder):
                    case Ping():
                        self.send(Pong())
                    case Step() as step:
                        steps.put(step)
        except (OSError, TransferError):
            os._exit(0)  # nothing needs to be closed: files are mapped, and nobody else reads the shared memory


def _open(start: Start) -> "CpuExecutor | RankOnGpu":
    settings = start.settings
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)  # before threads compute: their memory is then that of these CPUs
    if start.gpu is not None:
        from enginewright.runtime.device.cuda.ranked import open_rank

        return open_rank(start)
    exchange = _exchange(start)
    engine = Engine.open(start.path, "cpu")
    if engine.manifest.content_hash != settings.content_hash:
        raise CorruptEngineError(f"{start.path} is another engine than rank 0 has", "its content hash differs")
    config = RuntimeConfig(isa=settings.isa, threads=start.threads, mmap=settings.mmap)
    return CpuExecutor(engine, config, ranks=Ranks(exchange, settings.memory_plan, start.rank, settings.size))


def _exchange(start: Start) -> Any:
    """Opens the exchange with the other ranks, which keeps no descriptor that this process was given."""
    settings = start.settings
    if start.memory is not None:
        exchange: Any = _cpu.SharedRanks(start.memory, start.rank, settings.size, settings.slot_bytes, TIMEOUT_S)
        os.close(start.memory)
    else:
        exchange = _cpu.SocketRanks(start.sockets, start.rank, settings.slot_bytes, TIMEOUT_S)
        for descriptor in start.sockets:
            if descriptor >= 0:
                os.close(descriptor)
    return exchange


if __name__ == "__main__":
    main()
