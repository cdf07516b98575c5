"""`engine verify`: is the file what was built, and does it compute here what it computed there?"""

from pathlib import Path
from typing import Any

from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, EngineError
from enginewright.runtime.devices import AUTO, open_engine, open_executor
from enginewright.runtime.goldens import GOLDENS, Goldens, last_logits_of, replay, replay_config


def verify(
    path: Path, *, goldens: bool, threads: int | None = None, isa: str | None = None, device: str = AUTO
) -> dict[str, Any]:
    """What was checked, in words and numbers.

    Raises:
        CorruptEngineError: the header, the manifest or a section is not as it was built; all such sections are named.
        EngineError: the engine computes something else on this machine.
    """
    with EngineFile.open(path, check_sections=False) as file:
        damaged = file.verify_sections()
        if damaged:
            raise CorruptEngineError(f"{path} is damaged", f"section {', '.join(damaged)}", "Build it again.")
        report: dict[str, Any] = {"file": str(path), "sections": len(file.manifest.sections), "hashes": "right"}
        report["content"] = f"sha256:{file.manifest.content_hash}"
    if not goldens:
        return report | {"goldens": "not replayed"}
    with open_engine(path, device) as engine:
        expected = Goldens.from_json(engine.file.read_section(GOLDENS))
        expected.check(engine.plan)
        executor = open_executor(engine, replay_config(engine.plan.max_seq_len, threads, isa, device))
        deviations = replay(expected, last_logits_of(executor), executor.plan)
    worst = max(deviations, default=0.0)
    if worst > expected.tolerance:
        raise EngineError(
            f"{path} computes something else on this machine",
            f"its goldens (log-probabilities, or vectors) differ by up to {worst:.2f}, allowed is {expected.tolerance}",
            "Please report it, with the output of lscpu; --isa portable may still be right.",
        )
    return report | {"goldens": "right", "deviation": round(worst, 3), "isa": executor.isa}
