"""`--quant int4-gptq`: rounds column after column, and later columns compensate for the errors of earlier ones (GPTQ).

https://arxiv.org/abs/2210.17323
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import ClassVar

import torch

from enginewright import quant_methods
from enginewright.errors import UsageError
from enginewright.passes.pass_manager import Pass
from enginewright.passes.quant.choose import Choose, ChooseRows, Parts
from enginewright.passes.quant.int4_codes import MAX_CODE, fitted
from enginewright.passes.quant.int4_rtn import Int4Rtn
from enginewright.passes.quant.method import Calibration, QuantConfig
from enginewright.passes.streaming import single_threaded_pool
from enginewright.quant_methods import MethodInfo

BLOCK = 128  # columns whose effect on all later ones is applied at once


@dataclass(frozen=True)
class Int4Gptq(Int4Rtn):
    """GPTQ weights of 4 bits."""

    info: ClassVar[MethodInfo] = quant_methods.INT4_GPTQ  # facts that need no torch
    # True if columns with the largest activations are rounded first; groups stay where they are in memory, with scales
    # that are chosen beforehand ("static groups"), so that nothing is permuted when the engine runs
    act_order: bool = True
    # number added to the Hessian's diagonal, as a fraction of the diagonal's mean (`damp_percent` of AutoGPTQ and
    # GPTQModel); a text, since recipes hold no fractions
    damping: str = "0.01"

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            usable = 0 < Decimal(self.damping) < 1
        except InvalidOperation:
            usable = False
        if not usable:
            raise UsageError(
                f"--damping {self.damping} is not possible",
                "it is a fraction of the mean of the Hessian's diagonal, between 0 and 1",
                "Use 0.01 for one percent.",
            )

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        """Lists the pass that chooses codes."""
        return [Choose(lambda weight: self, calibration, self.study)]

    def study(self, inputs: Sequence[torch.Tensor], threads: int) -> ChooseRows:
        """Makes the function that chooses codes.

        Args:
            inputs: input of a layer in each text, [tokens, K].
            threads: number of threads.
        """
        hessian = _hessian(inputs, threads)
        diagonal = hessian.diagonal().clone()
        order = diagonal.argsort(descending=True, stable=True) if self.act_order else torch.arange(len(diagonal))
        factor = _inverse_factor(hessian[order][:, order], float(self.damping))

        def choose(config: QuantConfig, rows: torch.Tensor) -> Parts:
            group = self.group_of(rows)
            scale, zero = fitted(rows, group, self.zero_points, diagonal)
            groups = order // group
            codes = torch.empty_like(rows)
            codes[:, order] = _solve(rows[:, order], factor, scale.float()[:, groups], zero.float()[:, groups])
            parts = codes.to(torch.uint8), scale, zero
            return parts if self.zero_points else parts[:2]

        return choose


def _hessian(inputs: Sequence[torch.Tensor], threads: int) -> torch.Tensor:
    """Computes Xᵀ X over all texts, divided by their tokens: [K, K]."""

    def square(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.t() @ x

    columns = inputs[0].shape[1]
    total = torch.zeros(columns, columns)
    with single_threaded_pool(threads) as pool:
        for part in pool.map(square, inputs):
            total += part
    return total / sum(map(len, inputs))


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Computes the upper Cholesky factor of the inverse, which spreads a column's error over later columns."""
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    diagonal += damping * mean if mean > 0 else 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def _solve(weight: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Rounds columns in their order; scale and zero are [n, K]. Returns codes [n, K], as floats."""
    weight = weight.clone()
    codes = torch.empty_like(weight)
    step = torch.where(scale != 0, scale, 1.0)
    for begin in range(0, weight.shape[1], BLOCK):
        end = min(begin + BLOCK, weight.shape[1])
        block, within = weight[:, begin:end].clone(), factor[begin:end, begin:end]
        errors = torch.empty_like(block)
        for column in range(end - begin):
            index = begin + column
            w = block[:, column]
            code = (w / step[:, index] + zero[:, index]).round().clamp(0, MAX_CODE)
            codes[:, index] = code
            errors[:, column] = (w - (code - zero[:, index]) * scale[:, index]) / within[column, column]
            block[:, column + 1 :] -= errors[:, column, None] * within[column, column + 1 :]
        weight[:, end:] -= errors @ factor[begin:end, end:]
    return codes
