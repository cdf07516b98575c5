"""The keys and values of new tokens go to their slots in the KV pools.

k, v: FLOAT [tokens, kv_heads·D]. key_pool, value_pool: [slots, kv_heads, D], whose dtype the values are rounded to.
slots: INT32 [tokens]. Functional: the pools come out changed; a lowering works in place. No target has a kernel for
it alone: fusion/rope_kv_write.py takes it up.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_of, int_of, operand
from enginewright.plugins.writer import Writer


def written(write: Writer, pool: ir.Value, new: ir.Value, slots: ir.Value, kv_heads: int, head_dim: int) -> ir.Value:
    """The pool with `new` at its slots."""
    by_head = write.op("Reshape", write.cast(new, dtype_of(pool)), [-1, kv_heads, head_dim])
    at = write.op("Unsqueeze", write.cast(slots, ir.DataType.INT64), [-1])
    return write.op("ScatterND", pool, at, by_head)


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    k, v, key_pool, value_pool, slots = (operand(node, index) for index in range(5))
    shape = int_of(node, "kv_heads"), int_of(node, "head_dim")
    return [written(write, key_pool, k, slots, *shape), written(write, value_pool, v, slots, *shape)]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(dtype_of(pool), dims_of(pool)) for pool in (operand(node, 2), operand(node, 3))]


KV_WRITE = Plugin(
    name="KvWrite",
    inputs=("k", "v", "key_pool", "value_pool", "slots"),
    outputs=("key_pool", "value_pool"),
    attributes={"kv_heads": int, "head_dim": int},
    reference=_reference,
    infer=_infer,
)
