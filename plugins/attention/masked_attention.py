"""Attention in standard ops: shared by the references of the ops that attend."""

import numpy as np
import onnx_ir as ir

from enginewright.plugins.writer import Writer

EVERYTHING = 2**31 - 1  # lookahead to the end of the text, however long it is


def masked_attention(
    write: Writer,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    visible: ir.Value,
    scale: float,
    softcap: float,
    sinks: ir.Value | None = None,
) -> ir.Value:
    """Computes softmax(cap(q kᵀ · scale) where visible) v over the last two dimensions; the first two broadcast.

    Args:
        write: writer of the graph.
        q: queries [., ., rows, head_dim].
        k: keys [., ., keys, head_dim].
        v: values [., ., keys, head_dim].
        visible: bool, broadcasts to [., ., rows, keys].
        scale: factor on the products.
        softcap: limit of the scores; 0 means none.
        sinks: broadcasts to [., ., rows, 1]: logits that belong to no key and join the softmax's sum.
    """
    scores = write.op("Mul", write.op("MatMul", q, write.op("Transpose", k, perm=[0, 1, 3, 2])), scale)
    if softcap:
        scores = write.op("Mul", write.op("Tanh", write.op("Div", scores, softcap)), softcap)
    masked = write.op("Where", visible, scores, np.array(-np.inf, np.float32))
    if sinks is None:
        return write.op("MatMul", write.op("Softmax", masked, axis=-1), v)
    maximum = write.op("Max", write.op("ReduceMax", masked, [-1]), sinks)
    weights = write.op("Exp", write.op("Sub", masked, maximum))
    total = write.op("Add", write.op("ReduceSum", weights, [-1]), write.op("Exp", write.op("Sub", sinks, maximum)))
    return write.op("MatMul", write.op("Div", weights, total), v)


def in_window(write: Writer, query: ir.Value, key: ir.Value, window: int, lookahead: int = 0) -> ir.Value:
    """Checks if a query sees a key.

    Args:
        write: writer of the graph.
        query: position of the query.
        key: position of the key.
        window: positions that a query sees, its own included; 0 is all before it.
        lookahead: positions after its own that a query sees.
    """
    visible = write.op("LessOrEqual", key, write.op("Add", query, lookahead) if lookahead else query)
    if not window:
        return visible
    return write.op("And", visible, write.op("Greater", key, write.op("Sub", query, window)))
