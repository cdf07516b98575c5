"""`--quant w8a8`: int8 weights with a scale for each output row, int8 activations with one for each group of columns.

Small groups keep outlier channels of activations from reducing the precision of all others: for SmolLM2, the divergence
from the BF16 model is a fifth of that with one scale for each token. Tables are those of `int8-wo`, and the head's
activations are int8, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from enginewright import quant_methods
from enginewright.passes.quant.int8_wo import Int8Wo
from enginewright.plugins.gemm.gemm_w8a8 import GEMM_W8A8
from enginewright.plugins.plugin import width_of
from enginewright.plugins.target import Activations, Target
from enginewright.quant_methods import MethodInfo


@dataclass(frozen=True)
class W8A8(Int8Wo):
    """Weights and activations of 8 bits."""

    info: ClassVar[MethodInfo] = quant_methods.W8A8  # facts that need no torch
    group_size: int = 32  # columns of activations that share a scale, a multiple of 32 up to 512; 0 is a whole token

    @property
    def activation_group(self) -> int:
        """Columns of INT8 activations that share a scale."""
        return self.group_size

    def precision(self, target: Target) -> Activations:
        """Returns the target's activations for INT8 weights."""
        return target.activations_for_int8(self.activation_group)

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        """Makes a GemmW8A8."""
        (q, q_scale), (weight, scale) = x, weights
        inputs = [q, weight, q_scale, scale, bias]
        group = self.group_size if width_of(q_scale) > 1 else 0
        return GEMM_W8A8.node(inputs, epilogue="none", to=int(ir.DataType.FLOAT), group=group)


@dataclass(frozen=True)
class W8Table(W8A8):
    """Tables of models with 4-bit weights, which read the same activations as these."""

    def precision(self, target: Target) -> Activations:
        """Returns the target's activations for 4-bit weights."""
        return target.activations_for_four_bits(self.activation_group)

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        """Makes a GemmW8A8 for INT8 activations, otherwise a GemmW8A16."""
        return super().gemm(x, weights, bias) if len(x) > 1 else Int8Wo.gemm(self, x, weights, bias)
