"""Ranks that end, stop, or cannot be reached: the engine fails by an error that names them, and nothing is left."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM, SamplingParams
from enginewright.errors import EngineDeadError, EngineError, UsageError
from enginewright.passes.quant import Bf16
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device import devices
from enginewright.runtime.device.ranks import group as group_module
from enginewright.runtime.device.ranks import watch
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.serve import serve
from tests.api.test_embeddings import engine_of
from tests.helpers.machines import (
    WorkerNode,
    all_ranks,
    group_limits,
    is_rank,
    pids_of_ranks,
    rank_processes,
    wait_until_none_is_left,
    workers,
)
from tests.helpers.process_facts import held
from tests.helpers.serving import running, tiny_engine, wait_until

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]
NOTICED_S = 10  # maximum seconds until an engine has failed by a rank that is lost
RAY: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "ray"}
PING_S = 0.5  # seconds between pings of this process in tests that wait for a member that does not answer
GROUPS = {"one machine": (1, 3), "two machines": (2, 4)}  # machines, ranks


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dict[str, Any], list[WorkerNode]]]:
    """Limits of an engine, and its other machines. All ranks have to end at the end of the test."""
    before = all_ranks()
    limits = group_limits(tmp_path, *GROUPS[request.param])
    with workers(tiny_engine(), tmp_path, limits) as nodes:
        yield limits, nodes
    wait_until_none_is_left(before)


@pytest.fixture
def pings_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process find out in 3 s, instead of 6 s, who does not answer; `engine worker` does not."""
    monkeypatch.setattr(watch, "PING_S", PING_S)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with LLM(tiny_engine(), max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory=16 << 20, threads=1) as llm:
        return answer(llm)


def answer(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids


def failure(llm: LLM) -> str:
    """Waits until an engine has failed, and returns why."""
    began = time.monotonic()
    wait_until(lambda: not llm._thread.is_alive, NOTICED_S)
    assert time.monotonic() - began < NOTICED_S
    with pytest.raises(EngineDeadError) as caught:
        answer(llm)
    return str(caught.value)


def test_ranks_answer_like_one_process(group: tuple[dict[str, Any], list[WorkerNode]], expected: list[int]) -> None:
    limits, nodes = group
    for _ in range(2):  # other machines wait for the next engine
        with LLM(tiny_engine(), **limits) as llm:
            assert answer(llm) == expected
            assert sorted(pids_of_ranks(nodes)) == list(range(1, limits["tensor_parallel_size"]))
    assert all(node.process.poll() is None for node in nodes)


@pytest.mark.parametrize("rank", [1, -1])
def test_a_rank_that_is_killed_while_the_engine_is_idle(
    group: tuple[dict[str, Any], list[WorkerNode]], rank: int, expected: list[int]
) -> None:
    limits, nodes = group
    rank %= limits["tensor_parallel_size"]
    with LLM(tiny_engine(), **limits) as llm:
        assert answer(llm) == expected
        pid = pids_of_ranks(nodes)[rank]
        os.kill(pid, signal.SIGKILL)
        why = failure(llm)
        assert f"rank {rank}" in why and f"process {pid} was ended by signal SIGKILL" in why
    with LLM(tiny_engine(), **limits) as llm:  # nothing has to be cleaned
        assert answer(llm) == expected


@pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (-1, signal.SIGKILL), (-1, signal.SIGSTOP)])
@pytest.mark.usefixtures("pings_often")
def test_a_rank_that_is_lost_in_a_step(
    group: tuple[dict[str, Any], list[WorkerNode]], rank: int, how: signal.Signals
) -> None:
    limits, nodes = group
    rank %= limits["tensor_parallel_size"]
    with LLM(tiny_engine(), **limits) as llm:
        with closing(llm.stream(PROMPT, LONG)) as stream:
            next(stream)
            pid = pids_of_ranks(nodes)[rank]
            os.kill(pid, how)
            began = time.monotonic()
            with pytest.raises(EngineDeadError) as caught:
                for _ in stream:
                    pass
            assert time.monotonic() - began < NOTICED_S
        why = str(caught.value)
        assert f"rank {rank}" in why, why
        silent = f"it has not answered for {6 if nodes else 3} s"  # another machine's last rank, or one of this process
        reason = f"process {pid} was ended by signal SIGKILL" if how == signal.SIGKILL else silent
        assert reason in why, why
    assert not is_rank(pid)


@pytest.mark.parametrize("group", ["one machine"], indirect=True)
@pytest.mark.usefixtures("pings_often")
def test_a_rank_that_is_stopped_while_the_engine_is_idle(group: tuple[dict[str, Any], list[WorkerNode]]) -> None:
    """tests/long has two machines, and the time between pings that others have."""
    check_stopped_while_idle(group, silent_s=3)


def check_stopped_while_idle(group: tuple[dict[str, Any], list[WorkerNode]], silent_s: int) -> None:
    """Checks that an engine without requests fails by a rank that is stopped.

    Args:
        group: limits of the engine, and its other machines.
        silent_s: seconds of which the error speaks.
    """
    limits, nodes = group
    with LLM(tiny_engine(), **limits) as llm:
        os.kill(pids_of_ranks(nodes)[2], signal.SIGSTOP)
        why = failure(llm)
        assert "rank 2" in why and f"it has not answered for {silent_s} s" in why


def test_a_rank_that_is_killed_at_the_start(
    group: tuple[dict[str, Any], list[WorkerNode]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for the others until it knows of the end, however fast they were ready."""
    limits, nodes = group
    killed: list[int] = []
    wait_until_ready = group_module.RankGroup.wait_until_ready

    def wait_for_the_end(self: group_module.RankGroup) -> None:
        wait_until(lambda: self._watch.failure is not None, NOTICED_S)
        wait_until_ready(self)

    def kill() -> None:
        wait_until(lambda: len(pids_of_ranks(nodes)) == limits["tensor_parallel_size"] - 1, 30)
        killed.append(pids_of_ranks(nodes)[2])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with monkeypatch.context() as patch, pytest.raises(EngineError) as caught:
        patch.setattr(group_module.RankGroup, "wait_until_ready", wait_for_the_end)
        LLM(tiny_engine(), **limits)
    killer.join()
    assert "rank 2" in str(caught.value) and f"process {killed[0]} was ended by signal SIGKILL" in str(caught.value)
    with LLM(tiny_engine(), **limits) as llm:
        assert answer(llm) == expected


def test_a_rank_that_cannot_open_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reason is the engine's."""
    engine = tmp_path / "tiny.engine"
    engine.write_bytes(tiny_engine().read_bytes())
    start = group_module.start_processes

    def without_the_file(*arguments: Any, **options: Any) -> Any:
        engine.unlink()
        return start(*arguments, **options)

    monkeypatch.setattr(group_module, "start_processes", without_the_file)
    with pytest.raises(EngineError, match=r"rank [12]: .*tiny.engine cannot be opened"):
        LLM(engine, **group_limits(tmp_path, 1, 3))


def test_a_machine_that_is_lost(tmp_path: Path, expected: list[int]) -> None:
    limits = group_limits(tmp_path, 2, 4)
    with workers(tiny_engine(), tmp_path, limits) as (node,):
        with LLM(tiny_engine(), **limits) as llm:
            ranks = node.ranks
            node.end(signal.SIGKILL)
            assert "node 1 (127.0.0.1): it has closed its connection" in failure(llm)
            wait_until(lambda: not any(map(is_rank, ranks)), 5)
        again = WorkerNode(tiny_engine(), tmp_path, limits)
        with LLM(tiny_engine(), **limits) as llm:
            assert answer(llm) == expected
        assert again.end() == 143


@pytest.mark.usefixtures("pings_often")
def test_a_machine_that_stops(tmp_path: Path) -> None:
    limits = group_limits(tmp_path, 2, 2)
    with workers(tiny_engine(), tmp_path, limits) as (node,), LLM(tiny_engine(), **limits) as llm:
        os.kill(node.process.pid, signal.SIGSTOP)
        assert "node 1 (127.0.0.1): it has not answered for 3 s" in failure(llm)
        os.kill(node.process.pid, signal.SIGCONT)


def test_a_connection_between_ranks_that_is_cut(tmp_path: Path) -> None:
    """`ss -K` needs rights, so the connection is ended by a rank: its descriptors are those of its process."""
    limits = group_limits(tmp_path, 2, 2)
    with workers(tiny_engine(), tmp_path, limits) as (node,), LLM(tiny_engine(), **limits) as llm:
        (pid,) = node.ranks
        cut(pid)
        why = failure(llm)
        assert "the connection to rank 0 has ended" in why or "the connection to rank 1 has ended" in why, why


def cut(pid: int) -> None:
    """Ends the TCP connections of another process, whose own descriptors stay."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:") and is_tcp(target[8:-1]):
            process = os.pidfd_open(pid)
            copy = pidfd_getfd(process, int(name))
            os.close(process)
            with socket.socket(fileno=copy) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def is_tcp(inode: str) -> bool:
    return any(line.split()[9] == inode for line in Path("/proc/net/tcp").read_text().splitlines()[1:])


def pidfd_getfd(process: int, descriptor: int) -> int:
    """The system call of this name on x86-64 and aarch64, which Python does not have."""
    copy = ctypes.CDLL(None, use_errno=True).syscall(438, process, descriptor, 0)
    if copy < 0:
        pytest.skip(f"pidfd_getfd is not allowed here: {os.strerror(ctypes.get_errno())}")
    return int(copy)


PROGRAM = """
import json, sys, time
from enginewright import LLM, SamplingParams
from enginewright.runtime.device.ranks import watch
if __name__ == "__main__":
    watch.PING_S, go_on_s = map(float, sys.argv[3:])
    llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    print("ready", flush=True)
    began = time.monotonic()
    while True:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        if time.monotonic() > began + go_on_s:
            print("still here", flush=True)
            began = float("inf")
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_rank_0(
    group: tuple[dict[str, Any], list[WorkerNode]], how: signal.Signals, expected: list[int]
) -> None:
    limits, _ = group
    before, files = all_ranks(), set(os.listdir("/dev/shm"))
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_engine()), json.dumps(limits), str(watch.PING_S), "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert program.stdout is not None and program.stdout.readline() == b"ready\n"
    assert len(all_ranks() - before) == limits["tensor_parallel_size"] - 1
    program.send_signal(how)
    program.wait(20)
    program.stdout.close()
    wait_until(lambda: all_ranks() <= before, 5)
    assert set(os.listdir("/dev/shm")) <= files
    with LLM(tiny_engine(), **limits) as llm:
        assert answer(llm) == expected


@pytest.mark.parametrize("group", ["one machine"], indirect=True)
def test_rank_0_that_stands_still(group: tuple[dict[str, Any], list[WorkerNode]]) -> None:
    """Ctrl-Z in a terminal, or a machine that sleeps; tests/long has two machines."""
    check_rank_0_that_stands_still(group[0], PING_S)


def check_rank_0_that_stands_still(limits: dict[str, Any], ping_s: float) -> None:
    """Checks that an engine goes on after its process has stood still for longer than pings may be unanswered.

    Args:
        limits: limits of the engine.
        ping_s: seconds between its pings, of which 6 may be unanswered.
    """
    before = all_ranks()
    options = (json.dumps(limits), str(ping_s), str(10 * ping_s))
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tiny_engine()), *options], stdout=subprocess.PIPE)
    assert program.stdout is not None and program.stdout.readline() == b"ready\n"
    program.send_signal(signal.SIGSTOP)
    time.sleep(8 * ping_s)
    assert len(all_ranks() - before) == limits["tensor_parallel_size"] - 1
    program.send_signal(signal.SIGCONT)
    assert program.stdout.readline() == b"still here\n"
    program.kill()
    program.wait(20)
    program.stdout.close()
    wait_until_none_is_left(before)


def test_nothing_is_left_after_close(group: tuple[dict[str, Any], list[WorkerNode]]) -> None:
    limits, nodes = group
    with LLM(tiny_engine(), **limits) as llm:
        answer(llm)
    threads, files = set(threading.enumerate()), set(os.listdir("/dev/shm"))
    workers_before = [settled(node) for node in nodes]
    facts = held(os.getpid())
    for _ in range(3):
        with LLM(tiny_engine(), **limits) as llm:
            answer(llm)
    del llm
    assert set(threading.enumerate()) <= threads and set(os.listdir("/dev/shm")) <= files
    after = held(os.getpid())
    assert {name: after[name] for name in ("files", "children", "mappings")} == {
        name: facts[name] for name in ("files", "children", "mappings")
    }
    assert [settled(node) for node in nodes] == workers_before
    if "master_port" in limits:
        with socket.create_server(("127.0.0.1", limits["master_port"])):
            pass


def settled(node: WorkerNode) -> dict[str, int]:
    """Descriptors and threads of a worker once it waits for the next engine."""
    wait_until(lambda: not node.ranks and node.log.rstrip().rpartition("\n")[2].startswith("waiting for"), 20)
    return held(node.process.pid)


def test_an_engine_that_is_not_closed_ends_its_ranks(tmp_path: Path) -> None:
    before = all_ranks()
    llm = LLM(tiny_engine(), **group_limits(tmp_path, 1, 2))
    assert len(all_ranks() - before) == 1
    del llm
    wait_until_none_is_left(before)


def test_a_server_says_why(tmp_path: Path) -> None:
    limits = group_limits(tmp_path, 1, 2)
    with running(limits=limits) as server:
        rest = server.begin("/v1/completions", {"prompt": [5, 6], "max_tokens": 4000, "ignore_eos": True})
        (pid,) = rank_processes()
        os.kill(pid, signal.SIGKILL)
        *_, last = rest().events
        assert last["error"]["code"] == "engine_dead"
        health = server.ask("GET", "/health")
        assert health.status == 503
        assert f"rank 1: process {pid} was ended by signal SIGKILL" in health.json["reason"]
        refused = server.post("/v1/completions", {"prompt": [5]})
        assert refused.status == 503 and refused.error["message"] == "the engine has failed"


def test_a_folder_of_engines(tmp_path: Path) -> None:
    """Each engine has ranks of its own, which end when it is closed; one that has failed is opened again."""
    files = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.engine").write_bytes(tiny_engine().read_bytes())
        files.append(tmp_path / f"{name}.engine")
    limits = group_limits(tmp_path, 1, 2)
    with running(engine=files, limits=limits, idle_seconds=1.0) as server:
        for name in ("a", "b"):
            assert server.complete([5, 6, 7], model=name, max_tokens=4)["choices"]
        assert len(rank_processes()) == 2
        os.kill(rank_processes()[0], signal.SIGKILL)
        wait_until(lambda: not all(service.llm.is_alive for service in server.engines.services), 10)
        answers = [server.complete([5, 6, 7], model=name, max_tokens=4) for name in ("a", "b")]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        wait_until(lambda: not rank_processes(), 30)  # both have been idle


def test_several_machines_are_for_one_engine(tmp_path: Path) -> None:
    files = [tmp_path / "a.engine", tmp_path / "b.engine"]
    for file in files:
        file.write_bytes(tiny_engine().read_bytes())
    with pytest.raises(UsageError, match="nnodes is for one engine"):
        serve([str(file) for file in files], ServerConfig(port=0), **group_limits(tmp_path, 2, 2))


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0: it must be a whole number of at least 1"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size is 65: it must be 64 or less"),
        ({"tensor_parallel_size": 2, "kv_cache_disk": "1m"}, "--kv-cache-disk"),
        ({"tensor_parallel_size": 2, "kv_role": "both", "kv_secret_file": "SECRET"}, "--kv-role"),
        (
            {"tensor_parallel_size": 2, "kv_cache_remote": "tcp://127.0.0.1:9", "kv_secret_file": "SECRET"},
            "--kv-cache-remote or --kv-cache-share",
        ),
        ({"nnodes": 2}, "tensor_parallel_size 1 cannot be divided among 2 machines"),
        ({"tensor_parallel_size": 3, "nnodes": 2}, "tensor_parallel_size 3 cannot be divided among 2 machines"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "nnodes needs master_addr"),
        ({"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "0.0.0.0"}, "it must be one address"),
        ({"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1"}, "nnodes needs secret_file"),
        ({"tensor_parallel_size": 2, "master_addr": "127.0.0.1"}, "master_addr needs nnodes"),
        ({"tensor_parallel_size": 2, "secret_file": "SECRET"}, "secret_file needs nnodes"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "backend ray needs nnodes"),
        ({"distributed_executor_backend": "uni"}, "distributed_executor_backend is 'uni': it must be mp or ray"),
        ({**RAY, "secret_file": "SECRET"}, "secret_file is for engine worker"),
        ({**RAY, "master_addr": "0.0.0.0"}, "it must be one address"),
        (RAY, "--distributed-executor-backend ray needs Ray"),
        ({"tensor_parallel_size": 2, "master_port": 70000}, "master_port is 70000"),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "secret_file": "nowhere"},
            "--secret-file nowhere cannot be read",
        ),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "192.0.2.1", "secret_file": "SECRET"},
            "--master-addr 192.0.2.1:29501 is not available",
        ),
    ],
)
def test_limits_that_do_not_go_with_ranks(
    limits: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad limits are refused before a process is started."""
    (tmp_path / "SECRET").write_text("5" * 32)
    monkeypatch.chdir(tmp_path)

    def start(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process is started")

    engine = tiny_engine()  # a build may start processes
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(UsageError) as caught:
        LLM(engine, **limits)
    assert why in str(caught.value)


def test_ranks_of_gpus_are_made_in_the_build() -> None:
    with Engine.open(tiny_engine()) as engine, pytest.raises(UsageError, match="cannot be divided among 2 GPUs"):
        devices._open_on_gpu(engine, RuntimeConfig(device="cuda", tensor_parallel_size=2), {})


def test_an_embedding_model() -> None:
    engine = engine_of("qwen3", "last", Bf16())
    limits = {"threads": 1, "max_num_seqs": 4}
    with LLM(engine, **limits) as llm:
        expected = llm.embed(["Hello", "World, what is this?"])
    before = all_ranks()
    with LLM(engine, **limits, tensor_parallel_size=2) as llm:
        assert len(all_ranks() - before) == 1
        found = llm.embed(["Hello", "World, what is this?"])
    assert [one.outputs.embedding for one in found] == [one.outputs.embedding for one in expected]
    with pytest.raises(UsageError, match="kv_events is for engines that write"):
        LLM(engine, **limits, tensor_parallel_size=2, kv_events="tcp://127.0.0.1:*")
    wait_until_none_is_left(before)


def test_more_ranks_than_heads(tmp_path: Path, expected: list[int]) -> None:
    with LLM(tiny_engine(), **group_limits(tmp_path, 1, 7)) as llm:
        assert answer(llm) == expected


def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C reaches the process group of the command, and ranks are in others: they end with the command."""
    before = all_ranks()
    command = (
        "generate",
        str(tiny_engine()),
        "--prompt",
        "a",
        "--max-tokens",
        "4000",
        "--ignore-eos",
        "--threads",
        "1",
    )
    program = subprocess.Popen(
        [sys.executable, "-m", "enginewright.cli", *command, "--tensor-parallel-size", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert program.stdout is not None and program.stderr is not None
    assert program.stdout.read(1)
    assert len(all_ranks() - before) == 2
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=20)
    assert program.returncode == 130 and b"Traceback" not in errors, errors
    wait_until_none_is_left(before)
