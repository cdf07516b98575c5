"""`--quant int4-gptq`: column after column, what rounding one column does to a layer's result is made up for by the
columns that are not rounded yet (GPTQ, https://arxiv.org/abs/2210.17323).
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
from enginewright.passes.quant.int4_codes import LARGEST, fitted
from enginewright.passes.quant.int4_rtn import Int4Rtn
from enginewright.passes.quant.method import Calibration, QuantConfig
from enginewright.passes.streaming import one_thread_each
from enginewright.quant_methods import MethodInfo

BLOCK = 128  # columns whose effect on all later ones is taken together


@dataclass(frozen=True)
class Int4Gptq(Int4Rtn):
    """act_order: columns with the largest activations come first. Groups stay where they are in memory, with scales
    that were chosen beforehand ("static groups"), so that nothing is permuted when the engine runs.
    damping: what is added to the Hessian's diagonal, as a fraction of the diagonal's mean (`damp_percent` of AutoGPTQ
    and GPTQModel). A text, since recipes hold no fractions.
    """

    info: ClassVar[MethodInfo] = quant_methods.INT4_GPTQ
    act_order: bool = True
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
        return [Choose(lambda weight: self, calibration, self.study)]

    def study(self, inputs: Sequence[torch.Tensor], threads: int) -> ChooseRows:
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
    """Xᵀ X over all texts, divided by their tokens: [K, K]."""

    def square(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.t() @ x

    columns = inputs[0].shape[1]
    total = torch.zeros(columns, columns)
    with one_thread_each(threads) as pool:
        for part in pool.map(square, inputs):
            total += part
    return total / sum(map(len, inputs))


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse, which holds what each column's error asks of the later ones."""
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    diagonal += damping * mean if mean > 0 else 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def _solve(weight: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Codes [n, K], as floats, with scale and zero [n, K] of each column; columns in the order they are rounded in."""
    weight = weight.clone()
    codes = torch.empty_like(weight)
    step = torch.where(scale != 0, scale, 1.0)
    for begin in range(0, weight.shape[1], BLOCK):
        end = min(begin + BLOCK, weight.shape[1])
        block, within = weight[:, begin:end].clone(), factor[begin:end, begin:end]
        errors = torch.empty_like(block)
        for column in range(end - begin):
            at = begin + column
            w = block[:, column]
            code = (w / step[:, at] + zero[:, at]).round().clamp(0, LARGEST)
            codes[:, at] = code
            errors[:, column] = (w - (code - zero[:, at]) * scale[:, at]) / within[column, column]
            block[:, column + 1 :] -= errors[:, column, None] * within[column, column + 1 :]
        weight[:, end:] -= errors @ factor[begin:end, end:]
    return codes
