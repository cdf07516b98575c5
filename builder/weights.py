"""A checkpoint's tensors as initializers that are read when somebody asks for their values, and not before."""

from collections.abc import Iterator

import onnx_ir as ir
import torch

from enginewright.builder.checkpoint.quantized import Format
from enginewright.builder.tensors import Read, Tensors
from enginewright.errors import UnsupportedModelError
from enginewright.passes.quant.method import forget_format, stored
from enginewright.passes.weights import RowReader, RowsTensor, shape_of

STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NAMES_SHOWN = 5


class Weights:
    """Hands out initializers: one a tensor, the same one every time.

    Values are rounded to bfloat16, the precision that engines are built from, and presented as FLOAT; weights that are
    stored quantized are presented as FLOAT, too, and keep their form. Nothing that was read is kept.
    """

    def __init__(self, tensors: Tensors, format: Format | None = None) -> None:
        """format: of the weights that are stored quantized, where some are; it has the same `tensors`."""
        self.tensors = tensors
        self._format = format
        self._values: dict[str, ir.Value] = {}
        self._ignored: set[str] = set()
        self._any_quantized = False

    @property
    def reads(self) -> int:
        """How often a tensor was read."""
        return self.tensors.reads

    def tensor(self, name: str, shape: tuple[int, ...], offset: float = 0.0) -> ir.Value:
        """The initializer of a tensor; `offset` is added to its values, in fp32 after the rounding.

        Raises:
            EngineError: there is no such tensor, or it is of another shape.
            UnsupportedModelError: it is stored in a form that is not implemented.
        """
        if name not in self._values:
            quantized = self._format.weight(name, shape) if self._format and len(shape) == 2 else None
            self._any_quantized |= quantized is not None
            self._values[name] = (quantized or self._plain(name, shape, offset)).initializer()
        return self._values[name]

    def table(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        """As `tensor`, of a weight whose rows are looked up. In formats that no kernel looks up it is restored."""
        value = self.tensor(name, shape)
        already = stored(value)
        if self._format and already and already.stored_as.tables != already.stored_as:
            self._format.note("an embedding, which no kernel looks up in its format, is restored to bfloat16")
            forget_format(value)
        return value

    def ignore(self, suffix: str) -> None:
        """Tensors whose name ends in `suffix` may be left over."""
        self._ignored.update(name for name in self.tensors.names if name.endswith(suffix))

    def __iter__(self) -> Iterator[ir.Value]:
        """The initializers handed out, in the order of their first use."""
        return iter(self._values.values())

    def refuse_left_over(self) -> None:
        """Raise an error that names the tensors that the model did not ask for."""
        left_over = sorted(self.tensors.names - self.tensors.taken - self._ignored)
        if self._format:
            left_over = [name for name in left_over if not self._format.means_nothing(name)]
        if left_over:
            more = f" and {len(left_over) - NAMES_SHOWN} more" if len(left_over) > NAMES_SHOWN else ""
            raise UnsupportedModelError(
                f"{len(left_over)} of the checkpoint's {len(self.tensors.names)} tensors are not used",
                f"{', '.join(left_over[:NAMES_SHOWN])}{more}",
                "The model has parts that are not implemented, or its config.json does not say that they are there.",
            )

    def note_none_quantized(self) -> None:
        """Tell people of a checkpoint whose config names a format that none of its weights has."""
        if self._format is None or self._any_quantized:
            return
        for value in self._values.values():
            if len(shape_of(value)) == 2:
                self._format.note("not quantized, though the checkpoint's quantization_config names a format")

    def _plain(self, name: str, shape: tuple[int, ...], offset: float) -> RowsTensor:
        read = self.tensors.take(name, shape, dtypes=STORED_DTYPES)
        return RowsTensor(name, torch.float32, shape, lambda: _rounded(read, offset))


def _rounded(read: Read, offset: float) -> RowReader:
    values = read()

    def rows(begin: int, end: int) -> torch.Tensor:
        rounded = values[begin:end].to(torch.bfloat16).to(torch.float32)
        return rounded + offset if offset else rounded

    return rows
