"""GPU launches of recurrences: csrc/cuda/recurrence.cuh computes one token after another.

Sequences with several tokens in a step have kernels that compute them in chunks (recurrence_triton.py).
"""

from dataclasses import replace

from enginewright.dtypes import DTYPES
from enginewright.plan import Launch, linear
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, blocks, cuda_type, expression
from enginewright.plugins.recurrence.recurrence_triton import chunk_instances, chunk_launches, chunk_scratch

THREADS = 128
WARPS = THREADS // 32
F32_BYTES = DTYPES["f32"].bytes
LANE_ROWS = 32  # limit of rows of a state's column in a thread's registers


def conv_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of causal convolutions."""

    def launches(call: Call) -> tuple[Launch, ...]:
        x, out, before, after = (call.operands.get(role) for role in ("x", "out", "before", "behind"))
        assert x is not None and out is not None
        padded = out.columns if out.dtype == "f32" else out.padded
        kernel = expression(
            "causal_conv",
            "CausalConv",
            columns=x.columns,
            width=call.operands["taps"].columns,
            x_stride=x.stride,
            before_stride=before.stride if before else 0,
            behind_stride=after.stride if after else 0,
            out_stride=out.stride,
            padded=padded,
            slot_stride=call.operands["state"].block_stride // F32_BYTES,
            type=cuda_type(out.dtype),
            silu=call.attributes["activation"] == "silu",
            bias="bias" in call.operands,
            before=before is not None,
            behind=after is not None,
        )
        arguments = ("x", "taps", "bias", "before", "behind", "state", "query_start", "slots", "out")
        return (Launch(kernel, arguments, (blocks(padded, THREADS), blocks(linear(sequences=1)), ONE), THREADS),)

    return binding.on_cuda(launches, causal_conv="recurrence")


def recurrence_on_cuda(binding: KernelBinding, *, delta: bool) -> CudaKernel:
    """Makes the GPU kernel of a recurrence.

    Args:
        binding: the kernel call.
        delta: True for the gated delta rule, False for Mamba-2.
    """

    def launches(call: Call) -> tuple[Launch, ...]:
        chunked = _chunked(call)
        operands, attributes = call.operands, call.attributes
        heads, key_heads = int(attributes["heads"]), int(attributes["key_heads"])
        rows, columns = operands["key"].columns // key_heads, operands["value"].columns // heads
        kernel = expression(
            "linear_recurrence",
            "LinearRecurrence",
            delta=delta,
            by_row=_by_row(call),
            decodes=chunked,
            heads=heads,
            key_heads=key_heads,
            rows=rows,
            columns=columns,
            query_stride=operands["query"].stride,
            key_stride=operands["key"].stride,
            value_stride=operands["value"].stride,
            decay_stride=operands["decay"].stride,
            beta_stride=operands["beta"].stride if delta else 0,
            out_stride=operands["out"].stride,
            slot_stride=operands["state"].block_stride // F32_BYTES,
            scale=float(attributes["scale"]) if delta else 1.0,
            epsilon=float(attributes["epsilon"]) if delta else 0.0,
            dt_min=0.0 if delta else float(attributes["dt_min"]),
        )
        lanes = 1
        while rows > lanes * LANE_ROWS:
            lanes *= 2
        arguments = ("query", "key", "value", "decay", "beta", "log_a", "dt_bias", "skip")
        grid = blocks(columns, THREADS // lanes), blocks(heads), blocks(linear(sequences=1))
        shared_bytes = ((3 if _by_row(call) else 2) * rows + 2 * WARPS) * F32_BYTES
        step = Launch(kernel, (*arguments, "state", "query_start", "slots", "out"), grid, THREADS, shared_bytes)
        return (step, *(chunk_launches(call, delta) if chunked else ()))

    return replace(
        binding.on_cuda(launches, linear_recurrence="recurrence"),
        inputs=(*binding.inputs[:-1], "kv_len"),
        scratch=lambda call: chunk_scratch(call, delta) if _chunked(call) else None,
        triton=lambda call: chunk_instances(call, delta) if _chunked(call) else (),
    )


def _chunked(call: Call) -> bool:
    """Checks if sequences with several tokens in a step are computed in chunks.

    Chunks add in another order than single tokens do, so batch-invariant engines do not have them.
    """
    return not call.batch_invariant and not _by_row(call)


def _by_row(call: Call) -> bool:
    """Checks if each row of a state has a decay of its own."""
    return call.operands["decay"].columns != int(call.attributes["heads"])
