"""Simulates an engine on targets that are not available, in the dense graph.

Weights are those of the file, and activations, queries, keys and values are rounded as on the target. The rest (norms,
the sums of attention) is the source's, in fp32.
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
from enginewright.passes.streaming import Replacements, Streamed, Substitute, stream
from enginewright.passes.torch_ops import Compute, compute_of
from enginewright.passes.weights import RowReader, RowsTensor, shape_of
from enginewright.plugins.attention.kv_write import STORED
from enginewright.plugins.plugin import int_of
from enginewright.plugins.target import Target

BLOCK_ELEMENTS = 1 << 22  # elements of logits that are computed at once


def simulate(
    dense: ir.Model,
    quant: QuantConfig,
    target: Target,
    weights: FileWeights,
    texts: Sequence[Sequence[int]],
    threads: int = 1,
    kv_dtype: str = "bf16",
) -> Streamed:
    """Computes texts as a target does; the result does not depend on the number of threads.

    Args:
        dense: the graph before it was quantized. It is changed.
        quant: the method.
        target: the target.
        weights: weights of the engine's file.
        texts: token ids.
        threads: number of threads.
        kv_dtype: dtype of the KV cache, one of `STORED`.
    """
    methods = _methods(dense, quant)
    for weight, method in methods.items():
        rows = weights.rows(weight, method)
        weight.const_value = RowsTensor(str(weight.name), torch.float32, shape_of(weight), _again(rows))

    def rounding(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> Replacements:
        method = methods[linear.weight]
        return dict.fromkeys(range(len(inputs)), Substitute(lambda x: method.round_activations(x, target)))

    logits = head_of(dense)
    assert logits is not None, "embedding models are built for CPUs only"
    head = methods[logits.weight]
    compute = _attending(STORED[kv_dtype], target.queries(STORED[kv_dtype]))
    return stream(dense, texts, rounding, threads, lambda x: head.round_activations(x, target), compute)


def blocks(streamed: Streamed, texts: Sequence[Sequence[int]], vocab_size: int) -> Iterator[tuple[int, int, NDArray]]:  # type: ignore[type-arg]
    """Yields logits by text and position, as `runtime.score.forced` does for an engine.

    Args:
        streamed: the simulated texts.
        texts: token ids.
        vocab_size: tokens of the vocabulary.
    """
    step = max(BLOCK_ELEMENTS // vocab_size, 1)
    for text, tokens in enumerate(texts):
        for begin in range(0, len(tokens), step):
            yield text, begin, streamed.logits(text, begin, min(begin + step, len(tokens))).numpy()


def _methods(dense: ir.Model, quant: QuantConfig) -> dict[ir.Value, QuantConfig]:
    """Returns the method of every quantized weight: its stored format, that of tables, or `quant`."""
    methods = {linear.weight: quant for linear in linears_of(dense)}
    methods.update(table_methods(dense, quant))
    return {weight: existing.stored_as if (existing := stored(weight)) else own for weight, own in methods.items()}


def _again(rows: RowReader) -> Callable[[], RowReader]:
    return lambda: rows


def _attending(stored: ir.DataType, queries: ir.DataType) -> Callable[[ir.Node], Compute]:
    """Makes the function that computes nodes, with attention's inputs rounded as on the target."""

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
