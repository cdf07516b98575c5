"""The keys and values of new tokens go to their slots in the KV pools.

k, v: FLOAT [tokens, kv_heads·D]. stored: what a pool holds, one of `STORED`. key_pool, value_pool: `pool_dtype` of that
[slots, kv_heads, D]. slots: INT32 [tokens]. Functional: the pools come out changed; a lowering works in place. No
target has a kernel for it alone: fusion/rope_kv_write.py takes it up.
"""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from enginewright.dtypes import DTYPES, KV_CACHES
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_attribute, dtype_of, int_of, operand
from enginewright.plugins.quantize_rows import quantized
from enginewright.plugins.writer import Writer

BLOCK_SIZE = 32  # tokens a KV block
HEAD_DIM_ALIGN = 32  # elements; a head in a KV pool is padded to this (csrc/cpu/kernel.h)

# What KV is stored as, by Plane.dtype: numbers, or codes with a scale a row.
STORED: Mapping[str, ir.DataType] = {dtype.name: ir.DataType[dtype.onnx] for dtype in KV_CACHES.values()}


def padded_head_dim(head_dim: int) -> int:
    """Elements that a head takes in a KV pool."""
    return -(-head_dim // HEAD_DIM_ALIGN) * HEAD_DIM_ALIGN


def kv_row_bytes(head_dim: int, dtype: str) -> int:
    """Bytes that a token's K, or V, of one head takes in a pool."""
    return padded_head_dim(head_dim) * DTYPES[dtype].bytes + DTYPES[dtype].scale_bytes


def pool_dtype(stored: ir.DataType) -> ir.DataType:
    """Of the pools in a graph: rows of codes are the FLOAT numbers that they stand for, so that a pool is one value."""
    return stored if stored == ir.DataType.BFLOAT16 else ir.DataType.FLOAT


def as_stored(write: Writer, by_head: ir.Value, pool: ir.Value, stored: ir.DataType) -> ir.Value:
    """FLOAT [..., D], rounded as the rows of a pool are; of its dtype."""
    if stored == ir.DataType.BFLOAT16:
        return write.cast(by_head, stored)
    codes, scale = quantized(write, by_head, dims_of(pool), 0, stored)
    return write.op("Mul", write.cast(codes, ir.DataType.FLOAT), scale)


def written(write: Writer, node: ir.Node, pool: ir.Value, new: ir.Value, slots: ir.Value) -> ir.Value:
    """The pool with `new` at its slots."""
    by_head = write.op("Reshape", new, [-1, int_of(node, "kv_heads"), int_of(node, "head_dim")])
    at = write.op("Unsqueeze", write.cast(slots, ir.DataType.INT64), [-1])
    return write.op("ScatterND", pool, at, as_stored(write, by_head, pool, dtype_attribute(node, "stored")))


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    k, v, key_pool, value_pool, slots = (operand(node, index) for index in range(5))
    return [written(write, node, key_pool, k, slots), written(write, node, value_pool, v, slots)]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(dtype_of(pool), dims_of(pool)) for pool in (operand(node, 2), operand(node, 3))]


KV_WRITE = Plugin(
    name="KvWrite",
    inputs=("k", "v", "key_pool", "value_pool", "slots"),
    outputs=("key_pool", "value_pool"),
    attributes={"kv_heads": int, "head_dim": int, "stored": int},
    reference=_reference,
    infer=_infer,
)
