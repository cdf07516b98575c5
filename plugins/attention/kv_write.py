"""Prepares new tokens for attention: rounds queries, and writes keys and values to their slots of the KV pools.

q: FLOAT [tokens, heads·D]. k, v: FLOAT [tokens, kv_heads·D]. stored: dtype of a pool, one of `STORED`. key_pool,
value_pool: `pool_dtype` of that [slots, kv_heads, D]. slots: INT32 [tokens]. q_out: BFLOAT16 [tokens, heads·D].
Functional: the pools are outputs; a lowering works in place. No target has a kernel for this op alone:
fusion/rope_kv_write.py replaces it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from enginewright.dtypes import DTYPES, KV_CACHES, DType
from enginewright.plugins.gemm.quantize_rows import quantized
from enginewright.plugins.plugin import (
    Plugin,
    TypeAndDims,
    dims_of,
    dtype_attribute,
    dtype_of,
    int_of,
    operand,
    width_of,
)
from enginewright.plugins.writer import Writer

BLOCK_SIZE = 32  # tokens of a KV block
HEAD_DIM_ALIGN = 32  # elements; a head in a KV pool is padded to this (csrc/cpu/kernel.h)

# Plane.dtype → stored numbers, or codes with a scale for each row; and the inverse.
STORED: Mapping[str, ir.DataType] = {dtype.name: ir.DataType[dtype.onnx] for dtype in KV_CACHES.values()}
STORED_NAMES: Mapping[ir.DataType, str] = {stored: name for name, stored in STORED.items()}


def padded_head_dim(head_dim: int) -> int:
    """Computes the elements of a head in a KV pool, padding included."""
    return -(-head_dim // HEAD_DIM_ALIGN) * HEAD_DIM_ALIGN


def kv_row_bytes(head_dim: int, dtype: str) -> int:
    """Computes the bytes of a token's key, or value, of one head in a pool.

    Args:
        head_dim: elements of a head.
        dtype: dtype of the pool.
    """
    return DTYPES[dtype].kv_row_bytes(padded_head_dim(head_dim))


def shared_row_bytes(head_dim: int, dtype: str) -> int:
    """Computes the bytes of the same row in shared memory of a GPU, where attention multiplies it.

    Args:
        head_dim: elements of a head.
        dtype: dtype of the pool.
    """
    return kv_row_bytes(head_dim, "bf16" if DTYPES[dtype].kv_group else dtype)


def pool_dtype(stored: ir.DataType) -> ir.DataType:
    """Returns the dtype of a pool in a graph, where codes are the FLOAT numbers that they represent."""
    return stored if stored == ir.DataType.BFLOAT16 else ir.DataType.FLOAT


def hadamard_block(head_dim: int) -> int:
    """Returns the order of the Hadamard matrices that rotate a head's parts: the largest power of 2 that divides it."""
    return head_dim & -head_dim


def _hadamard(write: Writer, by_head: ir.Value, head_dim: int) -> ir.Value:
    """Rotates FLOAT [..., D] so that outliers spread; products of rotated rows stay the same. arXiv:2404.00456"""
    block = np.ones((1, 1), np.float32)
    while len(block) < hadamard_block(head_dim):
        block = np.block([[block, block], [block, -block]])
    signs = np.kron(np.eye(head_dim // len(block), dtype=np.float32), block)
    return write.op("Mul", write.op("MatMul", by_head, signs), len(block) ** -0.5)


def _in_groups(write: Writer, by_head: ir.Value, head_dim: int, dtype: DType) -> ir.Value:
    """Rounds FLOAT [tokens, heads, D] to the numbers that 4-bit codes represent: bf16(scale · code + zero), by groups.

    Heads are padded with zeros. zero is bf16(min), scale bf16((max - min) / 15), code clip(round((x - zero) / scale),
    0, 15). A scale or zero that is too small compared to the other counts as 0: so scale · code + zero is exact in
    fp32, and the same number in any order of summation.
    """

    def rounded(x: ir.Value) -> ir.Value:
        return write.cast(write.cast(x, ir.DataType.BFLOAT16), ir.DataType.FLOAT)

    padded = padded_head_dim(head_dim)
    x = write.op("Pad", by_head, [0, padded - head_dim], None, [-1])
    x = write.op("Reshape", x, [0, 0, padded // dtype.kv_group, dtype.kv_group])
    low, high = (write.op(op, x, [-1], keepdims=1) for op in ("ReduceMin", "ReduceMax"))
    zero, scale = rounded(low), rounded(write.op("Div", write.op("Sub", high, low), 15.0))
    size = write.op("Abs", zero)
    no_scale = write.op("Less", scale, write.op("Max", write.op("Mul", size, 2.0**-14), dtype.tiny))
    no_zero = write.op("Less", size, write.op("Max", write.op("Mul", scale, 2.0**-10), dtype.tiny))
    scale, zero = write.op("Where", no_scale, 0.0, scale), write.op("Where", no_zero, 0.0, zero)
    inverse = write.op("Where", write.op("Greater", scale, 0.0), write.op("Div", 1.0, scale), 0.0)
    codes = write.op("Clip", write.op("Mul", write.op("Sub", x, zero), inverse), 0.0, 15.0)
    nan_or_zero = write.op("ReduceSum", write.op("Mul", x, 0.0), [-1], keepdims=1)
    product = write.op("Mul", write.op("Round", codes), write.op("Add", scale, nan_or_zero))
    values = write.op("Reshape", rounded(write.op("Add", product, zero)), [0, 0, padded])
    return write.op("Slice", values, [0], [head_dim], [-1])


def as_stored(write: Writer, by_head: ir.Value, pool: ir.Value, stored: ir.DataType) -> ir.Value:
    """Rounds FLOAT [..., D] as the rows of a pool are.

    Args:
        write: writer of the graph.
        by_head: rows of heads.
        pool: the pool.
        stored: dtype of the pool's numbers.

    Returns:
        The rounded rows, of the pool's dtype.
    """
    if stored == ir.DataType.BFLOAT16:
        return write.cast(by_head, stored)
    dtype = DTYPES[STORED_NAMES[stored]]
    if dtype.kv_group:
        return _in_groups(write, by_head, width_of(pool), dtype)
    codes, scale = quantized(write, by_head, dims_of(pool), 0, stored)
    return write.op("Mul", write.cast(codes, ir.DataType.FLOAT), scale)


def written(
    write: Writer,
    node: ir.Node,
    new: Sequence[ir.Value],
    pools: Sequence[ir.Value],
    slots: ir.Value,
) -> Sequence[ir.Value]:
    """Computes the outputs of ops that write to KV pools.

    Args:
        write: writer of the graph.
        node: the node.
        new: queries, keys and values, FLOAT.
        pools: key_pool and value_pool.
        slots: slot of each token.

    Returns:
        q_out, and the pools with keys and values at their slots.
    """
    stored, head_dim = dtype_attribute(node, "stored"), int_of(node, "head_dim")
    q, *others = new
    k, v = (write.op("Reshape", x, [-1, int_of(node, "kv_heads"), head_dim]) for x in others)
    if DTYPES[STORED_NAMES[stored]].kv_group:
        k = _hadamard(write, k, head_dim)
    at = write.op("Unsqueeze", write.cast(slots, ir.DataType.INT64), [-1])
    rows = [as_stored(write, x, pool, stored) for x, pool in zip((k, v), pools, strict=True)]
    return [
        queries_as_read(write, node, q),
        *(write.op("ScatterND", pool, at, x) for x, pool in zip(rows, pools, strict=True)),
    ]


def queries_as_read(write: Writer, node: ir.Node, q: ir.Value) -> ir.Value:
    """Computes q_out: queries as attention reads them.

    Args:
        write: writer of the graph.
        node: the node.
        q: queries, FLOAT [tokens, heads·D].
    """
    stored, head_dim = dtype_attribute(node, "stored"), int_of(node, "head_dim")
    by_head = write.op("Reshape", q, [-1, int_of(node, "heads"), head_dim])
    if DTYPES[STORED_NAMES[stored]].kv_group:
        by_head = _hadamard(write, by_head, head_dim)
    return write.cast(write.op("Reshape", by_head, [0, -1]), ir.DataType.BFLOAT16)


def types_of(node: ir.Node) -> Sequence[TypeAndDims]:
    """Infers q_out and the pools of a node whose last inputs are key_pool, value_pool and slots."""
    pools = [(dtype_of(pool), dims_of(pool)) for pool in (operand(node, -3), operand(node, -2))]
    return [(ir.DataType.BFLOAT16, dims_of(operand(node, 0))), *pools]


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, k, v, key_pool, value_pool, slots = (operand(node, index) for index in range(6))
    return written(write, node, (q, k, v), (key_pool, value_pool), slots)


KV_WRITE = Plugin(
    name="KvWrite",
    inputs=("q", "k", "v", "key_pool", "value_pool", "slots"),
    outputs=("q_out", "key_pool", "value_pool"),
    attributes={"heads": int, "kv_heads": int, "head_dim": int, "stored": int},
    reference=_reference,
    infer=types_of,
)
