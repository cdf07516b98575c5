"""Static scales of INT8 activations, from the amax of each group of columns that calibration has observed.

Larger numbers of a token are clipped. In return no amax has to be computed for a row when an engine runs; the cost is
that tokens with smaller numbers do not use all codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright import quant_methods
from enginewright.passes.graph import LinearLayer
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.auto import free_weights
from enginewright.passes.quant.method import Calibration, StoredTensor, in_groups, stored
from enginewright.passes.quant.w8a8 import W8A8
from enginewright.passes.streaming import stream
from enginewright.passes.weights import shape_of
from enginewright.plugins.gemm.quantize_rows import groups_of
from enginewright.plugins.target import Target
from enginewright.quant_methods import MethodInfo

MIN_AMAX = 2.0**-60  # lower limit of a group's amax, for groups that were 0 wherever they were seen


@dataclass(frozen=True)
class StaticInt8(W8A8):
    """The format of one layer with static scales."""

    info: ClassVar[MethodInfo] = quant_methods.INT8_SQ  # facts that need no torch
    amax: tuple[float, ...] = ()  # amax of each group of its input, for targets that take static scales

    def activation_amax(self, target: Target) -> tuple[float, ...]:
        """Returns the fixed amax of each group, if the target takes static scales."""
        return self.amax if target.static_scales else ()

    def amax_of(self, runs: torch.Tensor, target: Target) -> torch.Tensor:
        """Returns the fixed amax of each group, if the target takes static scales."""
        given = self.activation_amax(target)
        return torch.tensor(given).unsqueeze(1) if given else super().amax_of(runs, target)


def observed_amax(runs: torch.Tensor) -> torch.Tensor:
    """Returns the amax of each group over all tokens: [tokens, G, group] → FLOAT [G, 1].

    It is not reduced by clipping: attention depends on the tokens that stick out.
    """
    return runs.abs().amax((0, 2)).clamp_(min=MIN_AMAX).unsqueeze(1)


@dataclass(frozen=True)
class FixScales:
    """Gives every linear layer but the head a format with the scales of its own input."""

    group: int  # columns of activations that share a scale; 0 is a whole token
    calibration: Calibration | None  # texts; None: all scales are 1, for a plan without data
    name: str = "fix_scales"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        amax: dict[ir.Value, torch.Tensor] = {}

        def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
            if not stored(linear.weight):
                seen = torch.stack([observed_amax(in_groups(x, self.group)) for x in inputs]).amax(0)
                # It is rounded to BFLOAT16, so that the scale does not depend on its last bits.
                amax[linear.weight] = seen.flatten().bfloat16().float()

        if self.calibration is None:
            ones = {weight: torch.ones(groups_of(shape_of(weight)[1], self.group)) for weight in free_weights(model)}
            amax.update(ones)
        else:
            stream(model, self.calibration.texts, visit, self.calibration.threads)
        for weight, numbers in amax.items():
            config = StaticInt8(self.group, tuple(numbers.tolist()))
            source = ir.Value(name=weight.name, type=weight.type, shape=weight.shape, const_value=weight.const_value)
            parts = config.weights(source)
            weight.const_value = StoredTensor(str(weight.name), config, parts, source=source.const_value)
        return PassResult(len(amax))
