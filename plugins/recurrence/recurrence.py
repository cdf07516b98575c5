"""Shared parts of ops that carry a state from token to token: the sequence of each token, and its slot.

In a dense graph such an op has one sequence, whose state is an input as past and an output as present. In a ragged
graph the states of all sequences are in a pool of slots, query_start INT32 [sequences + 1] has each sequence's first
token, and slots INT32 [sequences] its slot; the pool is an output, and a lowering works in place. kv_len INT32
[sequences], positions after this step, changes no result: kernels that compute many tokens at once cut by it.
"""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from enginewright.plugins.writer import Writer

STATE_INPUTS = ("state", "query_start?", "slots?", "kv_len?")  # the last inputs of such an op
STATE_ROLES = ("state", "query_start", "slots", "")  # roles in kernels that compute one token after another

# (writer, state of a sequence, one token's row of each scanned value) → the state after it, and the token's result
Step = Callable[[Writer, ir.Value, Sequence[ir.Value]], tuple[ir.Value, ir.Value]]


def token_by_token(
    write: Writer, node: ir.Node, states: Sequence[ir.Value | None], scanned: Sequence[ir.Value], step: Step
) -> tuple[ir.Value, ir.Value]:
    """Computes a recurrence, one token after another.

    Args:
        write: writer of the graph.
        node: the node.
        states: the first three of STATE_INPUTS of the node.
        scanned: FLOAT values with a row for each token.
        step: computes one token.

    Returns:
        The states after all tokens, and a row of the result for each token.
    """
    pool, query_start, slots = states
    assert pool is not None
    tokens = write.op("Shape", scanned[0], start=0, end=1)

    def body(inner: Writer, pools: Sequence[ir.Value], rows: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        slot, *values = rows
        state, row = step(inner, inner.op("Gather", pools[0], slot, axis=0), values)
        index = inner.op("Reshape", slot, [1, 1])
        return inner.op("ScatterND", pools[0], index, inner.op("Unsqueeze", state, [0])), row

    slot = _token_slots(write, tokens, query_start, slots)
    state, rows = write.scan(str(node.name), body, [pool], [slot, *scanned])
    return state, rows


def _token_slots(write: Writer, tokens: ir.Value, query_start: ir.Value | None, slots: ir.Value | None) -> ir.Value:
    """Returns the slot of each token's sequence, INT64 [tokens]."""
    if query_start is None or slots is None:
        return write.op("Expand", write.constant([0]), tokens)
    ends = write.op("Slice", write.cast(query_start, ir.DataType.INT64), [1], [1 << 30], [0])  # [sequences]
    token = write.op("Range", write.constant(0), write.op("Squeeze", tokens), write.constant(1))
    over = write.cast(write.op("LessOrEqual", ends, write.op("Unsqueeze", token, [1])), ir.DataType.INT64)
    return write.op("Gather", write.cast(slots, ir.DataType.INT64), write.op("ReduceSum", over, [1], keepdims=0))
