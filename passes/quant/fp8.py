"""`--quant fp8`: weights in FP8 (E4M3FN) with a scale for each output row.

On GPUs activations are FP8, too, with a scale for each token (W8A8), and on the CPU bfloat16 (W8A16).
`--fp8-scales tensor` has one scale for a weight, which a kernel reads row by row, and `block` one for each 128×128
numbers (DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3.2), of which a kernel reads a row's groups of 128 columns;
activations then have a scale for the same groups. `--fp8-activations bf16` leaves activations bfloat16 on GPUs as well.
Embeddings and the head are int8 with a scale for each row, as in every quantized build, so that a tied table is stored
once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import onnx_ir as ir
import torch
from torch.nn import functional as F

from enginewright import quant_methods
from enginewright.errors import UsageError
from enginewright.passes.quant.int8_wo import Int8Wo
from enginewright.passes.quant.method import LayerMethod, QuantConfig, check_finite, in_groups
from enginewright.passes.weights import Output, converted, open_rows, shape_of
from enginewright.plugins.gemm.gemm_fp8a8 import GEMM_FP8A8
from enginewright.plugins.gemm.gemm_fp8a16 import GEMM_FP8A16
from enginewright.plugins.gemm.quantize_rows import groups_of
from enginewright.plugins.target import Activations, Target
from enginewright.quant_methods import MethodInfo

MAX_CODE = 448  # largest number of E4M3FN, which has no infinity
BLOCK = 128  # rows and columns that share a scale
SCALES = ("tensor", "channel", "block")
ACTIVATIONS = ("fp8", "bf16")
ROWS_AT_ONCE = 1024  # rows of a weight that are read at once to find its amax

# rows [n, K] → amax of the numbers that share a scale with each row: [n] or [n, G]
Amax = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Fp8(LayerMethod):
    """FP8 weights; embeddings and the head are int8."""

    info: ClassVar[MethodInfo] = quant_methods.FP8  # facts that need no torch
    fp8_scales: str = "channel"  # part of a weight that has one scale, one of SCALES; a channel is an output row
    fp8_activations: str = "fp8"  # dtype of GEMM inputs on GPUs, one of ACTIVATIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("fp8_scales", SCALES), ("fp8_activations", ACTIVATIONS)):
            if (given := getattr(self, name)) not in known:
                raise UsageError(f"--{name.replace('_', '-')} {given} is not known", f"there are {', '.join(known)}")

    @property
    def tables(self) -> QuantConfig:
        """Method of embeddings: int8."""
        return Int8Wo()

    def precision(self, target: Target) -> Activations:
        """Returns FP8 on targets that multiply it, unless the method keeps BFLOAT16."""
        return target.activations_for_fp8(self._group) if self.fp8_activations == "fp8" else super().precision(target)

    @property
    def _group(self) -> int:
        """Columns that share a scale; 0 is a whole row."""
        return BLOCK if self.fp8_scales == "block" else 0

    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        """Lists the numbers in FLOAT8E4M3FN, and their scales."""
        shape = (rows, groups_of(columns, BLOCK)) if self._group else (rows,)
        return [(name, torch.float8_e4m3fn, (rows, columns)), (f"{name}.scale", torch.float32, shape)]

    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        """Rounds rows to FLOAT8E4M3FN, and returns their scales; whole-weight scales are those of these rows."""
        return self._coded(rows, name, amax_of_tensor if self.fp8_scales == "tensor" else self._amax)

    def weights(self, weight: ir.Value) -> Sequence[ir.Value]:
        """Makes the initializers; a scale for the whole weight is read from all of its rows."""
        name, shape = str(weight.name), shape_of(weight)
        amax = amax_in(weight) if self.fp8_scales == "tensor" else self._amax
        block_rows = BLOCK if self.fp8_scales == "block" else 1
        return converted(weight, lambda rows: self._coded(rows, name, amax), self.outputs(name, *shape), block_rows)

    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        """Multiplies numbers with their scales."""
        values, scale = parts
        return values.float() * self._wide(scale, values)

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        """Makes a GemmFp8A8 for FP8 activations, otherwise a GemmFp8A16."""
        (q, *q_scale), (weight, scale) = x, weights
        gemm = GEMM_FP8A8 if q_scale else GEMM_FP8A16
        inputs = [q, weight, *q_scale, scale, bias]
        return gemm.node(inputs, epilogue="none", to=int(ir.DataType.FLOAT), group=self._group)

    @property
    def _amax(self) -> Amax:
        return amax_of_blocks if self._group else amax_of_rows

    def _coded(self, rows: torch.Tensor, name: str, amax: Amax) -> Sequence[torch.Tensor]:
        """Rounds to FLOAT8E4M3FN [n, K], to nearest even, and returns scales; a scale is 0 if all its numbers are.

        Raises:
            EngineError: the weight holds NaN or infinity.
        """
        scale = check_finite(amax(rows), name) / MAX_CODE
        values = rows / self._wide(torch.where(scale > 0, scale, 1.0), rows)
        return values.clamp(-MAX_CODE, MAX_CODE).to(torch.float8_e4m3fn), scale

    def _wide(self, of_groups: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if of_groups.dim() == 1:
            return of_groups.unsqueeze(1)
        return of_groups.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


def amax_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the amax of each row, [n]."""
    return rows.abs().amax(dim=1)


def amax_of_tensor(rows: torch.Tensor) -> torch.Tensor:
    """Returns the amax of all rows, [n]: one number, repeated."""
    return rows.abs().amax().expand(len(rows))


def amax_of_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Returns the amax of each block, [n, G], repeated for its rows; the first row must start a block."""
    of_groups = in_groups(rows.abs(), BLOCK).amax(-1)
    padded = F.pad(of_groups, (0, 0, 0, -len(rows) % BLOCK))
    blocks = padded.view(-1, BLOCK, of_groups.shape[1]).amax(1)
    return blocks.repeat_interleave(BLOCK, 0)[: len(rows)]


def amax_in(weight: ir.Value) -> Amax:
    """Makes a function that returns the amax of a whole weight, which is read at the first call."""

    @cache
    def amax() -> torch.Tensor:
        rows, count = open_rows(weight), shape_of(weight)[0]
        starts = range(0, count, ROWS_AT_ONCE)
        return torch.stack([rows(at, min(at + ROWS_AT_ONCE, count)).abs().amax() for at in starts]).amax()

    return lambda rows: amax().expand(len(rows))
