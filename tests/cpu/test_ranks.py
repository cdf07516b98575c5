"""Ranks: processes exchange columns over shared memory and sockets, every byte right, and none waits for a dead one."""

import gc
import os
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from enginewright import _cpu
from tests.helpers.kernel_runner import ONE_COLUMN, KernelRunner, Operands
from tests.helpers.rank_processes import (
    CARRIERS,
    MAX_TOKENS,
    ROWS,
    Exchange,
    Program,
    RankProcess,
    RankProcesses,
    make_executor,
    make_mesh,
    make_pair,
    make_ranks,
)
from tests.helpers.serving import wait_until
from tests.helpers.site_adapters import random_adapter

IS_SANITIZED = bool(os.environ.get("ENGINEWRIGHT_SANITIZE"))
PATIENT_S = 600.0  # longer than any test: what ends earlier was ended by a failure
TIMEOUT_S = 8.0 if IS_SANITIZED else 2.0  # of tests that wait for it
SOCKETS = [carrier for carrier in CARRIERS if carrier != "shared"]
ONE = Exchange("f32", 4)  # of which each of up to 4 ranks has a column


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RankProcess]]:
    """Four processes, which are ranks of one group after the other."""
    shm = set(os.listdir("/dev/shm"))
    with RankProcesses(4) as group:
        yield group.processes
    assert set(os.listdir("/dev/shm")) == shm


def group_of(processes: list[RankProcess], size: int) -> RankProcesses:
    return RankProcesses(processes[:size])


def slot_bytes(exchanges: Sequence[Exchange], size: int) -> int:
    return max(exchange.slot_bytes(size) for exchange in exchanges)


def every_kind(size: int) -> list[Exchange]:
    """Odd columns, uneven pieces, ranks without columns, all dtypes, views of wider buffers, and each root."""
    last = size - 1
    return [
        Exchange("f32", 37),
        Exchange("bf16", 111, unit=3),
        Exchange("i8", 130, unit=2),
        Exchange("bf16", 64, unit=32),  # two units, of which some of three ranks have none
        Exchange("i8", 1),
        Exchange("f32", 7, root=last, rows="logit_rows"),
        Exchange("e4m3", 67, root=0),
        Exchange("i32", 5, rows="one"),
        Exchange("bf16", 21, column_offset=13, more_columns=3, unit=7),
        Exchange("i8", 61, column_offset=3, root=last),
        Exchange("bf16", 96, unit=96, root=0),  # of which only the last rank has any
        Exchange("f32", 40, unit=5, more_columns=24),
        Exchange("bf16", 40_001, rows="logit_rows"),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_all_ranks_have_all_columns(processes: list[RankProcess], carrier: str, size: int) -> None:
    group, exchanges = group_of(processes, size), every_kind(size)
    before = group.call("close")
    group.open(carrier, slot_bytes(exchanges, size), PATIENT_S)
    for threads in (1, 2):
        group.bind(exchanges, [(threads + rank) % 3 + 1 for rank in range(size)])
        group.call("steps", count=15, seed=threads)
    assert group.call("failure") == [""] * size
    # Threads and descriptors of each process. Linux lists a joined thread a moment longer.
    wait_until(lambda: group.call("close") == before)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_thousands_of_exchanges_with_ranks_that_are_late(processes: list[RankProcess], carrier: str) -> None:
    """Ranks are late between steps and in them. Gathers to one rank let the others go on meanwhile."""
    group = group_of(processes, 3)
    exchanges = [
        Exchange("bf16", 96),
        Exchange("f32", 17, root=0),
        Exchange("i8", 33),
        Exchange("f32", 9, root=2),
        Exchange("i32", 19, root=2),
        Exchange("bf16", 11, root=2),
        Exchange("bf16", 5000, unit=2500, rows="one"),
        Exchange("i8", 64, unit=64),
    ]
    group.open(carrier, slot_bytes(exchanges, 3), PATIENT_S)
    group.bind(exchanges, [1, 2, 1], busy=2)
    group.call("steps", count=60 if IS_SANITIZED else 400, seed=7, late_s=0.004)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_large_pieces(processes: list[RankProcess], carrier: str) -> None:
    """Pieces take long to copy and fill the buffers of sockets."""
    group, exchanges = group_of(processes, 2), [Exchange("f32", 100_003), Exchange("f32", 100_003, root=1)]
    group.open(carrier, slot_bytes(exchanges, 2), PATIENT_S)
    group.bind(exchanges, [2, 1])
    group.call("steps", count=12, seed=3)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_late_root_gets_every_exchange(processes: list[RankProcess], carrier: str) -> None:
    """The others may send ahead, but must not write where the root has not read yet."""
    group, exchanges = group_of(processes, 2), [Exchange("f32", 8, root=0) for _ in range(9)]
    group.open(carrier, slot_bytes(exchanges, 2), PATIENT_S)
    group.bind(exchanges, [1, 1])
    late, sender = group.processes
    sender.start("steps", count=5, seed=5)
    time.sleep(0.2)
    late.start("steps", count=5, seed=5)
    group.results()


def test_the_columns_of_each_rank() -> None:
    assert Exchange("f32", 10).pieces(4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert Exchange("f32", 12, unit=4).pieces(4) == [(0, 0), (0, 4), (4, 8), (8, 12)]


@pytest.mark.parametrize("carrier", SOCKETS)
def test_a_killed_rank_ends_its_connections(processes: list[RankProcess], carrier: str) -> None:
    assert failures(processes, carrier, signal.SIGKILL, PATIENT_S) <= {
        "the connection to rank 2 has ended",
        "the connection to rank 2 has ended: Connection reset by peer",
    }


def test_a_killed_rank_of_shared_memory_does_not_answer(processes: list[RankProcess]) -> None:
    found = failures(processes, "shared", signal.SIGKILL, TIMEOUT_S)
    assert found == {f"rank 2 has not answered for {TIMEOUT_S:g} s"}


@pytest.mark.parametrize("carrier", ["shared", "tcp"])
def test_a_stopped_rank_does_not_answer(processes: list[RankProcess], carrier: str) -> None:
    found = failures(processes, carrier, signal.SIGSTOP, TIMEOUT_S)
    assert found == {f"rank 2 has not answered for {TIMEOUT_S:g} s"}


def test_the_time_in_which_a_rank_is_stopped_itself_does_not_count(processes: list[RankProcess]) -> None:
    group = group_of(processes, 2)
    group.open("shared", slot_bytes([ONE], 2), TIMEOUT_S)
    group.bind([ONE], [1, 1])
    waiting, other = group
    waiting.start("run")
    time.sleep(0.3)  # it waits
    waiting.process.send_signal(signal.SIGSTOP)
    time.sleep(TIMEOUT_S + 0.5)
    waiting.process.send_signal(signal.SIGCONT)
    other.start("run")
    assert group.results() == ["", ""]


def failures(processes: list[RankProcess], carrier: str, number: signal.Signals, timeout_s: float) -> set[str]:
    """Lets a rank 2 take part in some steps, sends it a signal, and returns what the others say of the next step."""
    with RankProcesses(1) as ends:
        (victim,) = ends
        group = RankProcesses([*processes[:2], victim])
        group.open(carrier, slot_bytes([ONE], 3), timeout_s)
        group.bind([ONE, ONE], [1, 2, 1])
        group.call("steps", count=2, seed=1)
        survivors = group_of(processes, 2)
        survivors.start("run")
        victim.process.send_signal(number)
        found = set(survivors.results())
        assert set(survivors.call("run")) == found, "a failed group stays failed, and nobody waits any more"
    return found


@pytest.mark.parametrize("carrier", CARRIERS)
def test_fail_ends_the_waits_of_all_ranks(processes: list[RankProcess], carrier: str) -> None:
    """Two processes wait for columns of this one, which knows better."""
    group = group_of(processes, 2)
    (fds,) = group.open(carrier, slot_bytes([ONE], 3), PATIENT_S, size=3)
    ranks = make_ranks(carrier, 2, 3, slot_bytes([ONE], 3), PATIENT_S, fds)
    group.bind([ONE], [1, 3])
    group.start("run")
    ranks.check()
    ranks.fail(1, "its process has ended by signal 9 ✗")
    ranks.fail(0, "a second reason")
    reason = "rank 1: its process has ended by signal 9 ✗"
    assert group.results() == [reason, reason]
    with pytest.raises(RuntimeError, match=reason):
        ranks.check()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("way", ["fail", "close"])
def test_a_wait_ends_when_this_rank_gives_up(carrier: str, way: str) -> None:
    ranks, _other = local_ranks(carrier, 2, slot_bytes([ONE], 2))
    program = Program(ranks, [ONE], threads=3)
    step = threading.Thread(target=program.executor.run, args=([], (1, 1, 1)))
    step.start()
    wait_until(lambda: ranks.stats()[0] > 0)  # it has sent its column
    if way == "fail":
        ranks.fail(1, "is gone")
    else:
        ranks.close()
    step.join(60)
    assert not step.is_alive()
    ranks.close()
    ranks.close()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_rank_that_leaves_fails_the_group(processes: list[RankProcess], carrier: str) -> None:
    group = group_of(processes, 3)
    group.open(carrier, slot_bytes([ONE], 3), PATIENT_S)
    group.bind([ONE], [1, 1, 1])
    first, second, leaving = group
    first.start("run")
    second.start("run")
    leaving.start("close")
    leaving.result()
    assert [first.result(), second.result()] == ["rank 2 has left"] * 2


@pytest.mark.parametrize("carrier", CARRIERS)
def test_steps_of_different_sizes_fail_by_name(processes: list[RankProcess], carrier: str) -> None:
    group = group_of(processes, 2)
    group.open(carrier, slot_bytes([ONE], 2), PATIENT_S)
    group.bind([ONE], [1, 1])
    for process, tokens in zip(group, (2, 3), strict=True):
        process.start("run", tokens=tokens)
    for reason in group.results():
        assert reason.startswith(("rank 0 has sent 16 bytes to rank 1", "rank 1 has sent 24 bytes to rank 0")), reason


def local_ranks(carrier: str, size: int, slot_bytes: int, timeout_s: float = PATIENT_S) -> list[_cpu.Ranks]:
    """Returns all ranks of a group, in this process."""
    mesh = make_mesh(carrier, size, slot_bytes)
    return [make_ranks(carrier, rank, size, slot_bytes, timeout_s, fds) for rank, fds in enumerate(mesh)]


HEADER = struct.Struct("<4sIQQ")  # magic, kind, exchange, bytes
MAGIC, PIECE, FAILURE = b"RKR1", 1, 2


def message(exchange: int, data: bytes, kind: int = PIECE) -> bytes:
    return HEADER.pack(MAGIC, kind, exchange, len(data)) + data


def socket_rank(carrier: str) -> tuple[_cpu.SocketRanks, list[socket.socket]]:
    """Returns rank 0 of three, and the other ends of its connections to ranks 1 and 2."""
    pairs = [make_pair(carrier) for _ in range(2)]
    ranks = _cpu.SocketRanks([-1, *(own.fileno() for own, _ in pairs)], 0, ONE.slot_bytes(3), PATIENT_S)
    for own, other in pairs:
        own.close()
        other.settimeout(60)
    return ranks, [other for _, other in pairs]


COLUMN = bytes(range(4 * 2))  # a column of two rows, and ranks 0 and 1 of 3 have one of ONE's, rank 2 has two
PIECE_BYTES = 2 * 4 * MAX_TOKENS
UNKNOWN = "the connection to rank 1 carries something that no rank sends"
ENDED = "the connection to rank 1 has ended"


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n", UNKNOWN),
        (HEADER.pack(MAGIC, 3, 1, 8) + COLUMN, UNKNOWN),
        (HEADER.pack(MAGIC, PIECE, 1, PIECE_BYTES + 1), UNKNOWN),
        (HEADER.pack(MAGIC, PIECE, 1, 2**64 - 1), UNKNOWN),
        (message(1, b""), UNKNOWN),
        (message(0, bytes(2000), FAILURE), UNKNOWN),
        (message(0, COLUMN), "the connection to rank 1 carries exchange 0 after exchange 0"),
        (message(1, COLUMN) * 2, "the connection to rank 1 carries exchange 1 after exchange 1"),
        (message(2, COLUMN), "rank 1 has sent 8 bytes to rank 0 in exchange 2, which needs 8 in exchange 1"),
        (message(1, COLUMN[:7]), "rank 1 has sent 7 bytes to rank 0 in exchange 1, which needs 8 in exchange 1"),
        (message(0, "rank 2: it is gone ✗".encode(), FAILURE), "rank 2: it is gone ✗"),
        (message(0, b"rank 2: \xff", FAILURE), "rank 2: \ufffd"),
        (b"", ENDED),
        (message(1, COLUMN)[:11], ENDED),
        (message(1, COLUMN)[:-1], ENDED),
        (message(1, COLUMN), ENDED),
    ],
)
@pytest.mark.parametrize("carrier", SOCKETS)
def test_whatever_a_socket_brings_fails_by_name(carrier: str, sent: bytes, reason: str) -> None:
    """The other ranks learn the reason before the connections end."""
    ranks, (first, second) = socket_rank(carrier)
    program = Program(ranks, [ONE], threads=2)
    first.sendall(sent)
    if reason == ENDED:
        first.shutdown(socket.SHUT_WR)
    program.executor.run([], (2, 1, 1))
    with pytest.raises(RuntimeError) as raised:
        ranks.check()
    assert str(raised.value) == reason
    received = b""
    while part := second.recv(4096):
        received += part
    sentence = b"rank 2: \xff" if "\ufffd" in reason else reason.encode()
    own_column = message(1, bytes(8))  # sent unless the group had failed before
    assert received.removeprefix(own_column) == message(0, sentence, FAILURE)
    first.close()
    second.close()


def test_messages_are_as_documented() -> None:
    """A rank without a program of ours takes part."""
    ranks, (first, second) = socket_rank("tcp")
    program = Program(ranks, [Exchange("bf16", 6, unit=2)], threads=2)
    matrix = program.buffers[0].view(np.uint16)
    matrix[:2, :2] = [[1, 2], [3, 4]]
    first.sendall(message(1, np.array([[5, 6], [7, 8]], "<u2").tobytes()))
    second.sendall(message(1, np.array([[9, 10], [11, 12]], "<u2").tobytes()))
    program.executor.run([], (2, 1, 1))
    ranks.check()
    assert matrix[:2, :6].tolist() == [[1, 2, 5, 6, 9, 10], [3, 4, 7, 8, 11, 12]] and not matrix[:2, 6:].any()
    sent = message(1, np.arange(1, 5, dtype="<u2").tobytes())
    assert [first.recv(4096), second.recv(4096)] == [sent, sent]
    first.close()
    second.close()
    assert ranks.stats()[0] == 16 and ranks.stats() == (0, 0)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_columns_of_a_kernel_without_a_barrier_after_it(carrier: str) -> None:
    """An adapter's delta is computed by columns, and sent by rows: each thread sends what others have computed."""
    tokens, columns, inputs = 16, 600, 64
    receiver, sender = local_ranks(carrier, 2, tokens * columns * 4)
    table = _cpu.Adapters([(columns, inputs, 0)], 1, 16, tokens, 1, 0)
    table.load(0, [random_adapter(1, inputs, [(0, columns, 16)]).change()])
    step = {
        "adapter_slots": (np.zeros(tokens, np.int32), (0, 1, 0, 0, 0, 0), ONE_COLUMN),
        "logit_rows": (np.zeros(1, np.int32), (0, 0, 0, 1, 0, 0), ONE_COLUMN),
    }
    computes = KernelRunner("portable", 3, tokens=tokens, inputs=step)
    gets = KernelRunner("portable", 2, tokens=tokens)
    x, shrunk = computes.filled(torch.ones(tokens, inputs).bfloat16()), computes.buffer(tokens, 16, "f32")
    delta, received = computes.buffer(tokens, columns, "f32"), gets.buffer(tokens, columns, "f32")
    adapters = _cpu.OperandSpec.adapters(table, 0)
    operands: Operands = {"x": x, "shrunk": shrunk, "delta": delta, "adapters": adapters}
    computes.add("adapter_delta@1", operands, {"gated": 0})
    computes.executor.add_all_gather(delta.spec(), columns, 0, sender)  # all columns are the sender's
    gets.executor.add_all_gather(received.spec(), columns, 0, receiver)
    for _ in range(50):
        computes.executor.buffer(delta.offset_bytes, tokens, columns, delta.stride, "f32")[:] = np.nan
        sending = threading.Thread(target=computes.run)
        sending.start()
        gets.run()
        sending.join()
        assert torch.equal(gets.read(received), computes.read(delta)) and computes.read(delta).isfinite().all()


def test_the_executor_keeps_its_ranks() -> None:
    ranks, other = local_ranks("shared", 2, 4096)
    alive = weakref.ref(ranks)
    executor = make_executor(1, 1 << 16)
    executor.add_all_gather(_cpu.OperandSpec.arena(0, "f32", ROWS["tokens"], 8, 64), 1, 0, ranks)
    del ranks
    gc.collect()
    assert alive() is not None
    other.check()
    del executor
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="rank 0 has left"):
        other.check()


def test_a_profile_has_the_bytes_and_the_wait() -> None:
    first, second = local_ranks("shared", 2, 1 << 16)
    exchanges = [Exchange("bf16", 7), Exchange("f32", 11, root=1)]
    programs = [Program(ranks, exchanges, threads=1) for ranks in (first, second)]
    late = threading.Timer(0.1, programs[1].executor.run, args=([], (5, 1, 1)))
    late.start()
    nanoseconds, work = programs[0].executor.profile([], (5, 1, 1))
    late.join()
    sent_bytes, waited = first.stats()
    assert sent_bytes == 5 * (3 * 2 + 5 * 4)
    assert 5e7 < waited <= nanoseconds[0], "rank 0 waits in the first exchange, and not in the second"
    assert work["activation_bytes"].tolist() == [5 * 7 * 2, 5 * 5 * 4]
    assert second.stats()[0] == 5 * 4 * 2 and first.stats() == (0, 0)
    _, work = programs[1].executor.profile([], (0, 1, 1))
    assert work["activation_bytes"].tolist() == [0, 0]


def operand(dtype: str = "f32", columns: int = 12) -> _cpu.OperandSpec:
    return _cpu.OperandSpec.arena(0, dtype, ROWS["tokens"], columns, 64)


@pytest.mark.parametrize(
    ("spec", "unit", "root", "message"),
    [
        (operand(), 5, -1, "the 12 columns of 'x' are no multiple of 5"),
        (operand(), 0, -1, "no multiple of 0"),
        (operand(), -3, -1, "no multiple of -3"),
        (operand(), 1, 2, "there is no rank 2 of 2 that could receive"),
        (operand(), 1, -2, "there is no rank -2 of 2"),
        (operand(columns=16), 1, -1, "rank 0 would send 288 bytes, and slots have 256"),
        (operand(columns=15), 1, -1, "rank 1 would send 288 bytes"),
        (operand("u4"), 1, -1, "cannot hold u4"),
        (_cpu.OperandSpec.step("tokens"), 1, -1, "must be a buffer of the arena"),
        (_cpu.OperandSpec.weight(np.zeros(8, np.float32), "f32", "plain", 1, 8), 1, -1, "must be a buffer"),
    ],
)
def test_what_cannot_be_gathered_is_refused(spec: _cpu.OperandSpec, unit: int, root: int, message: str) -> None:
    ranks, _other = local_ranks("shared", 2, 256)
    executor = _cpu.Executor("portable", 1, (MAX_TOKENS, 1, 1), [("tokens", ROWS["tokens"], (1,))], 1 << 16)
    with pytest.raises(ValueError, match=f"^all_gather@1: .*{message}|{message}"):
        executor.add_all_gather(spec, unit, root, ranks)


@pytest.mark.parametrize(
    ("rank", "size", "slot_bytes", "timeout_s", "message"),
    [
        (2, 2, 64, 1.0, r"the rank must be in 0 … 1, not 2"),
        (-1, 2, 64, 1.0, r"the rank must be in 0 … 1, not -1"),
        (0, 0, 64, 1.0, r"the number of ranks must be in 1 … 256, not 0"),
        (0, 257, 64, 1.0, r"not 257"),
        (0, 2, 0, 1.0, "a slot must have bytes, not 0"),
        (0, 2, -64, 1.0, "a slot must have bytes, not -64"),
        (0, 2, 2**62, 1.0, "overflows"),
        (0, 2, 64, 0.0, "the timeout must be above 0"),
        (0, 2, 64, -1.0, "the timeout must be above 0"),
        (0, 2, 64, float("nan"), "the timeout must be above 0"),
        (0, 2, 64, float("inf"), "the timeout must be above 0"),
        (0, 2, 1 << 20, 1.0, r"has 20480 bytes, and they need \d+"),
    ],
)
def test_senseless_groups_are_refused(rank: int, size: int, slot_bytes: int, timeout_s: float, message: str) -> None:
    fd = os.memfd_create("ranks")
    os.ftruncate(fd, 20480)
    with pytest.raises(ValueError, match=message):
        _cpu.SharedRanks(fd, rank, size, slot_bytes, timeout_s)
    os.close(fd)
    if size != 2 or slot_bytes == 1 << 20:
        return
    first, second = make_pair("socketpair")
    with pytest.raises(ValueError, match=message):
        _cpu.SocketRanks([-1, first.fileno()] if rank <= 0 else [first.fileno(), -1], rank, slot_bytes, timeout_s)
    first.close()
    second.close()


def test_shared_memory_of_another_group_is_refused() -> None:
    fd = os.memfd_create("ranks")
    os.ftruncate(fd, 1 << 20)
    first = _cpu.SharedRanks(fd, 0, 2, 64, 1.0)
    with pytest.raises(ValueError, match="belongs to 2 ranks with slots of 64 bytes, not 3 with slots of 64"):
        _cpu.SharedRanks(fd, 1, 3, 64, 1.0)
    with pytest.raises(ValueError, match="belongs to 2 ranks with slots of 64 bytes, not 2 with slots of 65"):
        _cpu.SharedRanks(fd, 1, 2, 65, 1.0)
    with pytest.raises(ValueError, match="another process is rank 0, or has been"):
        _cpu.SharedRanks(fd, 0, 2, 64, 1.0)
    os.close(fd)
    first.check()
    with pytest.raises(ValueError, match="cannot be used: Bad file descriptor"):
        _cpu.SharedRanks(-1, 0, 1, 64, 1.0)


def test_descriptors_that_are_no_sockets_are_refused() -> None:
    fds = set(os.listdir("/proc/self/fd"))
    stream, other = make_pair("tcp")
    datagrams, unconnected = socket.socketpair(type=socket.SOCK_DGRAM), socket.socket()
    file = os.memfd_create("file")
    for wrong in (-1, file, datagrams[0].fileno(), unconnected.fileno(), 10**6):
        with pytest.raises(ValueError, match="the descriptor for rank 2 is no connected stream socket"):
            _cpu.SocketRanks([-1, stream.fileno(), wrong], 0, 64, 1.0)
    with pytest.raises(ValueError, match="a rank has no socket to itself"):
        _cpu.SocketRanks([other.fileno(), stream.fileno()], 0, 64, 1.0)
    for one in (stream, other, *datagrams, unconnected):
        one.close()
    os.close(file)
    assert set(os.listdir("/proc/self/fd")) == fds


def test_fail_of_no_rank_is_refused() -> None:
    ranks, _other = local_ranks("shared", 2, 64)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"there is no rank {rank} of 2"):
            ranks.fail(rank, "is gone")
    ranks.check()
    assert (ranks.rank, ranks.size, ranks.slot_bytes) == (0, 2, 64)
