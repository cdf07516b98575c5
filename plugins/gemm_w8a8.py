"""Matrix product with int8 weights and int8 activations: see gemm.py.

x: INT8 [..., K] and x_scale: FLOAT [..., 1], as QuantizeRows gives them. weight: INT8 [N, K] in [-127, 127]. scale:
FLOAT [N]. The sum of products is an integer, exact; it is multiplied by x_scale, then by scale.
"""

from enginewright.plugins import gemm
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, operand

GEMM_W8A8 = Plugin(
    name="GemmW8A8",
    inputs=("x", "weight", "x_scale", "scale", "bias?"),
    outputs=("out",),
    attributes=gemm.ATTRIBUTES,
    reference=lambda write, node: gemm.reference(write, node, [operand(node, 2), operand(node, 3)], 4),
    infer=gemm.infer,
    by_rows=True,
    kernels={"cpu": KernelBinding("gemm_w8a8@1", ("x", "weight", "x_scale", "scale", "bias"), ("out",), ("epilogue",))},
)
