"""`--quant int4-awq`: smoothing by mean activations, and scales that clip where it costs least (AWQ).

https://arxiv.org/abs/2306.00978
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from enginewright import quant_methods
from enginewright.passes.pass_manager import Pass
from enginewright.passes.quant.choose import Choose, ChooseRows, Parts
from enginewright.passes.quant.int4_codes import fitted
from enginewright.passes.quant.int4_rtn import Int4Rtn
from enginewright.passes.quant.method import Calibration, QuantConfig
from enginewright.passes.quant.smooth import Smooth, SmoothWithoutData
from enginewright.quant_methods import MethodInfo


@dataclass(frozen=True)
class Int4Awq(Int4Rtn):
    """Activation-aware weights of 4 bits."""

    info: ClassVar[MethodInfo] = quant_methods.INT4_AWQ  # facts that need no torch

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        """Lists the passes that smooth, and that fit scales."""
        return [smooth_by_mean(self, calibration), Choose(lambda weight: self, calibration, by_importance)]

    def plan_without_data(self) -> Sequence[Pass]:
        """Lists the pass that scales without texts."""
        return [SmoothWithoutData()]


def smooth_by_mean(config: QuantConfig, calibration: Calibration) -> Smooth:
    """Makes the smoothing pass by mean activations.

    Args:
        config: format of the layers.
        calibration: texts.
    """
    return Smooth(config, calibration, lambda x: x.mean(0), with_weights=False)


def by_importance(inputs: Sequence[torch.Tensor], threads: int) -> ChooseRows:
    """Makes a choosing function: 4-bit scales fit best where inputs are large; other formats round to nearest.

    Args:
        inputs: input of a layer in each text, [tokens, K].
        threads: not used.
    """
    importance = torch.stack([x.square().sum(0) for x in inputs]).sum(0) / sum(map(len, inputs))

    def choose(config: QuantConfig, rows: torch.Tensor) -> Parts:
        if not isinstance(config, Int4Rtn):
            return config.quantize(rows, "weight")
        return config.coded(rows, *fitted(rows, config.group_of(rows), config.zero_points, importance))

    return choose
