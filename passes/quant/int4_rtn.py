"""`--quant int4-rtn`: 4-bit weights, rounded to nearest, with a scale for each quantization group of columns.

On the CPU, activations are int8 with a scale for the same groups (W4A8), on GPUs they are bfloat16 (W4A16).

Embeddings and the head are int8, as in every quantized build, so that a tied table is stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright import quant_methods
from enginewright.passes.quant.int4_codes import codes_of, nearest
from enginewright.passes.quant.method import LayerMethod, QuantConfig
from enginewright.passes.quant.w8a8 import W8Table
from enginewright.passes.weights import Output
from enginewright.plugins.gemm.gemm_w4a8 import GEMM_W4A8, MIDDLE
from enginewright.plugins.gemm.gemm_w4a16 import GEMM_W4A16
from enginewright.plugins.gemm.quantize_rows import groups_of
from enginewright.plugins.target import Activations, Target
from enginewright.quant_methods import MethodInfo


@dataclass(frozen=True)
class Int4Rtn(LayerMethod):
    """Round-to-nearest weights of 4 bits; embeddings and the head are int8."""

    info: ClassVar[MethodInfo] = quant_methods.INT4_RTN  # facts that need no torch
    group_size: int = 32  # columns that share a scale, a multiple of 32 up to 512; 0 is a whole row
    # True if a group has a zero point, too, so that its codes reach from its smallest weight to its largest
    zero_points: bool = False

    @property
    def activation_group(self) -> int:
        """Columns of INT8 activations that share a scale: those of a quantization group."""
        return self.group_size

    @property
    def tables(self) -> QuantConfig:
        """Method of embeddings: int8, with the activations of 4-bit weights."""
        return W8Table(self.group_size)

    def precision(self, target: Target) -> Activations:
        """Returns the target's activations for 4-bit weights."""
        return target.activations_for_four_bits(self.activation_group)

    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        """Lists the codes, their scales, and their zero points if there are any."""
        groups = groups_of(columns, self.group_size)
        outputs = [
            (name, torch.uint8, (rows, columns)),
            (f"{name}.scale", torch.bfloat16, (rows, groups)),
            (f"{name}.zero", torch.int8, (rows, groups)),
        ]
        return outputs[: 3 if self.zero_points else 2]

    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        """Rounds rows to nearest."""
        return self.coded(rows, *nearest(rows, self.group_of(rows), self.zero_points, name))

    def coded(self, rows: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Sequence[torch.Tensor]:
        """Quantizes rows with given scales.

        Args:
            rows: rows of a weight, FLOAT [n, K].
            scale: scales, [n, G].
            zero: zero points, [n, G].

        Returns:
            The same rows of each of `outputs`.
        """
        parts = codes_of(rows, self.group_of(rows), scale, zero), scale, zero
        return parts if self.zero_points else parts[:2]

    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        """Computes (code - zero) · scale."""
        codes, *of_groups = parts
        group, columns = self.group_of(codes), codes.shape[1]
        scale, *zero = (values.float().repeat_interleave(group, 1)[:, :columns] for values in of_groups)
        return (codes.float() - (zero[0] if zero else MIDDLE)) * scale

    def group_of(self, rows: torch.Tensor) -> int:
        """Returns the columns of a group in weights as wide as `rows`."""
        return min(self.group_size, rows.shape[1]) or rows.shape[1]

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        """Makes a GemmW4A8 for INT8 activations, otherwise a GemmW4A16."""
        (q, *q_scale), (weight, scale, *zeros) = x, weights
        gemm = GEMM_W4A8 if q_scale else GEMM_W4A16
        inputs = [q, weight, *q_scale, scale, zeros[0] if zeros else None, bias]
        return gemm.node(inputs, epilogue="none", to=int(ir.DataType.FLOAT), group=self.group_size)
