"""GPU launches with a row for each block: csrc/cuda/quantize_rows.cuh and gather_columns.cuh."""

from enginewright.dtypes import DTYPES
from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, blocks, cuda_type, expression

THREADS = 256
SHARED_BYTES = 2 * THREADS // 32 * DTYPES["f32"].bytes


def quantize_rows_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel that quantizes rows."""

    def launches(call: Call) -> tuple[Launch, ...]:
        x, q, scale = (call.operands[role] for role in ("x", "q", "scale"))
        rows, copies = call.copies("q")
        kernel = expression(
            "quantize_rows",
            "QuantizeRows",
            rows=rows,
            x_type=cuda_type(x.dtype),
            type=cuda_type(q.dtype),
            columns=q.columns,
            padded=q.padded,
            x_stride=x.stride,
            q_stride=q.stride,
            group=int(call.attributes["group"]),
            scale_stride=scale.stride,
            **({} if copies == 1 else {"copies": copies}),
        )
        return (Launch(kernel, ("x", "q", "scale"), (blocks(q.rows), ONE, ONE), THREADS, SHARED_BYTES),)

    return binding.on_cuda(launches, quantize_rows="quantize_rows")


def gather_columns_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel that gathers columns."""

    def launches(call: Call) -> tuple[Launch, ...]:
        out, scale = call.operands["out"], call.operands.get("scale")
        kernel = expression(
            "gather_columns",
            "GatherColumns",
            rows=call.rows("out"),
            type=cuda_type(out.dtype),
            columns=out.columns,
            padded=out.columns if out.dtype == "f32" else out.padded,
            x_stride=call.operands["x"].stride,
            out_stride=out.stride,
            group=int(call.attributes["group"]),
            scale_stride=scale.stride if scale else 0,
        )
        arguments = ("x", "columns", "out", "scale")
        return (Launch(kernel, arguments, (blocks(out.rows), ONE, ONE), THREADS, SHARED_BYTES),)

    return binding.on_cuda(launches, gather_columns="gather_columns")
