"""`--quant int4-awq`: int4-rtn behind smoothing by what activations are on average (AWQ,
https://arxiv.org/abs/2306.00978).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from enginewright.passes.pass_manager import Pass
from enginewright.passes.quant.int4_rtn import Int4Rtn
from enginewright.passes.quant.method import Calibration
from enginewright.passes.quant.smooth import Smooth


@dataclass(frozen=True)
class Int4Awq(Int4Rtn):
    name: ClassVar[str] = "int4-awq"
    calibrated: ClassVar[bool] = True

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        return [Smooth(self, calibration, lambda x: x.mean(0), with_weights=False)]
