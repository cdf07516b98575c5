"""KV caches in the gate: the rounding of attention's inputs, and the losses that are allowed in addition to layers'."""

import math
from collections.abc import Mapping

import onnx_ir as ir
import torch
from torch.nn import functional as F

from enginewright.dtypes import DTYPES, DType
from enginewright.passes.quant.method import round_to_codes
from enginewright.plugins.attention.kv_write import STORED_NAMES, hadamard_block, padded_head_dim
from enginewright.plugins.plugin import CODES

# Plane.dtype → limits, as LIMITS of config.py: rows for dtypes that lose more than layers of BF16 may.
KV_LIMITS: Mapping[str, Mapping[str, float]] = {
    # 0.0053, 0.960, 1.001 with bf16 weights, 0.002
    "e4m3": {"kl": 0.02, "top1": 0.90, "ppl": 1.04, "layer": 0.02},
    # 0.040, 0.899, 1.040 with bf16 weights, 0.002
    "u4": {"kl": 0.15, "top1": 0.78, "ppl": 1.12, "layer": 0.02},
}


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: tuple[int, int], stored: ir.DataType, queries: ir.DataType
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds queries, keys and values as attention reads them.

    Args:
        q: queries [..., heads·D], FLOAT.
        k: keys [..., heads·D], FLOAT.
        v: values [..., heads·D], FLOAT.
        heads: number of heads of queries, and of keys and values.
        stored: dtype of the KV cache, one of `STORED`.
        queries: dtype that attention rounds queries to, beyond BFLOAT16.
    """
    if DTYPES[STORED_NAMES[stored]].kv_group:
        q, k = (_rotated(x, count) for x, count in zip((q, k), heads, strict=True))
    q = as_stored(q.bfloat16().float(), heads[0], queries)
    return q, as_stored(k, heads[1], stored), as_stored(v, heads[1], stored)


def _rotated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotates each head of [..., heads·D] by Hadamard matrices: the fast Walsh-Hadamard transform of its blocks."""
    order: int = hadamard_block(x.shape[-1] // heads)
    blocks, half = torch.unflatten(x, -1, (-1, order)), 1
    while half < order:
        first, second = torch.unflatten(blocks, -1, (-1, 2, half)).unbind(-2)
        blocks, half = torch.stack((first + second, first - second), -2).flatten(-3), 2 * half
    return (blocks * math.sqrt(1 / order)).flatten(-2)


def _in_groups(by_head: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Rounds [..., D] to the numbers that 4-bit codes represent."""
    head_dim = by_head.shape[-1]
    x = torch.unflatten(F.pad(by_head, (0, padded_head_dim(head_dim) - head_dim)), -1, (-1, dtype.kv_group))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    zero, scale = low.bfloat16().float(), ((high - low) / 15).bfloat16().float()
    no_scale = scale < (zero.abs() * 2**-14).clamp(min=dtype.tiny)
    no_zero = zero.abs() < (scale * 2**-10).clamp(min=dtype.tiny)
    scale, zero = scale.masked_fill(no_scale, 0.0), zero.masked_fill(no_zero, 0.0)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    codes = ((x - zero) * inverse).clamp(0, 15).round()
    scale = scale + (x * 0).sum(-1, keepdim=True)
    return (codes * scale + zero).bfloat16().float().flatten(-2)[..., :head_dim]


def as_stored(x: torch.Tensor, heads: int, dtype: ir.DataType) -> torch.Tensor:
    """Rounds [..., heads·D] as the rows of a KV pool are: plugins/attention/kv_write.py.

    Args:
        x: keys or values, FLOAT.
        heads: number of heads.
        dtype: dtype of the pool.
    """
    if dtype == ir.DataType.BFLOAT16:
        return x.bfloat16().float()
    if DTYPES[STORED_NAMES[dtype]].kv_group:
        return _in_groups(torch.unflatten(x, -1, (heads, -1)), DTYPES[STORED_NAMES[dtype]]).flatten(-2)
    by_head, max_code = torch.unflatten(x, -1, (heads, -1)), CODES[dtype].largest
    amax = by_head.abs().amax(-1, keepdim=True)
    factor = torch.full_like(amax, max_code) / amax  # max_code / amax would be max_code * (1 / amax), rounded twice
    codes = (by_head * torch.where(amax < CODES[dtype].tiny, 0.0, factor)).clamp_(-max_code, max_code)
    return (round_to_codes(codes, dtype) * (amax / max_code)).flatten(-2)
