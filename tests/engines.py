"""Engines for tests: built once a process, from real or tiny checkpoints."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="enginewright-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def built(checkpoint: Path, quant: str, kv_cache_dtype: str = "bf16") -> Path:
    """The engine of a checkpoint, for the CPU."""
    output = _folder() / f"{len(list(_folder().iterdir()))}-{quant}.engine"
    config = BuildConfig(quant=quant_config(quant), kv_cache_dtype=kv_cache_dtype)
    build_engine(open_checkpoint(str(checkpoint)), config, output)
    return output
