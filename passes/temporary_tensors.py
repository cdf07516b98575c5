"""Stores computed weights on disk until they are packed, so that memory holds none of them."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir
import torch

from enginewright.errors import EngineError
from enginewright.passes.weights import Output, RowReader, RowsTensor


class TemporaryTensors:
    """A temporary file without a name, which is deleted when its last reader is closed, or the process ends."""

    def __init__(self, folder: Path | None = None) -> None:
        """Creates the file.

        Args:
            folder: a folder on a disk with enough space; None is the system's folder for temporary files.

        Raises:
            EngineError: no file can be created there.
        """
        self._folder = folder or Path(tempfile.gettempdir())
        with self._writing():
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (its readers keep it open)

    def add(self, output: Output, values: torch.Tensor) -> ir.Value:
        """Writes values to the file and returns an initializer that reads them from there.

        Args:
            output: name, dtype and shape of the initializer.
            values: its values.

        Raises:
            EngineError: the disk is full.
        """
        name, dtype, shape = output
        assert (values.dtype, tuple(values.shape)) == (dtype, shape), f"{name}: {values.dtype} {tuple(values.shape)}"
        start = self._file.seek(0, os.SEEK_END)
        with self._writing():
            self._file.write(values.contiguous().view(torch.uint8).numpy().data)
            self._file.flush()
        row_bytes = values[0].numel() * values.element_size()

        def rows(begin: int, end: int) -> torch.Tensor:
            data = bytearray(os.pread(self._file.fileno(), (end - begin) * row_bytes, start + begin * row_bytes))
            return torch.frombuffer(data, dtype=dtype).view(end - begin, *shape[1:])

        def open() -> RowReader:
            return rows

        return RowsTensor(name, dtype, shape, open).initializer()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise EngineError(
                f"weights cannot be stored in {self._folder}", why, "Make space there, and build again."
            ) from error
