"""Recorded hashes of logits: a change of how the engine is written, and not of its results, keeps them.

`python -m tests.helpers.logit_hashes` records those of this machine's instruction sets, for the weights that it builds:
methods that calibrate do so with torch's matrix products, whose last bits depend on the machine. After a change that is
meant to change logits, record them again and say so in the commit.
"""

import json
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.manifest import WEIGHTS
from enginewright.runtime.engine import Engine

RECORDED = Path(__file__).parent.parent / "golden/logit_hashes.json"
# SmolLM2's engines, with what `engine build` is asked for.
REAL = {
    "bf16": ("--quant", "bf16"),
    "int8-wo": ("--quant", "int8-wo"),
    "cpu-w8a8": ("--recipe", "cpu-w8a8"),
    "cpu-int4": ("--recipe", "cpu-int4"),
}


def hash_of(logits: list[NDArray[np.float32]]) -> str:
    return sha256(b"".join(np.ascontiguousarray(rows, "<f4").tobytes() for rows in logits)).hexdigest()[:16]


def weights_hash(engine: Engine) -> str:
    digest = sha256()
    for name in sorted(name for name in engine.file.sections if name.startswith(WEIGHTS)):
        digest.update(name.encode())
        digest.update(engine.file.section(name))
    return digest.hexdigest()[:16]


def recorded(name: str, weights: str, isa: str) -> str | None:
    """The recorded hash of an engine's logits on an instruction set; None if there is none for these weights."""
    found: str | None = json.loads(RECORDED.read_text())[name].get(weights, {}).get(isa)
    return found


def build_real(checkpoint: Path, name: str, folder: Path) -> Path:
    """An engine of REAL."""
    path = folder / f"{name}.engine"
    command = [sys.executable, "-m", "enginewright.cli", "build", checkpoint, *REAL[name], "--gate", "off"]
    subprocess.run([*command, "--output", path], check=True, capture_output=True, timeout=1200)
    return path


def main() -> None:
    from tests import test_batch_invariance

    hashes = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, path in test_batch_invariance.recorded_engines(Path(folder)):
            with Engine.open(path) as engine:
                by_isa = hashes.setdefault(name, {}).setdefault(weights_hash(engine), {})
                for isa in _cpu.isa_names():
                    by_isa[isa] = hash_of(test_batch_invariance.logits_of(engine, isa))
            print(name, by_isa, flush=True)
    lines = (f"{json.dumps(name)}: {json.dumps(hashes[name], sort_keys=True)}" for name in sorted(hashes))
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
