"""Causal attention of packed tokens to pools of latent vectors: latent_attention.py has the formulas.

q: BFLOAT16 [tokens, heads·(C + R)]. latent_pool: BFLOAT16 [slots, 1, C + R], as latent_write.py writes it; its first C
columns, `value_dim`, are what is summed. query_start, kv_len, block_table: as in paged_attention.py. out: `to` [tokens,
heads·C].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Cost
from enginewright.plugins.attention.latent_cuda import latent_attention_on_cuda
from enginewright.plugins.attention.masked_attention import masked_attention
from enginewright.plugins.attention.paged_attention import partials
from enginewright.plugins.attention.paged_context import PagedContext
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_attribute, float_of, int_of, operand
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, pool, *tables = (operand(node, index) for index in range(5))
    heads, width, value_dim = (int_of(node, name) for name in ("heads", "head_dim", "value_dim"))
    context = PagedContext(write, q, tables, int_of(node, "block_size"))
    keys = context.of(pool)  # [tokens, 1, positions, C + R]
    y = masked_attention(
        write,
        write.op("Reshape", write.cast(q, ir.DataType.FLOAT), [-1, 1, heads, width]),
        keys,
        write.op("Slice", keys, [0], [value_dim], [3]),
        context.visible(keys),
        float_of(node, "scale"),
        softcap=0.0,
    )
    return [write.round_to(write.op("Reshape", y, [-1, heads * value_dim]), dtype_attribute(node))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(dtype_attribute(node), (dims_of(operand(node, 0))[0], int_of(node, "heads") * int_of(node, "value_dim")))]


def _cost(node: ir.Node) -> Cost:
    """Counts Q Kᵀ and P V."""
    return Cost(of_position=2 * int_of(node, "heads") * (int_of(node, "head_dim") + int_of(node, "value_dim")))


KERNEL = KernelBinding(
    "latent_attention@1",
    ("q", "latent", "query_start", "kv_len", "block_table"),
    ("out",),
    ("heads", "head_dim", "value_dim", "scale"),
    scratch=partials,
)

LATENT_PAGED_ATTENTION = Plugin(
    name="LatentPagedAttention",
    inputs=("q", "latent_pool", "query_start", "kv_len", "block_table"),
    outputs=("out",),
    attributes={"heads": int, "head_dim": int, "value_dim": int, "scale": float, "block_size": int, "to": int},
    reference=_reference,
    infer=_infer,
    cost=_cost,
    kernels={CPU: KERNEL, CUDA: latent_attention_on_cuda(KERNEL)},
)
