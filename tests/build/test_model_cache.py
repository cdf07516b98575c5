"""`engine run MODEL`: a checkpoint is built once into the cache, and found there afterwards."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from enginewright.builder import model_cache
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.model_cache import cached_engine, engine_files
from enginewright.errors import EngineError, NotEnoughMemoryError, UsageError
from enginewright.runtime.engine import Engine
from tests.helpers.serving import tiny_engine
from tests.helpers.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/enginewright/engines"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "llama")


def test_a_second_start_finds_what_the_first_has_built(
    checkpoint: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = cached_engine(str(checkpoint))
    assert first.parent.parent == cache
    said = capsys.readouterr().err
    assert re.search(r"tiny-llama is built with int8-wo: .* of weights, and .* of memory\n", said)
    assert f"{checkpoint} is built for cpu, with int8-wo: {first} takes " in said
    before = first.stat()
    assert cached_engine(str(checkpoint)) == first and first.stat() == before
    assert capsys.readouterr().err == f"{checkpoint} was built before: {first} (--rebuild builds it again)\n"
    assert cached_engine(str(checkpoint), rebuild=True) == first and first.stat().st_ino != before.st_ino


def test_another_method_or_another_checkpoint_is_another_engine(checkpoint: Path) -> None:
    paths = [cached_engine(str(checkpoint), quant="bf16")]
    time_ns = (checkpoint / "config.json").stat().st_mtime_ns + 10**9
    os.utime(checkpoint / "config.json", ns=(time_ns, time_ns))
    paths += [cached_engine(str(checkpoint), quant="bf16"), cached_engine(str(checkpoint))]
    assert len({path.parent for path in paths}) == 3
    quants = []
    for path in paths:
        with Engine.open(path) as engine:
            quants.append(engine.manifest.recipe["quant"])
    assert quants == ["bf16", "bf16", "int8-wo"]


def test_two_starts_at_once_build_once(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(cached_engine, [str(checkpoint)] * 2)
    assert first == second
    said = capsys.readouterr().err
    for text in (" is built for cpu", " was built before: ", " is being built by another process: waiting for it\n"):
        assert said.count(text) == 1


def test_the_method_is_the_closest_that_fits(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_checkpoint(str(checkpoint))
    sizes = {}
    for memory in range(10_000, 400_000, 2_000):
        try:
            sizes.setdefault(model_cache._fitting_method(opened, "cpu", memory), memory)
        except NotEnoughMemoryError as error:
            refused, text = memory, str(error)
    assert "are available for it\nChoose a method with --quant, or a smaller model." in text
    assert list(sizes) == ["int4-awq", "int8-wo"] and refused < sizes["int4-awq"] < sizes["int8-wo"]
    assert "is built with int4-awq: " in capsys.readouterr().err
    assert model_cache._fitting_method(opened, "cuda:sm_90a", 1 << 30) == "bf16"


def test_a_build_that_fails_leaves_nothing(checkpoint: Path, cache: Path) -> None:
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(EngineError):
        cached_engine(str(checkpoint))
    assert not [path for path in cache.rglob("*") if path.is_file()]
    weights.write_bytes(whole)
    assert cached_engine(str(checkpoint)).is_file()


def test_no_place_for_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(EngineError, match=r"cannot be made: Not a directory\nXDG_CACHE_HOME names another folder"):
        cached_engine(str(checkpoint))


def test_engines_are_served_as_they_are(checkpoint: Path, tmp_path: Path) -> None:
    """Engines are served as they are, and so is a checkpoint's folder with an engine in it."""
    engine = tiny_engine()
    options = {"quant": None, "device": "auto", "memory": None, "rebuild": False}
    files = engine_files([engine, checkpoint], **options)
    assert files[0] == engine and files[1].name == "tiny-llama-int8-wo.engine"
    (checkpoint / "x.engine").write_bytes(engine.read_bytes())
    assert engine_files([checkpoint], **options) == [checkpoint]
    for name, given in (("--quant", {"quant": "bf16"}), ("--rebuild", {"rebuild": True})):
        with pytest.raises(UsageError, match=f"{name} is for models: all given files are already engines"):
            engine_files([engine], **options | given)


def test_the_command_serves_what_was_built_without_torch(checkpoint: Path) -> None:
    built = cached_engine(str(checkpoint))
    program = "import sys; sys.modules['torch'] = None; from enginewright.cli import main; main()"
    options = ["--port", "0", "--threads", "1", "--kv-cache-memory", "8m"]
    command = [sys.executable, "-c", program, "run", str(checkpoint), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as opened:
        try:
            assert opened.stderr is not None
            assert opened.stderr.readline() == f"{checkpoint} was built before: {built} (--rebuild builds it again)\n"
            assert opened.stderr.readline().startswith("serving tiny-llama at http://127.0.0.1:")
            opened.send_signal(signal.SIGTERM)
            assert opened.wait(10) == 0
        finally:
            opened.kill()
