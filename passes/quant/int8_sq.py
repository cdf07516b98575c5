"""`--quant int8-sq`: w8a8 behind smoothing, with α searched by layer (SmoothQuant, https://arxiv.org/abs/2211.10438)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from enginewright.passes.pass_manager import Pass
from enginewright.passes.quant.method import Calibration
from enginewright.passes.quant.smooth import Smooth
from enginewright.passes.quant.w8a8 import W8A8


@dataclass(frozen=True)
class Int8Sq(W8A8):
    name: ClassVar[str] = "int8-sq"
    calibrated: ClassVar[bool] = True

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        return [Smooth(self, calibration, lambda x: x.amax(0), with_weights=True)]
