"""`--quant int8-wo`: int8 weights with a scale for each output row, symmetric; activations stay bfloat16 (W8A16).

The embedding has a scale for each row as well, so that a tied table is stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright import quant_methods
from enginewright.passes.quant.method import QuantConfig
from enginewright.passes.weights import Output
from enginewright.plugins.embed.embed_w8 import EMBED_W8
from enginewright.plugins.gemm.gemm_w8a16 import GEMM_W8A16
from enginewright.quant_methods import MethodInfo

MAX_CODE = 127  # codes are in [-127, 127]: sign and absolute value fit, which AVX2 needs


@dataclass(frozen=True)
class Int8Wo(QuantConfig):
    """Weights of 8 bits."""

    info: ClassVar[MethodInfo] = quant_methods.INT8_WO  # facts that need no torch

    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        """Lists the codes, and a scale for each row."""
        return [(name, torch.int8, (rows, columns)), (f"{name}.scale", torch.float32, (rows,))]

    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        """Rounds rows to INT8."""
        return quantize_rows(rows)

    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        """Multiplies codes with their scales."""
        codes, scale = parts
        return codes * scale.unsqueeze(1)

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        """Makes a GemmW8A16."""
        return GEMM_W8A16.node([*x, *weights, bias], epilogue="none", to=int(ir.DataType.FLOAT))

    def embed(self, tokens: ir.Value, weights: Sequence[ir.Value], scale: float) -> ir.Node:
        """Makes an EmbedW8."""
        return EMBED_W8.node([tokens, *weights], scale=scale)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows to INT8, rounded half to even.

    Args:
        weight: FLOAT [N, K].

    Returns:
        Codes INT8 [N, K], and scales FLOAT [N] = max|row| / 127; a row of zeros has scale 0.
    """
    scale = weight.abs().amax(dim=1) / MAX_CODE
    codes = weight / torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    return codes.round().clamp(-MAX_CODE, MAX_CODE).to(torch.int8), scale
