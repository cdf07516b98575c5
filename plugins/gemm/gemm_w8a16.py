"""Matrix product with int8 weights and bfloat16 activations: see gemm.py.

weight: INT8 [N, K] in [-127, 127]. scale: FLOAT [N]; row n of the weight represents weight[n] · scale[n].
"""

from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.gemm_cuda import gemm_on_cuda
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, operand
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("gemm_w8a16@1", ("x", "weight", "scale", "bias", "starts"), ("out",), ("epilogue",))

GEMM_W8A16 = Plugin(
    name="GemmW8A16",
    inputs=("x", "weight", "scale", "bias?", "starts?"),
    outputs=("out",),
    attributes=gemm.ATTRIBUTES,
    reference=gemm.grouped(lambda write, node: gemm.floats_reference(write, node, 3, operand(node, 2))),
    infer=gemm.infer,
    cost=gemm.cost,
    by_rows=True,
    weight_rows=gemm.weight_rows,
    kernels={CPU: KERNEL, CUDA: gemm_on_cuda(KERNEL, "w8a16")},
)
