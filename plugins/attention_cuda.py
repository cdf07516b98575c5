"""What GPUs launch for paged attention: csrc/cuda/paged_prefill.cuh and paged_decode.cuh."""

from dataclasses import replace

from enginewright.plan import Launch, Linear
from enginewright.plugins.kernel import ONE, TYPES, Call, CudaKernel, KernelBinding, blocks, expression
from enginewright.plugins.kv_cuda import kv_constant

THREADS = 128
PREFILL_ROWS = 64  # of a block


def attention_on_cuda(binding: KernelBinding) -> CudaKernel:
    return replace(binding.on_cuda(_launches, paged_prefill="paged_prefill"), scratch=None)


def _launches(call: Call) -> tuple[Launch, ...]:
    q, kv, out = (call.operands[role] for role in ("q", "kv", "out"))
    heads, kv_heads = int(call.attributes["heads"]), int(call.attributes["kv_heads"])
    prefill = expression(
        "paged_prefill",
        "PagedAttention",
        kv=kv_constant(kv, kv_heads),
        heads=heads,
        q_stride=q.stride,
        out_stride=out.stride,
        padded=out.columns if out.dtype == "f32" else out.padded,
        out_type=TYPES[out.dtype],
        window=int(call.attributes["window"]),
        scale=float(call.attributes["scale"]),
        softcap=float(call.attributes["softcap"]),
        partials=0,
        partials_per_kv_split=0,
        partial_stride=0,
        counter_stride=0,
    )
    split = 64 if kv.stride > 128 else 128
    row_bytes = kv.stride * (2 if kv.dtype == "bf16" else 1) + (0 if kv.dtype == "bf16" else 4)
    shared_bytes = 2 * split * row_bytes + PREFILL_ROWS * kv.stride * 2
    arguments = ("q", "kv.keys", "kv.values", "query_start", "kv_len", "block_table", "out")
    tiles = blocks(Linear(tokens=heads // kv_heads, sequences=PREFILL_ROWS), PREFILL_ROWS)
    return (Launch(prefill, arguments, (tiles, blocks(kv_heads), ONE), THREADS, shared_bytes),)
