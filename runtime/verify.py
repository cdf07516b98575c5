"""`engine verify`: is the file what was built, and does it compute here what it computed there?"""

from pathlib import Path
from typing import Any

from enginewright.engine_file import EngineFile
from enginewright.errors import EngineError
from enginewright.runtime.engine import Engine
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.goldens import PROMPT_TOKENS, replay


def verify(path: Path, *, goldens: bool, threads: int | None) -> dict[str, Any]:
    """What was checked, in words and numbers.

    Raises:
        CorruptEngineError: the header, the manifest or a section is not as it was built; all such sections are named.
        EngineError: the engine computes something else on this machine.
    """
    with EngineFile.open(path) as file:
        file.verify_sections()
        report: dict[str, Any] = {"file": str(path), "sections": len(file.manifest.sections), "hashes": "right"}
        report["content"] = f"sha256:{file.manifest.content_hash}"
    if not goldens:
        return report | {"goldens": "not replayed"}
    with Engine.open(path) as engine:
        expected = engine.goldens
        executor = CpuExecutor(engine, threads=threads, max_logit_rows=max(PROMPT_TOKENS))
        deviations = replay(expected, executor)
    worst = max(deviations, default=0.0)
    if worst > expected.tolerance:
        raise EngineError(
            f"{path} computes something else on this machine",
            f"log-probabilities of its goldens differ by up to {worst:.2f}, allowed is {expected.tolerance}",
            "Report it with `engine inspect --json` and the output of lscpu; ENGINEWRIGHT_CPU_ISA=portable may still be right.",
        )
    return report | {"goldens": "right", "deviation": round(worst, 3), "isa": executor.isa}


