"""The compiler's table of contents: every pass, in order."""

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir

from enginewright.errors import EngineError
from enginewright.passes.cleanup import Cleanup
from enginewright.passes.fusion.gate_up import FuseGateUp
from enginewright.passes.fusion.qkv import FuseQkv
from enginewright.passes.fusion.residual_norm import FuseResidualNorm
from enginewright.passes.fusion.rope_kv_write import FuseRopeKvWrite
from enginewright.passes.fusion.round_in_producer import RoundInProducer
from enginewright.passes.fusion.state_projections import FuseStateProjections
from enginewright.passes.fusion.swiglu import FuseSwiGlu
from enginewright.passes.gather_early import GatherEarly
from enginewright.passes.graph import norms_rows
from enginewright.passes.pass_manager import Pass, PassResult, run_passes
from enginewright.passes.quant import QuantConfig
from enginewright.passes.quant.act_order import SortColumns
from enginewright.passes.quant.method import Calibration
from enginewright.passes.quant.quantize import Quantize
from enginewright.passes.show_hidden import ShowHidden
from enginewright.passes.to_ragged import ToRagged
from enginewright.plugins import plugin_of
from enginewright.plugins.registry import STANDARD_KERNELS
from enginewright.plugins.target import CPU_TARGET, Target

VIEWS = ("Split", "Reshape", "Concat")  # ops that a lowering makes no kernel of


def pipeline(
    quant: QuantConfig, kv_dtype: str = "bf16", calibration: Calibration | None = None, target: Target = CPU_TARGET
) -> list[Pass]:
    return [
        # Standard ONNX, one dense sequence.
        Cleanup(),
        SortColumns(),
        FuseQkv(),
        FuseStateProjections(),
        FuseGateUp(),
        # Formats of weights and activations. What sees activations does so in standard ops.
        *(quant.foresee() if quant.calibrated and calibration is None else quant.prepare(calibration or Calibration())),
        *for_target(quant, kv_dtype, target),
    ]


def for_target(quant: QuantConfig, kv_dtype: str, target: Target, hidden: ShowHidden | None = None) -> list[Pass]:
    """The rest, which depends on the target. hidden: what is shown to those who guess, if anything."""
    return [
        FuseResidualNorm(),
        *((hidden,) if hidden else ()),
        Quantize(quant, target),
        FuseSwiGlu(),
        # Packed tokens of many sequences, KV pools.
        ToRagged(kv_dtype, target),
        FuseRopeKvWrite(),
        RoundInProducer(),
        GatherEarly(),
        Cleanup(),
    ]


def run_pipeline(
    model: ir.Model,
    quant: QuantConfig,
    dump_graphs: Path | None = None,
    kv_dtype: str = "bf16",
    calibration: Calibration | None = None,
    keep: Callable[[ir.Model], None] | None = None,
    target: Target = CPU_TARGET,
) -> tuple[ir.Model, dict[str, PassResult]]:
    """A dense graph to one that has only ops with kernels (and views); the model is changed in place.

    Args:
        calibration: texts, for methods that need them; without any, there is a plan of the same sizes and no more.
        keep: given a copy of the last graph that can be streamed; its linear layers are those that are quantized, and
            `run_for_target` takes it.

    Raises:
        EngineError: an op is left that no target has a kernel for.
    """

    def watch(following: Pass, model: ir.Model) -> None:
        if keep is not None and isinstance(following, FuseResidualNorm):
            keep(model.clone())

    results = run_passes(model, pipeline(quant, kv_dtype, calibration, target), dump_graphs, watch)
    _check_kernels(model, results)
    return model, results


def run_for_target(
    dense: ir.Model,
    quant: QuantConfig,
    target: Target,
    dump_graphs: Path | None = None,
    kv_dtype: str = "bf16",
    hidden: ShowHidden | None = None,
) -> ir.Model:
    """The same for another target, or with hidden states, from the dense graph on; that is changed in place."""
    _check_kernels(dense, run_passes(dense, for_target(quant, kv_dtype, target, hidden), dump_graphs))
    return dense


def _check_kernels(model: ir.Model, results: Mapping[str, PassResult]) -> None:
    for node in model.graph:
        if not _has_kernel(node):
            refusals = [refusal for result in results.values() for refusal in result.refusals]
            why = " ".join(refusals[:3]) or "no pass took it up"
            raise EngineError(f"node {node.name} ({node.op_type}) has no kernel", why, "Please report this.")


def _has_kernel(node: ir.Node) -> bool:
    """Whether some target runs a node, or a lowering makes views of it."""
    plugin = plugin_of(node)
    if plugin is not None:
        return bool(plugin.kernels)
    if node.op_type == "Add" and any(value is None or value.is_initializer() for value in node.inputs):
        return False
    if node.op_type == "RMSNormalization" and not norms_rows(node):
        return False
    return node.op_type in VIEWS or node.op_type in STANDARD_KERNELS
