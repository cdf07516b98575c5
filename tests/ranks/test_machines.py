"""Machines that find each other: what is refused, by which name, and that the group goes on waiting for the others."""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import EngineError
from enginewright.runtime.cache.channel import Channel, TransferError
from enginewright.runtime.device.ranks import nodes as nodes_module
from enginewright.runtime.device.ranks.mesh import MAGIC, Listener, Pair, ask, facts_of
from enginewright.runtime.device.ranks.messages import Join, Link, Refused
from enginewright.runtime.engine import Engine
from tests.helpers.machines import WorkerNode, all_ranks, group_limits, wait_until_none_is_left, workers
from tests.helpers.serving import tiny_engine, wait_until
from tests.helpers.tiny import MemoryCheckpoint
from tests.ranks.test_faults import answer

REFUSED_S = 10  # maximum seconds until a machine knows that it is refused
SECRET = b"5" * 32
FACTS = {"engine file": "a", "release": "b"}


@contextmanager
def opening(limits: dict[str, Any]) -> Iterator[Future[LLM]]:
    """Opens the engine in a thread, where it waits for other machines."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(LLM, tiny_engine(), **limits)
        wait_until(lambda: future.done() or is_open(limits["master_port"]), 30)
        before = nodes_module.JOIN_TIMEOUT_S
        try:
            yield future
        except BaseException:
            nodes_module.JOIN_TIMEOUT_S = 0.0  # or it would wait for machines that do not come any more
            raise
        finally:
            failed = future.exception()
            nodes_module.JOIN_TIMEOUT_S = before
            if failed is None:
                future.result().close()


def is_open(port: int) -> bool:
    listening = f":{port:04X} "
    return any(listening in line and line.split()[3] == "0A" for line in Path("/proc/net/tcp").read_text().splitlines())


@pytest.fixture
def limits(tmp_path: Path) -> Iterator[dict[str, Any]]:
    before = all_ranks()
    yield group_limits(tmp_path, 2, 2)
    wait_until_none_is_left(before)


def refused(node: WorkerNode, code: int, why: str) -> None:
    """Checks that `engine worker` ends with an error that says why."""
    assert node.process.wait(REFUSED_S) == code, node.log
    assert why in " ".join(node.log.split()), node.log


def test_machines_that_are_refused(limits: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each by its reason, here and there, and the right one is still waited for."""
    other_engine, other_secret = tmp_path / "other.engine", tmp_path / "other.secret"
    build_engine(MemoryCheckpoint.tiny("qwen3"), BuildConfig(gate=None), other_engine)
    other_secret.write_text("6" * 32)
    where = f"node 0 at 127.0.0.1:{limits['master_port']} refuses this machine, node"
    with opening(limits) as future:
        strangers = [
            WorkerNode(tiny_engine(), tmp_path, limits, 1, "--secret-file", str(other_secret)),
            WorkerNode(other_engine, tmp_path, limits),
            WorkerNode(tiny_engine(), tmp_path, limits, 2),
        ]
        refused(strangers[0], 2, f"{where} 1: its secret may differ")
        refused(strangers[1], 2, f"{where} 1: it has another engine file")
        refused(strangers[2], 2, f"{where} 2: there is no node 2: --nnodes is 2")
        for why in (
            "127.0.0.1: a frame was altered on the way, or the secrets differ",
            "127.0.0.1: it does not fit: it has another engine file",
            "127.0.0.1: there is no node 2",
        ):
            assert why in caplog.text
        assert not future.done()
        with workers(tiny_engine(), tmp_path, limits) as (node,):
            llm = future.result(60)
            second = WorkerNode(tiny_engine(), tmp_path, limits)  # the same number twice
            refused(second, 2, f"{where} 1: node 1 has joined already")
            assert answer(llm) and node.process.poll() is None
            llm.close()


def test_garbage_on_the_port(limits: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    random = os.urandom(1 << 16)
    with opening(limits) as future:
        address = ("127.0.0.1", limits["master_port"])
        silent = socket.create_connection(address)
        for content in (b"GET / HTTP/1.1\r\n\r\n", random, b"", MAGIC, MAGIC + random, bytes(1000)):
            received = b""
            with socket.create_connection(address, timeout=20) as connection, suppress(OSError):
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(1000):
                    received += piece
            assert len(received) in (0, 32)  # a challenge at most
        assert "a client of another protocol has connected" in caplog.text
        assert not future.done()
        with workers(tiny_engine(), tmp_path, limits):
            assert answer(future.result(60))
            future.result().close()
        silent.close()


def test_a_handshake_that_is_replayed(limits: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All bytes that a machine has sent to join are sent again by another one."""
    with (
        recording(limits["master_port"]) as (port, recorded),
        opening(limits) as future,
        workers(tiny_engine(), tmp_path, {**limits, "master_port": port}),
    ):
        assert answer(future.result(60))
        future.result().close()
    assert len(recorded[0]) > 100
    caplog.clear()
    with opening(limits) as future:
        address = ("127.0.0.1", limits["master_port"])
        with socket.create_connection(address, timeout=REFUSED_S) as connection, suppress(ConnectionError):
            connection.sendall(recorded[0])
            while connection.recv(1000):
                pass
        wait_until(lambda: "a frame was altered on the way, or the secrets differ" in caplog.text)
        assert not future.done()
        with workers(tiny_engine(), tmp_path, limits):
            assert answer(future.result(60))
            future.result().close()


@contextmanager
def recording(to_port: int) -> Iterator[tuple[int, list[bytearray]]]:
    """Passes connections on to a port of this machine, and keeps what each client sends."""
    recorded: list[bytearray] = []

    def copy(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        try:
            while piece := source.recv(1 << 16):
                kept += piece
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for one in (source, sink):
                one.close()

    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                try:
                    target = socket.create_connection(("127.0.0.1", to_port))
                except OSError:
                    client.close()
                    continue
                recorded.append(bytearray())
                for arguments in ((client, target, recorded[-1]), (target, client, bytearray())):
                    threading.Thread(target=copy, args=arguments, daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield server.getsockname()[1], recorded
        server.shutdown(socket.SHUT_RDWR)
    accepting.join(10)


def test_those_who_do_not_come_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes_module, "JOIN_TIMEOUT_S", 4.0)
    monkeypatch.setattr(nodes_module, "SILENT_S", 0.2)
    before = all_ranks()
    limits = group_limits(tmp_path, 4, 4)
    node = WorkerNode(tiny_engine(), tmp_path, limits, 2)
    with pytest.raises(EngineError, match="node 1, node 3 of 4 machines did not join within 4 s") as caught:
        LLM(tiny_engine(), **limits)
    assert "--node-rank 1" in caught.value.fix
    assert f"127.0.0.1:{limits['master_port']}: waiting for node 1, node" in caplog.text
    assert node.process.poll() is None and node.end() == 143
    assert not is_open(limits["master_port"]) and all_ranks() == before


def test_a_machine_that_leaves_before_the_others_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    limits = group_limits(tmp_path, 3, 3)
    with opening(limits) as future:
        first = WorkerNode(tiny_engine(), tmp_path, limits, 1)
        wait_until(lambda: "node 1 (127.0.0.1) has joined" in caplog.text)
        first.end()
        wait_until(lambda: "node 1 (127.0.0.1) has gone again" in caplog.text)
        with workers(tiny_engine(), tmp_path, limits):
            assert answer(future.result(60))
            future.result().close()


def test_a_secret_that_cannot_be_used(tmp_path: Path) -> None:
    limits = group_limits(tmp_path, 2, 2)
    short = tmp_path / "short"
    short.write_text("1234")
    refused(WorkerNode(tiny_engine(), tmp_path, limits, 1, "--secret-file", str(short)), 2, "shorter than 16 bytes")
    absent = str(tmp_path / "absent")
    refused(WorkerNode(tiny_engine(), tmp_path, limits, 1, "--secret-file", absent), 2, "absent cannot be read")
    missing = WorkerNode(tmp_path / "absent.engine", tmp_path, limits)
    refused(missing, 2, "absent.engine cannot be opened")


def listener(join: Any = None) -> Listener:
    return Listener("--master-addr", "127.0.0.1", 0, SECRET, FACTS, join)


def connected(server: Listener) -> Channel:
    return Channel.connect("127.0.0.1", server.port, SECRET, FACTS, MAGIC)


def test_links_of_another_group() -> None:
    """A rank of an earlier group, or with another number, is no rank of this one."""
    group, earlier = os.urandom(32), os.urandom(32)
    with closing(listener()) as server:
        server.expect(group, [Pair(5, 2, 0), Pair(5, 3, 0)])
        for link, why in (
            (Link(earlier, 2, 0, 5), "a rank of another group connects"),
            (Link(group, 2, 1, 5), "rank 2 does not belong to rank 1"),
            (Link(group, 4, 0, 5), "rank 4 does not belong to rank 0"),
            (Link(group, 2, 0, 4), "rank 2 does not belong to rank 0"),  # over another channel
        ):
            with closing(connected(server)) as channel:
                answered = ask(channel, link)
                assert isinstance(answered, Refused) and why in answered.why
        own = []
        for rank in (2, 3):
            channel = connected(server)
            assert not isinstance(ask(channel, Link(group, rank, 0, 5)), Refused)
            own.append(channel.release())
            with closing(connected(server)) as second:
                assert isinstance(ask(second, Link(group, rank, 0, 5)), Refused)
        links = server.links(time.monotonic() + 10)
        assert sorted(links) == [(5, 2, 0), (5, 3, 0)]
        for rank, mine in zip((2, 3), own, strict=True):
            mine.sendall(b"%d" % rank)
            assert links[Pair(5, rank, 0)].recv(10) == b"%d" % rank
            mine.close()
            links[Pair(5, rank, 0)].close()


def test_a_machine_that_is_not_node_0() -> None:
    with closing(listener()) as server, closing(connected(server)) as channel:
        answered = ask(channel, Join(1, 5))
        assert answered == Refused("this machine is not node 0")


def test_messages_that_are_none(caplog: pytest.LogCaptureFixture) -> None:
    with closing(listener()) as server:
        for content in (b"", b"\xc1", b"\x81\xa4type\xa5other", os.urandom(4000), bytes(4096)):
            with closing(connected(server)) as channel:
                channel.send(content)
                with pytest.raises((TransferError, OSError)):
                    channel.receive(4096)
        wait_until(lambda: caplog.text.count("no message of ranks") == 5)


def test_facts_are_those_of_the_file(tmp_path: Path) -> None:
    build_engine(MemoryCheckpoint.tiny("qwen3"), BuildConfig(gate=None), tmp_path / "other.engine")
    with Engine.open(tiny_engine()) as one, Engine.open(tmp_path / "other.engine") as other:
        assert facts_of(one) == facts_of(one) != facts_of(other)
