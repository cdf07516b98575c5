"""A checkpoint's tensors as initializers that are read when somebody asks for their values, and not before."""

from collections.abc import Iterator

import onnx_ir as ir
import torch

from enginewright.builder.checkpoint.base import Checkpoint
from enginewright.errors import EngineError, UnsupportedModelError
from enginewright.passes.weights import RowReader, RowsTensor

STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NAMES_SHOWN = 5


class Weights:
    """Hands out initializers: one a tensor, the same one every time.

    Values are rounded to bfloat16, the precision that engines are built from, and presented as FLOAT. Nothing
    that was read is kept. `reads` counts how often a tensor was read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.reads = 0
        self._checkpoint = checkpoint
        self._tensors = checkpoint.tensors
        self._values: dict[str, ir.Value] = {}
        self._ignored: set[str] = set()

    def tensor(self, name: str, shape: tuple[int, ...], offset: float = 0.0) -> ir.Value:
        """The initializer of a tensor; `offset` is added to its values, in fp32 after the rounding.

        Raises:
            EngineError: there is no such tensor, or it is of another shape.
            UnsupportedModelError: it is stored in a quantized form.
        """
        if name not in self._values:
            self._check(name, shape)
            data = RowsTensor(name, torch.float32, shape, lambda: self._open(name, shape, offset))
            self._values[name] = data.initializer()
        return self._values[name]

    def ignore(self, suffix: str) -> None:
        """Tensors whose name ends in `suffix` may be left over."""
        self._ignored.update(name for name in self._tensors if name.endswith(suffix))

    def __iter__(self) -> Iterator[ir.Value]:
        """The initializers handed out, in the order of their first use."""
        return iter(self._values.values())

    def refuse_left_over(self) -> None:
        """Raise an error that names the tensors that the model did not ask for."""
        left_over = sorted(self._tensors.keys() - self._values.keys() - self._ignored)
        if left_over:
            more = f" and {len(left_over) - NAMES_SHOWN} more" if len(left_over) > NAMES_SHOWN else ""
            raise UnsupportedModelError(
                f"{len(left_over)} of the checkpoint's {len(self._tensors)} tensors are not used",
                f"{', '.join(left_over[:NAMES_SHOWN])}{more}",
                "The model has parts that are not implemented, or its config.json does not say that they are there.",
            )

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        info = self._tensors.get(name)
        if info is None:
            raise EngineError(
                f"the checkpoint has no tensor {name}",
                f"its config.json asks for it, with shape {list(shape)}",
                "Is the download complete, and is config.json of the same model?",
            )
        if info.shape != shape:
            raise EngineError(
                f"tensor {name} has the wrong shape", f"{list(info.shape)}, but config.json asks for {list(shape)}"
            )
        if info.dtype not in STORED_DTYPES:
            raise UnsupportedModelError(
                f"tensor {name} is stored as {str(info.dtype).removeprefix('torch.')}",
                "checkpoints that are already quantized are not implemented",
                "Build from the original checkpoint, and quantize with --quant.",
            )

    def _open(self, name: str, shape: tuple[int, ...], offset: float) -> RowReader:
        self.reads += 1
        values = self._checkpoint.read(name)
        if tuple(values.shape) != shape:
            raise EngineError(f"tensor {name} was read with shape {list(values.shape)}", f"promised was {list(shape)}")

        def rows(begin: int, end: int) -> torch.Tensor:
            rounded = values[begin:end].to(torch.bfloat16).to(torch.float32)
            return rounded + offset if offset else rounded

        return rows
