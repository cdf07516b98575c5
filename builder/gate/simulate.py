"""What an engine computes on targets that are not at hand: its weights as the file holds them, and activations rounded
as there, in the dense graph.

The rest (attention, norms, the KV cache) is the source's, in fp32. What a KV cache of 8 bits costs is not in it: the
same engine on a CPU says that.
"""

from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from enginewright.builder.gate.layers import FileWeights
from enginewright.passes.graph import Linear, head_of, linear_of, nodes_of
from enginewright.passes.quant import QuantConfig
from enginewright.passes.quant.method import stored
from enginewright.passes.quant.quantize import table_methods
from enginewright.passes.streaming import Instead, Streamed, stream
from enginewright.passes.weights import RowReader, RowsTensor, read, shape_of

BLOCK_ELEMENTS = 1 << 22  # of logits that are computed at once


def simulate(
    dense: ir.Model,
    quant: QuantConfig,
    family: str,
    weights: FileWeights,
    texts: Sequence[Sequence[int]],
    threads: int = 1,
) -> Streamed:
    """Texts as a family of targets computes them; the same by whatever number of threads.

    Args:
        dense: the graph that was quantized, as it was before. It is changed.
        weights: as the file holds them.
    """
    methods = _methods(dense, quant)
    for weight, method in methods.items():
        rows = weights.rows(weight, method)
        weight.const_value = RowsTensor(str(weight.name), torch.float32, shape_of(weight), _again(rows))

    def rounding(linear: Linear, inputs: Sequence[torch.Tensor]) -> Instead:
        multiply = _product(methods[linear.weight], family, read(linear.weight))
        return dict.fromkeys(range(len(inputs)), multiply)

    head = methods[head_of(dense).weight]
    return stream(dense, texts, rounding, threads, lambda x: head.round_activations(x, family))


def blocks(streamed: Streamed, texts: Sequence[Sequence[int]], vocab_size: int) -> Iterator[tuple[int, int, NDArray]]:  # type: ignore[type-arg]
    """Logits by text and position, as `runtime.score.forced` gives an engine's."""
    step = max(BLOCK_ELEMENTS // vocab_size, 1)
    for text, tokens in enumerate(texts):
        for begin in range(0, len(tokens), step):
            yield text, begin, streamed.logits(text, begin, min(begin + step, len(tokens))).numpy()


def _methods(dense: ir.Model, quant: QuantConfig) -> dict[ir.Value, QuantConfig]:
    """Of every weight that is quantized: what it is stored as, its own method if it is a table, or `quant`."""
    found = [linear_of(node.outputs[0]) for node in nodes_of(dense, "MatMul")]
    methods = {linear.weight: quant for linear in found if linear is not None}
    methods.update(table_methods(dense, quant))
    return {weight: already.stored_as if (already := stored(weight)) else own for weight, own in methods.items()}


def _again(rows: RowReader) -> Callable[[], RowReader]:
    return lambda: rows


def _product(method: QuantConfig, family: str, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.linear(method.round_activations(x, family), weight)
