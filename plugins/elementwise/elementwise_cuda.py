"""GPU launches of ops that treat all elements of a row alike: csrc/cuda/elementwise.cuh."""

from enginewright.dtypes import DTYPES
from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, blocks, cuda_type, expression

THREADS = 256
COLUMNS = 2048  # columns of a block


def by_element(binding: KernelBinding, operation: str, x: str = "x", other: str = "", source: str = "") -> CudaKernel:
    """Makes the GPU kernel of an operation on elements.

    Args:
        binding: the kernel call.
        operation: name of the operation in csrc/cuda.
        x: role of the operand that is read.
        other: role of the operand that is added or multiplied; "" is none.
        source: role of the indices of rows; "" takes all rows.
    """

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


def activation_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of activations."""

    def launches(call: Call) -> tuple[Launch, ...]:
        x, out = call.operands["x"], call.operands["out"]
        gate, scale = call.operands.get("gate"), call.operands.get("scale")
        rows, copies = call.copies("out")
        kernel = expression(
            "activation",
            "Activation",
            applied=f"Function::{call.attributes['activation']}",
            rows=rows,
            copies=copies,
            columns=out.columns,
            padded=out.columns if out.dtype == "f32" else out.padded,
            x_stride=x.stride,
            gate_stride=gate.stride if gate else 0,
            each=out.columns // gate.columns if gate else 0,
            out_stride=out.stride,
            group=int(call.attributes["group"]),
            scale_stride=scale.stride if scale else 0,
            type=cuda_type(out.dtype),
        )
        shared_bytes = 2 * THREADS // 32 * DTYPES["f32"].bytes
        grid = blocks(out.rows), ONE, ONE
        return (Launch(kernel, ("x", "gate", "out", "scale"), grid, THREADS, shared_bytes),)

    return binding.on_cuda(launches, activation="elementwise")


def position_scale_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of position scales."""

    def launches(call: Call) -> tuple[Launch, ...]:
        x, out = call.operands["x"], call.operands["out"]
        kernel = expression(
            "position_scale",
            "PositionScale",
            rows=call.rows("out"),
            columns=out.columns,
            x_stride=x.stride,
            out_stride=out.stride,
            beta=float(call.attributes["beta"]),
            original=int(call.attributes["original"]),
        )
        return (Launch(kernel, ("x", "positions", "out"), (blocks(out.rows), ONE, ONE), THREADS),)

    return binding.on_cuda(launches, position_scale="elementwise")
