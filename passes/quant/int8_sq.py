"""`--quant int8-sq`: w8a8 after smoothing, with α searched for each layer (SmoothQuant).

https://arxiv.org/abs/2211.10438
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from enginewright import quant_methods
from enginewright.errors import UsageError
from enginewright.passes.pass_manager import Pass
from enginewright.passes.quant.method import Calibration, QuantConfig
from enginewright.passes.quant.smooth import Smooth, SmoothWithoutData
from enginewright.passes.quant.static_scales import FixScales, observed_amax
from enginewright.passes.quant.w8a8 import W8A8
from enginewright.plugins.target import Target
from enginewright.quant_methods import MethodInfo

SCHEMES = ("dynamic", "static")


@dataclass(frozen=True)
class Int8Sq(W8A8):
    """Smoothed weights and activations of 8 bits."""

    info: ClassVar[MethodInfo] = quant_methods.INT8_SQ  # facts that need no torch
    # scales of activations: each token's own, or fixed for all by calibration ("static")
    activation_scheme: str = "dynamic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation_scheme not in SCHEMES:
            raise UsageError(
                f"--activation-scheme {self.activation_scheme} is not known", f"there are {', '.join(SCHEMES)}"
            )

    @property
    def _static(self) -> bool:
        return self.activation_scheme == "static"

    @property
    def without_data(self) -> QuantConfig:
        """The method for layers that no text streams through: scales of activations are dynamic."""
        return replace(self, activation_scheme="dynamic")

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        """Lists the passes that smooth, and that fix scales of activations if they are static."""
        smooth = Smooth(self, calibration, lambda x: x.amax(0), with_weights=True)
        return [smooth, FixScales(self.group_size, calibration)] if self._static else [smooth]

    def plan_without_data(self) -> Sequence[Pass]:
        """Lists the passes that scale without texts, and that give static scales their place in the plan."""
        smooth = SmoothWithoutData()
        return [smooth, FixScales(self.group_size, None)] if self._static else [smooth]

    def amax_of(self, runs: torch.Tensor, target: Target) -> torch.Tensor:
        """Returns the observed amax for static scales, otherwise that of each token."""
        return observed_amax(runs) if self._static and target.static_scales else super().amax_of(runs, target)
