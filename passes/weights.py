"""Weights that are computed when they are read: fused, rounded, quantized.

They are read by rows, so that no more of a weight is in memory than a reader needs at once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from threading import Lock

import onnx_ir as ir
import torch

from enginewright.dtypes import DTYPES
from enginewright.passes.origin import Origin, stacked_origin

ONNX_DTYPES: Mapping[torch.dtype, ir.DataType] = {
    getattr(torch, dtype.torch): ir.DataType[dtype.onnx] for dtype in DTYPES.values()
}

KEPT_OPEN = 4  # open readers of a stacked weight's parts: Q, K and V, or gate and up, are read side by side

RowReader = Callable[[int, int], torch.Tensor]  # (begin, end) → these rows, along the first axis


class RowsTensor(ir.LazyTensor):
    """A tensor that can be read by rows, through readers that `open` returns; a reader frees its memory at its end.

    Attributes:
        open: opens a reader.
        origin: its numbers in the checkpoint, before they were rounded to this dtype; None if that is not known.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        open: Callable[[], RowReader],
        origin: Origin | None = None,
    ) -> None:
        super().__init__(self._whole, ONNX_DTYPES[dtype], ir.Shape(shape), cache=False, name=name)
        self.open, self.origin = open, origin
        self._of = (dtype, shape)

    def _whole(self) -> ir.TensorProtocol:
        dtype, shape = self._of
        values = self.open()(0, shape[0])
        assert values.dtype == dtype and tuple(values.shape) == shape, f"{self.name}: {values.dtype} {values.shape}"
        return ir.tensor_adapters.TorchTensor(values, name=self.name)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Number type, as torch names it."""
        return self._of[0]

    def set_origin(self, origin: Origin | None) -> None:
        """Says where the numbers of a new tensor come from."""
        self.origin = origin

    def initializer(self) -> ir.Value:
        """Makes a graph's initializer of the tensor."""
        return ir.Value(name=self.name, type=ir.TensorType(self.dtype), shape=self.shape, const_value=self)


def as_torch(tensor: ir.TensorProtocol) -> torch.Tensor:
    """Returns the values of a tensor; a lazy one is read now."""
    while isinstance(tensor, ir.LazyTensor):
        tensor = tensor.raw()  # calls the function; its cache is never used
    if isinstance(tensor, ir.tensor_adapters.TorchTensor):
        raw: torch.Tensor = tensor.raw
        return raw
    return torch.from_numpy(tensor.numpy().copy())


def read(value: ir.Value) -> torch.Tensor:
    """Returns the values of an initializer."""
    assert value.const_value is not None, f"{value.name} is not an initializer"
    return as_torch(value.const_value)


def origin_of(value: ir.Value) -> Origin | None:
    """Returns the origin of an initializer's numbers; None if it is not known."""
    return value.const_value.origin if isinstance(value.const_value, RowsTensor) else None


def open_rows(value: ir.Value) -> RowReader:
    """Opens an initializer for reading by rows."""
    if isinstance(value.const_value, RowsTensor):
        return value.const_value.open()
    values = read(value)
    return lambda begin, end: values[begin:end]


def scale(value: ir.Value, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> None:
    """Multiplies an initializer's rows or columns when it is read; it stays the same initializer.

    Args:
        value: the initializer, [N, K] or [N].
        rows: factors of rows, [N].
        columns: factors of columns, [matrices, K], one row for each of the matrices that the weight consists of.
    """
    before = ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)

    def open() -> RowReader:
        reader = open_rows(before)

        def scaled(begin: int, end: int) -> torch.Tensor:
            values = reader(begin, end)
            if rows is not None:
                values = values * rows[begin:end].view(-1, *[1] * (values.dim() - 1))
            if columns is not None:
                values = values * columns[torch.arange(begin, end) * len(columns) // shape_of(value)[0]]
            return values

        return scaled

    origin = origin_of(value)
    if origin is not None:
        of_all = columns[0] if columns is not None and len(columns) == 1 else columns
        origin = origin.scaled(rows, of_all)
    value.const_value = RowsTensor(str(value.name), torch.float32, shape_of(value), open, origin)


def stacked(name: str, parts: Sequence[ir.Value]) -> ir.Value:
    """Stacks initializers of one dtype along the rows.

    Args:
        name: name of the result.
        parts: the initializers.
    """
    sizes = [shape_of(part)[0] for part in parts]

    starts = [0, *accumulate(sizes)]

    def open() -> RowReader:
        readers = _OpenReaders(parts)

        def rows(begin: int, end: int) -> torch.Tensor:
            pieces = []
            for part in range(bisect_right(starts, begin) - 1, bisect_left(starts, end)):
                start, size = starts[part], sizes[part]
                pieces.append(readers.of(part)(max(begin - start, 0), min(end - start, size)))
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

        return rows

    dtype = next(dtype for dtype, onnx_dtype in ONNX_DTYPES.items() if onnx_dtype == parts[0].dtype)
    origin = stacked_origin([origin_of(part) for part in parts])
    return RowsTensor(name, dtype, (sum(sizes), *shape_of(parts[0])[1:]), open, origin).initializer()


def picked(name: str, source: ir.Value, rows: Sequence[int] | torch.Tensor) -> ir.Value:
    """Selects rows of an initializer, in this order.

    Rows that are next to each other here should be close in the source: the rows between them are read, too.

    Args:
        name: name of the result.
        source: the initializer.
        rows: indices of its rows.
    """
    index = torch.as_tensor(rows, dtype=torch.int64)

    def open() -> RowReader:
        reader = open_rows(source)

        def some(begin: int, end: int) -> torch.Tensor:
            wanted = index[begin:end]
            first, last = int(wanted.min()), int(wanted.max())
            near = reader(first, last + 1)
            return near if bool((wanted.diff() == 1).all()) else near[wanted - first]

        return some

    dtype = next(dtype for dtype, onnx_dtype in ONNX_DTYPES.items() if onnx_dtype == source.dtype)
    origin = origin.picked(index) if (origin := origin_of(source)) else None
    return RowsTensor(name, dtype, (len(index), *shape_of(source)[1:]), open, origin).initializer()


def transposed_by_head(name: str, value: ir.Value, heads: int) -> ir.Value:
    """Transposes each head's part of a weight: FLOAT [heads · N, K] → [heads · K, N].

    Args:
        name: name of the result.
        value: the weight.
        heads: number of heads.
    """
    (height, columns), rows_each = shape_of(value), shape_of(value)[0] // heads

    def open() -> RowReader:
        reader = open_rows(value)

        def rows(begin: int, end: int) -> torch.Tensor:
            pieces = []
            for head in range(begin // columns, -(-end // columns)):
                transposed = reader(head * rows_each, (head + 1) * rows_each).t()
                pieces.append(transposed[max(begin - head * columns, 0) : end - head * columns])
            return torch.cat(pieces)

        return rows

    origin = source.transposed(heads) if (source := origin_of(value)) else None
    return RowsTensor(name, torch.float32, (heads * columns, height // heads), open, origin).initializer()


class _OpenReaders:
    """Readers of values, of which the last few used stay open; closing one frees its tensors."""

    def __init__(self, values: Sequence[ir.Value]) -> None:
        self._values = values
        self._readers: dict[int, RowReader] = {}
        self._lock = Lock()  # pieces of a weight are read by several threads

    def of(self, index: int) -> RowReader:
        with self._lock:
            reader = self._readers.pop(index, None) or open_rows(self._values[index])
            self._readers[index] = reader
            if len(self._readers) > KEPT_OPEN:
                del self._readers[next(iter(self._readers))]
            return reader


Output = tuple[str, torch.dtype, tuple[int, ...]]  # name, dtype, shape


def converted(
    source: ir.Value,
    convert: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    outputs: Sequence[Output],
    block_rows: int = 1,
) -> list[ir.Value]:
    """Makes initializers from a weight: its values, then scales if there are any.

    Args:
        source: the weight.
        convert: some rows of the weight → the same rows of each output. A row must not depend on others, except those
            of its block of `block_rows`, which are always passed with it.
        outputs: values first. After all their rows are read, the others are ready: the weight is read once.
        block_rows: rows of a block.
    """
    conversion = _Conversion(source, convert, outputs, block_rows)
    tensors = [
        RowsTensor(*output, lambda index=index: conversion.open(index))  # type: ignore[misc]
        for index, output in enumerate(outputs)
    ]
    tensors[0].set_origin(origin_of(source))
    return [tensor.initializer() for tensor in tensors]


class _Conversion:
    def __init__(
        self,
        source: ir.Value,
        convert: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        outputs: Sequence[Output],
        block_rows: int,
    ) -> None:
        self._source, self._convert, self._outputs, self._block_rows = source, convert, outputs, block_rows
        self._ready: dict[int, torch.Tensor] = {}  # outputs that were computed with the values, until they are read

    def open(self, index: int) -> RowReader:
        if index in self._ready:
            values = self._ready.pop(index)
            return lambda begin, end: values[begin:end]
        reader = open_rows(self._source)
        if index > 0:
            return lambda begin, end: self._of_rows(reader, begin, end)[index]
        others = [torch.empty(shape, dtype=dtype) for _, dtype, shape in self._outputs[1:]]
        missing = torch.ones(self._outputs[0][2][0], dtype=torch.bool)

        def rows(begin: int, end: int) -> torch.Tensor:
            values, *more = self._of_rows(reader, begin, end)
            for other, part in zip(others, more, strict=True):
                other[begin:end] = part
            missing[begin:end] = False
            if not missing.any():
                self._ready = dict(enumerate(others, start=1))
            return values

        return rows

    def _of_rows(self, reader: RowReader, begin: int, end: int) -> list[torch.Tensor]:
        count, start = self._outputs[0][2][0], begin - begin % self._block_rows
        parts = self._convert(reader(start, min(end + -end % self._block_rows, count)))
        return [part[begin - start : end - start] for part in parts]


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Returns the shape of an initializer."""
    assert value.shape is not None, value.name
    return tuple(int(size) for size in value.shape.numpy())
