"""The ops that kernels run: a line for each of the domain `enginewright`, and an entry for each standard one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.errors import EngineError, UnsupportedModelError
from enginewright.plugins.attention.kv_write import KV_WRITE
from enginewright.plugins.attention.latent_attention import LATENT_ATTENTION
from enginewright.plugins.attention.latent_paged_attention import LATENT_PAGED_ATTENTION
from enginewright.plugins.attention.latent_write import LATENT_WRITE
from enginewright.plugins.attention.paged_attention import PAGED_ATTENTION
from enginewright.plugins.attention.rope import ROPE
from enginewright.plugins.attention.rope_kv_write import ROPE_KV_WRITE
from enginewright.plugins.attention.rope_queries import ROPE_QUERIES
from enginewright.plugins.attention.rope_table import ROPE_TABLE
from enginewright.plugins.attention.window_attention import WINDOW_ATTENTION
from enginewright.plugins.elementwise.activation import ACTIVATION
from enginewright.plugins.elementwise.elementwise_cuda import by_element
from enginewright.plugins.elementwise.gather_columns import GATHER_COLUMNS
from enginewright.plugins.elementwise.mean_rows import MEAN_ROWS
from enginewright.plugins.elementwise.pool import POOL
from enginewright.plugins.elementwise.position_scale import POSITION_SCALE
from enginewright.plugins.elementwise.scale import SCALE
from enginewright.plugins.elementwise.softcap import SOFTCAP
from enginewright.plugins.embed.embed_bf16 import EMBED_BF16
from enginewright.plugins.embed.embed_positions import EMBED_POSITIONS
from enginewright.plugins.embed.embed_w8 import EMBED_W8
from enginewright.plugins.experts.combine_experts import COMBINE_EXPERTS
from enginewright.plugins.experts.grouped_linear import GROUPED_LINEAR
from enginewright.plugins.experts.route import ROUTE
from enginewright.plugins.experts.sort_rows import SORT_ROWS
from enginewright.plugins.gemm.gemm_bf16 import GEMM_BF16
from enginewright.plugins.gemm.gemm_fp8a8 import GEMM_FP8A8
from enginewright.plugins.gemm.gemm_fp8a16 import GEMM_FP8A16
from enginewright.plugins.gemm.gemm_mxfp4a8 import GEMM_MXFP4A8
from enginewright.plugins.gemm.gemm_mxfp4a16 import GEMM_MXFP4A16
from enginewright.plugins.gemm.gemm_w4a8 import GEMM_W4A8
from enginewright.plugins.gemm.gemm_w4a16 import GEMM_W4A16
from enginewright.plugins.gemm.gemm_w8a8 import GEMM_W8A8
from enginewright.plugins.gemm.gemm_w8a16 import GEMM_W8A16
from enginewright.plugins.gemm.head_gemm import HEAD_GEMM
from enginewright.plugins.gemm.head_linear import HEAD_LINEAR
from enginewright.plugins.gemm.quantize_rows import QUANTIZE_ROWS
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.norm.add_rms_norm import ADD_RMS_NORM
from enginewright.plugins.norm.gated_rms_norm import GATED_RMS_NORM
from enginewright.plugins.norm.layer_norm import LAYER_NORM
from enginewright.plugins.norm.rms_norm import RMS_NORM, norms_rows
from enginewright.plugins.plugin import DOMAIN, Op, Plugin, ViewKind
from enginewright.plugins.recurrence.causal_conv import CAUSAL_CONV
from enginewright.plugins.recurrence.gated_delta import GATED_DELTA
from enginewright.plugins.recurrence.selective_state import SELECTIVE_STATE
from enginewright.plugins.target import Target
from enginewright.targets import CPU, CUDA

PLUGINS: Mapping[str, Plugin] = {
    plugin.name: plugin
    for plugin in (
        ACTIVATION,
        ADD_RMS_NORM,
        CAUSAL_CONV,
        WINDOW_ATTENTION,
        COMBINE_EXPERTS,
        EMBED_BF16,
        EMBED_POSITIONS,
        EMBED_W8,
        GATED_DELTA,
        GATED_RMS_NORM,
        GATHER_COLUMNS,
        GEMM_BF16,
        GEMM_FP8A16,
        GEMM_FP8A8,
        GEMM_MXFP4A16,
        GEMM_MXFP4A8,
        GEMM_W4A16,
        GEMM_W4A8,
        GEMM_W8A8,
        GEMM_W8A16,
        GROUPED_LINEAR,
        HEAD_GEMM,
        HEAD_LINEAR,
        KV_WRITE,
        LATENT_ATTENTION,
        LATENT_PAGED_ATTENTION,
        LATENT_WRITE,
        LAYER_NORM,
        MEAN_ROWS,
        PAGED_ATTENTION,
        POOL,
        POSITION_SCALE,
        QUANTIZE_ROWS,
        RMS_NORM,
        ROPE,
        ROPE_KV_WRITE,
        ROPE_QUERIES,
        ROPE_TABLE,
        ROUTE,
        SCALE,
        SELECTIVE_STATE,
        SOFTCAP,
        SORT_ROWS,
    )
}


def plugin_of(node: ir.Node) -> Plugin | None:
    """Returns the plugin of a node; None for a standard op.

    Raises:
        EngineError: the node has our domain, but an unknown op.
    """
    if node.domain != DOMAIN:
        return None
    plugin = PLUGINS.get(node.op_type)
    if plugin is None:
        raise EngineError(f"node {node.name} has an unknown op {DOMAIN}.{node.op_type}", f"known: {', '.join(PLUGINS)}")
    return plugin


@dataclass(frozen=True, kw_only=True)
class StandardOp(Op):
    """A standard op that a lowered graph may still hold."""

    fits: Callable[[ir.Node], bool] = lambda _: True  # checks if a node is one that kernels run


def _adds_no_weight(node: ir.Node) -> bool:
    return not any(value is not None and value.is_initializer() for value in node.inputs)


def _selects_first_rows(node: ir.Node) -> bool:
    """Checks if a Gather selects the first row of each text in the step, which a later chunk does not have."""
    return node.inputs[1] is not None and node.inputs[1].name == "first_rows"


ADD = KernelBinding("add@1", ("a", "b"), ("out",), in_place={"out": 0})
CAST = KernelBinding("cast@1", ("x",), ("out",))
GATHER_ROWS = KernelBinding("gather_rows@1", ("x", "rows"), ("out",), layouts={"x": "plain"})
STANDARD_OPS: Mapping[str, StandardOp] = {
    "Add": StandardOp(kernels={CPU: ADD, CUDA: by_element(ADD, "add", "a", "b")}, by_rows=True, fits=_adds_no_weight),
    "Cast": StandardOp(kernels={CPU: CAST, CUDA: by_element(CAST, "cast")}, by_rows=True),
    "Concat": StandardOp(view=ViewKind.JOINED),
    "Gather": StandardOp(
        kernels={CPU: GATHER_ROWS, CUDA: by_element(GATHER_ROWS, "gather", source="rows")},
        whole_texts=_selects_first_rows,
    ),
    "Reshape": StandardOp(view=ViewKind.SHAPE),
    "RMSNormalization": StandardOp(kernels=RMS_NORM.kernels, by_rows=True, fits=norms_rows),
    "Split": StandardOp(view=ViewKind.COLUMNS),
}


def op_of(node: ir.Node) -> Op | None:
    """Returns the op of a node; None if it is a standard one that a lowered graph does not hold.

    Raises:
        EngineError: the node has our domain, but an unknown op.
    """
    standard = STANDARD_OPS.get(node.op_type)
    return plugin_of(node) or (standard if standard and standard.fits(node) else None)


def view_of(node: ir.Node) -> ViewKind | None:
    """Returns the view that a node is lowered to; None if it needs a kernel."""
    op = op_of(node)
    return op.view if op else None


def binding_of(node: ir.Node, target: Target) -> KernelBinding:
    """Returns the kernel that runs a node on a target.

    Args:
        node: the node.
        target: the target.

    Raises:
        EngineError: there is none; the message names the node.
        UnsupportedModelError: only another target has one.
    """
    op = op_of(node)
    kernels = op.kernels if op else {}
    if target.name not in kernels:
        what = f"node {node.name} ({node.op_type}) has no kernel for {target.name}"
        if kernels:
            raise UnsupportedModelError(what, f"only {', '.join(kernels)} has one", "Build it for that target.")
        raise EngineError(what, "no pass matched it")
    return kernels[target.name]
