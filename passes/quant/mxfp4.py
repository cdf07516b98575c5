"""`--quant mxfp4`: weights in MXFP4, FP4 numbers (E2M1) with a power of two for each run of 32 columns; on the CPU,
activations are int8 with a scale for the same runs.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
Embeddings and the head are int8, as in every quantized build, so that a tied table is stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright import quant_methods
from enginewright.passes.quant.method import OfLayers, QuantConfig, check_finite, in_runs
from enginewright.passes.quant.w8a8 import W8Table
from enginewright.passes.weights import Output
from enginewright.plugins.gemm.gemm_mxfp4a8 import DOUBLED, GEMM_MXFP4A8
from enginewright.plugins.gemm.gemm_mxfp4a16 import GEMM_MXFP4A16
from enginewright.plugins.gemm.quantize_rows import groups_of
from enginewright.plugins.target import Activations, Target
from enginewright.quant_methods import MethodInfo

RUN = 32  # columns that share a scale
LEAST = 2.0**-123  # of a run's largest number, or as if: half of its power is then bfloat16's smallest normal number
# Halfway between doubled numbers, from 0 and 1 on. There the even code is chosen: that above every other one.
HALFWAYS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)


@dataclass(frozen=True)
class Mxfp4(OfLayers):
    info: ClassVar[MethodInfo] = quant_methods.MXFP4

    @property
    def activation_group(self) -> int:
        return RUN

    def precision(self, target: Target) -> Activations:
        return target.beside_four_bits(self.activation_group)

    @property
    def tables(self) -> QuantConfig:
        return W8Table(RUN)

    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        return [
            (name, torch.uint8, (rows, columns)),
            (f"{name}.scale", torch.bfloat16, (rows, groups_of(columns, RUN))),
        ]

    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        codes, scale = _nearest(in_runs(check_finite(rows, name), RUN))
        return codes.flatten(1)[:, : rows.shape[1]], scale.squeeze(-1).to(torch.bfloat16)

    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        codes, scale = parts
        return _numbers(codes) * scale.float().repeat_interleave(RUN, 1)[:, : codes.shape[1]]

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        (q, *q_scale), (weight, scale) = x, weights
        gemm = GEMM_MXFP4A8 if q_scale else GEMM_MXFP4A16
        inputs = [q, weight, *q_scale, scale, bias]
        return gemm.node(inputs, epilogue="none", to=int(ir.DataType.FLOAT), group=RUN)


def _nearest(runs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and halved powers [..., 1] of runs [..., k]: the specification's power of two, or the next one where that
    leaves less error, since the largest number may be clipped to 6/8 of itself.
    """
    exponent = torch.frexp(runs.abs().amax(-1, keepdim=True).clamp_(min=LEAST)).exponent - 3  # ⌊log2⌋ - 2
    codes, scale, error = _rounded(runs, exponent)
    next_codes, next_scale, next_error = _rounded(runs, exponent + 1)
    better = 4 * next_error < error
    return torch.where(better, next_codes, codes), torch.where(better, next_scale, scale)


def _rounded(runs: torch.Tensor, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The third: squared errors, over the squared scale."""
    scale = (exponent + 126).to(torch.uint8).view(torch.float8_e8m0fnu).float()  # 2^(exponent - 1), exactly
    doubled = runs / scale
    codes, magnitude = doubled.signbit().to(torch.uint8) << 3, doubled.abs()
    for code, halfway in enumerate(HALFWAYS):
        codes += magnitude >= halfway if code % 2 else magnitude > halfway
    return codes, scale, (doubled - _numbers(codes)).square_().sum(-1, keepdim=True)


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(DOUBLED, dtype=torch.float32)[codes.int()]
