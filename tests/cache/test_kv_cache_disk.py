"""The prefix cache on disk: entries are found again, right or not at all, within its capacity, by their owner alone."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from numpy.typing import NDArray

from enginewright import LLM
from enginewright.errors import UsageError
from enginewright.plan import PagedCache, Plane
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.cache import disk
from enginewright.runtime.cache import store as store_module
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.disk import HASH_BYTES, DiskStore
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.cache.pool import Pool
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.device.cuda.places import DevicePlaces
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.request import SamplingRequest
from enginewright.runtime.scheduler import read_cost, stored
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.step.sequence import TokenSequence
from tests.emulator.device import EmulatedDevice
from tests.helpers.engines import built_tiny
from tests.helpers.kv_cache_disk import (
    FAMILIES,
    FEW,
    LIMITS,
    PARAMS,
    Collected,
    answers_of,
    check_damaged_entry,
    check_eviction,
    check_mixed_requests,
    check_next_process,
    check_preempted_answers,
    entries,
    gpu_engine,
    opened,
    prompt,
    stepped,
)
from tests.helpers.odd_files import ODD_FILES, make_sparse
from tests.helpers.serving import COMPLETIONS, port_of, process, wait_until

pytestmark = pytest.mark.usefixtures("reading_pays")


class Places:
    """Memory of a group, as an executor has it."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory, self.place_bytes = memory, memory.shape[1]

    def read(self, place: int) -> Callable[[], bytes]:
        content = self._memory[place].tobytes()
        return lambda: content

    def write(self, place: int, content: bytes | memoryview) -> None:
        self._memory[place] = np.frombuffer(content, np.uint8)

    def copy(self, places: Copies) -> None:
        for source, target in places:
            self._memory[target] = self._memory[source]


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine of the family, and for the device, that the parameter names."""
    family, _, on_gpu = request.param.partition(", ")
    with gpu_engine(family, monkeypatch) if on_gpu else Engine.open(cpu_engine(family)) as opened:
        yield opened


@pytest.fixture(scope="module")
def llama() -> Path:
    return cpu_engine("llama")


def cpu_engine(family: str) -> Path:
    return built_tiny(family, max_position_embeddings=256)


def answered(engine: Engine, limits: dict[str, Any]) -> str:
    """Generates the text for a prompt, and leaves its prefix on disk."""
    core, whole = EngineCore(engine, runtime_config(**{**LIMITS, **limits})), Collected()
    core.add(core.request(prompt(1), PARAMS, whole))
    while core.has_work:
        stepped(core)
    core.close()
    return whole.text


@pytest.mark.parametrize("engine", FAMILIES, indirect=True)
def test_the_next_process_goes_on_from_what_is_there(engine: Engine, tmp_path: Path) -> None:
    check_next_process(engine, tmp_path)


@pytest.mark.parametrize("engine", FAMILIES, indirect=True)
def test_what_falls_out_of_memory_is_there(engine: Engine, tmp_path: Path) -> None:
    check_eviction(engine, tmp_path)


@pytest.mark.parametrize("engine", ["llama", "llama, on a GPU"], indirect=True)
def test_what_was_too_much_at_once_is_kept_before_it_is_overwritten(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step writes where a place is read when it is taken."""
    prompts, memory = [prompt(seed, 70) for seed in range(5)], 2 * int(sequence_bytes(engine.plan.caches, 96, 64))
    with opened(engine, tmp_path, kv_cache_memory=memory, max_num_seqs=2, max_model_len=96) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, "has_room", lambda self, group: False)
            right = answers_of(llm.generate(prompts[:1], FEW))
        llm.generate(prompts[1:], FEW)
        assert answers_of(llm.generate(prompts[:1], FEW)) == right
        assert llm.stats().restored_tokens == 64


def test_preempted_answers_go_on_from_the_disk(llama: Path, tmp_path: Path) -> None:
    with Engine.open(llama) as engine:
        check_preempted_answers(engine, tmp_path)


@pytest.mark.parametrize("engine", FAMILIES, indirect=True)
def test_mixed_requests_with_few_blocks(engine: Engine, tmp_path: Path) -> None:
    check_mixed_requests(engine, 36, tmp_path)


def hold_reads(patch: pytest.MonkeyPatch, may_read: threading.Event) -> None:
    """Makes the disk's files wait for the event before they are read."""
    read = disk.read_regular
    patch.setattr(disk, "read_regular", lambda *given, **named: may_read.wait(60) and read(*given, **named))


def test_nobody_else_waits_for_the_disk(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request generates while another one's prefix is read from disk; a prefix that takes too long is computed."""
    may_read = threading.Event()
    limits = {"kv_cache_disk": 64 << 20, "kv_cache_dir": str(tmp_path)}
    with Engine.open(llama) as engine:
        right = answered(engine, limits)
        hold_reads(monkeypatch, may_read)
        for read_in_time in True, False:
            may_read.clear()
            monkeypatch.setattr(stored, "LONGEST_S", 60.0 if read_in_time else 0.0)
            core = EngineCore(engine, runtime_config(**{**LIMITS, **limits}))
            running, waiting = Collected(), Collected()
            core.add(core.request(prompt(5, 20), PARAMS, running))
            core.step()
            core.add(core.request(prompt(1), PARAMS, waiting))
            while running.tokens < 20:
                stepped(core)
            assert waiting.tokens == 0 or not read_in_time
            may_read.set()
            while core.has_work:
                stepped(core)
            assert waiting.tokens == 40 and waiting.text == right
            assert core.stats().restored_tokens == 128 * read_in_time
            core.close()


def test_with_nothing_else_to_do_it_sleeps(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"kv_cache_disk": 64 << 20, "kv_cache_dir": str(tmp_path)}
    with Engine.open(llama) as engine:
        answered(engine, limits)
        may_read, wait = threading.Event(), stored.futures.wait
        waits = list[float]()
        hold_reads(monkeypatch, may_read)
        monkeypatch.setattr(stored.futures, "wait", lambda read, seconds: waits.append(seconds) or wait(read, seconds))
        core = EngineCore(engine, runtime_config(**{**LIMITS, **limits}))
        core.add(core.request(prompt(1), PARAMS, Collected()))
        while not waits:  # until it is known what the disk has
            core.step()
        for _ in range(5):
            core.step()
        assert len(waits) == 1 + 5 and min(waits) > 0, "each turn has waited"
        may_read.set()
        while not core.stats().restored_tokens:
            core.step()
        core.close()


def test_an_aborted_request_leaves_nothing_of_what_it_read(llama: Path, tmp_path: Path) -> None:
    limits = {"kv_cache_disk": 64 << 20, "kv_cache_dir": str(tmp_path)}
    with Engine.open(llama) as engine:
        answered(engine, limits)
        core = EngineCore(engine, runtime_config(**{**LIMITS, **limits}))
        request = core.request(prompt(1), PARAMS, Collected())
        core.add(request)
        core.step()
        core.abort(request)
        assert not core.has_work and core.step() == []
        disk_of = core._scheduler._waiting.stored
        assert disk_of is not None and not disk_of._reads and not disk_of._searches and disk_of._sequence is None
        core.close()


def two_blocks_on_disk(
    folder: Path, memory: NDArray[np.uint8], seconds: float
) -> tuple[TokenSequence, stored.StoredPrefixes, DiskStore]:
    """A sequence that begins with two blocks of 500 bytes each, 1 and 2, which take so long to compute."""
    cache = Cache([PagedCache((0,), (Plane("key", 1, 8, "bf16", 16),), 4)], [len(memory)], 8)
    prefixes, kept = SharedPrefixes(cache, enabled=True), DiskStore(folder, "a" * 64, 10_000, [500])
    sequence = TokenSequence(list(range(9)), 9, 20, request=SamplingRequest(PARAMS, range(9), 300))
    prefixes.add(sequence)
    for number, block in enumerate(prefixes.keys_of(sequence), start=1):
        kept.save((0, block), lambda content=bytes([number]) * 500: content)
    kept.find(()).result(60)
    writer = stored.PrefixWriter(cache, prefixes, [Places(memory)])
    return sequence, stored.StoredPrefixes(cache, prefixes, [kept], writer, lambda *_: seconds), kept


def test_what_is_computed_sooner_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_cost, "FIRST_S_PER_BYTE", 1 / 900)
    sequence, found, kept = two_blocks_on_disk(tmp_path, np.zeros((20, 500), np.uint8), 1.0)
    for _ in range(3):
        assert found.is_read(sequence, []) and not found._reads
        found.forget(sequence)
    found.is_read(sequence, [])
    assert found._reads, "what was slow may be fast again"
    kept.close()


def test_what_is_not_read_in_time_is_not_tried_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read = threading.Event()
    hold_reads(monkeypatch, may_read)
    sequence, found, kept = two_blocks_on_disk(tmp_path, np.zeros((20, 500), np.uint8), 0.05)
    kept._writer.submit(lambda: None).result()  # what waits to be written would be read at once
    while not found.is_read(sequence, []):
        time.sleep(0.01)
    assert found._reads and found.restore(sequence, [], [[]]) == []
    assert found.is_read(sequence, []) and not found._reads
    may_read.set()
    kept.close()


def test_copies_that_are_to_be_made_are_made_first(tmp_path: Path) -> None:
    """Pending copies may read a block that no sequence holds any more, and that is about to be overwritten."""
    memory = np.full((3, 500), 7, np.uint8)
    sequence, found, kept = two_blocks_on_disk(tmp_path, memory, 60.0)
    copies = [[(0, 2), (1, 2)]]
    memory[1] = 8
    while not found.is_read(sequence, []):
        found.wait(1)
    assert len(found.restore(sequence, [], copies)) == 2
    assert memory[:, 0].tolist() == [1, 2, 8] and copies == [[]] and found._writer.num_tokens == 8
    kept.close()


def test_a_place_is_saved_when_it_can_be_found_and_before_it_is_taken() -> None:
    pool, saves = Pool(2), list[tuple[bytes, int]]()
    pool.save = lambda *one: saves.append(one)
    first, second = pool.take(), pool.take()
    pool.publish(first, pool.tag(first, key(1)))
    pool.tag(second, key(2))  # NaN came out of it
    pool.drop(first)
    pool.drop(second)
    assert saves == [(key(1), first)]
    pool.take()
    pool.take()
    assert saves == [(key(1), first)] * 2


def test_tenants_and_instruction_sets_share_nothing(llama: Path, tmp_path: Path) -> None:
    for limits, salt in ({}, "one"), ({}, "another"), ({"isa": "portable"}, "one"):
        with opened(llama, tmp_path, **limits) as llm:
            llm.generate([prompt(1)], PARAMS, cache_salt=salt)
            assert llm.stats().restored_tokens == 0
    with opened(llama, tmp_path, isa="portable") as llm:
        llm.generate([prompt(1)], PARAMS, cache_salt="one")
        assert llm.stats().restored_tokens == 128


def test_devices_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's engines for CPUs and for GPUs share no entries, nor do GPUs of two architectures."""
    with gpu_engine("llama", monkeypatch) as on_gpu, Engine.open(on_gpu.file.path, "cpu") as on_cpu:
        for engine in on_cpu, on_gpu:
            with opened(engine, tmp_path) as llm:
                llm.generate([prompt(1, 40)], FEW)
                assert llm.stats().restored_tokens == 0
        monkeypatch.setattr(EmulatedDevice, "architecture", "another")
        for restored in 0, 32:
            with opened(on_gpu, tmp_path) as llm:
                llm.generate([prompt(1, 40)], FEW)
                assert llm.stats().restored_tokens == restored


def test_places_of_a_device_are_read_and_written_in_order() -> None:
    """However late the device does what it is asked for: it does nothing before somebody waits."""
    device = EmulatedDevice({})
    places = DevicePlaces(device, 3, 1000)
    contents = [bytes([number]) * 1000 for number in range(1, 7)]
    for place in range(3):
        places.write(place, contents[place])
    before = [places.read(place) for place in range(3)]
    places.copy([(0, 2), (2, 1)])
    for place, content in zip((0, 0, 0, 2), contents[3:] + contents[4:5], strict=True):
        places.write(place, content)
    after = [places.read(place) for place in range(3)]
    assert [read() for read in reversed(after)] == [contents[4], contents[0], contents[5]]
    assert [read() for read in before] == contents[:3] == [read() for read in before], "it was read before it changed"


def test_a_device_uses_its_pinned_memory_again() -> None:
    device = EmulatedDevice({})
    places = DevicePlaces(device, 3, 1000)
    for _ in range(3):
        reads = [places.read(place) for place in range(3)]
        places.write(1, bytes(1000))
        assert {read() for read in reads} == {bytes(1000)}
        num_buffers = len(device._memory)
        places.write(2, bytes(1000))
    assert num_buffers == len(device._memory) == 1 + 3 + 2, "the places, and one for each that is on its way, and two"


@pytest.mark.parametrize("fault", ["a bit", "the end", "another's name", "a link", "a FIFO", "a sparse file"])
def test_a_damaged_entry_is_computed_again(fault: str, llama: Path, tmp_path: Path) -> None:
    with Engine.open(llama) as engine:
        check_damaged_entry(engine, fault, tmp_path)


def test_a_full_disk_stops_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(llama, **LIMITS) as llm:
        right = answers_of(llm.generate([prompt(seed) for seed in range(3)], PARAMS))
    replace, calls = os.replace, 0

    def fail(*names: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*names)

    monkeypatch.setattr(disk.os, "replace", fail)
    with opened(llama, tmp_path) as llm:
        assert answers_of(llm.generate([prompt(seed) for seed in range(3)], PARAMS)) == right
        core = llm
    stats = core.stats()
    assert stats.disk is not None and stats.disk.num_failures == 1
    assert [record.getMessage() for record in caplog.records if record.name == disk.__name__] == [
        f"no more of the KV cache is kept in {tmp_path}: No space left on device"
    ]
    assert len(entries(tmp_path)) == 2 and not list(tmp_path.glob("*/*.part"))


def test_a_killed_server_leaves_what_it_had_written(llama: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys, time, enginewright as e\n"
        f"llm = e.LLM(sys.argv[1], kv_cache_disk='64m', kv_cache_dir=sys.argv[2], **{LIMITS})\n"
        f"llm.generate([{prompt(1)}], e.SamplingParams(seed=7, max_tokens=40, ignore_eos=True))\n"
        "llm._core._stores._disk._writer.submit(lambda: None).result()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, llama, tmp_path], check=False).returncode == -9
    with opened(llama, tmp_path) as llm:
        llm.generate([prompt(1)], PARAMS)
        assert llm.stats().restored_tokens == 128


def test_a_server_answers_and_ends_in_order_with_odd_files_in_its_folder(tmp_path: Path) -> None:
    """Entries of one prompt are FIFOs, and those of another sparse files of more than the server may take."""
    reading_pays = (
        "from enginewright.runtime.core import engine_core as core\nfrom enginewright.runtime.scheduler import stored\n"
        "assert core.prompt_s and stored.LONGEST_S\n"
        "core.prompt_s, stored.LONGEST_S = lambda *_: None, 60.0\n"
    )
    limits = {"kv_cache_disk": "64m", "kv_cache_dir": str(tmp_path), "max_num_batched_tokens": 64}
    of_fifos = {f"0-{key.hex()}" for key in PrefixKeys(32).of(prompt(1), 4)}

    def ask(port: int, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{port}{path}", body, headers), timeout=300) as answer:
            return answer.read()  # type: ignore[no-any-return]

    def texts(port: int) -> list[str]:
        bodies = [{"prompt": prompt(seed), "max_tokens": 3, "temperature": 0} for seed in (1, 2)]
        return [json.loads(ask(port, COMPLETIONS, json.dumps(body).encode()))["choices"][0]["text"] for body in bodies]

    def metric(port: int, name: str) -> float:
        text = ask(port, "/metrics").decode()
        found = re.search(rf"^enginewright_kv_cache_disk_{name}\S* (\S+)$", text, re.MULTILINE)
        assert found
        return float(found[1])

    with process(reading_pays, limits) as server:
        right = texts(port_of(server))
        server.terminate()
        assert server.wait(60) == 0
    kept = entries(tmp_path)
    assert {path.name for path in kept} > of_fifos
    with process(reading_pays, limits) as server:
        port = port_of(server)
        wait_until(lambda: metric(port, "bytes") > 0)
        for path in kept:
            path.unlink()
            (os.mkfifo if path.name in of_fifos else make_sparse)(path)
        assert texts(port) == right
        assert metric(port, "failures") == 2  # the first block of each prompt, without which no other is of use
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
        assert peak and int(peak[1]) << 10 < 1 << 30
        server.terminate()
        _, said = server.communicate(timeout=60)
    assert server.returncode == 0 and "by force" not in said


def store(folder: Path, identity: str = "a", capacity: int = 1000) -> DiskStore:
    """A store of two groups, whose entries take 100 and 50 bytes."""
    return DiskStore(folder, identity * 64, capacity, [100 - HASH_BYTES, 50 - HASH_BYTES])


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def saved(kept: DiskStore, numbers: Sequence[int]) -> None:
    for number in filter(lambda _: kept.has_room(0), numbers):
        kept.save((0, key(number)), lambda content=bytes([number]) * (100 - HASH_BYTES): content)


def numbers_in(kept: DiskStore) -> list[int]:
    return sorted(int.from_bytes(one, "big") for one in kept.keys[0])


def test_what_was_wanted_last_stays(tmp_path: Path) -> None:
    kept = store(tmp_path)
    saved(kept, range(10))
    kept.touch([(0, key(0)), (0, key(1))])
    saved(kept, [10, 11])
    kept.close()
    assert numbers_in(kept) == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11] and kept.num_bytes == 1000
    assert sum(path.stat().st_size for path in entries(tmp_path)) == 1000
    for number in numbers_in(kept):  # the next process has the order from the files' times
        when = 100 + (7 * number) % 12  # no order that numbers have
        os.utime(tmp_path / ("a" * 64) / f"0-{key(number).hex()}", (when, when))
    again = store(tmp_path, capacity=500)
    saved(again, [20])
    again.close()
    assert numbers_in(again) == [1, 5, 8, 10, 20], "the latest by their times, and a new one"


def test_entries_of_other_engines_go_by_their_age(tmp_path: Path) -> None:
    old = store(tmp_path, "b")
    saved(old, range(4))
    old.close()
    for path in entries(tmp_path):
        os.utime(path, (100, 100))
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / ("b" * 64) / "notes.txt").write_text("not ours")
    new = store(tmp_path)
    saved(new, range(8))
    new.close()
    assert len(entries(tmp_path)) == 10 and numbers_in(new) == list(range(8))
    assert len(list((tmp_path / ("b" * 64)).iterdir())) == 3, "two entries, and what nobody knows"
    assert (tmp_path / "notes.txt").exists()


def test_a_file_that_was_never_finished_goes(tmp_path: Path) -> None:
    store(tmp_path).close()
    old, new = (tmp_path / ("a" * 64) / f"0-{key(n).hex()}.{n}.part" for n in (1, 2))
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (100, 100))
    store(tmp_path).close()
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("kind", [*ODD_FILES, "sparse"])
def test_what_is_put_in_the_place_of_an_entry_is_neither_waited_for_nor_read(kind: str, tmp_path: Path) -> None:
    """However late: it counts as damaged, and no more is read than an entry has."""
    kept = store(tmp_path)
    kept.save((0, key(1)), lambda: bytes(100 - HASH_BYTES))
    kept._writer.submit(lambda: None).result()
    (path,) = entries(tmp_path)
    path.unlink()
    make_sparse(path, 1 << 40) if kind == "sparse" else ODD_FILES[kind](path)
    assert not kept.read([(0, key(1))]).result(timeout=20).contents
    assert kept.num_failures > 0
    kept.close()


def test_a_fifo_in_the_place_of_an_unfinished_file_holds_up_nobody(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.find(()).result(20)
    os.mkfifo(tmp_path / ("a" * 64) / f"0-{key(1).hex()}.{os.getpid()}.part")
    kept.save((0, key(1)), lambda: bytes(100 - HASH_BYTES))
    kept._writer.submit(lambda: None).result(timeout=20)
    assert [path.stat().st_size for path in entries(tmp_path)] == [100] and kept.num_failures == 0
    kept.close()


def test_an_entry_of_the_wrong_size_takes_no_room(tmp_path: Path) -> None:
    """A sparse file is as large as it says, and would drive out all others."""
    kept = store(tmp_path)
    kept.save((0, key(1)), lambda: bytes(100 - HASH_BYTES))
    kept.close()
    make_sparse(tmp_path / ("a" * 64) / f"0-{key(2).hex()}")
    again = store(tmp_path)
    again.find(()).result(20)
    assert again.keys[0] == {key(1)} and again.num_bytes == 100 and again.num_failures == 1
    again.close()
    assert len(entries(tmp_path)) == 1


def test_what_waits_to_be_written_can_be_read_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_PENDING_BYTES", 3 * 100)
    kept, may_write = store(tmp_path), threading.Event()
    kept._writer.submit(may_write.wait)
    saved(kept, range(5))
    read = kept.read([(0, key(number)) for number in range(4)]).result()
    assert {entry[1]: bytes(content)[0] for entry, content in read.contents.items()} == {key(n): n for n in range(3)}
    may_write.set()
    kept.close()
    assert numbers_in(kept) == [0, 1, 2] and len(entries(tmp_path)) == 3
    again = store(tmp_path)
    read = again.read([(0, key(number)) for number in range(3)]).result()
    again.close()
    assert [bytes(content) for content in read.contents.values()] == [bytes([n]) * (100 - HASH_BYTES) for n in range(3)]


def test_an_entry_of_any_size_is_kept_where_nothing_else_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_PENDING_BYTES", 10)
    kept = store(tmp_path)
    assert kept.has_room(0)
    kept.close()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"kv_cache_dir": "somewhere"}, "kv_cache_dir needs kv_cache_disk"),
        ({"kv_cache_disk": "1k"}, "what a few tokens leave takes"),
        ({"kv_cache_disk": "many"}, "kv_cache_disk"),
        ({"kv_cache_disk": "1g", "enable_prefix_caching": False}, "kv_cache_disk goes with a prefix cache"),
    ],
)
def test_options_that_make_no_sense(limits: dict[str, Any], message: str, llama: Path) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(llama, **LIMITS, **limits)


def test_folders_that_others_can_write_are_refused(llama: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="others may write there") as refused:
        opened(llama, tmp_path)
    assert f"chmod go-w {tmp_path}" in str(refused.value)
    tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Name another --kv-cache-dir"):
        opened(llama, tmp_path / "file")
