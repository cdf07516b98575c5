"""Errors of each linear layer on its source's activations: they show which layers a format hurts, and how much."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import onnx_ir as ir
import torch

from enginewright.builder.lower import PackedForm, unpack_rows
from enginewright.manifest import ROWS
from enginewright.passes.graph import LinearLayer
from enginewright.passes.quant import QuantConfig
from enginewright.passes.quant.method import stored
from enginewright.passes.quant.quantize import table_methods
from enginewright.passes.streaming import stream
from enginewright.passes.weights import RowReader, open_rows, shape_of
from enginewright.plugins.target import CPU_TARGET, Target
from enginewright.runtime.commands.quality import LayerError, rounded
from enginewright.runtime.engine import Engine

PIECE_ELEMENTS = 1 << 20  # elements of a weight that a thread compares at once
# Minimum of an error's divisor, as a share of the median: tokens with a tiny output say little about a layer.
FLOOR = 0.1
SMALLEST = 1e-30  # smallest divisor of an error


class FileWeights:
    """The weights of an engine as its GEMMs read them."""

    def __init__(self, engine: Engine, sections: Mapping[str, str]) -> None:
        """Keeps the engine.

        Args:
            engine: the engine, open.
            sections: name in the graph → name in the plan.
        """
        self._engine, self._sections = engine, sections

    def rows(self, weight: ir.Value, method: QuantConfig) -> RowReader:
        """Opens a weight for reading by rows, in FLOAT.

        Args:
            weight: the weight.
            method: its format.
        """
        readers = [unpack_rows(data, form) for data, form in self._parts(weight, method)]
        return lambda begin, end: method.restore(*(rows(begin, end) for rows in readers))

    def nbytes(self, weight: ir.Value, method: QuantConfig) -> int:
        """Computes the bytes of a weight in the file.

        Args:
            weight: the weight.
            method: its format.
        """
        return sum(form.nbytes for _, form in self._parts(weight, method))

    def _parts(self, weight: ir.Value, method: QuantConfig) -> list[tuple[memoryview, PackedForm]]:
        parts = []
        for name, _, _ in method.outputs(str(weight.name), *shape_of(weight)):
            data, form = self._engine.weight(self._sections[name])
            assert form.dtype is not None and form.shape is not None and form.layout is not None
            parts.append((data, PackedForm(form.dtype, form.shape, form.layout)))
        return parts


def layer_errors(
    dense: ir.Model,
    quant: QuantConfig,
    weights: FileWeights,
    texts: Sequence[Sequence[int]],
    threads: int = 1,
    target: Target = CPU_TARGET,
    done: Callable[[int], None] = lambda elements: None,
) -> tuple[LayerError, ...]:
    """Measures the errors of all linear layers and tables; the result does not depend on the number of threads.

    Args:
        dense: the graph before it was quantized; weights whose codes were chosen are restored in it.
        quant: the method.
        weights: weights of the engine.
        texts: token ids.
        threads: number of threads.
        target: the target.
        done: called with the number of a layer's weights when its error is known; not for tables.

    Returns:
        The errors, the worst first.
    """
    formats = {
        weight: existing.stored_as for weight in dense.graph.initializers.values() if (existing := stored(weight))
    }
    for weight in formats:
        existing = stored(weight)
        if existing is not None and existing.source is not None:
            weight.const_value = existing.source
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = _Errors(weights, quant, formats, target, pool, done)
        stream(dense, texts, found.of_linear, threads)
        for table, method in table_methods(dense, quant).items():
            found.of_table(table, formats.get(table, method))
    return tuple(sorted(found.layers, key=_badness, reverse=True))


def _badness(layer: LayerError) -> tuple[bool, float]:
    return layer.error is None, layer.error or 0.0


class _Errors:
    def __init__(
        self,
        weights: FileWeights,
        quant: QuantConfig,
        formats: Mapping[ir.Value, QuantConfig],
        target: Target,
        pool: ThreadPoolExecutor,
        done: Callable[[int], None],
    ) -> None:
        """formats: weight → its format, if it has one of its own."""
        self.layers: list[LayerError] = []
        self._done = done
        self._weights, self._quant, self._formats, self._target, self._pool = weights, quant, formats, target, pool

    def of_linear(self, linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
        """Measures a linear layer.

        Args:
            linear: the layer.
            inputs: input of the layer in each text, [tokens, K].
        """
        weight, x = linear.weight, torch.cat(list(inputs))
        method = self._formats.get(weight, self._quant)
        source, file = open_rows(weight), self._weights.rows(weight, method)
        rows, of_matrices = shape_of(weight)[0] // linear.experts, []
        for matrix in range(linear.experts):
            own = torch.cat(linear.rows_of(matrix, inputs)) if linear.starts else x
            read = method.round_activations(own, self._target)
            compare = partial(_compare_products, own, read, source, file)
            pieces = self._pool.map(compare, *_pieces(weight, matrix * rows, (matrix + 1) * rows))
            errors, sizes = zip(*pieces, strict=True)
            of_matrices.append((torch.stack(errors).sum(0), torch.stack(sizes).sum(0)))
        error, size = (torch.cat(parts) for parts in zip(*of_matrices, strict=True))
        self._add(weight, method, error, size)
        self._done(math.prod(shape_of(weight)))

    def of_table(self, table: ir.Value, method: QuantConfig) -> None:
        """Measures a table.

        Args:
            table: the table.
            method: its format.
        """
        compare = partial(_compare_rows, open_rows(table), self._weights.rows(table, method))
        errors, sizes = zip(*self._pool.map(compare, *_pieces(table, 0, shape_of(table)[0])), strict=True)
        self._add(table, method, torch.cat(errors), torch.cat(sizes))

    def _add(self, weight: ir.Value, method: QuantConfig, error: torch.Tensor, size: torch.Tensor) -> None:
        """Adds a layer. error, size: sums of squares for each token or row."""
        norms = size.sqrt()
        relative = error.sqrt() / norms.clamp(min=max(FLOOR * float(norms.median()), SMALLEST))
        name = str(weight.name).removesuffix(".weight")
        mean = rounded(float(relative.mean()))
        self.layers.append(LayerError(name, method.name, self._weights.nbytes(weight, method), mean))


def _compare_products(
    x: torch.Tensor, x_read: torch.Tensor, source: RowReader, file: RowReader, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums the squares of the error and of the product with some rows, DOUBLE [tokens]."""
    product = x @ source(begin, end).t()
    error = x_read @ file(begin, end).t() - product
    return error.double().square().sum(1), product.double().square().sum(1)


def _compare_rows(source: RowReader, file: RowReader, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = source(begin, end)
    error = file(begin, end) - rows
    return error.double().square().sum(1), rows.double().square().sum(1)


def _pieces(weight: ir.Value, first: int, last: int) -> tuple[range, list[int]]:
    """Cuts rows of a weight into pieces; returns where they begin, and where they end."""
    step = max(PIECE_ELEMENTS // shape_of(weight)[1] // ROWS, 1) * ROWS
    begins = range(first, last, step)
    return begins, [min(begin + step, last) for begin in begins]
