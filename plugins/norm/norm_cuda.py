"""GPU launches of norms, with or without a residual before them: csrc/cuda/rms_norm.cuh, recurrence.cuh."""

from enginewright.dtypes import DTYPES
from enginewright.errors import EngineError
from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, blocks, cuda_type, expression

THREADS = 256
WARPS = THREADS // 32
GATED_THREADS = 128  # threads of a block of gated norms


def norm_on_cuda(binding: KernelBinding, out: str) -> CudaKernel:
    """Makes the GPU kernel of an RMS norm.

    Args:
        binding: the kernel call.
        out: role of the normalized output.
    """

    def launches(call: Call) -> tuple[Launch, ...]:
        if call.operands["weight"].columns < call.whole.operands[out].columns:
            return (_runs(call, out),)
        x, y, total = call.operands["x"], call.operands[out], call.operands.get("sum")
        scale = call.operands.get("scale")
        kernel = expression(
            "rms_norm",
            "RmsNorm",
            rows=call.rows(out),
            columns=y.columns,
            x_stride=x.stride,
            delta_stride=call.operands["delta"].stride if total else 0,
            sum_stride=total.stride if total else 0,
            y_stride=y.stride,
            padded=y.columns if y.dtype == "f32" else y.padded,
            group=int(call.attributes.get("group", 0)),
            scale_stride=scale.stride if scale else 0,
            type=cuda_type(y.dtype),
            add=total is not None,
            epsilon=float(call.attributes["epsilon"]),
        )
        shared_bytes = (y.columns + 3 * WARPS) * DTYPES["f32"].bytes
        arguments = ("x", "delta", "weight", "sum", out, "scale")
        return (Launch(kernel, arguments, (blocks(y.rows), ONE, ONE), THREADS, shared_bytes),)

    return binding.on_cuda(launches, rms_norm="rms_norm", rms_norm_runs="rms_norm")


def _runs(call: Call, out: str) -> Launch:
    """Makes the launch that normalizes groups of columns, each by itself."""
    y, width = call.operands[out], call.operands["weight"].columns
    if y.dtype not in ("f32", "bf16"):
        raise EngineError(f"heads that are normalized to {y.dtype} have no kernel for cuda", fix="Please report this.")
    kernel = expression(
        "rms_norm_runs",
        "RmsNormRuns",
        rows=call.rows(out),
        width=width,
        runs=y.columns // width,
        x_stride=call.operands["x"].stride,
        y_stride=y.stride,
        padded=y.columns if y.dtype == "f32" else y.padded,
        type=cuda_type(y.dtype),
        epsilon=float(call.attributes["epsilon"]),
    )
    grid = blocks(y.rows), blocks(y.columns // width, WARPS), ONE
    return Launch(kernel, ("x", "weight", out), grid, THREADS)


def layer_norm_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of layer norms."""

    def launches(call: Call) -> tuple[Launch, ...]:
        x, y, scale = call.operands["x"], call.operands["out"], call.operands.get("scale")
        kernel = expression(
            "layer_norm",
            "LayerNorm",
            rows=call.rows("out"),
            columns=y.columns,
            x_stride=x.stride,
            y_stride=y.stride,
            padded=y.columns if y.dtype == "f32" else y.padded,
            group=int(call.attributes.get("group", 0)),
            scale_stride=scale.stride if scale else 0,
            type=cuda_type(y.dtype),
            bias="bias" in call.operands,
            epsilon=float(call.attributes["epsilon"]),
        )
        shared_bytes = (y.columns + 4 * WARPS) * DTYPES["f32"].bytes
        arguments = ("x", "weight", "bias", "out", "scale")
        return (Launch(kernel, arguments, (blocks(y.rows), ONE, ONE), THREADS, shared_bytes),)

    return binding.on_cuda(launches, layer_norm="rms_norm")


def gated_norm_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of gated norms."""

    def launches(call: Call) -> tuple[Launch, ...]:
        x, y, scale = call.operands["x"], call.operands["out"], call.operands.get("scale")
        run = int(call.attributes["run"])
        kernel = expression(
            "gated_rms_norm",
            "GatedRmsNorm",
            rows=call.rows("out"),
            columns=y.columns,
            run=run,
            x_stride=x.stride,
            z_stride=call.operands["z"].stride,
            y_stride=y.stride,
            padded=y.columns if y.dtype == "f32" else y.padded,
            group=int(call.attributes.get("group", 0)),
            scale_stride=scale.stride if scale else 0,
            type=cuda_type(y.dtype),
            gates_first=call.attributes["gate"] == "before",
            wide=call.operands["weight"].columns != run,
            epsilon=float(call.attributes["epsilon"]),
        )
        shared_bytes = (y.columns + 2 * GATED_THREADS // 32) * DTYPES["f32"].bytes
        arguments = ("x", "z", "weight", "out", "scale")
        return (Launch(kernel, arguments, (blocks(y.rows), ONE, ONE), GATED_THREADS, shared_bytes),)

    return binding.on_cuda(launches, gated_rms_norm="recurrence")
