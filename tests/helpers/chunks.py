"""Kernels in Triton for recurrences in chunks, as engines with certain heads have them."""

from enginewright.plan import Linear, linear
from enginewright.plugins.kernel import Call, Matrix
from enginewright.plugins.recurrence.recurrence_triton import chunk_instances
from enginewright.triton_instance import TritonInstance


def chunk_kernels(
    delta: bool, heads: int, key_heads: int, k: int, v: int, unaligned: int = 0
) -> tuple[TritonInstance, TritonInstance]:
    """The kernels that prepare chunks and go through them.

    Args:
        delta: the gated delta rule, and not Mamba-2.
        k, v: rows and columns of a head's state.
        unaligned: the column at which operands begin in their buffers.
    """
    widths = {"query": key_heads * k, "key": key_heads * k, "value": heads * v, "out": heads * v}
    widths |= dict.fromkeys(("decay", "beta"), heads) | {"chunks": heads * 132}
    operands = {
        role: Matrix("f32", linear(tokens=1), width, (width + 64) // 64 * 64, width, column=unaligned)
        for role, width in widths.items()
    }
    elements = heads * k * v
    operands["state"] = Matrix("f32", Linear(), elements, elements, elements, block_stride=12 * elements)
    attributes = {"heads": heads, "key_heads": key_heads, "scale": k**-0.5, "epsilon": 1e-6, "dt_min": 0.0}
    return chunk_instances(Call(operands, attributes), delta)
