"""GPU launches of latent attention, for prompts and decoding: csrc/cuda/latent_attention.cuh.

A second launch combines the splits of sequences that are divided.
"""

from dataclasses import dataclass, replace

from enginewright.dtypes import DTYPES
from enginewright.errors import UnsupportedModelError
from enginewright.plan import Extent, Launch, Linear, linear
from enginewright.plugins.attention.kv_cuda import kv_constant
from enginewright.plugins.attention.kv_write import BLOCK_SIZE
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, ceil_div, cuda_type, expression

THREADS = 256
ROWS = 32  # rows of a block: a query head of a token each
QUARTERS = 4  # parts of a row's columns, whose scores are computed apart at first
PARTIALS = 512  # splits of row tiles whose results fit side by side, in addition to the longest sequence's
MAX_LATENT = 512  # columns of values, whose sums a warp holds in registers
MAX_WIDTH = 608  # columns of a latent vector and its key, of which shared memory holds two tiles on every GPU
ANY = Linear(1 << 20)  # blocks; a grid is bounded by the multiprocessors


@dataclass(frozen=True)
class _LatentShape:
    """Sizes of a call, as in LatentAttention and Latent of csrc/cuda."""

    heads: int  # query heads
    pad: int  # elements of a row in the pool
    value_dim: int  # columns of a latent vector, without its key

    @property
    def row_tiles(self) -> int:
        """Row tiles of a sequence that is divided into splits."""
        return ceil_div(self.heads, ROWS)

    @property
    def partials(self) -> Linear:
        return linear(PARTIALS // self.row_tiles, kv_splits=1)

    @property
    def partial_columns(self) -> int:
        return self.row_tiles * ROWS * (ceil_div(self.value_dim, 16) * 16 + 2)

    @property
    def shared_bytes(self) -> int:
        """Bytes of two tiles, scores of a tile, p, and four numbers for each row."""
        f32, bf16 = DTYPES["f32"].bytes, DTYPES["bf16"].bytes
        scores = QUARTERS * ROWS * (BLOCK_SIZE + 8) * f32
        return 2 * BLOCK_SIZE * self.pad * bf16 + scores + ROWS * BLOCK_SIZE * bf16 + 4 * ROWS * f32


def latent_attention_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of latent attention."""
    headers = dict.fromkeys(("latent_attention", "latent_combine"), "latent_attention")
    return replace(binding.on_cuda(_launches, **headers), scratch=_partials)


def _partials(call: Call) -> tuple[str, Linear, int]:
    """Returns the buffer for results of splits, before they are combined."""
    shape = _shape_of(call)
    return "partials", shape.partials, shape.partial_columns


def _launches(call: Call) -> tuple[Launch, ...]:
    shape, operands = _shape_of(call), call.operands
    width = operands["latent"].columns
    if shape.value_dim > MAX_LATENT or width > MAX_WIDTH:
        raise UnsupportedModelError(
            f"kv_lora_rank = {shape.value_dim} and qk_rope_head_dim = {width - shape.value_dim} are too many columns "
            "for latent attention on GPUs",
            f"the former may be {MAX_LATENT}, and both together {MAX_WIDTH}",
            "Build it for cpu only.",
        )
    constants: dict[str, int | float | str] = {
        "kv": kv_constant(operands["latent"], operands["latent"], 1),
        "heads": shape.heads,
        "value_dim": shape.value_dim,
        "q_stride": operands["q"].stride,
        "out_stride": operands["out"].stride,
        "padded": operands["out"].columns if operands["out"].dtype == "f32" else operands["out"].padded,
        "out_type": cuda_type(operands["out"].dtype),
        "scale": float(call.attributes["scale"]),
        "partials": shape.partials.constant,
        "partial_stride": operands["partials"].stride,
        "table_width": call.dims.index("kv_blocks"),
        "splits": call.dims.index("kv_splits"),
    }
    sequences = ("query_start", "kv_len")
    return (
        Launch(
            expression("latent_attention", "LatentAttention", **constants),
            arguments=("q", "latent", *sequences, "block_table", "out", "partials"),
            grid=(Extent(ANY, per_multiprocessor=1), ONE, ONE),
            threads=THREADS,
            shared_bytes=shape.shared_bytes,
        ),
        Launch(
            expression("latent_combine", "LatentAttention", **constants),
            arguments=(*sequences, "out", "partials"),
            grid=(Extent(ANY, per_multiprocessor=4), ONE, ONE),
            threads=THREADS,
        ),
    )


def _shape_of(call: Call) -> _LatentShape:
    heads, value_dim = (int(call.attributes[name]) for name in ("heads", "value_dim"))
    return _LatentShape(heads, call.operands["latent"].stride, value_dim)
