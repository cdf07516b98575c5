"""Quantizing layer by layer while texts stream through: what a layer's codes are is chosen on inputs that the quantized
layers before it made, so that later ones can make up for earlier ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir
import torch

from enginewright.passes.graph import Linear
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.method import Calibration, QuantConfig, StoredTensor, stored
from enginewright.passes.streaming import one_thread_each, stream
from enginewright.passes.temporary_tensors import TemporaryTensors
from enginewright.passes.weights import read, shape_of

ROWS_AT_ONCE = 512  # of a weight, by one thread

Parts = Sequence[torch.Tensor]
ChooseRows = Callable[
    [QuantConfig, torch.Tensor], Parts
]  # a format, some rows of a weight → the same rows of its parts


@dataclass(frozen=True)
class Choose:
    """Stores every linear layer but the head in a format.

    format_of: of a weight. study: what a layer reads, [tokens, K] FLOAT of each text → what chooses parts of its rows.
    """

    format_of: Callable[[ir.Value], QuantConfig]
    calibration: Calibration
    study: Callable[[Sequence[torch.Tensor], int], ChooseRows]
    name: str = "choose_codes"

    def __call__(self, model: ir.Model) -> PassResult:
        texts, threads = self.calibration.texts, self.calibration.threads
        studied: dict[ir.Value, ChooseRows] = {}  # of the last input, which several layers may read
        temporary, rewrites = TemporaryTensors(self.calibration.folder), 0

        def visit(linear: Linear, inputs: Sequence[torch.Tensor]) -> None:
            nonlocal rewrites
            if stored(linear.weight):
                return
            if linear.x not in studied:
                studied.clear()
                studied[linear.x] = self.study(inputs, threads)
            config = self.format_of(linear.weight)
            parts = _in_parts(read(linear.weight), partial(studied[linear.x], config), threads)
            name, shape = str(linear.weight.name), shape_of(linear.weight)
            kept = [temporary.add(*pair) for pair in zip(config.outputs(name, *shape), parts, strict=True)]
            linear.weight.const_value = StoredTensor(name, config, kept, origin=linear.weight.const_value)
            rewrites += 1

        stream(model, texts, visit, threads)
        return PassResult(rewrites)


def _in_parts(weight: torch.Tensor, choose: Callable[[torch.Tensor], Parts], threads: int) -> Parts:
    def task(rows: torch.Tensor) -> Parts:
        with torch.inference_mode():  # of this thread
            return choose(rows)

    with one_thread_each(threads) as pool:
        pieces = list(pool.map(task, torch.split(weight, ROWS_AT_ONCE)))
    return [torch.cat(list(part)) for part in zip(*pieces, strict=True)]
