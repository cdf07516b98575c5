"""`--quant w8a8`: int8 weights with a scale an output row, int8 activations with a scale a token, nothing smoothed.

Activations with outlier channels lose precision by it; measure the engine (the quality that the build's tests show is
that of SmolLM2). Tables are those of `int8-wo`, and the head's activations are int8, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from enginewright.passes.quant.int8_wo import Int8Wo
from enginewright.plugins.gemm_w8a8 import GEMM_W8A8


@dataclass(frozen=True)
class W8A8(Int8Wo):
    name: ClassVar[str] = "w8a8"
    activations: ClassVar[ir.DataType] = ir.DataType.INT8

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        (q, q_scale), (weight, scale) = x, weights
        return GEMM_W8A8.node([q, weight, q_scale, scale, bias], epilogue="none", to=int(ir.DataType.FLOAT))
