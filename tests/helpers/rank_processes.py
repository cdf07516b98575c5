"""Processes that are ranks: each has an executor, exchanges what it is told to, and checks every byte of it.

with RankProcesses(3) as processes:
    group = processes.open("tcp", slot_bytes=4096)  # or "shared", "socketpair"
    processes.call("bind", exchanges=[...], threads=2)
    processes.call("steps", count=100, seed=1)

`python -m tests.helpers.rank_processes FD` is one of them; FD is its end of a socket.
"""

import dataclasses
import gc
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from enginewright import _cpu

CARRIERS = ("shared", "socketpair", "tcp")
MAX_TOKENS, MAX_LOGIT_ROWS = 9, 5
ROWS = {"tokens": (0, 1, 0, 0), "logit_rows": (0, 0, 0, 1), "one": (1, 0, 0, 0)}
ITEM_BYTES = {"f32": 4, "bf16": 2, "i32": 4, "i8": 1, "e4m3": 1}
GUARD = 0xA7  # bytes that nobody may change
CONTROL_TIMEOUT_S = 300


@dataclass(frozen=True)
class Exchange:
    """A gather of a program.

    Attributes:
        dtype: dtype of the matrix.
        columns: columns of the matrix.
        unit: columns that stay together.
        root: the rank that receives; -1 means all ranks.
        rows: a key of ROWS.
        column_offset: columns of the buffer before the matrix.
        more_columns: columns of the buffer after the matrix that do not belong to it; 0 means that the rest is its pad.
    """

    dtype: str
    columns: int
    unit: int = 1
    root: int = -1
    rows: str = "tokens"
    column_offset: int = 0
    more_columns: int = 0

    @property
    def stride(self) -> int:
        return -(-(self.column_offset + self.columns + self.more_columns) // 64) * 64

    @property
    def pad(self) -> int:
        return 0 if self.column_offset or self.more_columns else self.stride - self.columns

    @property
    def max_rows(self) -> int:
        return {"tokens": MAX_TOKENS, "logit_rows": MAX_LOGIT_ROWS, "one": 1}[self.rows]

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """The columns that each rank computes."""
        bounds = [self.unit * (self.columns // self.unit * rank // size) for rank in range(size + 1)]
        return list(pairwise(bounds))

    def slot_bytes(self, size: int) -> int:
        """Bytes of the largest piece."""
        return self.max_rows * ITEM_BYTES[self.dtype] * max(end - begin for begin, end in self.pieces(size))


def make_mesh(carrier: str, size: int, slot_bytes: int) -> list[list[int]]:
    """Returns the descriptors of each rank, for `make_ranks`; who is given them closes them."""
    if carrier == "shared":
        fd = os.memfd_create("ranks")
        os.ftruncate(fd, _cpu.SharedRanks.bytes_needed(size, slot_bytes))
        copies = [[os.dup(fd)] for _ in range(size)]
        os.close(fd)
        return copies
    mesh = [[-1] * size for _ in range(size)]
    for rank in range(size):
        for other in range(rank):
            mesh[rank][other], mesh[other][rank] = (end.detach() for end in make_pair(carrier))
    return mesh


def make_pair(carrier: str) -> tuple[socket.socket, socket.socket]:
    """Returns connected sockets. One end of TCP does not block, as Python's sockets with a timeout do."""
    if carrier == "socketpair":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    second.settimeout(60)
    return first, second


def make_ranks(carrier: str, rank: int, size: int, slot_bytes: int, timeout_s: float, fds: Sequence[int]) -> _cpu.Ranks:
    """Returns a rank, and closes the descriptors."""
    try:
        if carrier == "shared":
            return _cpu.SharedRanks(fds[0], rank, size, slot_bytes, timeout_s)
        return _cpu.SocketRanks(fds, rank, slot_bytes, timeout_s)
    finally:
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def make_executor(threads: int, arena_bytes: int) -> _cpu.Executor:
    return _cpu.Executor("portable", threads, (MAX_TOKENS, 1, MAX_LOGIT_ROWS), [], arena_bytes)


class Program:
    """Exchanges that are bound to an executor, and what their matrices must hold.

    Args:
        ranks: the rank.
        exchanges: the exchanges, in the order of a step.
        threads: threads of the executor.
        busy: the largest number of kernels that this rank computes between two exchanges, to be late.
        seed: seed of these numbers.

    Attributes:
        buffers: bytes of each exchange's buffer, [rows, bytes].
    """

    def __init__(
        self, ranks: _cpu.Ranks, exchanges: Sequence[Exchange], threads: int, busy: int = 0, seed: int = 0
    ) -> None:
        self.ranks, self.exchanges = ranks, exchanges
        chance = random.Random(f"{seed} {ranks.rank}")
        busy_bytes = MAX_TOKENS * 1024 * 4
        ends = [busy_bytes]
        for exchange in exchanges:
            ends.append(ends[-1] + exchange.max_rows * exchange.stride * ITEM_BYTES[exchange.dtype])
        self.executor = make_executor(threads, ends[-1])
        idle = _cpu.OperandSpec.arena(0, "f32", ROWS["tokens"], 1000, 1024)
        self.buffers: list[NDArray[np.uint8]] = []
        for offset, exchange in zip(ends, exchanges, strict=False):
            for _ in range(chance.randint(0, busy)):
                self.executor.add_kernel("softcap@1", {"x": idle, "out": idle}, {"cap": 3.0})
            width = exchange.stride * ITEM_BYTES[exchange.dtype]
            view = self.executor.buffer(offset, exchange.max_rows, width, width, "i8")
            self.buffers.append(view.view(np.uint8))
            spec = _cpu.OperandSpec.arena(
                offset,
                exchange.dtype,
                ROWS[exchange.rows],
                exchange.columns,
                exchange.stride,
                exchange.column_offset,
                exchange.pad,
            )
            self.executor.add_all_gather(spec, exchange.unit, exchange.root, ranks)

    def step(self, step: int, sizes: tuple[int, int, int], seed: int) -> None:
        """Fills this rank's columns, runs a step, and checks all bytes of all matrices."""
        expected = [self._fill(index, step, sizes, seed) for index in range(len(self.exchanges))]
        self.executor.run([], sizes)
        self.ranks.check()
        for index, (exchange, buffer, wanted) in enumerate(zip(self.exchanges, self.buffers, expected, strict=True)):
            if not np.array_equal(buffer, wanted):
                row, byte = np.argwhere(buffer != wanted)[0]
                place = f"step {step}, exchange {index} ({exchange}), row {row}, byte {byte}"
                raise AssertionError(f"{place}: {buffer[row, byte]}, not {wanted[row, byte]}")

    def _fill(self, index: int, step: int, sizes: tuple[int, int, int], seed: int) -> NDArray[np.uint8]:
        """Returns the bytes that the buffer must have after the step."""
        exchange, buffer = self.exchanges[index], self.buffers[index]
        item = ITEM_BYTES[exchange.dtype]
        rows = {"tokens": sizes[0], "logit_rows": sizes[2], "one": 1}[exchange.rows]
        numbers = np.random.default_rng((seed, step, index)).integers(
            0, 256, (rows, exchange.columns * item), dtype=np.uint8
        )
        begin, end = exchange.pieces(self.ranks.size)[self.ranks.rank]
        first = exchange.column_offset * item
        buffer[:] = GUARD
        buffer[:rows, first + begin * item : first + end * item] = numbers[:, begin * item : end * item]
        wanted = buffer.copy()
        if exchange.root in (-1, self.ranks.rank):
            wanted[:rows, first : first + exchange.columns * item] = numbers
            if exchange.dtype != "f32" and exchange.pad:
                wanted[:rows, exchange.columns * item :] = 0
        return wanted


class Member:
    """A process's commands: its methods, whose results are JSON."""

    _ranks: _cpu.Ranks
    _program: Program | None = None

    def open(self, fds: Sequence[int], carrier: str, rank: int, size: int, slot_bytes: int, timeout_s: float) -> None:
        """Becomes a rank; -1 of the mesh, which cannot be sent, is put back."""
        descriptors = list(fds)
        if carrier != "shared":
            descriptors.insert(rank, -1)
        self._ranks = make_ranks(carrier, rank, size, slot_bytes, timeout_s, descriptors)

    def bind(self, exchanges: Sequence[dict[str, Any]], threads: int, busy: int = 0, seed: int = 0) -> None:
        """Builds an executor of exchanges."""
        self._program = Program(self._ranks, [Exchange(**one) for one in exchanges], threads, busy, seed)

    def steps(self, count: int, seed: int, late_s: float = 0, late_share: float = 0.1) -> None:
        """Runs steps of all sizes, some of them up to `late_s` late."""
        assert self._program
        sizes, chance = random.Random(seed), random.Random(f"{seed} {self._ranks.rank}")
        for step in range(count):
            tokens, logit_rows = sizes.randint(0, MAX_TOKENS), sizes.randint(0, MAX_LOGIT_ROWS)
            if chance.random() < late_share:
                time.sleep(chance.random() * late_s)
            self._program.step(step, (tokens, 1, logit_rows), seed)

    def run(self, tokens: int = MAX_TOKENS) -> str:
        """Runs a step, whatever it brings; returns the reason why the group has failed."""
        assert self._program
        self._program.executor.run([], (tokens, 1, 1))
        return self.failure()

    def failure(self) -> str:
        """Returns the reason why the group has failed, or nothing."""
        try:
            self._ranks.check()
        except RuntimeError as error:
            return str(error)
        return ""

    def stats(self) -> tuple[int, int]:
        """Returns the bytes sent and the time waited, of the rank."""
        return self._ranks.stats()

    def close(self) -> dict[str, int]:
        """Leaves the group; returns how many threads and descriptors the process has."""
        self._program = None
        if "_ranks" in vars(self):
            self._ranks.close()
            del self._ranks
        gc.collect()
        return {name: len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd")}


def serve(control: socket.socket) -> None:
    """Executes commands until the other end closes."""
    member = Member()
    make_executor(2, 64)  # with the first thread sanitizers start one of their own, which stays
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 16)
        if not data:
            return
        name, arguments = json.loads(data)
        try:
            answer = [getattr(member, name)(*([fds] if name == "open" else []), **arguments), ""]
        except Exception as error:  # who asked raises it
            answer = [None, f"{type(error).__name__}: {error}"]
        control.send(json.dumps(answer).encode())


class RankProcess:
    """One of the processes, from the view of the test."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(CONTROL_TIMEOUT_S)
        with closing(theirs):
            command = [sys.executable, "-m", "tests.helpers.rank_processes", str(theirs.fileno())]
            root = Path(__file__).parent.parent.parent
            self.process = subprocess.Popen(command, cwd=root, pass_fds=[theirs.fileno()])

    def start(self, name: str, fds: Sequence[int] = (), **arguments: Any) -> None:
        """Sends a command, with descriptors."""
        socket.send_fds(self.control, [json.dumps([name, arguments]).encode()], list(fds))

    def result(self) -> Any:
        """Waits for the result of the command; AssertionError if it raised."""
        value, error = json.loads(self.control.recv(1 << 16) or b'[null, "the process has ended"]')
        if error:
            raise AssertionError(error)
        return value

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.control.close()
        self.process.kill()
        self.process.wait()


class RankProcesses:
    """The processes of a group."""

    def __init__(self, processes: Sequence[RankProcess] | int) -> None:
        self.processes = [RankProcess() for _ in range(processes)] if isinstance(processes, int) else list(processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes:
            process.end()

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self.processes)

    def open(
        self, carrier: str, slot_bytes: int, timeout_s: float, size: int = 0, mesh: Sequence[list[int]] | None = None
    ) -> list[list[int]]:
        """Makes the processes the first ranks of a group of `size`; returns the descriptors of the others."""
        size = size or len(self.processes)
        mesh = mesh or make_mesh(carrier, size, slot_bytes)
        for rank, (process, fds) in enumerate(zip(self.processes, mesh, strict=False)):
            sent = [fd for fd in fds if fd >= 0]
            options = {"carrier": carrier, "rank": rank, "size": size, "slot_bytes": slot_bytes}
            process.start("open", fds=sent, **options, timeout_s=timeout_s)
            for fd in sent:
                os.close(fd)
        self.results()
        return list(mesh[len(self.processes) :])

    def bind(self, exchanges: Sequence[Exchange], threads: Sequence[int], busy: int = 0) -> None:
        """Has each rank build an executor of the exchanges, with its own number of threads."""
        programs = [dataclasses.asdict(exchange) for exchange in exchanges]
        for process, count in zip(self.processes, threads, strict=True):
            process.start("bind", exchanges=programs, threads=count, busy=busy)
        self.results()

    def start(self, name: str, **arguments: Any) -> None:
        """Sends a command to all."""
        for process in self.processes:
            process.start(name, **arguments)

    def results(self) -> list[Any]:
        """Waits for the results of all."""
        return [process.result() for process in self.processes]

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Has all execute a command; returns the results."""
        self.start(name, **arguments)
        return self.results()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
