"""What quantization methods share: a format of weights, the ops that read it, and how its numbers are chosen.

A method fixes the precision of activations, too (docs/design.md): a Cast or a QuantizeRows stands before each GEMM.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright.errors import EngineError, UsageError
from enginewright.passes.pass_manager import Pass
from enginewright.passes.weights import Output, RowReader, RowsTensor, converted, open_rows, picked, shape_of, stacked
from enginewright.plugins.gemm.quantize_rows import LARGEST_CODE
from enginewright.plugins.plugin import CODES
from enginewright.plugins.target import CPU_TARGET, Activations, Target
from enginewright.quant_methods import MethodInfo

LONGEST_GROUP = 512  # columns of one of several runs


@dataclass(frozen=True)
class Calibration:
    """What methods that look at activations are given.

    texts: token ids. threads: that compute them; they change no result. folder: where codes that were chosen wait until
    they are packed; None is the system's folder for temporary files.
    """

    texts: Sequence[Sequence[int]] = ()
    threads: int = 1
    folder: Path | None = None


def in_runs(x: torch.Tensor, group: int) -> torch.Tensor:
    """[..., K] → [..., G, group], zeros behind the last column; with group 0, all of K is one."""
    length = min(group, x.shape[-1]) or x.shape[-1]
    return torch.unflatten(torch.nn.functional.pad(x, (0, -x.shape[-1] % length)), -1, (-1, length))


def check_finite(weight: torch.Tensor, name: str) -> torch.Tensor:
    """The weight itself.

    Raises:
        EngineError: it holds NaN or infinity.
    """
    if not weight.isfinite().all():
        raise EngineError(f"{name} cannot be quantized", "it holds NaN or infinity", "Check the checkpoint.")
    return weight


@dataclass(frozen=True)
class QuantConfig(ABC):
    """A method and its settings."""

    info: ClassVar[MethodInfo]  # facts that need no torch

    @property
    def name(self) -> str:
        """Name in `--quant`."""
        return self.info.name

    @property
    def calibrated(self) -> bool:
        """True if `prepare` has to see texts."""
        return self.info.calibrated

    @property
    def tables(self) -> "QuantConfig":
        """The method of weights with a row for each token: of embeddings, and of the head, which may share one."""
        return self

    @property
    def head(self) -> "QuantConfig":
        """The method of a head that shares its table with no embedding."""
        return self.tables

    def __post_init__(self) -> None:
        group = self.activation_group
        if group % 32 or not 0 <= group <= LONGEST_GROUP:
            raise UsageError(
                f"--group-size {group} is not possible",
                "kernels take runs of columns that are whole lines of theirs",
                f"Use a multiple of 32 up to {LONGEST_GROUP}, or 0 for whole rows.",
            )

    @property
    def activation_group(self) -> int:
        """Columns of INT8 activations that share a scale; 0 where all of a row do."""
        return 0

    def precision(self, target: Target) -> Activations:
        """What a GEMM reads on a target."""
        return Activations()

    def activation_largest(self, target: Target) -> tuple[float, ...]:
        """Of each run of INT8 activations, the number that its scale is made of; () where that is each token's own."""
        return ()

    @abstractmethod
    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        """What stands for a weight [rows, columns] of this name: its values first, then scales if there are any."""

    @abstractmethod
    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        """The same rows of each of `outputs`, of some rows [n, K] FLOAT of a weight; a row does not depend on others.

        Raises:
            EngineError: they hold what the format cannot.
        """

    @abstractmethod
    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        """The other way: FLOAT [n, K], what these rows of `outputs` stand for."""

    def round_activations(self, x: torch.Tensor, target: Target = CPU_TARGET) -> torch.Tensor:
        """What a GEMM multiplies in the place of x: FLOAT [..., K]."""
        dtype, group = self.precision(target)
        if dtype not in CODES:
            return x.to(torch.bfloat16).float()
        runs, most = in_runs(x, group), LARGEST_CODE[dtype]
        scale = self.largest_of(runs, target) / most
        codes = (runs / torch.where(scale > 0, scale, 1.0)).clamp_(-most, most)
        codes = codes.round_() if dtype == ir.DataType.INT8 else codes.to(torch.float8_e4m3fn).float()
        return codes.mul_(scale).flatten(-2)[..., : x.shape[-1]]

    def largest_of(self, runs: torch.Tensor, target: Target) -> torch.Tensor:
        """What scales of activations are made of: runs [..., G, group] → what can be divided by, of each run."""
        return runs.abs().amax(-1, keepdim=True)

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        """Passes over the dense, fused graph in front of Quantize that choose what this method has to."""
        return ()

    def foresee(self) -> Sequence[Pass]:
        """Stands for `prepare` where a plan is all that is wanted: reads no weight and sees no text."""
        return ()

    @property
    def unseen(self) -> "QuantConfig":
        """The same formats for layers that no text is streamed through, with what `foresee` leaves in place."""
        return self

    def weights(self, weight: ir.Value) -> Sequence[ir.Value]:
        """The initializers that stand for a weight [N, K]: one for each of `outputs`."""
        name = str(weight.name)
        return converted(weight, lambda rows: self.quantize(rows, name), self.outputs(name, *shape_of(weight)))

    @abstractmethod
    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        """x: [..., K] in some target's precision, and its scales [..., G] if those are codes. Gives FLOAT [..., N]."""

    @abstractmethod
    def embed(self, tokens: ir.Value, weights: Sequence[ir.Value], scale: float) -> ir.Node:
        """Gives FLOAT [..., H]."""


@dataclass(frozen=True)
class OfLayers(QuantConfig):
    """A method of linear layers alone; `tables` names another for embeddings.

    quantize_lm_head: whether a head that shares its table with no embedding is one of the layers.
    """

    quantize_lm_head: bool = field(default=False, kw_only=True)

    @property
    def head(self) -> QuantConfig:
        return self if self.quantize_lm_head else self.tables

    def embed(self, tokens: ir.Value, weights: Sequence[ir.Value], scale: float) -> ir.Node:
        return self.tables.embed(tokens, weights, scale)


class StoredTensor(RowsTensor):
    """A weight that is quantized already: by its checkpoint, or by a pass that chose its codes.

    It is FLOAT to whoever reads it. Quantize takes its parts as they are, and the GEMM of its format.
    """

    def __init__(
        self,
        name: str,
        stored_as: QuantConfig,
        parts: Sequence[ir.Value],
        origin: ir.TensorProtocol | None = None,
    ) -> None:
        """parts: initializers, as `stored_as.weights` gives them. origin: FLOAT, what a pass has chosen the codes for;
        None where the checkpoint has the codes alone.
        """
        self.stored_as, self.parts, self.origin = stored_as, tuple(parts), origin
        super().__init__(name, torch.float32, shape_of(parts[0]), self._open)

    def _open(self) -> RowReader:
        readers = [open_rows(part) for part in self.parts]
        return lambda begin, end: self.stored_as.restore(*(rows(begin, end) for rows in readers))


def stack_weights(name: str, weights: Sequence[ir.Value]) -> ir.Value | str:
    """Weights, one behind the other along the rows; or why that cannot be, a sentence."""
    already = [one for weight in weights if (one := stored(weight))]
    if not already:
        return stacked(name, weights)
    config = already[0].stored_as
    if not stored_alike(weights):
        names = " and ".join(str(weight.name) for weight in weights)
        return f"{names} are stored in different formats."
    outputs = config.outputs(name, *shape_of(weights[0]))
    parts = [stacked(output[0], alike) for output, *alike in zip(outputs, *(one.parts for one in already), strict=True)]
    return StoredTensor(name, config, parts).initializer()


def pick_weight(name: str, weight: ir.Value, rows: Sequence[int] | torch.Tensor) -> ir.Value:
    """Some rows of a weight, in this order; in its format, where it is quantized already."""
    already = stored(weight)
    if already is None:
        return picked(name, weight, rows)
    outputs = already.stored_as.outputs(name, len(rows), shape_of(weight)[1])
    parts = [picked(output[0], part, rows) for output, part in zip(outputs, already.parts, strict=True)]
    return StoredTensor(name, already.stored_as, parts).initializer()


def stored_alike(weights: Sequence[ir.Value]) -> bool:
    """Whether weights are all quantized already in one and the same format, or none of them is."""
    formats = [one.stored_as if (one := stored(weight)) else None for weight in weights]
    return all(format == formats[0] for format in formats)


def forget_format(weight: ir.Value) -> None:
    """A weight that is quantized already is from now on as others: FLOAT, and to be quantized anew."""
    if (one := stored(weight)) is not None:
        weight.const_value = RowsTensor(str(one.name), torch.float32, shape_of(weight), one.open)


def stored(weight: ir.Value) -> StoredTensor | None:
    """What is known of a weight that is quantized already; None of others."""
    return weight.const_value if isinstance(weight.const_value, StoredTensor) else None
