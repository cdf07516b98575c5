"""`--quant fp8`: weights in FP8 (E4M3FN) with a scale an output row; on the CPU activations stay bfloat16 (W8A16).

Embeddings and the head are int8 with a scale a row, as in every quantized build, so that a tied table is stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright.passes.quant.int8_wo import Int8Wo
from enginewright.passes.quant.method import OfLayers, QuantConfig, check_finite
from enginewright.passes.weights import Output
from enginewright.plugins.gemm_fp8a16 import GEMM_FP8A16

LARGEST = 448  # of E4M3FN, which has no infinity


@dataclass(frozen=True)
class Fp8(OfLayers):
    name: ClassVar[str] = "fp8"

    @property
    def tables(self) -> QuantConfig:
        return Int8Wo()

    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        return [(name, torch.float8_e4m3fn, (rows, columns)), (f"{name}.scale", torch.float32, (rows,))]

    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        return quantize_rows(rows, name)

    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        values, scale = parts
        return values.float() * scale.unsqueeze(1)

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        return GEMM_FP8A16.node([*x, *weights, bias], epilogue="none", to=int(ir.DataType.FLOAT))


def quantize_rows(weight: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """FLOAT8E4M3FN [N, K], rounded to nearest even, and scales FLOAT [N] = max|row| / 448; 0 for a row of zeros.

    Raises:
        EngineError: the weight holds NaN or infinity.
    """
    scale = check_finite(weight.abs().amax(dim=1), name) / LARGEST
    values = weight / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale
