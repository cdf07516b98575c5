"""A build that fails or is killed, at any call to the system, leaves the folder as it was.

Every call that a build of a small engine makes is made to fail in turn, and a build is killed before and after every
one of them; with and without unnamed temporary files, over an earlier engine and under another name.
"""

import contextlib
import errno
import fcntl
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright.engine_file import EngineFile, EngineWriter
from enginewright.errors import EngineError
from tests.helpers.small_engine_file import ABOUT, add_content, replaced, write_engine

CALLS = ("open", "pwrite", "fsync", "link", "replace", "unlink", "close", "fstat", "fstatvfs", "listdir")
FORGIVEN = {"unlink", "close", "flock"}  # what a build can do without: removing, letting go, locking
EARLIER = replaced(name="earlier")
NEW = "new.engine"

Intercept = Callable[[str, Callable[[], Any]], Any]


@contextlib.contextmanager
def intercepted(intercept: Intercept) -> Iterator[None]:
    """Every call to the system goes through `intercept(name, call)`."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in ((os, CALLS), (fcntl, ("flock",))):
            for name in names:
                patch.setattr(module, name, _wrapper(name, getattr(module, name), intercept))
        yield


def _wrapper(name: str, call: Callable[..., Any], intercept: Intercept) -> Callable[..., Any]:
    return lambda *args, **kwargs: intercept(name, lambda: call(*args, **kwargs))


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


def without_hidden(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if not name.startswith(".")}


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / NEW
    write_engine(path)
    return path.read_bytes()


@pytest.fixture(params=["unnamed", "hidden"])
def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if temporary files have a name."""
    if request.param == "hidden":
        monkeypatch.delattr(os, "O_TMPFILE")
    return bool(request.param == "hidden")


@pytest.fixture(params=["fresh", "over"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a stranger's file, and perhaps an earlier engine."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".new.engine.notes").write_text("not ours")
    if request.param == "over":
        write_engine(folder / NEW, EARLIER)
    return folder


def test_unnamed_files_are_tested_here(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / NEW, 8) as writer:
        assert writer.temporary_path.parts[1] == "proc", f"{tmp_path} is on a file system without O_TMPFILE"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_every_call_that_fails(number: int, named: bool, folder: Path, whole: bytes) -> None:
    before = contents(folder)
    fatal: set[str] = set()
    for failing in range(1000):
        made: list[str] = []

        def fail(name: str, call: Callable[[], Any], made: list[str] = made, failing: int = failing) -> Any:
            made.append(name)
            if len(made) - 1 != failing:
                return call()
            if name == "close":
                call()  # as Linux does: closed, whatever it says
            raise OSError(number, os.strerror(number))

        error = None
        with intercepted(fail):
            try:
                write_engine(folder / NEW)
            except EngineError as caught:
                error = caught
        if len(made) <= failing:
            break
        if error is not None:
            fatal.add(made[failing])
            assert os.strerror(number) in str(error) and str(folder / NEW) in str(error)
            assert contents(folder) == before, f"call {failing}, {made[failing]}"
        else:
            assert made[failing] in FORGIVEN
            after = contents(folder)
            assert without_hidden(after) == {NEW: whole}
            hidden = after.keys() - before.keys() - {NEW}
            assert not hidden or made[failing] == "unlink", f"call {failing}, {made[failing]}"
            for name in {NEW, *hidden}:
                (folder / name).unlink()
            if NEW in before:
                (folder / NEW).write_bytes(before[NEW])
    else:
        pytest.fail("the build never ends")
    expected = {"open", "pwrite", "fsync", "fstatvfs", "listdir"}
    expected |= {"replace"} if named or NEW in before else set()
    expected |= {"link"} if not named or NEW in before else set()
    assert fatal >= expected and not fatal & FORGIVEN
    assert contents(folder) == {**before, NEW: whole}


def test_nothing_gets_its_name_before_it_is_on_disk(named: bool, folder: Path) -> None:
    calls: list[str] = []

    def record(name: str, call: Callable[[], Any]) -> Any:
        if name in ("pwrite", "fsync", "link", "replace"):
            calls.append(name)
        return call()

    over = (folder / NEW).exists()
    with intercepted(record):
        write_engine(folder / NEW)
    naming = calls[len(calls) - calls[::-1].index("pwrite") :]
    if named:
        assert naming == ["fsync", "link", "replace", "fsync"]  # link: a second name for the earlier file, if any
    elif over:
        assert naming == ["fsync", "link", "link", "link", "replace", "fsync"]  # the first finds the name taken
    else:
        assert naming == ["fsync", "link", "fsync"]


def test_short_writes(named: bool, folder: Path, whole: bytes) -> None:
    pwrite = os.pwrite
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data[:1000]), offset))
        write_engine(folder / NEW)
    assert (folder / NEW).read_bytes() == whole


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, OSError])
def test_weights_that_cannot_be_made(error: type[BaseException], named: bool, folder: Path) -> None:
    """An error that the caller's chunks raise is passed on unchanged."""
    before = contents(folder)

    def failing() -> Iterator[bytes]:
        yield b"some"
        raise error

    with pytest.raises(error), EngineWriter(folder / NEW, 8) as writer:
        writer.add("weights/x", failing(), dtype="i8", shape=(5,), layout="plain")
    assert contents(folder) == before


def test_a_writer_that_failed_is_closed(named: bool, folder: Path) -> None:
    before = contents(folder)
    with EngineWriter(folder / NEW, 8) as writer:
        writer.add("a", b"")
        with pytest.raises(EngineError, match="a section of that name exists"):
            writer.add("a", b"")
        assert contents(folder) == before
        for call in (lambda: writer.add("b", b""), lambda: writer.commit(ABOUT), lambda: writer.temporary_path):
            with pytest.raises(EngineError, match="writer is closed"):
                call()
    assert contents(folder) == before


def test_a_disk_known_to_be_too_small(named: bool, folder: Path) -> None:
    before = contents(folder)
    message = r"no space for .*: it takes 1,152,921,\d{3},\d{3},\d{3},\d{3} bytes, [\d,]+ are free"
    with pytest.raises(EngineError, match=message), EngineWriter(folder / NEW, 8, total_bytes=2**60):
        pass
    assert contents(folder) == before


def test_file_systems_without_links(folder: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without unnamed files, hard links and locks, an engine is built and replaced all the same."""
    monkeypatch.delattr(os, "O_TMPFILE")

    def refuse(name: str, call: Callable[[], Any]) -> Any:
        if name in ("link", "flock"):
            raise OSError(errno.EPERM if name == "link" else errno.ENOLCK, "not here")
        return call()

    with intercepted(refuse):
        write_engine(folder / NEW)
    assert without_hidden(contents(folder)) == {NEW: whole}


def test_unnamed_files_are_not_supported(folder: Path, whole: bytes) -> None:
    before = contents(folder)
    opened: list[str] = []

    def refuse(name: str, call: Callable[[], Any]) -> Any:
        opened.extend([name] * (name == "open"))
        if opened == ["open", "open"] and name == "open":  # the first opens the folder
            raise OSError(errno.EOPNOTSUPP, "not here")
        return call()

    with intercepted(refuse), EngineWriter(folder / NEW, 8) as writer:
        assert writer.temporary_path.parent == folder
        assert contents(folder).keys() - before.keys() == {writer.temporary_path.name}
        add_content(writer)
        writer.add("goldens", b"measured", evidence=True)
        writer.commit(ABOUT)
    assert contents(folder) == {**before, NEW: whole}


def test_what_dead_builds_left_is_removed(named: bool, folder: Path) -> None:
    """Only files of dead builds are removed: none of a living build, of another engine or of a user."""
    before = contents(folder)
    for kind in ("building", "previous"):
        (folder / f".{NEW}.123-0a1b2c3d.{kind}").write_bytes(b"dead")
    living = folder / f".{NEW}.124-0a1b2c3d.building"
    others = [
        folder / f".{name}" for name in (f"{NEW}.1-0a1b2c3d", "newXengine.1-0a1b2c3d.building", f"{NEW}x.building")
    ]
    for path in (living, *others):
        path.write_bytes(b"kept")
    with living.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with EngineWriter(folder / NEW, 8) as first, EngineWriter(folder / NEW, 8) as second:
            kept = before.keys() | {path.name for path in (living, *others)}
            temporary = {writer.temporary_path.name for writer in (first, second)} if named else set()
            assert contents(folder).keys() == kept | temporary
            for writer in (first, second):
                writer.add("a", b"")
                writer.commit(ABOUT)
    assert contents(folder).keys() == kept | {NEW}


def test_long_names(named: bool, tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 127)
    for _ in range(2):
        write_engine(path)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_and_stays(named: bool, there: bool, tmp_path: Path, whole: bytes) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if there:
        (folder / "target").write_text("mine")
    (tmp_path / NEW).symlink_to("elsewhere/target")
    write_engine(tmp_path / NEW)
    assert contents(folder) == {"target": whole} and (tmp_path / NEW).is_symlink()
    assert {entry.name for entry in tmp_path.iterdir()} == {NEW, "elsewhere"}


def test_the_target_of_a_link_comes_back_when_the_last_sync_fails(named: bool, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / NEW).symlink_to("target")
    synced: list[str] = []

    def fail(name: str, call: Callable[[], Any]) -> Any:
        synced.extend([name] * (name == "fsync"))
        if len(synced) == 2:
            synced.append("")
            raise OSError(errno.EIO, "the folder")
        return call()

    with intercepted(fail), pytest.raises(EngineError, match="the folder"):
        write_engine(tmp_path / NEW)
    assert (tmp_path / NEW).is_symlink() and contents(tmp_path) == {"target": b"mine", NEW: b"mine"}


def test_an_engine_has_the_mode_and_owner_of_the_file_that_it_replaces(named: bool, tmp_path: Path) -> None:
    path = tmp_path / NEW
    write_engine(path)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    owner = (1234, 1235) if os.geteuid() == 0 else (os.getuid(), os.getgid())  # only root gives files away
    os.chown(path, *owner)
    for mode in (0o600, 0o444, 0o666):
        path.chmod(mode)
        write_engine(path)
        status = path.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (mode, *owner)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_is_not_replaced(named: bool, kind: str, tmp_path: Path) -> None:
    path = tmp_path / NEW
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    before = path.stat()
    with pytest.raises(EngineError, match="cannot be written"):
        write_engine(path)
    assert path.stat() == before and os.listdir(tmp_path) == [NEW]


def test_another_build_starts_while_this_one_renames(named: bool, folder: Path, whole: bytes) -> None:
    """The build's hidden file is locked, so that the other build does not take it for abandoned."""
    before = contents(folder)

    def start_another(name: str, call: Callable[[], Any]) -> Any:
        if name == "replace":
            with EngineWriter(folder / NEW, 1):
                pass
        return call()

    with intercepted(start_another):
        write_engine(folder / NEW)
    assert contents(folder) == {**before, NEW: whole}


def test_another_build_takes_the_new_file_for_abandoned(
    folder: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock, that can happen."""
    monkeypatch.delattr(os, "O_TMPFILE")
    before = contents(folder)
    taken: list[str] = []

    def take(name: str, call: Callable[[], Any]) -> Any:
        if name == "flock" and not taken:
            taken.extend(contents(folder).keys() - before.keys())
            (folder / taken[0]).unlink()
        return call()

    with intercepted(take):
        write_engine(folder / NEW)
    assert len(taken) == 1 and contents(folder) == {**before, NEW: whole}


def run_self(*arguments: str) -> subprocess.CompletedProcess[str]:
    """This file as a program, in a process of its own that may fork and lower its limits."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", "from tests.engine_file.test_faults import main; main()", *arguments]
    return subprocess.run(command, cwd=root, text=True, capture_output=True, timeout=300)


def test_a_full_disk(named: bool, folder: Path) -> None:
    """The kernel itself refuses to write, in the middle of a section: no mock."""
    before = contents(folder)
    done = run_self("limit", str(folder), str(int(named)))
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before


def test_killed_at_every_call(named: bool, folder: Path, whole: bytes) -> None:
    """Under the final name there is the earlier file or the new one, whole; the next build removes the rest."""
    before = contents(folder)
    done = run_self("kill", str(folder), str(int(named)))
    assert done.returncode == 0 and int(done.stdout) >= 20, done.stderr  # builds that were killed
    assert contents(folder) == {**before, NEW: whole}


def build_and_die(folder: Path, place: int, afterwards: bool) -> bool:
    """Build in a child that is killed at its call number `place`; True if it got that far."""
    child = os.fork()
    if child == 0:
        count = 0

        def kill(_: str, call: Callable[[], Any]) -> Any:
            nonlocal count
            count += 1
            if count == place and not afterwards:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call()
            if count == place:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        with intercepted(kill):
            write_engine(folder / NEW)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return bool(status)


def kill_everywhere(folder: Path, named: bool) -> None:
    before = contents(folder)
    killed = 0
    for afterwards in (False, True):
        place = 0
        alive = False
        while not alive:
            place += 1
            alive = not build_and_die(folder, place, afterwards)
            killed += not alive
            after = contents(folder)
            if after.get(NEW) != before.get(NEW):
                EngineFile.open(folder / NEW).close()
                assert after[NEW] != before.get(NEW)
            hidden = after.keys() - before.keys() - {NEW}
            assert not hidden or named or NEW in before, "an unnamed file has appeared"
            with EngineWriter(folder / NEW, 1):
                rest = contents(folder)
            hidden = rest.keys() - before.keys() - {NEW}
            assert len(hidden) == named and without_hidden(rest) == without_hidden(after), f"{place}: {hidden}"
            if not alive:
                (folder / NEW).unlink(missing_ok=True)
                if NEW in before:
                    (folder / NEW).write_bytes(before[NEW])
    print(killed)


def main() -> None:
    what, folder, named = sys.argv[1], Path(sys.argv[2]), bool(int(sys.argv[3]))
    if named:
        del os.O_TMPFILE
    if what == "kill":
        return kill_everywhere(folder, named)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(EngineError, match="File too large"), EngineWriter(folder / NEW, 1) as writer:
        writer.add("big", bytes(100_000))
