"""GPU launches of paged attention: csrc/cuda/paged_prefill.cuh and paged_decode.cuh, one after the other.

Where plugins/architectures.py says so, Hopper has paged_prefill_wgmma.cuh for the former. Each computes the sequences
of its own kind, by their numbers of tokens in GPU memory. Where every sequence has one token, the former has nothing to
do, and is not launched.
"""

from dataclasses import dataclass, replace

from enginewright.dtypes import DTYPES
from enginewright.errors import UnsupportedModelError
from enginewright.plan import Extent, Launch, Linear, linear
from enginewright.plugins.architectures import ARCHITECTURES, ArchSpec, by_architecture
from enginewright.plugins.attention.kv_cuda import kv_constant
from enginewright.plugins.attention.kv_write import shared_row_bytes
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, blocks, cuda_type, expression

THREADS, WARPS = 128, 4
TILE_ROWS = 16
PREFILL_ROWS = WARPS * TILE_ROWS  # query rows of a block
WGMMA_ROWS, WGMMA_STAGES = 128, 3
KV_SPLIT = 256  # positions of one of "kv_splits"
PARTIALS = 2048  # splits of KV heads whose results fit side by side, in addition to the longest sequence's
ARGUMENTS = ("q", "key", "value", "query_start", "kv_len", "block_table", "out", "sinks")
ANY = Linear(1 << 20)  # blocks; a grid is bounded by the multiprocessors


@dataclass(frozen=True)
class _Shape:
    """Sizes of a call, as in Attention and Decode of csrc/cuda."""

    heads: int  # query heads
    kv_heads: int  # KV heads
    pad: int  # elements of a head in the pool

    @property
    def split(self) -> int:
        return 64 if self.pad > 128 else 128

    @property
    def head_rows(self) -> int:
        """Rows of a KV head in `partials`."""
        return -(-self.heads // self.kv_heads // TILE_ROWS) * TILE_ROWS

    @property
    def partial_columns(self) -> int:
        return self.kv_heads * self.head_rows * (self.pad + 2)

    @property
    def partials(self) -> Linear:
        return linear(PARTIALS // self.kv_heads, kv_splits=KV_SPLIT // self.split)

    def kv_bytes(self, dtype: str) -> int:
        """Computes the bytes of a split's keys and values in shared memory, scales included."""
        return 2 * self.split * shared_row_bytes(self.pad, dtype)

    @property
    def prefill_bytes(self) -> int:
        """Bytes of queries in shared memory, if they fit."""
        return 0 if self.pad > 256 else PREFILL_ROWS * self.pad * DTYPES["bf16"].bytes

    @property
    def decode_bytes(self) -> int:
        """Bytes in shared memory of p, of each warp's maxima and sums, and of a flag."""
        return TILE_ROWS * (self.split * DTYPES["bf16"].bytes + 2 * WARPS * DTYPES["f32"].bytes) + DTYPES["i32"].bytes


def attention_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of paged attention."""
    headers = {name: name for name in ("paged_prefill", "paged_prefill_wgmma", "paged_decode")}
    kernel = binding.on_cuda(_launches, **headers)
    return replace(kernel, scratch=_partials, counters=_counters)


def _partials(call: Call) -> tuple[str, Linear, int]:
    """Returns the buffer for results of splits, before they are combined."""
    shape = _shape_of(call)
    return "partials", shape.partials, shape.partial_columns


def _counters(call: Call) -> tuple[str, Linear, int]:
    """Returns the buffer that counts a sequence's finished splits, for each KV head and tile of its rows."""
    shape = _shape_of(call)
    return "counters", linear(sequences=1), shape.kv_heads * shape.head_rows // TILE_ROWS


def _launches(call: Call) -> tuple[Launch, ...]:
    if call.attributes["lookahead"]:
        what = "attention to positions after a query has no kernel for cuda"
        raise UnsupportedModelError(what, "only cpu has one", "Build it with --target cpu.")
    shape = _shape_of(call)
    kv_bytes = shape.kv_bytes(call.operands["key"].dtype)
    prefill = _prefill("paged_prefill", call, PREFILL_ROWS, THREADS, kv_bytes + shape.prefill_bytes)
    decode = Launch(
        kernel=expression("paged_decode", "PagedAttention", **_constants(call)),
        arguments=(*ARGUMENTS, "partials", "counters"),
        grid=(Extent(ANY, per_multiprocessor=2 if shape.pad > 64 else 4), ONE, ONE),
        threads=THREADS,
        shared_bytes=kv_bytes + shape.decode_bytes,
    )
    needed = max(prefill.shared_bytes, decode.shared_bytes)
    if small := [name for name in call.architectures if ARCHITECTURES[name].shared_bytes < needed]:
        raise UnsupportedModelError(
            f"heads of {call.attributes['head_dim']} columns are too wide for paged attention on {', '.join(small)}",
            f"their keys and values take {needed} bytes of shared memory, more than a block may have there",
            "Build with --kv-cache-dtype int8, whose heads may be twice as wide, or for GPUs that have more.",
        )

    def prefill_on(arch: ArchSpec) -> list[Launch]:
        wgmma = wgmma_launches(call) if arch.wgmma_prefill and not call.batch_invariant else []
        return wgmma or [prefill]

    return (*by_architecture(call, prefill_on), decode)


def wgmma_launches(call: Call) -> list[Launch]:
    """Lists the launches that replace paged_prefill's, if paged_prefill_wgmma can run pages and heads of this kind."""
    shape, dtype = _shape_of(call), call.operands["key"].dtype
    if dtype != "bf16" or shape.pad not in (64, 128):
        return []
    return [_prefill("paged_prefill_wgmma", call, WGMMA_ROWS, 2 * THREADS, WGMMA_STAGES * shape.kv_bytes(dtype))]


def _prefill(function: str, call: Call, rows: int, threads: int, shared_bytes: int) -> Launch:
    """Makes a prefill launch; `rows` are the query rows of a block."""
    shape = _shape_of(call)
    return Launch(
        kernel=expression(function, "PagedAttention", **_constants(call)),
        arguments=ARGUMENTS,
        grid=(
            blocks(linear(tokens=shape.heads // shape.kv_heads, sequences=rows), rows),
            blocks(shape.kv_heads),
            ONE,
        ),
        threads=threads,
        shared_bytes=shared_bytes,
        rows=linear(tokens=1, sequences=-1),
    )


def _shape_of(call: Call) -> _Shape:
    return _Shape(int(call.attributes["heads"]), int(call.attributes["kv_heads"]), call.operands["key"].stride)


def _constants(call: Call) -> dict[str, int | float | str]:
    q, out, partials, counters = (call.operands[role] for role in ("q", "out", "partials", "counters"))
    shape = _shape_of(call)
    return {
        "kv": kv_constant(call.operands["key"], call.operands["value"], shape.kv_heads),
        "heads": shape.heads,
        "q_stride": q.stride,
        "out_stride": out.stride,
        "padded": out.columns if out.dtype == "f32" else out.padded,
        "out_type": cuda_type(out.dtype),
        "window": int(call.attributes["window"]),
        "scale": float(call.attributes["scale"]),
        "softcap": float(call.attributes["softcap"]),
        "sinks": "sinks" in call.operands,
        "partials": shape.partials.constant,
        "partials_per_kv_split": KV_SPLIT // shape.split,
        "partial_stride": partials.stride,
        "counter_stride": counters.stride,
        "table_width": call.dims.index("kv_blocks"),
        "splits": call.dims.index("kv_splits"),
    }
