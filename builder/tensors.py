"""A checkpoint's tensors as the builder asks for them: checked when they are asked for, read when they are needed."""

from collections.abc import Callable, Collection, KeysView, Mapping

import torch

from enginewright.builder.checkpoint.base import TensorInfo, TensorSource
from enginewright.errors import EngineError, UnsupportedModelError

Read = Callable[[], torch.Tensor]


class Tensors:
    """reads: how often a tensor was read. taken: the names of those that somebody asked for."""

    def __init__(self, checkpoint: TensorSource) -> None:
        self.reads = 0
        self.taken: set[str] = set()
        self._checkpoint = checkpoint
        self._tensors: Mapping[str, TensorInfo] = checkpoint.tensors

    @property
    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def find(self, name: str) -> TensorInfo | None:
        return self._tensors.get(name)

    def take(self, name: str, *shapes: tuple[int, ...], dtypes: Collection[torch.dtype]) -> Read:
        """What reads a tensor, which is of one of these shapes and dtypes.

        Raises:
            EngineError: there is no such tensor, or it is of another shape.
            UnsupportedModelError: it is of another dtype.
        """
        info = self._tensors.get(name)
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        if info is None:
            raise EngineError(
                f"the checkpoint has no tensor {name}",
                f"its config.json asks for it, with shape {wanted}",
                "Is the download complete, and is config.json of the same model?",
            )
        if info.shape not in shapes:
            raise EngineError(
                f"tensor {name} has the wrong shape", f"{list(info.shape)}, but config.json asks for {wanted}"
            )
        if info.dtype not in dtypes:
            raise UnsupportedModelError(
                f"tensor {name} is stored as {short(info.dtype)}",
                f"in this place {' or '.join(map(short, dtypes))} can be read",
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
    """Stands for the tensors of a checkpoint that is not there yet: what is asked for exists, and cannot be read."""

    def __init__(self) -> None:
        self.reads = 0
        self.taken: set[str] = set()
        self._tensors = {}

    def take(self, name: str, *shapes: tuple[int, ...], dtypes: Collection[torch.dtype]) -> Read:
        del shapes, dtypes

        def read() -> torch.Tensor:
            raise AssertionError(f"{name} is not there yet")

        return read


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
