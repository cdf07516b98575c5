"""`--quant int4-awq`: smoothing by what activations are on average, and scales that clip where it costs least (AWQ,
https://arxiv.org/abs/2306.00978).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from enginewright.passes.pass_manager import Pass
from enginewright.passes.quant.choose import Choose, ChooseRows, Parts
from enginewright.passes.quant.int4_codes import fitted
from enginewright.passes.quant.int4_rtn import Int4Rtn
from enginewright.passes.quant.method import Calibration
from enginewright.passes.quant.smooth import Smooth


@dataclass(frozen=True)
class Int4Awq(Int4Rtn):
    name: ClassVar[str] = "int4-awq"
    calibrated: ClassVar[bool] = True

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        return [
            Smooth(self, calibration, lambda x: x.mean(0), with_weights=False),
            Choose(self, calibration, self._study),
        ]

    def _study(self, inputs: Sequence[torch.Tensor], threads: int) -> ChooseRows:
        importance = torch.stack([x.square().sum(0) for x in inputs]).sum(0) / sum(map(len, inputs))

        def choose(rows: torch.Tensor) -> Parts:
            return self.coded(rows, *fitted(rows, self.group_of(rows), self.zero_points, importance))

        return choose
