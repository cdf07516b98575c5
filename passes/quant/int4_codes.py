"""Quantization groups of weights as 4-bit codes, with a scale and a zero point each: (code - zero) · scale.

Group g has the columns [g · group, (g + 1) · group) of a row; the last one of a row is padded with zeros. Inside this
module groups are [group, N · G]: computing across groups is quicker than along them.
"""

import torch

from enginewright.passes.quant.method import check_finite
from enginewright.plugins.gemm.gemm_w4a8 import MIDDLE

MAX_CODE = 15  # codes are in [0, 15]
# factors that are tried on the scale that reaches a whole group
SHRINKS = tuple(1.05 - step / 20 for step in range(11))


def nearest(weight: torch.Tensor, group: int, zero_points: bool, name: str = "weight") -> tuple[torch.Tensor, ...]:
    """Chooses scales and zero points that reach all numbers of each group.

    With zero points, codes reach from the smallest number of a group to its largest, and 0 is always one of them.
    Without, zeros are MIDDLE; the number of largest magnitude (of two, the negative one) is at first -8, and then the
    scale is fitted to the codes by least squares.

    Args:
        weight: FLOAT [N, K].
        group: columns of a group.
        zero_points: True if groups have zero points.
        name: name of the weight, for errors.

    Returns:
        Scales BFLOAT16 [N, G] and zeros INT8 [N, G].

    Raises:
        EngineError: the weight holds NaN or infinity.
    """
    runs = _runs(check_finite(weight, name), group)
    whole, zero = _reaching_all(runs, zero_points)
    scale = whole.bfloat16() if zero_points else _least_squares(runs, _rounded(runs, whole.bfloat16(), zero))
    return _by_row(scale, weight), _by_row(zero.to(torch.int8), weight)


def fitted(
    weight: torch.Tensor, group: int, zero_points: bool, importance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses scales and zero points with the least error where activations are large.

    The error of a layer's result from one group's rounding is about Σ h_k (w_k - q_k)², with h_k the mean square of
    what column k is multiplied with. A scale below the one that reaches the largest weight clips it and is finer
    everywhere else: several are tried, each fitted to its codes by least squares (the clipping of AWQ,
    https://arxiv.org/abs/2306.00978, with the importance of columns in it).

    Args:
        weight: FLOAT [N, K].
        group: columns of a group.
        zero_points: True if groups have zero points.
        importance: h, [K], at least 0.

    Returns:
        Scales BFLOAT16 [N, G] and zeros INT8 [N, G].
    """
    runs = _runs(weight, group)
    h = _runs(importance.unsqueeze(0) + 1e-6 * importance.mean() + 1e-30, group).repeat(1, len(weight))
    whole, zero = _reaching_all(runs, zero_points)
    best, scale = torch.full_like(whole, torch.inf), whole.bfloat16()
    for shrink in SHRINKS:
        tried = (whole * shrink).bfloat16()
        for _ in range(2):
            tried = _least_squares(runs, _rounded(runs, tried, zero), h)
        loss = (h * (runs - _rounded(runs, tried, zero) * tried.float()).square()).sum(0)
        better = loss < best
        best, scale = torch.where(better, loss, best), torch.where(better, tried, scale)
    return _by_row(scale, weight), _by_row(zero.to(torch.int8), weight)


def codes_of(weight: torch.Tensor, group: int, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Rounds a weight to the nearest codes.

    Args:
        weight: FLOAT [N, K].
        group: columns of a group.
        scale: scales [N, G].
        zero: zero points [N, G].

    Returns:
        Codes UINT8 [N, K].
    """
    zeros = zero.float().flatten()
    codes = _rounded(_runs(weight, group), scale.flatten(), zeros).add_(zeros)
    return codes.to(torch.uint8).t().reshape(len(weight), -1)[:, : weight.shape[1]]


def _runs(weight: torch.Tensor, group: int) -> torch.Tensor:
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).reshape(-1, group).t().contiguous()


def _by_row(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return values.view(len(weight), -1)


def _reaching_all(runs: torch.Tensor, zero_points: bool) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = runs.amin(0), runs.amax(0)
    if not zero_points:
        return torch.where(-low >= high, low, high) / -MIDDLE, torch.full_like(low, MIDDLE)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / MAX_CODE
    return scale, (-low / _step(scale.bfloat16())).round().clamp(0, MAX_CODE)


def _least_squares(runs: torch.Tensor, codes: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
    """Fits scales to codes (less their zeros) by least squares."""
    weighted = codes if h is None else codes * h
    return ((runs * weighted).sum(0) / (codes * weighted).sum(0).clamp(min=1e-30)).bfloat16()


def _rounded(runs: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Returns codes less their zeros, as floats."""
    codes = (runs / _step(scale)).round_()
    return torch.minimum(torch.maximum(codes, -zero, out=codes), MAX_CODE - zero, out=codes)


def _step(scale: torch.Tensor) -> torch.Tensor:
    """Returns a scale to divide by: scales may be negative, and are 0 for groups of zeros."""
    return torch.where(scale != 0, scale.float(), 1.0)
