"""Static scales of INT8 activations: of the largest number in each run of columns that calibration has seen.

What tokens have beyond it is clipped. Nothing then has to be looked for in a row when an engine runs; what is lost is
what tokens with smaller numbers do not use of the codes.
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
from enginewright.passes.quant.method import Calibration, StoredTensor, in_runs, stored
from enginewright.passes.quant.w8a8 import W8A8
from enginewright.passes.streaming import stream
from enginewright.passes.weights import shape_of
from enginewright.plugins.gemm.quantize_rows import groups_of
from enginewright.plugins.target import Target
from enginewright.quant_methods import MethodInfo

LEAST = 2.0**-60  # of a run that was 0 wherever it was seen


@dataclass(frozen=True)
class StaticInt8(W8A8):
    """The format of one layer."""

    info: ClassVar[MethodInfo] = quant_methods.INT8_SQ
    largest: tuple[float, ...] = ()  # of each run of its input, where a target takes static scales

    def activation_largest(self, target: Target) -> tuple[float, ...]:
        return self.largest if target.static_scales else ()

    def largest_of(self, runs: torch.Tensor, target: Target) -> torch.Tensor:
        given = self.activation_largest(target)
        return torch.tensor(given).unsqueeze(1) if given else super().largest_of(runs, target)


def largest_seen(runs: torch.Tensor) -> torch.Tensor:
    """[tokens, G, group] → FLOAT [G, 1]. Not less: the tokens that stick out are those that attention rests on."""
    return runs.abs().amax((0, 2)).clamp_(min=LEAST).unsqueeze(1)


@dataclass(frozen=True)
class FixScales:
    """Gives every linear layer but the head a format with the scales of its own input. Without texts, with any."""

    group: int
    calibration: Calibration | None
    name: str = "fix_scales"

    def __call__(self, model: ir.Model) -> PassResult:
        largest: dict[ir.Value, torch.Tensor] = {}

        def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
            if not stored(linear.weight):
                seen = torch.stack([largest_seen(in_runs(x, self.group)) for x in inputs]).amax(0)
                # As BFLOAT16 would hold it, so that it does not hang on its last bits.
                largest[linear.weight] = seen.flatten().bfloat16().float()

        if self.calibration is None:
            ones = {weight: torch.ones(groups_of(shape_of(weight)[1], self.group)) for weight in free_weights(model)}
            largest.update(ones)
        else:
            stream(model, self.calibration.texts, visit, self.calibration.threads)
        for weight, numbers in largest.items():
            config = StaticInt8(self.group, tuple(numbers.tolist()))
            source = ir.Value(name=weight.name, type=weight.type, shape=weight.shape, const_value=weight.const_value)
            parts = config.weights(source)
            weight.const_value = StoredTensor(str(weight.name), config, parts, origin=source.const_value)
        return PassResult(len(largest))
