"""A function of each element, or a product with one of another: act(x), or x · act(gate) where there is a gate.

x: FLOAT [..., W]. gate: FLOAT [..., G], where G divides W: each of its numbers is for W / G columns of x (a head's, or
all). out: `to` [..., W]. With `to` one of CODES a row is quantized as in quantize_rows.py, by `group` and `largest`,
and there is also scale: FLOAT [..., groups].
activation: sigmoid; silu (https://arxiv.org/abs/1702.03118); gelu and gelu_tanh, its approximation
(https://arxiv.org/abs/1606.08415); relu2, max(x, 0)² (https://arxiv.org/abs/2109.08668).
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.elementwise.elementwise_cuda import activation_on_cuda
from enginewright.plugins.gemm.quantize_rows import TO_ATTRIBUTES, types_as, written_as
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, dims_of, operand, optional, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding(
    "activation@1", ("x", "gate", "largest"), ("out", "scale"), ("activation", "group"), in_place={"out": 0}
)


def activated(write: Writer, x: ir.Value, activation: str) -> ir.Value:
    """Applies an activation function.

    Args:
        write: writer of the graph.
        x: the values.
        activation: name of the function.
    """
    match activation:
        case "sigmoid":
            return write.op("Sigmoid", x)
        case "silu":
            return write.op("Mul", x, write.op("Sigmoid", x))
        case "gelu":
            return write.op("Gelu", x)
        case "gelu_tanh":
            return write.op("Gelu", x, approximate="tanh")
        case "relu2":
            above = write.op("Relu", x)
            return write.op("Mul", above, above)
    raise AssertionError(f"there is no activation {activation}")


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, gate, activation = operand(node, 0), optional(node, 1), node.attributes["activation"].as_string()
    y = activated(write, x if gate is None else gate, activation)
    if gate is not None:
        width, count, outer = width_of(x), width_of(gate), [0] * (len(dims_of(x)) - 1)  # 0: the dimension as it is
        if count == width:
            y = write.op("Mul", x, y)
        else:
            runs = write.op("Reshape", x, [*outer, count, width // count])
            y = write.op("Reshape", write.op("Mul", runs, write.op("Unsqueeze", y, [-1])), [*outer, width])
    return written_as(write, node, y, optional(node, 2))


ACTIVATION = Plugin(
    name="Activation",
    inputs=("x", "gate?", "largest?"),
    outputs=("out", "scale?"),
    attributes={"activation": str, **TO_ATTRIBUTES},
    reference=_reference,
    infer=types_as,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: activation_on_cuda(KERNEL)},
)
