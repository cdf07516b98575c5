"""`engine verify`: checks that the file is as it was built, and computes the same here as in its build."""

from pathlib import Path
from typing import Any

from enginewright.adapter_file import AdapterFile
from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, EngineError, UsageError
from enginewright.runtime.commands.goldens import GOLDENS, Goldens, last_logits_of, replay, replay_config
from enginewright.runtime.commands.provenance import check_provenance
from enginewright.runtime.commands.signing import Trust, check_signature, signature_of
from enginewright.runtime.device.devices import AUTO, open_engine, open_executor

NAME_SIGNER = "Name the signer that you trust with --key, --certificate or --identity."


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
    """Checks an engine or an adapter. Nothing of an engine is run before its signature has been checked.

    Args:
        path: the file.
        goldens: whether to replay the goldens.
        threads: threads of the CPU executor; None is the default.
        isa: instruction set of the CPU executor; None is the default.
        device: the device that replays the goldens.
        trust: the trusted signer; None accepts an unsigned file.
        signature: the file of the signature; None is the default path.
        provenance: the file of its provenance; with `trust`, it must be signed as well.

    Returns:
        The checks and their results, in words and numbers.

    Raises:
        SignatureError: the trusted signer has not signed it, or the provenance is of another engine.
        CorruptEngineError: header, manifest or sections are not as they were built; all such sections are named.
        EngineError: the engine computes something else on this machine.
    """
    with EngineFile.open(path, check_sections=False, adapters=True) as file:
        origin = _check_origin(path, trust, signature, provenance)
        damaged = file.verify_sections()
        if damaged:
            raise CorruptEngineError(f"{path} is damaged", f"section {', '.join(damaged)}", "Build it again.")
        report: dict[str, Any] = {"file": str(path), "sections": len(file.manifest.sections), "hashes": "right"}
        report["content"] = f"sha256:{file.manifest.content_hash}"
        is_adapter = file.manifest.engine is not None
    report |= origin
    if is_adapter:
        AdapterFile.open(path).close()  # checks what it lists
        return report | {"goldens": "none, since it is an adapter"}
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
        raise UsageError(f"{signature} cannot be checked", "no trusted signer is named", NAME_SIGNER)
    elif signature_of(path).exists():
        report["signature"] = f"not checked. {NAME_SIGNER}"
    if provenance is not None:
        if trust is not None:
            check_signature(provenance, trust)
        report["provenance"] = f"right{'' if trust else ', but unsigned'}: of {check_provenance(path, provenance)}"
    return report
