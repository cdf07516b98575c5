"""What an engine computes on targets that are not at hand: its weights as the file holds them, and activations,
queries, keys and values rounded as there, in the dense graph.

The rest (norms, the sums of attention) is the source's, in fp32.
"""

from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir
import torch
from numpy.typing import NDArray

from enginewright.builder.gate.kv import attended
from enginewright.builder.gate.layers import FileWeights
from enginewright.passes.graph import LinearLayer, head_of, linears_of
from enginewright.passes.quant import QuantConfig
from enginewright.passes.quant.method import stored
from enginewright.passes.quant.quantize import table_methods
from enginewright.passes.streaming import Instead, Other, Streamed, stream
from enginewright.passes.torch_ops import Compute, compute_of
from enginewright.passes.weights import RowReader, RowsTensor, shape_of
from enginewright.plugins.attention.kv_write import STORED
from enginewright.plugins.plugin import int_of
from enginewright.plugins.target import Target

BLOCK_ELEMENTS = 1 << 22  # of logits that are computed at once


def simulate(
    dense: ir.Model,
    quant: QuantConfig,
    target: Target,
    weights: FileWeights,
    texts: Sequence[Sequence[int]],
    threads: int = 1,
    kv_dtype: str = "bf16",
) -> Streamed:
    """Texts as a target computes them; the same by whatever number of threads.

    Args:
        dense: the graph that was quantized, as it was before. It is changed.
        weights: as the file holds them.
        kv_dtype: what the KV cache holds, one of `STORED`.
    """
    methods = _methods(dense, quant)
    for weight, method in methods.items():
        rows = weights.rows(weight, method)
        weight.const_value = RowsTensor(str(weight.name), torch.float32, shape_of(weight), _again(rows))

    def rounding(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> Instead:
        method = methods[linear.weight]
        return dict.fromkeys(range(len(inputs)), Other(lambda x: method.round_activations(x, target)))

    logits = head_of(dense)
    assert logits is not None, "embedding models are built for CPUs alone"
    head = methods[logits.weight]
    compute = _attending(STORED[kv_dtype], target.queries(STORED[kv_dtype]))
    return stream(dense, texts, rounding, threads, lambda x: head.round_activations(x, target), compute)


def blocks(streamed: Streamed, texts: Sequence[Sequence[int]], vocab_size: int) -> Iterator[tuple[int, int, NDArray]]:  # type: ignore[type-arg]
    """Logits by text and position, as `runtime.score.forced` gives an engine's."""
    step = max(BLOCK_ELEMENTS // vocab_size, 1)
    for text, tokens in enumerate(texts):
        for begin in range(0, len(tokens), step):
            yield text, begin, streamed.logits(text, begin, min(begin + step, len(tokens))).numpy()


def _methods(dense: ir.Model, quant: QuantConfig) -> dict[ir.Value, QuantConfig]:
    """Of every weight that is quantized: what it is stored as, its own method if it is a table, or `quant`."""
    methods = {linear.weight: quant for linear in linears_of(dense)}
    methods.update(table_methods(dense, quant))
    return {weight: already.stored_as if (already := stored(weight)) else own for weight, own in methods.items()}


def _again(rows: RowReader) -> Callable[[], RowReader]:
    return lambda: rows


def _attending(stored: ir.DataType, queries: ir.DataType) -> Callable[[ir.Node], Compute]:
    """What computes a node, where attention reads queries, keys and values as targets round them."""

    def compute(node: ir.Node) -> Compute:
        exact = compute_of(node)
        if "kv_num_heads" not in node.attributes:
            return exact
        heads = int_of(node, "q_num_heads"), int_of(node, "kv_num_heads")

        def attend(
            node: ir.Node, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
        ) -> tuple[torch.Tensor, ...]:
            return exact(node, *attended(q, k, v, heads, stored, queries))

        return attend

    return compute
