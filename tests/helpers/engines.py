"""Engines for tests: built once a process, from real or tiny checkpoints; and altered."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.engine_file import EngineFile, EngineWriter
from enginewright.manifest import About
from enginewright.passes.quant import QuantConfig
from tests.helpers.tiny import MemoryCheckpoint


@cache
def folder_of_engines() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="enginewright-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def built(checkpoint: Path, quant: str | QuantConfig, kv_cache_dtype: str = "bf16") -> Path:
    """The engine of a checkpoint, for the CPU; the gate would take longer than the build."""
    method = quant_config(quant) if isinstance(quant, str) else quant
    config = BuildConfig(quant=method, kv_cache_dtype=kv_cache_dtype, gate=None)
    build_engine(open_checkpoint(str(checkpoint)), config, output := _next_path(method.name))
    return output


@cache
def built_tiny(family: str, **overrides: Any) -> Path:
    """The engine of a tiny model in bf16, for the CPU. overrides: entries of its `tiny_config`."""
    build_engine(MemoryCheckpoint.tiny(family, **overrides), BuildConfig(gate=None), output := _next_path(family))
    return output


def _next_path(name: str) -> Path:
    return folder_of_engines() / f"{len(list(folder_of_engines().iterdir()))}-{name}.engine"


def copied(engine: Path, path: Path, changed: dict[str, bytes], **about: object) -> Path:
    """An engine with other sections, or more of them, and another description, and hashes that fit them."""
    with EngineFile.open(engine) as file, EngineWriter(path, 300) as writer:
        for name, form in file.sections.items():
            data = changed.get(name, file.read_section(name))
            writer.add(name, data, dtype=form.dtype, shape=form.shape, layout=form.layout, evidence=form.evidence)
        for name in changed.keys() - file.sections.keys():
            writer.add(name, changed[name])
        fields = {field: getattr(file.manifest, field) for field in About.__struct_fields__}
        writer.commit(About(**fields | about))
    return path
