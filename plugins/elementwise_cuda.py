"""What GPUs launch for ops that treat each element of a row alike: csrc/cuda/elementwise.cuh."""

from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, blocks, cuda_type, expression

THREADS = 256
COLUMNS = 2048  # of a block


def by_element(binding: KernelBinding, operation: str, x: str = "x", other: str = "", source: str = "") -> CudaKernel:
    """x, other, source: roles of what is read, of what is added to it, and of the indices of rows that are taken."""

    def launches(call: Call) -> tuple[Launch, ...]:
        out = call.operands["out"]
        kernel = expression(
            "elementwise",
            "Elementwise",
            operation=f"Operation::{operation}",
            rows=call.rows("out"),
            columns=out.columns,
            padded=out.columns if out.dtype == "f32" else out.padded,
            x_stride=call.operands[x].stride,
            other_stride=call.operands[other].stride if other else 0,
            out_stride=out.stride,
            x_type=cuda_type(call.operands[x].dtype),
            out_type=cuda_type(out.dtype),
            cap=float(call.attributes.get("cap", 0.0)),
        )
        grid = blocks(out.rows), blocks(out.padded, COLUMNS), ONE
        return (Launch(kernel, (x, other, source, "out"), grid, THREADS),)

    return binding.on_cuda(launches, elementwise="elementwise")
