"""The message of a failed gate: the broken limits, the layers with the largest errors, and what to try."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from enginewright.errors import QualityGateError
from enginewright.passes.quant import QuantConfig
from enginewright.plugins.plugin import CODES
from enginewright.plugins.target import Target
from enginewright.runtime.commands.quality import Check, LayerError, Measured

LAYERS_SHOWN = 8  # layers that the message lists
SMALLEST_GROUP = 32  # columns


def refusal(measured: Measured, target: Target, quant: QuantConfig, kv_cache_dtype: str) -> QualityGateError:
    """Makes the error for an engine that failed the gate.

    Args:
        measured: its figures.
        target: the target.
        quant: the method.
        kv_cache_dtype: dtype of the KV cache.
    """
    why = "; ".join(check.description for check in measured.failed)
    tries = list(_tries(quant, target, kv_cache_dtype))
    loosened = [f"{check.name}={_passing_limit(check):g}" for check in measured.failed if _may_pass(check)]
    if loosened:
        tries.append(f"other limits, --gate {','.join(loosened if measured.full is None else ['full', *loosened])}")
    lines = [*_table(measured.layers[:LAYERS_SHOWN]), ""]
    if tries:
        lines.append(f"No engine was written. Try {', or '.join(tries)}.")
    else:
        lines.append("No engine was written. Please report this: the engine does not compute what it should.")
    return QualityGateError("the engine is too far from the model that it was built from", why, "\n".join(lines))


def _may_pass(check: Check) -> bool:
    """Checks if a user may accept the value with another limit."""
    return check.value is not None and check.name not in ("finite", "layer")


def _passing_limit(check: Check) -> float:
    """Returns the strictest limit that the same texts pass for certain."""
    assert check.value is not None
    if check.interval is None:
        return check.value
    low, high = check.interval
    return low if check.is_minimum else high


def _table(layers: Sequence[LayerError]) -> Iterator[str]:
    width = max(len(layer.name) for layer in layers)
    yield f"  {'layers with the largest errors':<{width}}  {'format':<9} {'error':>8} {'MiB':>9}"
    for layer in layers:
        error = "NaN" if layer.error is None else f"{layer.error:.2%}"
        yield f"  {layer.name:<{width}}  {layer.method:<9} {error:>8} {layer.nbytes / 2**20:>9.2f}"


def _tries(quant: QuantConfig, target: Target, kv_cache_dtype: str) -> Iterator[str]:
    settings = {field.name: getattr(quant, field.name) for field in fields(quant)}
    group = settings.get("group_size")
    if group is not None and not 0 < group <= SMALLEST_GROUP:
        yield f"--group-size {SMALLEST_GROUP}"
    if settings.get("zero_points") is False:
        yield "--zero-points"
    if settings.get("activation_scheme") == "static":
        yield "--activation-scheme dynamic"
    if settings.get("fp8_scales") == "tensor":
        yield "--fp8-scales block"
    if settings.get("fp8_activations") == "fp8" and quant.precision(target).dtype in CODES:
        yield "--fp8-activations bf16"
    if "bits" in settings:
        yield f"more than --bits {settings['bits']}"
    yield from (f"--quant {name}" for name in quant.info.fallbacks)
    if kv_cache_dtype != "bf16":
        yield "--kv-cache-dtype bf16"
