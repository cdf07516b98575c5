"""An engine that cannot be opened leaves no threads, processes or descriptors, also while its error is kept."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM
from enginewright.errors import UsageError
from enginewright.runtime.core.engine_core import EngineCore
from tests.helpers.serving import LIMITS, tiny_engine

SECRET = b"a secret of more than thirty-two characters"
TAKEN, FILE = "taken", "file"  # stand for an address that another socket has, and for a file

FAILURES = {
    "events": ({"kv_events": f"tcp://*:{TAKEN}"}, "KV events cannot listen"),
    "events of two ranks": ({"kv_events": f"tcp://*:{TAKEN}", "tensor_parallel_size": 2}, "KV events cannot listen"),
    "a file for a folder": ({"kv_cache_disk": 64 << 20, "kv_cache_dir": FILE}, "Not a directory|File exists"),
    "a port for leases": ({"kv_role": "both", "kv_listen": f"127.0.0.1:{TAKEN}"}, "kv_listen 127.0.0.1"),
    "leases, then events": ({"kv_role": "both", "kv_listen": "127.0.0.1:0", "kv_events": f"tcp://*:{TAKEN}"}, "events"),
    "a disk, then a port": (
        {"kv_cache_disk": 64 << 20, "kv_cache_share": 64 << 20, "kv_cache_listen": f"127.0.0.1:{TAKEN}"},
        "kv_cache_listen 127.0.0.1",
    ),
}  # fmt: skip


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        yield server.getsockname()[1]


def held() -> tuple[set[str], int, int]:
    """Names of threads, and numbers of descriptors and of child processes.

    The engine file is left out: the traceback of an error may keep its mapping, which has a descriptor of its own.
    """
    threads = {thread.name for thread in threading.enumerate()}
    children = [
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    ]  # fmt: skip
    files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if os.path.lexists(file)]
    return threads, sum(not file.endswith(".engine") for file in files), len(children)


def wait_until(is_true: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not is_true() and time.monotonic() < until:
        time.sleep(0.02)
    return is_true()


@pytest.mark.parametrize("name", FAILURES)
def test_nothing_is_left_of_an_engine_that_cannot_be_opened(name: str, taken_port: int, tmp_path: Path) -> None:
    """Twice, since the first time imports packages, which may keep descriptors."""
    wanted, message = FAILURES[name]
    (tmp_path / FILE).write_text("")
    (tmp_path / "secret").write_bytes(SECRET)
    limits: dict[str, Any] = {"kv_cache_dir": str(tmp_path / "kv")} if "kv_cache_disk" in wanted else {}
    for key, value in wanted.items():
        limits[key] = value.replace(TAKEN, str(taken_port)) if isinstance(value, str) else value
    if "kv_cache_dir" in wanted:
        limits["kv_cache_dir"] = str(tmp_path / FILE)
    if {"kv_role", "kv_cache_share"} & wanted.keys():
        limits["kv_secret_file"] = str(tmp_path / "secret")
    kept, engine = [], tiny_engine()
    for _ in range(2):
        before = held()
        with pytest.raises(UsageError, match=message) as raised:
            LLM(engine, **{**LIMITS, **limits})
        kept.append(raised)
    assert wait_until(lambda: held() == before), (before, held())
    LLM(engine, **{**LIMITS, **{key: value for key, value in limits.items() if key == "tensor_parallel_size"}}).close()


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_is_left_if_the_thread_of_the_engine_cannot_start(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, held()

    def refused(thread: threading.Thread) -> None:
        if thread.name == "engine":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start") as raised:
            LLM(tiny_engine(), **LIMITS, tensor_parallel_size=size)
    assert wait_until(lambda: held() == before), (before, held())
    del raised


def test_what_is_closed_last_is_closed_even_if_another_part_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    with LLM(tiny_engine(), **LIMITS) as llm:
        core = llm._core
        assert isinstance(core, EngineCore)

        def fail() -> None:
            raise OSError("no space left")

        core._opened.callback(fail)
        with pytest.raises(OSError, match="no space left"):
            core.close()
    del llm, core
    assert wait_until(lambda: held() == before), (before, held())
