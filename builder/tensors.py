"""A checkpoint's tensors for the builder: checked when they are requested, read when they are needed."""

from collections.abc import Callable, Collection, KeysView, Mapping

import torch

from enginewright.builder.checkpoint.base import TensorInfo, TensorSource
from enginewright.errors import EngineError, UnsupportedModelError

Read = Callable[[], torch.Tensor]


class Tensors:
    """Tensors of a checkpoint.

    Attributes:
        reads: number of tensor reads.
        taken: names of requested tensors.
    """

    def __init__(self, checkpoint: TensorSource) -> None:
        self.reads = 0
        self.taken: set[str] = set()
        self._checkpoint = checkpoint
        self._tensors: Mapping[str, TensorInfo] = checkpoint.tensors

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def find(self, name: str) -> TensorInfo | None:
        """Returns facts about a tensor; None if there is none of that name."""
        return self._tensors.get(name)

    def take(self, name: str, *shapes: tuple[int, ...], dtypes: Collection[torch.dtype]) -> Read:
        """Requests a tensor.

        Args:
            name: name of the tensor.
            shapes: shapes that it may have.
            dtypes: number types that it may have.

        Returns:
            A function that reads it.

        Raises:
            EngineError: there is no such tensor, or it has another shape.
            UnsupportedModelError: it has another number type.
        """
        info = self._tensors.get(name)
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        if info is None:
            raise EngineError(
                f"the checkpoint has no tensor {name}",
                f"its config.json requires it, with shape {wanted}",
                "Is the download complete, and is config.json from the same model?",
            )
        if info.shape not in shapes:
            raise EngineError(
                f"tensor {name} has the wrong shape", f"{list(info.shape)}, but config.json requires {wanted}"
            )
        if info.dtype not in dtypes:
            raise UnsupportedModelError(
                f"tensor {name} is stored as {short(info.dtype)}",
                f"here {' or '.join(map(short, dtypes))} can be read",
                "Does config.json have the quantization_config that belongs to these weights?",
            )
        self.taken.add(name)
        return lambda: self._read(name, info.shape)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.reads += 1
        values = self._checkpoint.read(name)
        if tuple(values.shape) != shape:
            raise EngineError(
                f"tensor {name} was read with shape {list(values.shape)}", f"it was expected as {list(shape)}"
            )
        return values


class AssumedTensors(Tensors):
    """Tensors of a checkpoint that does not exist yet: every request succeeds, and nothing can be read."""

    def __init__(self) -> None:
        self.reads = 0
        self.taken: set[str] = set()
        self._tensors = {}

    def take(self, name: str, *shapes: tuple[int, ...], dtypes: Collection[torch.dtype]) -> Read:
        """Accepts any request.

        Args:
            name: name of the tensor.
            shapes: not used.
            dtypes: not used.
        """
        del shapes, dtypes

        def read() -> torch.Tensor:
            raise AssertionError(f"{name} does not exist yet")

        return read


def short(dtype: torch.dtype) -> str:
    """Formats a number type without `torch.`."""
    return str(dtype).removeprefix("torch.")
