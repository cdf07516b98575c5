"""An engine's file that others write to while it is in use: the engine fails and says why, or does not depend on it."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, EngineError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests.helpers.serving import COMPLETIONS, LIMITS, Running, running, tiny_engine, wait_until
from tests.helpers.small_engine_file import write_engine

ANSWER = {"prompt": "a", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_engine(), tmp_path / "served.engine"))


def overwrite_with_nan(path: Path) -> None:
    """The larger half of the file, which weights are; 0xFFFF is a NaN."""
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        file.write(b"\xff" * middle)


def truncate(path: Path) -> None:
    os.truncate(path, 8192)


def copy_over(path: Path) -> None:
    """Overwrites an engine in place, as `cp` does, with one of other weights and the same length."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)


def replace(path: Path) -> None:
    new = path.with_suffix(".new")
    shutil.copy(path, new)
    overwrite_with_nan(new)
    new.rename(path)


CHANGES = [
    (overwrite_with_nan, "it was written to; it was last modified at 2"),
    (copy_over, "it was "),  # cut short, for a moment; then written to
    (truncate, "it was cut short from"),
]


def text_of(server: Running) -> str:
    return str(server.complete(**ANSWER)["choices"][0]["text"])


def check_failed(server: Running, path: Path, why: str, log: str) -> None:
    health = server.ask("GET", "/health")
    assert (health.status, health.json["status"]) == (503, "engine_dead")
    assert f"{path} was changed while it is in use: {why}" in log and "--no-mmap" in log


@pytest.mark.parametrize("change", [change for change, _ in CHANGES])
@pytest.mark.parametrize("warm", [True, False])
def test_health_sees_a_changed_file_before_a_step_does(path: Path, change: Callable[[Path], None], warm: bool) -> None:
    with running(engine=path) as server:
        if warm:
            assert text_of(server)
        assert server.ask("GET", "/health").status == 200
        change(path)
        health = server.ask("GET", "/health")
        assert (health.status, health.json["status"]) == (503, "engine_dead")
        assert health.json["reason"] == "the engine's file was changed while it is in use"


@pytest.mark.parametrize(("change", "why"), CHANGES)
def test_a_changed_file_ends_the_engine(
    path: Path, change: Callable[[Path], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(engine=path) as server:
        assert text_of(server)
        change(path)
        answer = server.post(COMPLETIONS, ANSWER)
        assert (answer.status, answer.error["code"]) == (500, "engine_dead"), "and not nan_logits, the request's fault"
        assert path.name not in str(answer.error)
        check_failed(server, path, why, caplog.text)


@pytest.mark.parametrize(("change", "why"), CHANGES)
def test_a_file_that_changes_while_answers_are_written(
    path: Path, change: Callable[[Path], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(engine=path) as server, ThreadPoolExecutor(1) as pool:
        options = {**ANSWER, "max_tokens": 4000}
        expected = server.complete(**options)["choices"][0]["text"]
        before = server.llm.stats().generated_tokens
        stream = pool.submit(server.post, COMPLETIONS, {**options, "stream": True})
        wait_until(lambda: server.llm.stats().generated_tokens > before + 10)
        change(path)
        *pieces, error = stream.result().events
        assert error["error"]["code"] == "engine_dead"
        text = "".join(piece["choices"][0]["text"] for piece in pieces)
        assert text and expected.startswith(text), "no token comes of other weights"
        check_failed(server, path, why, caplog.text)


@pytest.mark.parametrize("change", [replace, Path.unlink, lambda path: path.chmod(0o400)])
def test_another_file_of_that_name_is_none_of_the_engines_business(path: Path, change: Callable[[Path], None]) -> None:
    with running(engine=path) as server:
        expected = text_of(server)
        change(path)
        assert text_of(server) == expected
        assert server.ask("GET", "/health").status == 200


@pytest.mark.parametrize("change", [change for change, _ in CHANGES])
@pytest.mark.parametrize("warm", [True, False])
def test_without_mmap_nothing_depends_on_the_file(path: Path, change: Callable[[Path], None], warm: bool) -> None:
    with running() as server:
        expected = text_of(server)
    with running(engine=path, limits={"mmap": False}) as server:
        if warm:  # else not even the tokenizer was asked for anything yet
            assert text_of(server) == expected
        change(path)
        assert text_of(server) == expected
        assert server.ask("GET", "/health").status == 200


def test_a_file_that_changes_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(path) as engine:
        read = engine.read_weight

        def read_and_write(*given: object) -> None:
            read(*given)  # type: ignore[arg-type]
            overwrite_with_nan(path)

        monkeypatch.setattr(engine, "read_weight", read_and_write)
        with pytest.raises(CorruptEngineError, match="was written to"):
            CpuExecutor(engine, RuntimeConfig(mmap=False, threads=1, kv_cache_memory=LIMITS["kv_cache_memory"]))


def test_what_counts_as_a_change(tmp_path: Path) -> None:
    path = tmp_path / "small.engine"
    write_engine(path)
    size, modified = path.stat().st_size, path.stat().st_mtime_ns
    with EngineFile.open(path) as file:
        file.check_unchanged()
        for new, changed in ((size + 1, "extended"), (size - 1, "cut short"), (0, "cut short")):
            os.truncate(path, new)
            os.utime(path, ns=(modified, modified))  # the size alone tells
            why = f"it was {changed} from {size:,} to {new:,} bytes"
            with pytest.raises(CorruptEngineError, match=why) as error:
                file.check_unchanged()
            assert error.value.exit_code == 5
        os.truncate(path, size)
        with pytest.raises(CorruptEngineError, match="was written to"):
            file.check_unchanged()
        os.utime(path, ns=(0, modified))
        file.check_unchanged()
    with pytest.raises(EngineError, match="it is closed"):
        file.check_unchanged()


# In processes of their own, which SIGBUS may end.

CUT_UNDER_A_STEP = """
import os, sys
from enginewright import LLM, SamplingParams
from enginewright.errors import EngineError
llm = LLM(sys.argv[1], threads=1, kv_cache_memory=64 << 20)
executor = llm._core.executor
prepare = executor._prepare
def cut(plan):  # when all that a step looks at before it begins has been looked at
    os.truncate(sys.argv[1], 8192)
    return prepare(plan)
executor._prepare = cut
try:
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
except EngineError as error:
    sys.exit(f"raised: {error}")
"""
MAPPINGS = """
import faulthandler, mmap, os, signal, sys
from enginewright._cpu import MappedFile
def mapped(name):
    with open(name, "w+b") as file:
        file.write(bytes([1]) * 5 * mmap.PAGESIZE + b"end")
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
if sys.argv[1] == "faulthandler":
    faulthandler.enable()
one, other = mapped("one"), mapped("other")
guards = [MappedFile(one), MappedFile(one), MappedFile(other)]
os.truncate("one", mmap.PAGESIZE + 3)
assert not any(guard.faulted for guard in guards)
assert one[-3:] == bytes(3) and [guard.faulted for guard in guards] == [True, True, False]
assert one[2 * mmap.PAGESIZE] == 0 and one[0] == 1 and other[-3:] == b"end"
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGBUS)
del guards
os.truncate("other", 0)
print("so far", flush=True)
other[0]
print("too far")
"""


def run(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=folder, timeout=60
    )


def test_a_file_that_is_cut_short_under_a_step(path: Path) -> None:
    ended = run(CUT_UNDER_A_STEP, str(path), folder=path.parent)
    assert ended.returncode == 1, ended.stderr
    assert "raised: the engine has failed" in ended.stderr
    assert f"{path} was changed while it is in use: it was cut short from" in ended.stderr


@pytest.mark.parametrize(("how", "out"), [("plain", "so far\n"), ("faulthandler", "so far\n"), ("kill", "")])
def test_other_bus_errors_are_left_to_who_had_them(how: str, out: str, tmp_path: Path) -> None:
    ended = run(MAPPINGS, how, folder=tmp_path)
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, out), ended.stderr
    assert ("Bus error" in ended.stderr) == (how == "faulthandler"), ended.stderr


def test_a_page_that_could_not_be_read_stays_so(path: Path) -> None:
    """The file is whole again, and has its old times; but who says so of the mapping?"""
    program = """
import os, sys
from enginewright.errors import CorruptEngineError
from enginewright.runtime.engine import Engine
engine = Engine.open(sys.argv[1])
engine.check_mapped_weights()
data, status = open(sys.argv[1], "rb").read(), os.stat(sys.argv[1])
os.truncate(sys.argv[1], 0)
engine.file.mapping[-1]
with open(sys.argv[1], "r+b") as file:
    file.write(data)
os.utime(sys.argv[1], ns=(status.st_atime_ns, status.st_mtime_ns))
engine.file.check_unchanged()
for _ in range(2):
    try:
        engine.check_mapped_weights()
    except CorruptEngineError as error:
        print(error)
"""
    ended = run(program, str(path), folder=path.parent)
    assert ended.returncode == 0 and ended.stdout.count("could not be read while it is in use") == 2, ended.stderr
