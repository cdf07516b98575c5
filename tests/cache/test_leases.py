"""Leases of KV blocks between two ends of a real TCP connection, and ends that lie, leave or are late."""

import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import closing, suppress

import pytest

from enginewright.errors import UsageError
from enginewright.runtime.cache import channel
from enginewright.runtime.cache.channel import Channel, TransferError
from enginewright.runtime.cache.leases import LeaseFetcher, LeaseServer, RemotePrefix
from tests.helpers.serving import wait_until

SECRET, FACTS, SIZES = b"s" * 32, {"content hash": "a", "KV dtype": "bf16"}, (100, 7)
ENTRIES = {(0, b"k" * 32): b"0" * 100, (0, b"l" * 32): b"1" * 100, (1, b"l" * 32): b"2" * 7}


@pytest.fixture
def server() -> Iterator[LeaseServer]:
    server = LeaseServer("127.0.0.1", 0, SECRET, FACTS)
    yield server
    server.close()


def hold(server: LeaseServer) -> RemotePrefix:
    return server.hold({entry: lambda content=content: content for entry, content in ENTRIES.items()}, 207)  # type: ignore[misc]


def fetched(remote: RemotePrefix, present: Collection[tuple[int, bytes]] = (), **other: object) -> dict[object, bytes]:
    arguments = {"secret": SECRET, "facts": FACTS, "place_bytes": SIZES} | other
    with closing(LeaseFetcher(**arguments)) as fetcher:  # type: ignore[arg-type]
        read = fetcher.fetch(remote, present).result(30)
        assert fetcher.num_failures == int(not read.contents)
        assert fetcher.num_received_bytes == sum(map(len, read.contents.values()))
        return {entry: bytes(content) for entry, content in read.contents.items()}


def test_a_lease_is_fetched_once(server: LeaseServer) -> None:
    remote = hold(server)
    assert server.num_bytes == 207
    assert fetched(remote) == ENTRIES and server.num_sent_bytes == 207
    wait_until(lambda: server.num_bytes == 0)
    assert fetched(remote) == {}


def test_entries_that_are_present_do_not_move(server: LeaseServer) -> None:
    first, *others = ENTRIES
    assert fetched(hold(server), {first}) == {entry: ENTRIES[entry] for entry in others}
    assert server.num_sent_bytes == 107


def test_a_lease_that_was_interrupted_can_be_fetched_again(server: LeaseServer) -> None:
    remote = hold(server)
    client = Channel.connect("127.0.0.1", server.port, SECRET, FACTS)
    client.send(bytes.fromhex(remote.lease))
    client.receive(1 << 20)
    client.close()
    assert fetched(remote) == ENTRIES


def test_leases_end() -> None:
    with closing(LeaseServer("127.0.0.1", 0, SECRET, FACTS, lease_s=0)) as server:
        remote = hold(server)
        assert fetched(remote) == {}
        hold(server)
        assert server.num_expired == 1 and server.num_bytes == 207


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"secret": b"t" * 32}, "its secret may differ"),
        ({"facts": {**FACTS, "KV dtype": "fp8"}}, "it has another KV dtype"),
        ({"facts": {"KV dtype": "fp8"}}, "it has another KV dtype, content hash"),
        ({"place_bytes": (100, 8)}, "another size: 7 bytes, not 8"),
        ({"place_bytes": (99, 7)}, "too long: 100 bytes where at most 99 belong"),
        ({"place_bytes": (100,)}, "a cache group that this engine does not have"),
    ],
)
def test_servers_that_differ(
    server: LeaseServer, other: dict[str, object], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert fetched(hold(server), **other) == {}
    assert text in caplog.text and "are computed" in caplog.text


def test_a_server_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with closing(LeaseServer("127.0.0.1", 0, SECRET, FACTS)) as server:
        remote = hold(server)
    assert fetched(remote) == {} and f"127.0.0.1:{remote.port} cannot be reached" in caplog.text


def test_a_frame_that_is_altered_or_repeated() -> None:
    ours, theirs = socket.socketpair()
    until = time.monotonic() + 60
    sender, receiver = Channel(ours, b"a", b"b", until), Channel(theirs, b"b", b"a", until)
    sender.send(b"first")
    assert receiver.receive(10) == b"first"
    sender.send(b"second")
    frame = bytearray(theirs.recv(1000))
    frame[9] ^= 1
    ours.sendall(frame)
    middle, end = socket.socketpair()
    middle.sendall(frame)
    with pytest.raises(TransferError, match="altered"):
        Channel(end, b"b", b"a", until).receive(10)
    frame[9] ^= 1
    middle, end = socket.socketpair()
    middle.sendall(frame)  # the second frame in the place of the first
    with pytest.raises(TransferError, match="altered"):
        Channel(end, b"b", b"a", until).receive(10)
    middle.sendall(b"\xff" * 8)
    with pytest.raises(TransferError, match="too long"):
        Channel(end, b"b", b"a", until).receive(10)


NOISES = (b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, os.urandom(1000), b"ew-kv-01" + bytes(2000))


@pytest.mark.parametrize("noise", NOISES)
def test_clients_of_other_protocols(server: LeaseServer, noise: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection, suppress(OSError):
        connection.sendall(noise)  # the server may close the connection at any of its bytes
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1000):
            pass
    assert fetched(hold(server)) == ENTRIES


def test_a_server_that_sends_a_byte_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the connection as a whole does not."""
    monkeypatch.setattr(channel, "MAX_CONNECTION_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as slow:
        ended = threading.Event()

        def serve() -> None:
            with slow.accept()[0] as connection:
                while not ended.wait(0.05):
                    connection.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        assert fetched(RemotePrefix("127.0.0.1", slow.getsockname()[1], "00" * 16)) == {}
        ended.set()
        thread.join()


def test_addresses_of_version_6() -> None:
    with closing(LeaseServer("::1", 0, SECRET, FACTS)) as server:
        assert fetched(hold(server)) == ENTRIES


def test_parameters_are_signed(server: LeaseServer) -> None:
    params = hold(server).to_params(SECRET)
    assert RemotePrefix.of_params(params, SECRET).port == server.port
    for change in ({"remote_host": "10.0.0.1"}, {"remote_port": 22}, {"remote_engine_id": "00"}, {"signature": "00"}):
        with pytest.raises(UsageError, match="not signed"):
            RemotePrefix.of_params(params | change, SECRET)
    for change in ({"remote_host": 1}, {"remote_port": "22"}, {"remote_engine_id": None}, {"signature": 5}):
        with pytest.raises(UsageError, match="kv_transfer_params are not"):
            RemotePrefix.of_params(params | change, SECRET)
    with pytest.raises(UsageError, match="remote_host"):
        RemotePrefix.of_params({"do_remote_prefill": True}, SECRET)


def test_an_address_that_is_taken(server: LeaseServer) -> None:
    with pytest.raises(UsageError, match=f"kv_listen 127.0.0.1:{server.port} is not available"):
        LeaseServer("127.0.0.1", server.port, SECRET, FACTS)


def test_nothing_is_left(server: LeaseServer) -> None:
    for _ in range(3):
        fetched(hold(server))
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("kv-fetch") for name in names)
    wait_until(lambda: server.num_bytes == 0)
