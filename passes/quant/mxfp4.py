"""`--quant mxfp4`: weights in MXFP4, FP4 numbers (E2M1) with a power of two for each group of 32 columns.

On the CPU, activations are int8 with a scale for the same groups.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
Embeddings and the head are int8, as in every quantized build, so that a tied table is stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright import quant_methods
from enginewright.passes.quant.method import LayerMethod, QuantConfig, check_finite, in_groups
from enginewright.passes.quant.w8a8 import W8Table
from enginewright.passes.weights import Output
from enginewright.plugins.gemm.gemm_mxfp4a8 import DOUBLED, GEMM_MXFP4A8
from enginewright.plugins.gemm.gemm_mxfp4a16 import GEMM_MXFP4A16
from enginewright.plugins.gemm.quantize_rows import groups_of
from enginewright.plugins.target import Activations, Target
from enginewright.quant_methods import MethodInfo

GROUP_SIZE = 32  # columns that share a scale
MIN_AMAX = 2.0**-123  # lower limit of a group's amax: half of its power is then bfloat16's smallest normal number
# Midpoints of doubled numbers, from 0 and 1 on. There the even code is chosen: that above every other midpoint.
HALFWAYS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)


@dataclass(frozen=True)
class Mxfp4(LayerMethod):
    """Weights in MXFP4; embeddings and the head are int8."""

    info: ClassVar[MethodInfo] = quant_methods.MXFP4  # facts that need no torch

    @property
    def activation_group(self) -> int:
        """Columns of INT8 activations that share a scale: those of a quantization group."""
        return GROUP_SIZE

    def precision(self, target: Target) -> Activations:
        """Returns the target's activations for 4-bit weights."""
        return target.activations_for_four_bits(self.activation_group)

    @property
    def tables(self) -> QuantConfig:
        """Method of embeddings: int8, with the activations of 4-bit weights."""
        return W8Table(GROUP_SIZE)

    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        """Lists the codes, and halved powers of two as their scales."""
        return [
            (name, torch.uint8, (rows, columns)),
            (f"{name}.scale", torch.bfloat16, (rows, groups_of(columns, GROUP_SIZE))),
        ]

    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        """Rounds rows to MXFP4."""
        codes, scale = _nearest(in_groups(check_finite(rows, name), GROUP_SIZE))
        return codes.flatten(1)[:, : rows.shape[1]], scale.squeeze(-1).to(torch.bfloat16)

    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        """Multiplies numbers with their scales."""
        codes, scale = parts
        return _numbers(codes) * scale.float().repeat_interleave(GROUP_SIZE, 1)[:, : codes.shape[1]]

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        """Makes a GemmMxfp4A8 for INT8 activations, otherwise a GemmMxfp4A16."""
        (q, *q_scale), (weight, scale) = x, weights
        gemm = GEMM_MXFP4A8 if q_scale else GEMM_MXFP4A16
        inputs = [q, weight, *q_scale, scale, bias]
        return gemm.node(inputs, epilogue="none", to=int(ir.DataType.FLOAT), group=GROUP_SIZE)


def _nearest(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and halved powers [..., 1] of groups [..., k].

    A group has the specification's power of two, or the next one where that leaves less error, since the largest number
    may be clipped to 6/8 of itself.
    """
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True).clamp_(min=MIN_AMAX)).exponent - 3  # ⌊log2⌋ - 2
    codes, scale, error = _rounded(groups, exponent)
    next_codes, next_scale, next_error = _rounded(groups, exponent + 1)
    better = 4 * next_error < error
    return torch.where(better, next_codes, codes), torch.where(better, next_scale, scale)


def _rounded(groups: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes, scales, and squared errors over the squared scale."""
    scale = (exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu).float()  # 2^(exponent - 1), exactly
    doubled = groups / scale
    codes, magnitude = doubled.signbit().to(torch.uint8) << 3, doubled.abs()
    for code, halfway in enumerate(HALFWAYS):
        codes += magnitude >= halfway if code % 2 else magnitude > halfway
    return codes, scale, (doubled - _numbers(codes)).square_().sum(-1, keepdim=True)


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(DOUBLED, dtype=torch.float32)[codes.int()]
