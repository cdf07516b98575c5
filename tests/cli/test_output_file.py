"""Outputs of commands: regular files are replaced atomically, links followed, and all else is written in place."""

import json
import os
import resource
import socket
import stat
from pathlib import Path

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.engine_file import EngineFile
from enginewright.errors import EngineError, UsageError
from enginewright.output_file import require_writable, write_file
from tests.helpers.command import run_engine
from tests.helpers.outputs import FULL, NULL, make_device, read_end
from tests.helpers.tiny import MemoryCheckpoint


def test_a_file_is_replaced_and_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to("target")
    write_file(link, b"new")
    target.chmod(0o600)
    with target.open("rb") as earlier:
        require_writable(link)
        write_file(link, b"newer")
        assert earlier.read() == b"new"  # who reads the earlier file goes on with it
    assert target.read_bytes() == b"newer" and link.is_symlink() and stat.S_IMODE(target.stat().st_mode) == 0o600
    assert {entry.name for entry in tmp_path.iterdir()} == {"target", "link"}


@pytest.mark.parametrize("kind", ["fifo", "descriptor"])
def test_what_is_no_regular_file_is_written_to(tmp_path: Path, kind: str) -> None:
    with read_end(tmp_path / "out", kind) as (path, read):
        require_writable(path)
        write_file(path, b"x" * 1_000_000)
        with pytest.raises(UsageError, match="it is there, and is no file"):
            require_writable(path, regular=True)
    assert read() == b"x" * 1_000_000
    assert kind == "descriptor" or stat.S_ISFIFO((tmp_path / "out").lstat().st_mode)


def test_a_device_stays_one(tmp_path: Path) -> None:
    make_device(tmp_path / "null", NULL)
    require_writable(tmp_path / "null")
    write_file(tmp_path / "null", b"x")
    assert stat.S_ISCHR((tmp_path / "null").lstat().st_mode)


def test_an_open_file_under_its_descriptor_is_appended_to(tmp_path: Path) -> None:
    """With `-o /dev/stdout >> log`, the log keeps its content."""
    with (tmp_path / "log").open("wb", buffering=0) as log:
        log.write(b"before\n")
        (tmp_path / "link").symlink_to(f"/dev/fd/{log.fileno()}")
        for path in (Path(f"/dev/fd/{log.fileno()}"), Path(f"/proc/self/fd/{log.fileno()}"), tmp_path / "link"):
            require_writable(path)
            write_file(path, b"line\n")
        log.write(b"after\n")
    assert (tmp_path / "log").read_bytes() == b"before\nline\nline\nline\nafter\n"


@pytest.mark.parametrize("in_place", [True, False])
def test_outputs_that_cannot_be_written(tmp_path: Path, in_place: bool) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere/x")
    with socket.socket(socket.AF_UNIX) as listener, (tmp_path / "file").open("rb") as reader:
        listener.bind(str(tmp_path / "socket"))
        for name, piece in [
            (".", "it is a folder"),
            ("nowhere/x", "there is no folder"),
            ("file/x", "there is no folder"),
            ("dangling", "there is no folder"),
            ("loop", "Too many levels of symbolic links"),
            ("x" * 300, "File name too long"),
            ("socket", "it is a socket"),
            ("/proc/x", "/proc/x cannot be written"),
            ("/dev/fd/77", "Bad file descriptor"),
            (f"/dev/fd/{reader.fileno()}", "Bad file descriptor"),
        ]:
            with pytest.raises(UsageError, match=piece):
                require_writable(tmp_path / name, in_place=in_place)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dangling", "file", "loop", "socket"]


def test_a_device_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    make_device(tmp_path / "full", FULL)
    with pytest.raises(EngineError, match="full cannot be written: No space left on device"):
        write_file(tmp_path / "full", b"x")
    assert stat.S_ISCHR((tmp_path / "full").lstat().st_mode)


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path) -> None:
    """The kernel itself refuses to write."""
    path = tmp_path / "report"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, hard))
    try:
        with pytest.raises(EngineError, match="report cannot be written: File too large"):
            write_file(path, b"x" * 300_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_build_writes_through_links_and_into_pipes(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("x.engine", "x.html", "x.json"):
        (tmp_path / name).symlink_to(f"folder/{name}")
    (tmp_path / "folder" / "x.json").touch(0o600)
    with read_end(tmp_path / "fifo", "descriptor") as (provenance, read):
        options = ("-o", tmp_path / "x.engine", "--report", tmp_path / "x.html", "--provenance", provenance)
        built = run_engine("build", checkpoint, *options)
    assert built.exit_code == 0, built.stderr
    assert json.loads(read())["subject"][0]["name"] == "x.engine"
    assert all((tmp_path / name).is_symlink() for name in ("x.engine", "x.html", "x.json"))
    EngineFile.open(tmp_path / "folder" / "x.engine").close()
    assert stat.S_IMODE((tmp_path / "folder" / "x.json").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "folder" / "x.json").read_bytes())["quality"]
    assert sorted(entry.name for entry in (tmp_path / "folder").iterdir()) == ["x.engine", "x.html", "x.json"]


@pytest.mark.parametrize(
    "options",
    [
        ("-o", "fifo"),
        ("-o", "nowhere/x.engine"),
        ("-o", "folder"),
        ("--provenance", "nowhere/x.json"),
        ("--provenance", "file/x.json"),
        ("--provenance", "x.engine"),
        ("--report", "nowhere/x.html"),
        ("--report", "x.json", "--provenance", "x.json"),
        ("--dump-graphs", "file/graphs"),
    ],
)
def test_outputs_of_a_build_are_looked_at_before_the_work(tmp_path: Path, options: tuple[str, ...]) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    paths = {name: tmp_path / value for name, value in zip(options[::2], options[1::2], strict=True)}
    config = BuildConfig(
        report=paths.get("--report"), provenance=paths.get("--provenance"), dump_graphs=paths.get("--dump-graphs")
    )
    untouched = MemoryCheckpoint.tiny("llama")
    with pytest.raises(UsageError):
        build_engine(untouched, config, paths.get("-o", tmp_path / "x.engine"))
    assert sorted(tmp_path.iterdir()) == before and untouched.reads == []
