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
from enginewright.passes.pass_manager import Pass, PassResult, run_passes
from enginewright.passes.quant import QuantConfig
from enginewright.passes.quant.act_order import SortColumns
from enginewright.passes.quant.method import Calibration
from enginewright.passes.quant.quantize import Quantize
from enginewright.passes.quant.recover import CheckRecoverable, Recover
from enginewright.passes.quant.rotate import Rotate
from enginewright.passes.show_hidden import ShowHidden
from enginewright.passes.to_ragged import ToRagged
from enginewright.plugins.registry import op_of
from enginewright.plugins.target import CPU_TARGET, Target


def pipeline(
    quant: QuantConfig,
    kv_dtype: str = "bf16",
    calibration: Calibration | None = None,
    target: Target = CPU_TARGET,
    *,
    rotate: bool = False,
    recover: Recover | None = None,
) -> list[Pass]:
    """Lists all passes of a build, in order.

    Args:
        quant: quantization method.
        kv_dtype: dtype of the KV cache.
        calibration: texts, for methods that need them; None: their choices are left out.
        target: target of the first graph.
        rotate: true to rotate the residual stream and the values of attention.
        recover: trains scales and norms after codes are chosen; None: nothing is trained.
    """
    return [
        # These run on standard ONNX, with one dense sequence.
        Cleanup(),
        SortColumns(),
        FuseQkv(),
        FuseStateProjections(),
        FuseGateUp(),
        *((Rotate(),) if rotate else ()),
        # Formats of weights and activations. Passes that observe activations run on standard ops.
        *(
            quant.plan_without_data()
            if quant.calibrated and calibration is None
            else quant.prepare(calibration or Calibration())
        ),
        *(() if recover is None else (recover if calibration else CheckRecoverable(),)),
        *for_target(quant, kv_dtype, target),
    ]


def for_target(quant: QuantConfig, kv_dtype: str, target: Target, hidden: ShowHidden | None = None) -> list[Pass]:
    """Lists the passes that depend on the target, in order.

    Args:
        quant: quantization method.
        kv_dtype: dtype of the KV cache.
        target: the target.
        hidden: pass that adds hidden states as an output, for heads that propose draft tokens; None: no such output.
    """
    return [
        FuseResidualNorm(),
        *((hidden,) if hidden else ()),
        Quantize(quant, target),
        FuseSwiGlu(),
        # From here on, the graph has packed tokens of many sequences, and KV pools.
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
    *,
    rotate: bool = False,
    recover: Recover | None = None,
) -> tuple[ir.Model, dict[str, PassResult]]:
    """Turns a dense graph into one that has only ops with kernels (and views); the model is changed in place.

    Args:
        model: the dense graph.
        quant: quantization method.
        dump_graphs: a folder for one ONNX file a pass; None writes none.
        kv_dtype: dtype of the KV cache.
        calibration: texts, for methods that need them; without them the plan has the same sizes, but no useful codes.
        keep: called with a copy of the last graph that can be streamed; its linear layers are those that are quantized,
            and `run_for_target` takes it.
        target: the target.
        rotate: as for `pipeline`, and so the next.
        recover: a pass.

    Returns:
        The model, and results of the passes by name.

    Raises:
        EngineError: an op is left that no target has a kernel for.
    """

    def watch(following: Pass, model: ir.Model) -> None:
        if keep is not None and isinstance(following, FuseResidualNorm):
            keep(model.clone())

    results = run_passes(
        model, pipeline(quant, kv_dtype, calibration, target, rotate=rotate, recover=recover), dump_graphs, watch
    )
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
    """Turns a dense graph of `run_pipeline`'s `keep` into one for another target, or with hidden states, in place.

    Args:
        dense: the dense graph.
        quant: quantization method.
        target: the target.
        dump_graphs: a folder for one ONNX file a pass; None writes none.
        kv_dtype: dtype of the KV cache.
        hidden: pass that adds hidden states as an output; None: no such output.

    Returns:
        The model.

    Raises:
        EngineError: an op is left that no target has a kernel for.
    """
    _check_kernels(dense, run_passes(dense, for_target(quant, kv_dtype, target, hidden), dump_graphs))
    return dense


def _check_kernels(model: ir.Model, results: Mapping[str, PassResult]) -> None:
    for node in model.graph:
        op = op_of(node)
        if op is None or not (op.kernels or op.view):
            refusals = [refusal for result in results.values() for refusal in result.refusals]
            why = " ".join(refusals[:3]) or "no pass matched it"
            raise EngineError(f"node {node.name} ({node.op_type}) has no kernel", why, "Please report this.")
