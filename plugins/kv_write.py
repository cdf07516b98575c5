"""The keys and values of new tokens go to their slots in the KV pools.

k, v: FLOAT [tokens, kv_heads·D]. key_pool, value_pool: [slots, kv_heads, D], `POOL_DTYPES` of what they are stored as.
slots: INT32 [tokens]. Functional: the pools come out changed; a lowering works in place. No target has a kernel for
it alone: fusion/rope_kv_write.py takes it up.
"""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_of, int_of, operand
from enginewright.plugins.quantize_rows import quantized
from enginewright.plugins.writer import Writer

# What KV is stored as (KvGroup.dtype) → dtype of the pools in a graph. Rows of int8 with a scale are the FLOAT numbers
# that they stand for, so that a pool is one value in either case.
POOL_DTYPES: Mapping[str, ir.DataType] = {"bf16": ir.DataType.BFLOAT16, "i8": ir.DataType.FLOAT}


def as_stored(write: Writer, by_head: ir.Value, pool: ir.Value) -> ir.Value:
    """FLOAT [..., D], rounded as the rows of a pool are; of its dtype."""
    if dtype_of(pool) == POOL_DTYPES["i8"]:
        codes, scale = quantized(write, by_head, dims_of(pool), 0)
        return write.op("Mul", write.cast(codes, ir.DataType.FLOAT), scale)
    return write.cast(by_head, dtype_of(pool))


def written(write: Writer, pool: ir.Value, new: ir.Value, slots: ir.Value, kv_heads: int, head_dim: int) -> ir.Value:
    """The pool with `new` at its slots."""
    by_head = write.op("Reshape", new, [-1, kv_heads, head_dim])
    at = write.op("Unsqueeze", write.cast(slots, ir.DataType.INT64), [-1])
    return write.op("ScatterND", pool, at, as_stored(write, by_head, pool))


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
