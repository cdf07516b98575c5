"""`--quant fp8`: weights in FP8 (E4M3FN) with a scale an output row; on GPUs activations are FP8, too, with a scale a
token (W8A8), and on the CPU bfloat16 (W8A16).

`--fp8-scales tensor` has one scale a weight, which a kernel reads row by row, and `block` one for each 128×128 numbers
(DeepSeek-V3, https://arxiv.org/abs/2412.19437, 3.3.2), of which a kernel reads a row's runs of 128 columns; activations
then have a scale for the same runs. `--fp8-activations bf16` leaves activations bfloat16 on GPUs as well.
Embeddings and the head are int8 with a scale a row, as in every quantized build, so that a tied table is stored once.
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
from enginewright.passes.quant.method import OfLayers, QuantConfig, check_finite, in_runs
from enginewright.passes.weights import Output, converted, open_rows, shape_of
from enginewright.plugins.gemm.gemm_fp8a8 import GEMM_FP8A8
from enginewright.plugins.gemm.gemm_fp8a16 import GEMM_FP8A16
from enginewright.plugins.gemm.quantize_rows import groups_of
from enginewright.plugins.target import Activations, Target
from enginewright.quant_methods import MethodInfo

LARGEST = 448  # of E4M3FN, which has no infinity
BLOCK = 128  # rows and columns
SCALES = ("tensor", "channel", "block")
ACTIVATIONS = ("fp8", "bf16")
ROWS_AT_ONCE = 1024  # of a weight whose largest number is looked for

Largest = Callable[[torch.Tensor], torch.Tensor]  # rows [n, K] → the largest number that each shares a scale with


@dataclass(frozen=True)
class Fp8(OfLayers):
    """fp8_scales: what has a scale of its own, one of SCALES; a channel is an output row. fp8_activations: what GEMMs
    read on GPUs, one of ACTIVATIONS.
    """

    info: ClassVar[MethodInfo] = quant_methods.FP8
    fp8_scales: str = "channel"
    fp8_activations: str = "fp8"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("fp8_scales", SCALES), ("fp8_activations", ACTIVATIONS)):
            if (given := getattr(self, name)) not in known:
                raise UsageError(f"--{name.replace('_', '-')} {given} is not known", f"there are {', '.join(known)}")

    @property
    def tables(self) -> QuantConfig:
        return Int8Wo()

    def precision(self, target: Target) -> Activations:
        return target.beside_fp8(self._group) if self.fp8_activations == "fp8" else super().precision(target)

    @property
    def _group(self) -> int:
        """Columns that share a scale; 0 is all of a row."""
        return BLOCK if self.fp8_scales == "block" else 0

    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        shape = (rows, groups_of(columns, BLOCK)) if self._group else (rows,)
        return [(name, torch.float8_e4m3fn, (rows, columns)), (f"{name}.scale", torch.float32, shape)]

    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        return self._coded(rows, name, largest_of_tensor if self.fp8_scales == "tensor" else self._largest)

    def weights(self, weight: ir.Value) -> Sequence[ir.Value]:
        name, shape = str(weight.name), shape_of(weight)
        largest = largest_in(weight) if self.fp8_scales == "tensor" else self._largest
        together = BLOCK if self.fp8_scales == "block" else 1
        return converted(weight, lambda rows: self._coded(rows, name, largest), self.outputs(name, *shape), together)

    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        values, scale = parts
        return values.float() * self._wide(scale, values)

    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        (q, *q_scale), (weight, scale) = x, weights
        gemm = GEMM_FP8A8 if q_scale else GEMM_FP8A16
        inputs = [q, weight, *q_scale, scale, bias]
        return gemm.node(inputs, epilogue="none", to=int(ir.DataType.FLOAT), group=self._group)

    @property
    def _largest(self) -> Largest:
        return largest_of_blocks if self._group else largest_of_rows

    def _coded(self, rows: torch.Tensor, name: str, largest: Largest) -> Sequence[torch.Tensor]:
        """FLOAT8E4M3FN [n, K], rounded to nearest even, and scales; 0 for what shares one if all of that is 0.

        Raises:
            EngineError: the weight holds NaN or infinity.
        """
        scale = check_finite(largest(rows), name) / LARGEST
        values = rows / self._wide(torch.where(scale > 0, scale, 1.0), rows)
        return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale

    def _wide(self, of_runs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if of_runs.dim() == 1:
            return of_runs.unsqueeze(1)
        return of_runs.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]


def largest_of_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax(dim=1)


def largest_of_tensor(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().amax().expand(len(rows))


def largest_of_blocks(rows: torch.Tensor) -> torch.Tensor:
    """[n, G]; the first row is the first one of a block."""
    of_runs = in_runs(rows.abs(), BLOCK).amax(-1)
    padded = F.pad(of_runs, (0, 0, 0, -len(rows) % BLOCK))
    blocks = padded.view(-1, BLOCK, of_runs.shape[1]).amax(1)
    return blocks.repeat_interleave(BLOCK, 0)[: len(rows)]


def largest_in(weight: ir.Value) -> Largest:
    """Of the whole weight, which is read for it when it is first asked for."""

    @cache
    def largest() -> torch.Tensor:
        rows, count = open_rows(weight), shape_of(weight)[0]
        starts = range(0, count, ROWS_AT_ONCE)
        return torch.stack([rows(at, min(at + ROWS_AT_ONCE, count)).abs().amax() for at in starts]).amax()

    return lambda rows: largest().expand(len(rows))
