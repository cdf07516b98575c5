"""`--quant int4-rtn`: weights of 4 bits, rounded to nearest, with a scale for each run of columns; on the CPU,
activations are int8 with a scale for the same runs (W4A8).

Embeddings and the head are int8, as in every quantized build, so that a tied table is stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright.errors import EngineError
from enginewright.passes.quant.method import QuantConfig
from enginewright.passes.quant.w8a8 import W8A8
from enginewright.passes.weights import Output
from enginewright.plugins.gemm_w4a8 import GEMM_W4A8, MIDDLE
from enginewright.plugins.quantize_rows import groups_of

LARGEST = 15  # codes are in [0, 15]


@dataclass(frozen=True)
class Int4Rtn(QuantConfig):
    """group_size: columns that share a scale, a multiple of 32 up to 512; 0 is all of a row. zero_points: whether a run
    has a zero point, too, so that its codes reach from its smallest weight to its largest.
    """

    name: ClassVar[str] = "int4-rtn"
    activations: ClassVar[ir.DataType] = ir.DataType.INT8
    group_size: int = 32
    zero_points: bool = False

    @property
    def activation_group(self) -> int:
        return self.group_size

    @property
    def tables(self) -> QuantConfig:
        return W8A8(self.group_size)

    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        groups = groups_of(columns, self.group_size)
        outputs = [
            (name, torch.uint8, (rows, columns)),
            (f"{name}.scale", torch.bfloat16, (rows, groups)),
            (f"{name}.zero", torch.int8, (rows, groups)),
        ]
        return outputs[: 3 if self.zero_points else 2]

    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        quantize = quantize_with_zeros if self.zero_points else quantize_symmetric
        return quantize(rows, self._group(rows), name)

    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        codes, *of_groups = parts
        group, columns = self._group(codes), codes.shape[1]
        scale, *zero = (values.float().repeat_interleave(group, 1)[:, :columns] for values in of_groups)
        return (codes.float() - (zero[0] if zero else MIDDLE)) * scale

    def _group(self, rows: torch.Tensor) -> int:
        """Columns of a run, of weights with so many."""
        return min(self.group_size, rows.shape[1]) or rows.shape[1]

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        (q, q_scale), (weight, scale, *zeros) = x, weights
        inputs = [q, weight, q_scale, scale, zeros[0] if zeros else None, bias]
        return GEMM_W4A8.node(inputs, epilogue="none", to=int(ir.DataType.FLOAT), group=self.group_size)

    def embed(self, tokens: ir.Value, weights: Sequence[ir.Value], scale: float) -> ir.Node:
        return self.tables.embed(tokens, weights, scale)


def quantize_symmetric(weight: torch.Tensor, group: int, name: str = "weight") -> tuple[torch.Tensor, ...]:
    """Codes UINT8 [N, K] and scales BFLOAT16 [N, G]; a code stands for (code - 8) · scale.

    The number of largest magnitude (of two, the negative one) is at first -8; then the scale is fitted to the codes by
    least squares, and the codes are chosen anew.

    Raises:
        EngineError: the weight holds NaN or infinity.
    """
    runs = _runs(weight, group, name)
    low, high = runs.amin(0), runs.amax(0)
    scale = (torch.where(-low >= high, low, high) / -MIDDLE).bfloat16()
    codes = _rounded(runs, scale)
    scale = ((runs * codes).sum(0) / codes.square().sum(0).clamp(min=1)).bfloat16()
    return _codes(_rounded(runs, scale).add_(MIDDLE), weight), scale.view(len(weight), -1)


def quantize_with_zeros(weight: torch.Tensor, group: int, name: str = "weight") -> tuple[torch.Tensor, ...]:
    """Codes UINT8 [N, K], scales BFLOAT16 [N, G] and zeros INT8 [N, G]; a code stands for (code - zero) · scale.

    Codes reach from the smallest number of a run to its largest, and 0 is always one of them.

    Raises:
        EngineError: the weight holds NaN or infinity.
    """
    runs = _runs(weight, group, name)
    low, high = runs.amin(0).clamp(max=0), runs.amax(0).clamp(min=0)
    scale = ((high - low) / LARGEST).bfloat16()
    step = torch.where(scale > 0, scale.float(), 1.0)
    zero = (-low / step).round().clamp(0, LARGEST)
    codes = (runs / step + zero).round_().clamp_(0, LARGEST)
    return _codes(codes, weight), scale.view(len(weight), -1), zero.to(torch.int8).view(len(weight), -1)


def _runs(weight: torch.Tensor, group: int, name: str) -> torch.Tensor:
    """[group, N · G]: the runs of all rows, zeros behind the last one of a row. Across is quicker than along."""
    if not weight.isfinite().all():
        raise EngineError(f"{name} cannot be quantized", "it holds NaN or infinity", "Check the checkpoint.")
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).view(-1, group).t().contiguous()


def _rounded(runs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes in [-8, 7], as floats; scale may be negative, and is 0 for a run of zeros."""
    return (runs / torch.where(scale != 0, scale.float(), 1.0)).round_().clamp_(-MIDDLE, MIDDLE - 1)


def _codes(runs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Codes of runs as UINT8 in the weight's shape."""
    rows, columns = weight.shape
    return runs.to(torch.uint8).t().reshape(rows, -1)[:, :columns]
