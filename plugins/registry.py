"""The ops of the domain `enginewright`: one line each."""

from collections.abc import Mapping

import onnx_ir as ir

from enginewright.errors import EngineError, UnsupportedModelError
from enginewright.plugins.activation import ACTIVATION
from enginewright.plugins.add_rms_norm import ADD_RMS_NORM
from enginewright.plugins.causal_conv import CAUSAL_CONV
from enginewright.plugins.combine_experts import COMBINE_EXPERTS
from enginewright.plugins.elementwise_cuda import by_element
from enginewright.plugins.embed_bf16 import EMBED_BF16
from enginewright.plugins.embed_positions import EMBED_POSITIONS
from enginewright.plugins.embed_w8 import EMBED_W8
from enginewright.plugins.gated_delta import GATED_DELTA
from enginewright.plugins.gated_rms_norm import GATED_RMS_NORM
from enginewright.plugins.gather_columns import GATHER_COLUMNS
from enginewright.plugins.gemm_bf16 import GEMM_BF16
from enginewright.plugins.gemm_fp8a8 import GEMM_FP8A8
from enginewright.plugins.gemm_fp8a16 import GEMM_FP8A16
from enginewright.plugins.gemm_mxfp4a8 import GEMM_MXFP4A8
from enginewright.plugins.gemm_mxfp4a16 import GEMM_MXFP4A16
from enginewright.plugins.gemm_w4a8 import GEMM_W4A8
from enginewright.plugins.gemm_w4a16 import GEMM_W4A16
from enginewright.plugins.gemm_w8a8 import GEMM_W8A8
from enginewright.plugins.gemm_w8a16 import GEMM_W8A16
from enginewright.plugins.grouped_linear import GROUPED_LINEAR
from enginewright.plugins.head_gemm import HEAD_GEMM
from enginewright.plugins.head_linear import HEAD_LINEAR
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.kv_write import KV_WRITE
from enginewright.plugins.latent_attention import LATENT_ATTENTION
from enginewright.plugins.latent_paged_attention import LATENT_PAGED_ATTENTION
from enginewright.plugins.latent_write import LATENT_WRITE
from enginewright.plugins.layer_norm import LAYER_NORM
from enginewright.plugins.mean_rows import MEAN_ROWS
from enginewright.plugins.paged_attention import PAGED_ATTENTION
from enginewright.plugins.plugin import DOMAIN, Plugin
from enginewright.plugins.pool import POOL
from enginewright.plugins.position_scale import POSITION_SCALE
from enginewright.plugins.quantize_rows import QUANTIZE_ROWS
from enginewright.plugins.rms_norm import RMS_NORM
from enginewright.plugins.rope import ROPE
from enginewright.plugins.rope_kv_write import ROPE_KV_WRITE
from enginewright.plugins.rope_queries import ROPE_QUERIES
from enginewright.plugins.rope_table import ROPE_TABLE
from enginewright.plugins.route import ROUTE
from enginewright.plugins.scale import SCALE
from enginewright.plugins.selective_state import SELECTIVE_STATE
from enginewright.plugins.softcap import SOFTCAP
from enginewright.plugins.sort_rows import SORT_ROWS
from enginewright.plugins.target import Target
from enginewright.plugins.window_attention import WINDOW_ATTENTION
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
    """The plugin of a node, None for a standard op.

    Raises:
        EngineError: the node is of our domain, and we have no such op.
    """
    if node.domain != DOMAIN:
        return None
    plugin = PLUGINS.get(node.op_type)
    if plugin is None:
        raise EngineError(
            f"node {node.name} is of an unknown op {DOMAIN}.{node.op_type}", f"known: {', '.join(PLUGINS)}"
        )
    return plugin


# Standard ops that a lowered graph may still hold, with their kernels by target.
ADD = KernelBinding("add@1", ("a", "b"), ("out",), in_place={"out": 0})
CAST = KernelBinding("cast@1", ("x",), ("out",))
GATHER_ROWS = KernelBinding("gather_rows@1", ("x", "rows"), ("out",))
STANDARD_KERNELS: Mapping[str, Mapping[str, KernelBinding]] = {
    "Add": {CPU: ADD, CUDA: by_element(ADD, "add", "a", "b")},
    "Cast": {CPU: CAST, CUDA: by_element(CAST, "cast")},
    "Gather": {CPU: GATHER_ROWS, CUDA: by_element(GATHER_ROWS, "gather", source="rows")},
    "RMSNormalization": RMS_NORM.kernels,
}


def binding_of(node: ir.Node, target: Target) -> KernelBinding:
    """The kernel that runs a node on a target.

    Raises:
        EngineError: there is none; the message names the node.
        UnsupportedModelError: there is one for another target.
    """
    plugin = plugin_of(node)
    kernels = plugin.kernels if plugin else STANDARD_KERNELS.get(node.op_type, {})
    if target.name not in kernels:
        what = f"node {node.name} ({node.op_type}) has no kernel for {target.name}"
        if kernels:
            raise UnsupportedModelError(
                what, f"there is one for {', '.join(kernels)} alone", "Build it for that target."
            )
        raise EngineError(what, "no pass took it up")
    return kernels[target.name]
