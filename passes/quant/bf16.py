"""`--quant bf16`: weights of the checkpoint, rounded to bfloat16; inputs of GEMMs are bfloat16 as well."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright import quant_methods
from enginewright.passes.quant.method import QuantConfig
from enginewright.passes.weights import Output
from enginewright.plugins.embed.embed_bf16 import EMBED_BF16
from enginewright.plugins.gemm.gemm_bf16 import GEMM_BF16
from enginewright.quant_methods import MethodInfo


@dataclass(frozen=True)
class Bf16(QuantConfig):
    """Weights in bfloat16."""

    info: ClassVar[MethodInfo] = quant_methods.BF16  # facts that need no torch

    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        """Lists one tensor: the weight in BFLOAT16."""
        return [(name, torch.bfloat16, (rows, columns))]

    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        """Rounds rows to BFLOAT16."""
        return [rows.to(torch.bfloat16)]

    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        """Widens rows to FLOAT."""
        (values,) = parts
        return values.float()

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        """Makes a GemmBf16."""
        return GEMM_BF16.node([*x, *weights, bias], epilogue="none", to=int(ir.DataType.FLOAT))

    def embed(self, tokens: ir.Value, weights: Sequence[ir.Value], scale: float) -> ir.Node:
        """Makes an EmbedBf16."""
        return EMBED_BF16.node([tokens, *weights], scale=scale)
