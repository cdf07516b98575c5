"""The prefix cache that servers share: found by all of one engine and secret, believed by none, in nobody's way."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM
from enginewright.errors import EngineError, UsageError
from enginewright.plan import PagedCache, Plane
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.cache import channel, remote, s3
from enginewright.runtime.cache import store as store_module
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.channel import Channel, TransferError
from enginewright.runtime.cache.peer import MemoryBlobs, PeerBlobs, PeerServer
from enginewright.runtime.cache.remote import SEAL_BYTES, EntryCipher, RemoteStore, StoreError
from enginewright.runtime.cache.s3 import Credentials, S3Blobs, S3Location, signed_headers
from enginewright.runtime.cache.store import PrefixStore
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core import storage
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.request import SamplingRequest
from enginewright.runtime.scheduler import read_cost, scheduler, stored
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.scheduler.read_cost import ReadCost
from enginewright.runtime.scheduler.stored import StoredPrefixes
from enginewright.runtime.step.sequence import TokenSequence
from tests.helpers.engines import built_tiny
from tests.helpers.kv_cache_disk import FAMILIES, FEW, LIMITS, PARAMS, Collected, answers_of, prompt, stepped
from tests.helpers.s3_server import S3Server, answer, s3_server
from tests.helpers.serving import free_port, wait_until

SECRET, OTHER_SECRET, IDENTITY = b"s" * 32, b"t" * 32, "ab" * 32
FACTS = {"content hash": "a", "KV dtype": "bf16"}
KEYS = [bytes([number]) * 32 for number in range(1, 130)]


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("the secret of all servers of the test\n")
    return file


# Engines that share.


def opened(engine: Path, secret: Path, port: int, *, shares: bool = False, **limits: Any) -> LLM:
    """An engine that keeps blocks in its memory for others, or uses those of the one that does."""
    where: dict[str, Any] = {"kv_cache_remote": f"tcp://127.0.0.1:{port}"}
    if shares:
        where = {"kv_cache_share": "64m", "kv_cache_listen": f"127.0.0.1:{port}"}
    return LLM(engine, kv_secret_file=str(secret), **where, **{**LIMITS, **limits})


def remote_stats(llm: LLM) -> Any:
    stats = llm.stats().remote
    assert stats is not None
    return stats


@pytest.mark.usefixtures("reading_pays")
@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
def test_a_server_finds_what_others_have_computed(family: str, secret_file: Path) -> None:
    """Blocks of attention, windows, recurrent states and latents; the same bits as one server."""
    engine, port = built_tiny(family, max_position_embeddings=256), free_port()
    prompts = [[token % 250 for token in prompt(seed, 70)] for seed in range(3)]
    with LLM(engine, enable_prefix_caching=False, **LIMITS) as llm:
        right = answers_of(llm.generate(prompts, PARAMS))
    with opened(engine, secret_file, port, shares=True):
        with opened(engine, secret_file, port) as first:
            assert answers_of(first.generate(prompts, PARAMS)) == right
            assert first.stats().restored_tokens == 0
        sent = remote_stats(first).num_sent_bytes
        assert sent > 0 == sum(remote_stats(first).failures.values())
        with opened(engine, secret_file, port) as second:
            outputs = second.generate(prompts, PARAMS)
            assert answers_of(outputs) == right
            assert [one.num_cached_tokens for one in outputs] == [64] * 3
            stats = remote_stats(second)
            assert second.stats().restored_tokens == 3 * 64 and 0 < stats.num_received_bytes <= sent
            assert stats.num_found == stats.num_searches == 3 and not any(stats.failures.values())
        assert remote_stats(second).num_sent_bytes == 0, "all of it was there"


@pytest.mark.usefixtures("reading_pays")
def test_the_server_that_shares_its_memory_uses_it(secret_file: Path) -> None:
    engine, port = built_tiny("llama", max_position_embeddings=256), free_port()
    with opened(engine, secret_file, port, shares=True) as host:
        with opened(engine, secret_file, port) as other:
            right = answers_of(other.generate([prompt(1)], PARAMS))
        assert remote_stats(host).shared_bytes == remote_stats(other).num_sent_bytes > 0
        assert answers_of(host.generate([prompt(1)], PARAMS)) == right and host.stats().restored_tokens == 128


@pytest.mark.usefixtures("reading_pays")
def test_tenants_share_nothing(secret_file: Path) -> None:
    engine, port = built_tiny("llama", max_position_embeddings=256), free_port()
    with opened(engine, secret_file, port, shares=True):
        for salt, restored in ("one", 0), ("another", 0), ("one", 128):
            with opened(engine, secret_file, port) as llm:
                llm.generate([prompt(1)], PARAMS, cache_salt=salt)
                assert llm.stats().restored_tokens == restored and not any(remote_stats(llm).failures.values())


@pytest.mark.usefixtures("reading_pays")
@pytest.mark.parametrize("differs", ["engine", "secret", "nobody"])
def test_servers_that_do_not_fit(
    differs: str, secret_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are those of a server alone, the failure is counted, and logged once with what to do."""
    engine, port = built_tiny("llama", max_position_embeddings=256), free_port()
    with LLM(engine, **LIMITS) as llm:
        right = answers_of(llm.generate([prompt(seed) for seed in range(3)], FEW))
    (tmp_path / "other").write_text("another secret that is long enough")
    host = built_tiny("gemma3_text", max_position_embeddings=256) if differs == "engine" else engine
    file = tmp_path / "other" if differs == "secret" else secret_file
    hosts = [] if differs == "nobody" else [opened(host, file, port, shares=True)]
    with caplog.at_level(logging.WARNING), opened(engine, secret_file, port) as llm:
        assert answers_of([llm.generate([prompt(seed)], FEW)[0] for seed in range(3)]) == right
        cause = "unreachable" if differs == "nobody" else "refused"
        wait_until(lambda: remote_stats(llm).failures[cause] > 0)
        assert llm.stats().restored_tokens == 0
    for one in hosts:
        one.close()
    logged = [record.getMessage() for record in caplog.records if record.name == remote.__name__]
    why = {
        "engine": "another KV layout, content hash",
        "secret": "its secret may differ",
        "nobody": "cannot be reached",
    }
    assert len(logged) == 1 and why[differs] in logged[0] and "\n" in logged[0]


@pytest.mark.usefixtures("reading_pays")
def test_what_the_disk_lacks_comes_from_the_store(secret_file: Path, tmp_path: Path) -> None:
    """The disk has the first two blocks of a prompt, and the store four; then the disk has all of them."""
    engine, port = built_tiny("llama", max_position_embeddings=256), free_port()
    with opened(engine, secret_file, port, shares=True):
        with opened(engine, secret_file, port) as llm:
            right = answers_of(llm.generate([prompt(1)], FEW))
        kept = {"kv_cache_disk": "64m", "kv_cache_dir": str(tmp_path / "disk")}
        with LLM(engine, **kept, **LIMITS) as llm:
            llm.generate([prompt(1)[:65]], FEW)
        with opened(engine, secret_file, port, **kept) as llm:
            assert answers_of(llm.generate([prompt(1)], FEW)) == right
            block_bytes = llm.engine.plan.paged_caches[0].block_bytes
            assert llm.stats().restored_tokens == 128
            assert remote_stats(llm).num_received_bytes == 2 * (block_bytes + SEAL_BYTES)
    with LLM(engine, **kept, **LIMITS) as llm:
        assert answers_of(llm.generate([prompt(1)], FEW)) == right and llm.stats().restored_tokens == 128


def test_nobody_waits_for_a_store_that_hangs(secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request generates while the store is searched for another one, and read; then that one is computed."""
    engine, port = built_tiny("llama", max_position_embeddings=256), free_port()
    limits = {"kv_cache_share": "64m", "kv_cache_listen": f"127.0.0.1:{port}", "kv_secret_file": str(secret_file)}
    monkeypatch.setattr(stored, "LONGEST_S", 60.0)
    patient = partial(StoredPrefixes, seconds=lambda *_: None)
    monkeypatch.setattr(scheduler, "StoredPrefixes", lambda *given: patient(*given[:4]))
    may_answer, find, get = threading.Event(), MemoryBlobs.find, MemoryBlobs.get
    hangs = {"find": find, "get": get}
    kept = MemoryBlobs(64 << 20)
    monkeypatch.setattr(storage, "MemoryBlobs", lambda _: kept)
    monkeypatch.setattr(MemoryBlobs, "close", lambda _: None)
    may_answer.set()
    with Engine.open(engine) as opened_engine:
        with LLM(opened_engine, **limits, **LIMITS) as llm:
            right = answers_of(llm.generate([prompt(1)], PARAMS))
        for method, is_patient in ("find", True), ("get", True), ("find", False), ("get", False):
            may_answer.clear()
            with monkeypatch.context() as patch:
                patch.setattr(
                    MemoryBlobs, method, lambda self, names, m=hangs[method]: may_answer.wait(60) and m(self, names)
                )
                patch.setattr(stored, "LONGEST_S", 60.0 if is_patient else 0.0)
                core = EngineCore(opened_engine, runtime_config(**limits, **LIMITS))
                running, waiting = Collected(), Collected()
                core.add(core.request(prompt(5, 20), PARAMS, running))
                core.step()
                core.add(core.request(prompt(1), PARAMS, waiting))
                while running.tokens < 20:
                    stepped(core)
                assert waiting.tokens == 0 or not is_patient
                may_answer.set()
                while core.has_work:
                    stepped(core)
                assert waiting.tokens == 40 and waiting.text == right[0][0]
                assert core.stats().restored_tokens == 128 * is_patient
                core.close()


# The store alone.


class Held(MemoryBlobs):
    """Contents that can be made to fail or to wait. calls: methods and numbers of names."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.calls: list[tuple[str, int]] = []
        self.error: StoreError | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()

    def _call(self, method: str, count: int) -> None:
        self.calls.append((method, count))
        assert self.may_answer.wait(60)
        if self.error is not None:
            raise self.error

    def find(self, names: Sequence[bytes]) -> Sequence[bool]:
        self._call("find", len(names))
        return super().find(names)

    def get(self, names: Sequence[bytes]) -> Iterator[bytes | bytearray | None]:
        self._call("get", len(names))
        return super().get(names)

    def put(self, name: bytes, content: bytes | bytearray) -> None:
        self._call("put", 1)
        super().put(name, content)

    def close(self) -> None:
        """Keeps the contents for the next store."""


def store(blobs: Any, identity: str = IDENTITY, secret: bytes = SECRET, sizes: Sequence[int] = (100,)) -> RemoteStore:
    return RemoteStore(blobs, EntryCipher(secret, identity), sizes)


def content_of(number: int) -> bytes:
    return bytes([number]) * 100


def saved(kept: RemoteStore, numbers: Sequence[int], group: int = 0) -> None:
    """Saves entries, and waits until they are written, or dropped."""
    for number in numbers:
        kept.save((group, KEYS[number]), lambda number=number: content_of(number))
    wait_until(lambda: not kept._pending)


def found(kept: RemoteStore, keys: Sequence[bytes] = KEYS[:10]) -> list[set[bytes]]:
    return [set(keys) for keys in kept.find(keys).result(30).keys]  # type: ignore[call-overload]


def read(kept: RemoteStore, numbers: Sequence[int]) -> list[int]:
    """Numbers of the entries that could be read, all of which are right."""
    contents = kept.read([(0, KEYS[number]) for number in numbers]).result(30).contents
    assert all(bytes(contents[0, KEYS[number]]) == content_of(number) for number in numbers[: len(contents)])
    return list(numbers[: len(contents)])


def test_entries_are_found_and_read_by_another_server() -> None:
    blobs = Held()
    with closing(store(blobs)) as kept:
        saved(kept, range(3))
        assert kept.num_sent_bytes == 3 * (100 + SEAL_BYTES) == blobs.num_bytes
    with closing(store(blobs)) as other:
        assert found(other) == [set(KEYS[:3])] and read(other, range(4)) == [0, 1, 2]
        assert other.num_received_bytes == 3 * (100 + SEAL_BYTES) and not other.failures
        saved(other, range(3))
        assert other.num_sent_bytes == 0
    assert all(content_of(number)[:16] not in sealed for sealed in blobs._contents.values() for number in range(3))
    assert not set(KEYS) & set(blobs._contents)


def test_a_new_prompt_takes_one_question() -> None:
    blobs = Held()
    with closing(store(blobs, sizes=(100, 100))) as kept:
        assert found(kept, KEYS) == [set(), set()] and blobs.calls == [("find", 2)]
        saved(kept, range(66))
        saved(kept, range(66), group=1)
        kept._known.clear()
        blobs.calls.clear()
        assert found(kept, KEYS) == [set(KEYS[:66])] * 2
        assert blobs.calls == [("find", 2), ("find", 128), ("find", 128)], "the first block, and then 64 at a time"
        blobs.calls.clear()
        assert found(kept, KEYS[:66]) == [set(KEYS[:66])] * 2 and not blobs.calls, "they are known to be there"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_KNOWN", 3)
    with closing(store(Held())) as kept:
        saved(kept, range(5))
        assert len(kept._known) == 3 and kept.has((0, KEYS[4]))
        assert found(kept) == [set(KEYS[:5])] and len(kept._known) == 3


def test_a_removed_entry_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading an entry that was deleted finds that out, and so does saving it again after a while."""
    blobs = Held()
    with closing(store(blobs)) as kept:
        monkeypatch.setattr(remote, "KNOWN_S", 0.0)
        saved(kept, [9])
        assert not kept.has((0, KEYS[9]))
        monkeypatch.undo()
        saved(kept, range(3))
        MemoryBlobs.close(blobs)
        assert found(kept) == [set(KEYS[:3])] and read(kept, range(3)) == [] and not kept.has((0, KEYS[0]))
        saved(kept, [0])
        assert read(kept, [0]) == [0] and not kept.failures


DAMAGE = {
    "salt": lambda sealed, other: bytes([sealed[0] ^ 1]) + sealed[1:],
    "content": lambda sealed, other: sealed[:50] + bytes([sealed[50] ^ 128]) + sealed[51:],
    "tag": lambda sealed, other: sealed[:-1] + bytes([sealed[-1] ^ 1]),
    "cut": lambda sealed, other: sealed[:-1],
    "empty": lambda sealed, other: b"",
    "short": lambda sealed, other: sealed[:33],
    "longer": lambda sealed, other: sealed + b"x",
    "another's": lambda sealed, other: other,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_missing_and_written_again(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    blobs = Held()
    with closing(store(blobs)) as kept:
        saved(kept, range(3))
        names = [kept._cipher.name((0, KEYS[number])) for number in range(3)]
        whole = bytes(blobs._contents[names[1]])
        for _ in range(2):
            blobs._contents[names[1]] = DAMAGE[kind](whole, bytes(blobs._contents[names[0]]))
            assert read(kept, range(3)) == [0]
        assert kept.failures == {"damaged": 2} and kept.takes_entries
        saved(kept, [1])
        assert read(kept, range(3)) == [0, 1, 2]
    assert len(caplog.messages) == 1 and "damaged" in caplog.text, "it is logged once"


@pytest.mark.parametrize("other", [{"identity": "cd" * 32}, {"secret": OTHER_SECRET}])
def test_other_engines_and_secrets_find_nothing(other: dict[str, Any]) -> None:
    """Nor do they decrypt what somebody has copied to their names."""
    blobs = Held()
    with closing(store(blobs)) as kept, closing(store(blobs, **other)) as second:
        saved(kept, range(2))
        assert found(second) == [set()] and not second.failures
        entry = (0, KEYS[0])
        blobs.put(second._cipher.name(entry), blobs._contents[kept._cipher.name(entry)])
        assert found(second) == [{KEYS[0]}] and read(second, [0]) == [] and second.failures == {"damaged": 1}


def test_groups_have_names_of_their_own() -> None:
    with closing(store(Held(), sizes=(100, 100))) as kept:
        saved(kept, range(2), group=1)
        assert found(kept) == [set(), set(KEYS[:2])]


def test_a_store_that_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Longer each time, up to a limit; each cause is logged once, and all of them are counted."""
    monkeypatch.setattr(remote, "MAX_PAUSE_S", 3.0)
    now = [1000.0]
    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    blobs = Held()
    with closing(store(blobs)) as kept:
        blobs.error = StoreError("failed", "it has failed", "status 500", "Wait.")
        for pause in 1.0, 2.0, 3.0, 3.0:
            blobs.calls.clear()
            assert found(kept) == [set()] and found(kept) == [set()] and len(blobs.calls) == 1
            assert not kept.takes_entries and not kept.has_room(0)
            now[0] += pause - 0.1
            assert not kept.takes_entries
            now[0] += 0.2
            assert kept.takes_entries
        blobs.error = StoreError("refused", "it refuses", "status 403", "See the rights.")
        saved(kept, [0])
        assert not kept.has((0, KEYS[0])) and kept.failures == {"failed": 4, "refused": 1}
        now[0] += 5
        blobs.error = None
        saved(kept, [0])
        blobs.error = StoreError("failed", "it has failed")
        assert read(kept, [0]) == [] and kept._pause_s == 2.0, "it has worked meanwhile"
        assert [message.split("\n") for message in caplog.messages] == [
            ["the shared KV cache cannot be used, and prompts are computed: it has failed: status 500", "Wait."],
            ["the shared KV cache cannot be used, and prompts are computed: it refuses: status 403", "See the rights."],
        ]
        now[0] += 3600
        assert read(kept, [0]) == [] and len(caplog.messages) == 3


def test_a_store_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that wait to be written are bounded, and are dropped when the store closes."""
    monkeypatch.setattr(remote, "CLOSE_S", 0.0)
    monkeypatch.setattr(store_module, "MAX_PENDING_BYTES", 5 * (100 + SEAL_BYTES))
    blobs, num_saved = Held(), 0
    blobs.may_answer.clear()
    kept = store(blobs)
    while kept.has_room(0):
        kept.save((0, KEYS[num_saved]), lambda number=num_saved: content_of(number))  # type: ignore[misc]
        num_saved += 1
    assert num_saved == 5 and all(kept.has((0, key)) for key in KEYS[:5])
    closer = threading.Thread(target=kept.close)
    closer.start()
    wait_until(lambda: not kept.takes_entries)
    blobs.may_answer.set()
    closer.join(30)
    assert not closer.is_alive() and len(blobs._contents) <= 4, "those that had begun"


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(EngineError, match=r"pip install 'enginewright\[kv-store\]'"):
        EntryCipher(SECRET, IDENTITY)
    with pytest.raises(EngineError, match=r"pip install 'enginewright\[kv-store\]'"):
        S3Blobs(S3Location("bucket", "", "http://127.0.0.1:1", "eu-1"), "folder", Credentials("a", "b"), 1)


# What is slower to fetch than to compute.


class Places:
    """Memory of a group, as an executor has it."""

    place_bytes = 100

    def read(self, place: int) -> Callable[[], bytes]:
        return lambda: content_of(place)

    def write(self, place: int, content: bytes | memoryview) -> None:
        pass

    def copy(self, places: Any) -> None:
        pass


def waiting_for(kept: PrefixStore, seconds: float) -> tuple[TokenSequence, StoredPrefixes]:
    """A sequence with two blocks that the store has, and that take so long to compute."""
    cache = Cache([PagedCache((0,), (Plane("key", 1, 8, "bf16", 16),), 4)], [20], 8)
    prefixes = SharedPrefixes(cache, enabled=True)
    sequence = TokenSequence(list(range(9)), 9, 20, request=SamplingRequest(PARAMS, range(9), 300))
    prefixes.add(sequence)
    for block in prefixes.keys_of(sequence):
        kept.save((0, block), lambda: content_of(1))
    wait_until(lambda: not kept._pending)
    writer = stored.PrefixWriter(cache, prefixes, [Places()])
    return sequence, StoredPrefixes(cache, prefixes, [kept], writer, lambda first, end: seconds * (end - first) / 8)


def test_a_search_begins_when_a_sequence_arrives() -> None:
    blobs = Held()
    with closing(store(blobs)) as kept:
        sequence, prefixes = waiting_for(kept, 60.0)
        prefixes.search(sequence)
        prefixes._searches[sequence][0].found.result(30)
        assert prefixes.is_read(sequence, []) or prefixes._reads, "it reads at once when it is the sequence's turn"
        prefixes.wait(30)
        assert prefixes.is_read(sequence, []) and len(prefixes.restore(sequence, [], [[]])) == 2
        assert not prefixes._searches and prefixes._sequence is None


def test_a_search_that_takes_longer_than_computing_is_given_up_and_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_cost, "RETRY_SPEEDUP", 2.0)
    blobs = Held()
    with closing(store(blobs)) as kept:
        sequence, prefixes = waiting_for(kept, 0.05)
        kept._known.clear()
        blobs.may_answer.clear()
        prefixes.search(sequence)
        while not prefixes.is_read(sequence, []):
            prefixes.wait(0.01)
        assert prefixes.restore(sequence, [], [[]]) == []
        (source,) = prefixes._sources
        assert source.cost.search_s >= read_cost.LATE * 0.05
        num_skipped = 0
        while prefixes.search(sequence) or not prefixes._searches[sequence]:
            prefixes.forget(sequence)
            num_skipped += 1
        assert num_skipped > 0, "it is searched again once it may be fast enough"
        blobs.may_answer.set()
        for _ in range(30):
            prefixes.forget(sequence)
            prefixes.search(sequence)
            prefixes._searches[sequence][0].found.result(30)
        prefixes.forget(sequence)
        assert source.cost.search_s < 0.05


@pytest.mark.parametrize(
    ("latency_s", "num_bytes", "computing_s", "pays"), [(0.0, 100, 1.0, True), (0.5, 100, 0.4, False)]
)
def test_the_latency_counts_for_small_reads(latency_s: float, num_bytes: int, computing_s: float, pays: bool) -> None:
    cost = ReadCost()
    for _ in range(40):
        cost.search_ended(latency_s)
        cost.read_ended(1_000_000, latency_s + 0.01)
    assert cost.of_read(1_000_000) == pytest.approx(latency_s + 0.01, rel=0.01)
    assert (cost.of_read(num_bytes) < computing_s) == pays


# A peer's memory.


@pytest.fixture
def peer() -> Iterator[tuple[PeerServer, MemoryBlobs, PeerBlobs]]:
    blobs = MemoryBlobs(1000)
    with closing(PeerServer("127.0.0.1", 0, SECRET, FACTS, blobs, 200)) as server:
        yield server, blobs, PeerBlobs("127.0.0.1", server.port, SECRET, FACTS, 200)


def test_contents_in_a_peers_memory(peer: tuple[PeerServer, MemoryBlobs, PeerBlobs]) -> None:
    _, blobs, client = peer
    assert client.find(KEYS[:3]) == [False] * 3 and list(client.get(KEYS[:2])) == [None, None]
    for number in range(12):
        client.put(KEYS[number], content_of(number))
        list(client.get(KEYS[:1]))
    there = client.find(KEYS[:12])
    assert there == [True, False, False] + [True] * 9, "what was used last stays"
    assert list(client.get(KEYS[:4])) == [content_of(0), None, None, content_of(3)] and blobs.num_bytes == 1000
    client.put(KEYS[0], content_of(7) + b"x")
    assert list(client.get(KEYS[:1])) == [content_of(7) + b"x"] and blobs.num_bytes <= 1000


@pytest.mark.parametrize(
    "frames",
    [[b"!" + KEYS[0]], [b">"], [b">" + KEYS[0] + KEYS[1]], [b"?" + KEYS[0][:31]], [b""], [b">" + KEYS[0], bytes(201)]],
)
def test_clients_that_break_the_protocol(
    frames: list[bytes], peer: tuple[PeerServer, MemoryBlobs, PeerBlobs], caplog: pytest.LogCaptureFixture
) -> None:
    server, blobs, client = peer
    with (
        closing(Channel.connect("127.0.0.1", server.port, SECRET, FACTS)) as connection,
        pytest.raises((TransferError, OSError)),  # the server may end the connection before all is sent
    ):
        for frame in frames:
            connection.send(frame)
        connection.receive(100)
    wait_until(lambda: "a client of kv_cache_listen is refused" in caplog.text)
    assert blobs.num_bytes == 0 and client.find(KEYS[:1]) == [False]


@pytest.mark.parametrize(
    ("other", "cause", "text"),
    [
        ({"secret": OTHER_SECRET}, "refused", "its secret may differ"),
        ({"facts": {**FACTS, "KV dtype": "fp8"}}, "refused", "it has another KV dtype"),
        ({"max_bytes": 99}, "unreachable", "too long"),
    ],
)
def test_peers_that_differ(
    other: dict[str, Any], cause: str, text: str, peer: tuple[PeerServer, MemoryBlobs, PeerBlobs]
) -> None:
    server, blobs, _ = peer
    blobs.put(KEYS[0], content_of(0))
    arguments: dict[str, Any] = {"secret": SECRET, "facts": FACTS, "max_bytes": 200} | other
    client = PeerBlobs("127.0.0.1", server.port, **arguments)
    with pytest.raises(StoreError, match=text) as failed:
        list(client.get(KEYS[:1]))
    assert failed.value.cause == cause and failed.value.fix


def test_a_peer_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = PeerBlobs("127.0.0.1", silent.getsockname()[1], SECRET, FACTS, 200)
        for call in (
            lambda: client.find(KEYS[:1]),
            lambda: list(client.get(KEYS[:1])),
            lambda: client.put(KEYS[0], b"x"),
        ):
            with pytest.raises(StoreError, match="does not answer") as failed:
                call()
            assert failed.value.cause == "unreachable"


# An object store.

AWS = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")


@pytest.mark.parametrize(
    ("method", "path", "content", "extra", "signature"),
    [
        (
            *("GET", "/test.txt", b"", {"range": "bytes=0-9"}),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            *("PUT", "/test%24file.text", b"Welcome to Amazon S3."),
            {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
    ],
)
def test_signatures_are_those_of_amazons_examples(
    method: str, path: str, content: bytes, extra: dict[str, str], signature: str
) -> None:
    now = datetime(2013, 5, 24, tzinfo=UTC)
    host = "examplebucket.s3.amazonaws.com"
    headers = signed_headers(method, host, path, AWS, "us-east-1", now, content, extra)
    assert headers["authorization"].endswith(f"Signature={signature}")
    of_session = Credentials(AWS.key_id, AWS.secret, "token")
    headers = signed_headers(method, host, path, of_session, "us-east-1", now, content, extra)
    assert headers["x-amz-security-token"] == "token" and "x-amz-security-token" in headers["authorization"]


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket", ("bucket", "", "https://s3.us-east-1.amazonaws.com", "us-east-1")),
        ("s3://bucket/?region=eu-1", ("bucket", "", "https://s3.eu-1.amazonaws.com", "eu-1")),
        ("s3://my.bucket/a/b/?endpoint=http://[::1]:9000/", ("my.bucket", "a/b/", "http://[::1]:9000", "us-east-1")),
    ],
)
def test_locations(url: str, location: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert S3Location.of_url(url) == S3Location(*location)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert S3Location.of_url("s3://bucket") == S3Location("bucket", "", "http://minio:9000", "us-west-2")


@pytest.mark.parametrize(
    "url",
    [
        *("s3://", "s3://Bucket", "s3://a", "s3://bucket/a b", "s3://bucket/a%20b", "s3://bucket/../other"),
        *("s3://bucket?endpoint=", "s3://bucket?endpoint=ftp://a", "s3://bucket?endpoint=http://a/path"),
        *("s3://bucket?endpoint=http://a:99999", "s3://bucket?other=1", "s3://bucket?region", "s3://bucket#a"),
        "s3://bucket?endpoint=http://user:password@a",
    ],
)
def test_locations_that_are_none(url: str) -> None:
    with pytest.raises(UsageError, match="it must be s3://BUCKET/PREFIX"):
        S3Location.of_url(url)


def test_credentials_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY is not set"):
        Credentials.of_environment()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "c")
    assert Credentials.of_environment() == Credentials("a", "b", "c")


@contextmanager
def s3_blobs(server: S3Server, max_bytes: int = 200) -> Iterator[S3Blobs]:
    with closing(S3Blobs(S3Location.of_url(server.url), "folder", Credentials("key", "secret"), max_bytes)) as blobs:
        yield blobs


def test_objects() -> None:
    with s3_server() as server, s3_blobs(server) as blobs:
        assert blobs.find(KEYS[:2]) == [False, False] and list(blobs.get(KEYS[:1])) == [None]
        blobs.put(KEYS[1], content_of(1))
        assert blobs.find(KEYS[:3]) == [False, True, False]
        assert list(blobs.get(KEYS[:3])) == [None, content_of(1), None]
        path = f"/bucket/some/prefix/folder/{KEYS[1].hex()}"
        assert server.objects == {path: content_of(1)}
        assert all("/eu-1/s3/aws4_request" in headers["authorization"] for _, _, headers in server.requests)


S3_FAULTS = {
    "denied": (answer(403, b"<Error><Code>AccessDenied</Code></Error>"), "refused", "status 403"),
    "another region": (answer(301), "refused", "status 301"),
    "busy": (answer(503, b"<Error><Code>SlowDown</Code></Error>"), "failed", "status 503"),
    "not HTTP": (lambda _, connection: connection.sendall(b"\x00" * 100), "unreachable", "cannot be reached"),
    "gone": (lambda _, connection: None, "unreachable", "cannot be reached"),
    "silent": (lambda _, connection: connection.recv(1), "unreachable", "cannot be reached"),
}


@pytest.mark.parametrize("fault", S3_FAULTS)
def test_a_server_with_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(s3.TIMEOUTS, "read", 0.2)
    with s3_server() as server, s3_blobs(server) as blobs:
        server.fault, cause, text = S3_FAULTS[fault]
        for call in (lambda: blobs.find(KEYS[:1]), lambda: list(blobs.get(KEYS[:1])), lambda: blobs.put(KEYS[0], b"x")):
            with pytest.raises(StoreError, match=text) as failed:
                call()
            assert failed.value.cause == cause
        server.fault = None
        blobs.put(KEYS[0], b"x")
        assert list(blobs.get(KEYS[:1])) == [b"x"]


def test_a_bucket_that_does_not_exist() -> None:
    with s3_server() as server, s3_blobs(server) as blobs:
        server.fault = answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        assert blobs.find(KEYS[:1]) == [False]
        with pytest.raises(StoreError, match="NoSuchBucket\nCreate the bucket"):
            blobs.put(KEYS[0], b"x")


def test_bodies_that_are_cut_or_too_long_or_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(_: str, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 X\r\nContent-Length: 100\r\n\r\n")
        for _ in range(100):
            time.sleep(0.05)
            connection.sendall(b"x")

    with s3_server() as server, s3_blobs(server) as blobs:
        server.fault = answer(200, bytes(50), length=100)
        with pytest.raises(StoreError, match="cannot be reached"):
            list(blobs.get(KEYS[:1]))
        server.fault = answer(200, bytes(1000), length=1 << 40)
        (content,) = blobs.get(KEYS[:1])
        assert content is not None and len(content) <= 1000, "no more is read than an entry may have"
        monkeypatch.setattr(s3, "MAX_REQUEST_S", 0.2)
        server.fault = drip
        with pytest.raises(StoreError, match="took more than"):
            list(blobs.get(KEYS[:1]))


@pytest.mark.usefixtures("reading_pays")
def test_engines_share_by_an_object_store(secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits; then each fault, with which answers are the same, too."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    engine = built_tiny("llama", max_position_embeddings=256)
    with s3_server() as server:
        limits = {"kv_cache_remote": server.url, "kv_secret_file": str(secret_file), **LIMITS}
        with LLM(engine, **limits) as llm:
            right = answers_of(llm.generate([prompt(1)], PARAMS))
        with LLM(engine, **limits) as llm:
            assert answers_of(llm.generate([prompt(1)], PARAMS)) == right and llm.stats().restored_tokens == 128
            assert not any(remote_stats(llm).failures.values())
        for fault, cause, _ in (*S3_FAULTS.values(), (answer(200, bytes(100)), "damaged", "")):
            server.fault = fault
            with LLM(engine, **limits) as llm:
                assert answers_of(llm.generate([prompt(1)], PARAMS)) == right and llm.stats().restored_tokens == 0
            assert remote_stats(llm).failures[cause] > 0


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"kv_cache_remote": "s3://a"}, "kv_cache_remote needs kv_secret_file"),
        ({"kv_cache_remote": "http://a"}, "it must be s3://BUCKET/PREFIX or tcp://HOST:PORT"),
        ({"kv_cache_remote": "tcp://a"}, "kv_cache_remote is 'tcp://a': it must be tcp://HOST:PORT"),
        ({"kv_cache_remote": "tcp://a:99999"}, "it must be tcp://HOST:PORT"),
        ({"kv_cache_share": 100}, "kv_cache_share and kv_cache_listen go together"),
        ({"kv_cache_listen": "a:1"}, "kv_cache_share and kv_cache_listen go together"),
        ({"kv_cache_share": 100, "kv_cache_listen": "a"}, "kv_cache_listen is 'a': it must be HOST:PORT"),
        ({"kv_cache_share": 100, "kv_cache_listen": "a:1"}, "kv_cache_share needs kv_secret_file"),
        ({"kv_cache_share": 1, "kv_cache_listen": "a:1", "kv_cache_remote": "tcp://a:1"}, "exclude each other"),
        ({"kv_secret_file": "x"}, "kv_secret_file needs kv_role or kv_cache_remote"),
    ],
)
def test_limits(limits: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        RuntimeConfig(**limits)
    assert text in str(error.value)


def test_an_address_that_is_taken(secret_file: Path) -> None:
    engine = built_tiny("llama", max_position_embeddings=256)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="is not available"):
        opened(engine, secret_file, taken.getsockname()[1], shares=True)


def test_sharing_takes_a_prefix_cache(secret_file: Path) -> None:
    engine = built_tiny("llama", max_position_embeddings=256)
    with pytest.raises(UsageError, match="kv_cache_remote goes with a prefix cache"):
        opened(engine, secret_file, 1, enable_prefix_caching=False)
