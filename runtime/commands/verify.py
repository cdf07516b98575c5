"""`engine verify`: is the file what was built, and does it compute here what it computed there?"""

from pathlib import Path
from typing import Any

from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, EngineError, UsageError
from enginewright.runtime.commands.goldens import GOLDENS, Goldens, last_logits_of, replay, replay_config
from enginewright.runtime.commands.provenance import check_provenance
from enginewright.runtime.commands.signing import Trust, check_signature, signature_of
from enginewright.runtime.device.devices import AUTO, open_engine, open_executor

NAME_THEM = "Name whom you trust with --key, --certificate or --identity."


def verify(
    path: Path,
    *,
    goldens: bool,
    threads: int | None = None,
    isa: str | None = None,
    device: str = AUTO,
    trust: Trust | None = None,
    signature: Path | None = None,
    provenance: Path | None = None,
) -> dict[str, Any]:
    """What was checked, in words and numbers. Nothing of the engine is run before its signature is known to be right.

    Args:
        trust: who has to have signed it; None takes what nobody has signed.
        signature: None is the file beside it.
        provenance: the file that says what it was built of; with `trust`, it has to be signed as well.

    Raises:
        SignatureError: it is not signed by them, or the provenance is not its own.
        CorruptEngineError: the header, the manifest or a section is not as it was built; all such sections are named.
        EngineError: the engine computes something else on this machine.
    """
    with EngineFile.open(path, check_sections=False) as file:
        origin = _check_origin(path, trust, signature, provenance)
        damaged = file.verify_sections()
        if damaged:
            raise CorruptEngineError(f"{path} is damaged", f"section {', '.join(damaged)}", "Build it again.")
        report: dict[str, Any] = {"file": str(path), "sections": len(file.manifest.sections), "hashes": "right"}
        report["content"] = f"sha256:{file.manifest.content_hash}"
    report |= origin
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


def _check_origin(path: Path, trust: Trust | None, signature: Path | None, provenance: Path | None) -> dict[str, Any]:
    report: dict[str, Any] = {}
    if trust is not None:
        check_signature(path, trust, signature)
        report["signature"] = f"right: of {trust}"
    elif signature is not None:
        raise UsageError(f"{signature} cannot be checked", "nobody is trusted", NAME_THEM)
    elif signature_of(path).exists():
        report["signature"] = f"not checked. {NAME_THEM}"
    if provenance is not None:
        if trust is not None:
            check_signature(provenance, trust)
        report["provenance"] = f"right{'' if trust else ', but unsigned'}: of {check_provenance(path, provenance)}"
    return report
