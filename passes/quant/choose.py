"""Quantizes layer by layer while texts stream through the model.

A layer's codes are chosen on inputs that the quantized layers before it computed, so that later layers can compensate
for errors of earlier ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir
import torch

from enginewright.passes.graph import LinearLayer
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.method import Calibration, QuantConfig, StoredTensor, stored
from enginewright.passes.streaming import single_threaded_pool, stream
from enginewright.passes.temporary_tensors import TemporaryTensors
from enginewright.passes.weights import open_rows, origin_of, shape_of, stacked

ROWS_AT_ONCE = 512  # rows of a weight that one thread quantizes

UNSEEN = "no calibration text came to this expert, for which what its nearest neighbour read was taken"

Parts = Sequence[torch.Tensor]
# (format, some rows of a weight) → the same rows of its parts
ChooseRows = Callable[[QuantConfig, torch.Tensor], Parts]


@dataclass(frozen=True)
class Choose:
    """Stores every linear layer but the head in a format."""

    format_of: Callable[[ir.Value], QuantConfig]  # weight → its format
    calibration: Calibration  # texts
    # (input of a layer in each text, [tokens, K] FLOAT; number of threads) → function that chooses parts of its rows
    study: Callable[[Sequence[torch.Tensor], int], ChooseRows]
    name: str = "choose_codes"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        texts, threads = self.calibration.texts, self.calibration.threads
        studied: dict[ir.Value, ChooseRows] = {}  # holds the last input alone, which several layers may read
        temporary, rewrites = TemporaryTensors(self.calibration.folder), 0

        notes: list[str] = []

        def choices(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> Iterator[ChooseRows]:
            """Yields the choosing function of each matrix in a layer's weight."""
            if linear.experts == 1:
                if linear.x not in studied:
                    studied.clear()
                    studied[linear.x] = self.study(inputs, threads)
                yield studied[linear.x]
                return
            for expert in range(linear.experts):
                seen = nearest_seen(linear, expert)
                notes.extend([UNSEEN] * (seen != expert))
                yield self.study(linear.rows_of(seen, inputs), threads)

        def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
            nonlocal rewrites
            if stored(linear.weight):
                return
            config, name = self.format_of(linear.weight), str(linear.weight.name)
            reader, (rows, columns) = open_rows(linear.weight), shape_of(linear.weight)
            rows //= linear.experts
            kept: list[list[ir.Value]] = []
            for matrix, choose in enumerate(choices(linear, inputs)):
                values = reader(matrix * rows, (matrix + 1) * rows)
                parts = _in_parts(values, partial(choose, config), threads)
                outputs = config.outputs(name if linear.experts == 1 else f"{name}.{matrix}", rows, columns)
                kept.append([temporary.add(*pair) for pair in zip(outputs, parts, strict=True)])
            names = [output[0] for output in config.outputs(name, rows, columns)]
            whole = [stacked(*pair) for pair in zip(names, zip(*kept, strict=True), strict=True)]
            chosen = StoredTensor(name, config, whole, source=linear.weight.const_value)
            chosen.set_origin(origin_of(linear.weight))
            linear.weight.const_value = chosen
            rewrites += 1

        stream(model, texts, visit, threads)
        return PassResult(rewrites, notes=tuple(notes))


def nearest_seen(linear: LinearLayer, expert: int) -> int:
    """Finds the nearest expert that has rows in some text, the expert itself if it has."""
    seen = [one for one in range(linear.experts) if any(each[one] < each[one + 1] for each in linear.starts)]
    return min(seen, key=lambda one: (abs(one - expert), one))


def _in_parts(weight: torch.Tensor, choose: Callable[[torch.Tensor], Parts], threads: int) -> Parts:
    def task(rows: torch.Tensor) -> Parts:
        with torch.inference_mode():  # the mode belongs to a thread
            return choose(rows)

    with single_threaded_pool(threads) as pool:
        pieces = list(pool.map(task, torch.split(weight, ROWS_AT_ONCE)))
    return [torch.cat(list(part)) for part in zip(*pieces, strict=True)]
