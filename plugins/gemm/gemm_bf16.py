"""Matrix product with bfloat16 weights: see gemm.py. weight: BFLOAT16 [N, K]."""

from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.gemm_cuda import gemm_on_cuda
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("gemm_bf16@1", ("x", "weight", "bias", "starts"), ("out",), ("epilogue",))

GEMM_BF16 = Plugin(
    name="GemmBf16",
    inputs=("x", "weight", "bias?", "starts?"),
    outputs=("out",),
    attributes=gemm.ATTRIBUTES,
    reference=gemm.grouped(lambda write, node: gemm.floats_reference(write, node, 2)),
    infer=gemm.infer,
    cost=gemm.cost,
    by_rows=True,
    weight_rows=gemm.weight_rows,
    kernels={CPU: KERNEL, CUDA: gemm_on_cuda(KERNEL, "bf16")},
)
