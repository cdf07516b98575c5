"""Refuses build options that an embedding model cannot have."""

from enginewright.builder.gate import GateConfig
from enginewright.errors import UnsupportedModelError, UsageError
from enginewright.passes.quant import QuantConfig
from enginewright.targets import CPU

OF_TOKENS = ("kl", "top1", "ppl", "needle", "json", "divergence")  # limits of the gate that are about next tokens


def check_embedding(
    targets: tuple[str, ...], method: QuantConfig, calib_data: str | None, gate: GateConfig | None, report: object
) -> None:
    """Checks the options of an embedding model.

    Args:
        targets: targets of the build.
        method: quantization method.
        calib_data: source of calibration texts.
        gate: options of the gate.
        report: file for the gate's results.

    Raises:
        UsageError: an option is about generated text.
        UnsupportedModelError: an option is about GPUs.
    """
    if others := [target for target in targets if target != CPU]:
        what = f"embedding models have no code for {', '.join(others)}"
        raise UnsupportedModelError(what, "they run on CPUs only", "Build it with --target cpu.")
    if method.name == "auto":
        why = "it compares formats by their effect on next tokens, and an embedding model has none"
        raise UsageError("--quant auto is not possible", why, "Name another method.")
    if method.calibrated and calib_data is None:
        why = "an embedding model writes no text that it could be calibrated on"
        raise UsageError(f"--quant {method.name} needs --calib-data here", why, "Name a file of texts.")
    if gate is not None and gate.full:
        raise UsageError("--gate full is not possible", "an embedding model writes no answers", "Use --gate quick.")
    if gate is not None and (limits := [name for name in gate.limits if name in OF_TOKENS]):
        why = "an embedding model has no next tokens"
        raise UsageError(f"--gate {limits[0]}=… is not possible", why, "Its limits are cosine and layer.")
    if report is not None and str(report).endswith(".html"):
        why = "pages are about next tokens, and an embedding model has none"
        raise UsageError(f"--report {report} is not possible", why, "Name a .json file.")
