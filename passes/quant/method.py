"""The base of quantization methods: a format of weights, the ops that read it, and the choice of its numbers.

A method fixes the precision of activations, too (docs/design.md): a Cast or a QuantizeRows is before each GEMM.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir
import torch

from enginewright.errors import EngineError, UsageError
from enginewright.passes.origin import Origin
from enginewright.passes.pass_manager import Pass
from enginewright.passes.weights import (
    Output,
    RowReader,
    RowsTensor,
    converted,
    open_rows,
    origin_of,
    picked,
    shape_of,
    stacked,
)
from enginewright.plugins.plugin import CODES
from enginewright.plugins.target import CPU_TARGET, Activations, Target
from enginewright.quant_methods import MethodInfo

MAX_GROUP_SIZE = 512  # columns of a quantization group, where a row has several


@dataclass(frozen=True)
class Calibration:
    """Inputs of methods that observe activations."""

    texts: Sequence[Sequence[int]] = ()  # token ids
    threads: int = 1  # threads that compute texts; results do not depend on their number
    # folder where chosen codes wait until they are packed; None is the system's folder for temporary files
    folder: Path | None = None
    recovery_texts: Sequence[Sequence[int]] = ()  # token ids of the texts that `Recover` trains on


def in_groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """Splits columns into quantization groups: [..., K] → [..., G, group], with zeros after the last column.

    Args:
        x: the matrix.
        group: columns of a group; 0 is all of K.
    """
    length = min(group, x.shape[-1]) or x.shape[-1]
    return torch.unflatten(torch.nn.functional.pad(x, (0, -x.shape[-1] % length)), -1, (-1, length))


def round_to_codes(x: torch.Tensor, dtype: ir.DataType) -> torch.Tensor:
    """Rounds numbers to the nearest codes, ties to even.

    Args:
        x: numbers in the codes' range, FLOAT; overwritten.
        dtype: dtype of the codes, one of `CODES`.

    Returns:
        The codes as FLOAT.
    """
    codes: torch.dtype = getattr(torch, CODES[dtype].torch)
    return x.to(codes).float() if codes.is_floating_point else x.round_()


def check_finite(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Checks that a weight holds no NaN and no infinity.

    Args:
        weight: the weight, or amax values of it.
        name: its name, for the error.

    Returns:
        The weight itself.

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
        """Method of weights with a row for each token: embeddings, and the head, which may share a table with one."""
        return self

    @property
    def head(self) -> "QuantConfig":
        """Method of a head that shares its table with no embedding."""
        return self.tables

    def __post_init__(self) -> None:
        group = self.activation_group
        if group % 32 or not 0 <= group <= MAX_GROUP_SIZE:
            raise UsageError(
                f"--group-size {group} is not possible",
                "kernels need groups of whole cache lines",
                f"Use a multiple of 32 up to {MAX_GROUP_SIZE}, or 0 for whole rows.",
            )

    @property
    def activation_group(self) -> int:
        """Columns of INT8 activations that share a scale; 0 is a whole row."""
        return 0

    def precision(self, target: Target) -> Activations:
        """Returns the precision of GEMM inputs on a target."""
        return Activations()

    def activation_amax(self, target: Target) -> tuple[float, ...]:
        """Returns the fixed amax of each group of INT8 activations; () if each token has its own."""
        return ()

    @abstractmethod
    def outputs(self, name: str, rows: int, columns: int) -> Sequence[Output]:
        """Lists the tensors that replace a weight: its values first, then scales if there are any.

        Args:
            name: name of the weight.
            rows: its rows.
            columns: its columns.

        Returns:
            Name, dtype and shape of each tensor.
        """

    @abstractmethod
    def quantize(self, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        """Quantizes some rows of a weight; a row does not depend on others.

        Args:
            rows: the rows, FLOAT [n, K].
            name: name of the weight, for errors.

        Returns:
            The same rows of each of `outputs`.

        Raises:
            EngineError: the format cannot represent the rows.
        """

    @abstractmethod
    def restore(self, *parts: torch.Tensor) -> torch.Tensor:
        """Restores FLOAT [n, K] from some rows of each of `outputs`."""

    def round_activations(self, x: torch.Tensor, target: Target = CPU_TARGET) -> torch.Tensor:
        """Rounds activations as a GEMM on a target reads them.

        Args:
            x: activations, FLOAT [..., K].
            target: the target.

        Returns:
            The rounded activations, FLOAT [..., K].
        """
        dtype, group = self.precision(target)
        if dtype not in CODES:
            return x.to(torch.bfloat16).float()
        groups, max_code = in_groups(x, group), CODES[dtype].largest
        scale = self.amax_of(groups, target) / max_code
        codes = (groups / torch.where(scale > 0, scale, 1.0)).clamp_(-max_code, max_code)
        return round_to_codes(codes, dtype).mul_(scale).flatten(-2)[..., : x.shape[-1]]

    def amax_of(self, groups: torch.Tensor, target: Target) -> torch.Tensor:
        """Returns the amax that scales of activations are computed from.

        Args:
            groups: activations, [..., G, group].
            target: the target.

        Returns:
            The amax, which broadcasts over `groups`.
        """
        return groups.abs().amax(-1, keepdim=True)

    def prepare(self, calibration: Calibration) -> Sequence[Pass]:
        """Lists the passes over the dense, fused graph, before Quantize, that make this method's choices."""
        return ()

    def plan_without_data(self) -> Sequence[Pass]:
        """Lists passes that replace `prepare` if only a plan is needed: they read no weights and see no texts."""
        return ()

    @property
    def without_data(self) -> "QuantConfig":
        """The method for layers that no text streams through: the same formats, chosen by `plan_without_data`."""
        return self

    def weights(self, weight: ir.Value) -> Sequence[ir.Value]:
        """Makes the initializers that replace a weight [N, K]: one for each of `outputs`."""
        name = str(weight.name)
        return converted(weight, lambda rows: self.quantize(rows, name), self.outputs(name, *shape_of(weight)))

    @abstractmethod
    def gemm(self, x: Sequence[ir.Value], weights: Sequence[ir.Value], bias: ir.Value | None) -> ir.Node:
        """Makes the node that multiplies activations with a weight.

        Args:
            x: activations [..., K] in some target's precision, and their scales [..., G] if those are codes.
            weights: one initializer for each of `outputs`.
            bias: the layer's bias, [N], or None.

        Returns:
            A node whose output is FLOAT [..., N].
        """

    @abstractmethod
    def embed(self, tokens: ir.Value, weights: Sequence[ir.Value], scale: float) -> ir.Node:
        """Makes the node that looks up rows of an embedding.

        Args:
            tokens: token ids.
            weights: one initializer for each of `outputs`.
            scale: factor on the rows.

        Returns:
            A node whose output is FLOAT [..., H].
        """


@dataclass(frozen=True)
class LayerMethod(QuantConfig):
    """A method of linear layers alone; `tables` is another method, for embeddings."""

    # True if a head that shares its table with no embedding is quantized as a layer
    quantize_lm_head: bool = field(default=False, kw_only=True)

    @property
    def head(self) -> QuantConfig:
        """Method of a head that shares its table with no embedding."""
        return self if self.quantize_lm_head else self.tables

    def embed(self, tokens: ir.Value, weights: Sequence[ir.Value], scale: float) -> ir.Node:
        """Makes the node that looks up rows of an embedding, which `tables` stores."""
        return self.tables.embed(tokens, weights, scale)


class StoredTensor(RowsTensor):
    """A weight that is already quantized: by its checkpoint, or by a pass that chose its codes.

    It reads as FLOAT. Quantize takes its parts as they are, and the GEMM of its format.
    """

    def __init__(
        self,
        name: str,
        stored_as: QuantConfig,
        parts: Sequence[ir.Value],
        source: ir.TensorProtocol | None = None,
    ) -> None:
        """Wraps the parts of a weight.

        Args:
            name: name of the weight.
            stored_as: its format.
            parts: initializers, as `stored_as.weights` returns them.
            source: FLOAT weight for which a pass chose the codes; None if the checkpoint has the codes alone.
        """
        self.stored_as, self.parts, self.source = stored_as, tuple(parts), source
        super().__init__(name, torch.float32, shape_of(parts[0]), self._open, origin_of(parts[0]))

    def set_origin(self, origin: Origin | None) -> None:
        """Says where the numbers of a new tensor come from, and so those of its values."""
        super().set_origin(origin)
        values = self.parts[0].const_value
        assert isinstance(values, RowsTensor)
        values.set_origin(origin)

    def _open(self) -> RowReader:
        readers = [open_rows(part) for part in self.parts]
        return lambda begin, end: self.stored_as.restore(*(rows(begin, end) for rows in readers))


def stack_weights(name: str, weights: Sequence[ir.Value]) -> ir.Value | str:
    """Stacks weights along the rows, in their format if they are already quantized.

    Args:
        name: name of the result.
        weights: the weights.

    Returns:
        The stacked weight, or the reason why it cannot be, a sentence.
    """
    existing = [one for weight in weights if (one := stored(weight))]
    if not existing:
        return stacked(name, weights)
    config = existing[0].stored_as
    if not stored_alike(weights):
        names = " and ".join(str(weight.name) for weight in weights)
        return f"{names} are stored in different formats."
    outputs = config.outputs(name, *shape_of(weights[0]))
    of_weights = zip(outputs, *(one.parts for one in existing), strict=True)
    parts = [stacked(output[0], parts) for output, *parts in of_weights]
    return StoredTensor(name, config, parts).initializer()


def pick_weight(name: str, weight: ir.Value, rows: Sequence[int] | torch.Tensor) -> ir.Value:
    """Selects rows of a weight, in this order, and in its format if it is already quantized.

    Args:
        name: name of the result.
        weight: the weight.
        rows: indices of its rows.
    """
    existing = stored(weight)
    if existing is None:
        return picked(name, weight, rows)
    outputs = existing.stored_as.outputs(name, len(rows), shape_of(weight)[1])
    parts = [picked(output[0], part, rows) for output, part in zip(outputs, existing.parts, strict=True)]
    return StoredTensor(name, existing.stored_as, parts).initializer()


def stored_alike(weights: Sequence[ir.Value]) -> bool:
    """Checks if all weights are already quantized in one format, or none of them is quantized."""
    formats = [one.stored_as if (one := stored(weight)) else None for weight in weights]
    return all(format == formats[0] for format in formats)


def forget_format(weight: ir.Value) -> None:
    """Makes an already quantized weight FLOAT, to be quantized again like others."""
    if (one := stored(weight)) is not None:
        weight.const_value = RowsTensor(str(one.name), torch.float32, shape_of(weight), one.open, one.origin)


def stored(weight: ir.Value) -> StoredTensor | None:
    """Returns a weight's quantized tensor; None if it is not quantized yet."""
    return weight.const_value if isinstance(weight.const_value, StoredTensor) else None
