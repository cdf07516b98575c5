"""Runs a dense graph on texts, node by node: a weight is read when its node runs, and freed after it.

Calibration and the quality gate run a model this way. Memory holds one weight at a time, and the activations that later
nodes read, whatever the model's size. Each text is computed alone and by one thread, so that results depend neither on
the number of threads nor on the other texts.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import onnx_ir as ir
import torch
from torch.nn import functional as F

from enginewright.passes.graph import LinearLayer, head_of, linear_of, made_by
from enginewright.passes.torch_ops import GATES, Compute, compute_of
from enginewright.passes.weights import RowReader, open_rows, read, shape_of
from enginewright.plugins.experts.grouped_linear import STARTS
from enginewright.plugins.plugin import operand

HEAD_ROWS = 8192  # rows of the vocabulary whose logits are computed at once


@dataclass(frozen=True)
class Substitute:
    """A replacement of a linear layer for one text: weight · rounded(x), with its own weight or another one."""

    rounded: Callable[[torch.Tensor], torch.Tensor]  # rounds the layer's input
    weight: RowReader | None = None  # reader of the weight; None is the layer's own


Replacements = Mapping[int, Substitute]  # text → replacement


class Visit(Protocol):
    """A function that sees the linear layers while texts stream."""

    def __call__(self, linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> Replacements | None:
        """Sees a linear layer before it is computed, and may replace it.

        If it gives the weight another value (`linear.weight.const_value`), the layer is computed with that.

        Args:
            linear: the layer.
            inputs: input of the layer in each text, [tokens, K]; for experts the rows of all of them, where
                `linear.starts` has each one's first row.

        Returns:
            Replacements of the layer for some of the texts; None is none.
        """


class Streamed:
    """Texts that are computed up to the head; logits are computed on demand."""

    def __init__(self, head: LinearLayer | None, tail: Sequence[ir.Node], hidden: Sequence[torch.Tensor]) -> None:
        """Keeps the inputs of the head.

        Args:
            head: the head; None in an embedding model.
            tail: nodes that make logits from the head's output.
            hidden: the head's input, [1, tokens, K] for each text; the output [1, 1, W] of an embedding model.
        """
        self._tail, self._hidden = tail, hidden
        if head is None:
            return
        rows, reader = shape_of(head.weight)[0], open_rows(head.weight)
        self._table = [_compact(reader(begin, min(begin + HEAD_ROWS, rows))) for begin in range(0, rows, HEAD_ROWS)]

    def embedded(self) -> list[torch.Tensor]:
        """Returns the vector of each text, FLOAT [W], of an embedding model."""
        return [each[0, 0] for each in self._hidden]

    @torch.inference_mode()
    def logits(self, text: int, begin: int, end: int) -> torch.Tensor:
        """Computes logits, FLOAT [end - begin, vocab].

        Args:
            text: index of the text.
            begin: first position.
            end: position after the last one.
        """
        return self.logits_of(self._hidden[text][0, begin:end])

    def logits_of(self, x: torch.Tensor) -> torch.Tensor:
        """Computes logits from inputs of the head.

        Args:
            x: the inputs, FLOAT [n, K].

        Returns:
            Logits, FLOAT [n, vocab].
        """
        value = torch.cat([F.linear(x, rows.float()) for rows in self._table], dim=-1).unsqueeze(0)
        for node in self._tail:
            (value,) = compute_of(node)(node, value, *(shared_operand(node, extra) for extra in node.inputs[1:]))
        return value[0]


def single_threaded_pool(threads: int) -> ThreadPoolExecutor:
    """Starts threads in each of which torch uses one: results do not depend on their number."""
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))


@torch.inference_mode()
def stream(
    model: ir.Model,
    texts: Sequence[Sequence[int]],
    visit: Visit | None = None,
    threads: int = 1,
    round_for_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    compute_of: Callable[[ir.Node], Compute] = compute_of,
) -> Streamed:
    """Computes texts, each from its first position.

    Args:
        model: a dense graph of standard ops and of our ops that importers write.
        texts: token ids.
        visit: called at every linear layer but the head.
        threads: number of threads that compute texts, each with one of torch's.
        round_for_head: rounds the input of the head.
        compute_of: returns the function that computes a node.

    Raises:
        EngineError: an op is unknown here.
    """
    head = head_of(model)
    nodes, tail = _divided(model, head)
    result = model.graph.outputs[0] if head is None else head.x
    tokens = [torch.tensor([text]) for text in texts]
    given = {
        "tokens": tokens,
        "positions": [torch.arange(len(text)).unsqueeze(0) for text in texts],
        "token_types": [torch.zeros_like(text) for text in tokens],
    }
    inputs: dict[ir.Value | None, list[torch.Tensor]] = {
        value: given[value.name] for value in model.graph.inputs if value.name in given
    }
    readers = Counter([result, *(value for node in nodes for value in node.inputs)])
    values = _Values(len(texts), inputs, readers)
    with single_threaded_pool(threads) as pool:
        for node in nodes:
            values.store(node, _computed(node, values, visit, compute_of, pool))
    hidden = values[result]
    return Streamed(head, tail, [round_for_head(x) for x in hidden] if round_for_head else hidden)


class _Values:
    """Values of the texts; each is freed after the last node that reads it."""

    def __init__(
        self, num_texts: int, given: dict[ir.Value | None, list[torch.Tensor]], readers: Counter[ir.Value | None]
    ) -> None:
        """Starts with the inputs.

        Args:
            num_texts: number of texts.
            given: inputs of the graph, with a tensor for each text. Other values join them.
            readers: value → number of its readers to come.
        """
        self.num_texts = num_texts
        self._values, self._readers = given, readers

    def __getitem__(self, value: ir.Value) -> list[torch.Tensor]:
        return self._values[value]

    def operands(self, node: ir.Node) -> list[Sequence[object]]:
        """Lists each input of a node, for all texts."""
        return [self._values.get(value) or [shared_operand(node, value)] * self.num_texts for value in node.inputs]

    def store(self, node: ir.Node, results: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Stores the outputs of a node that have readers, and frees its inputs that have no more.

        Args:
            node: the node.
            results: its outputs for each text.
        """
        for index, output in enumerate(node.outputs):
            if self._readers[output]:
                self._values[output] = [result[index] for result in results]
        for value in node.inputs:
            self._readers[value] -= 1
            if not self._readers[value]:
                self._values.pop(value, None)


def _computed(
    node: ir.Node,
    values: _Values,
    visit: Visit | None,
    compute_of: Callable[[ir.Node], Compute],
    pool: ThreadPoolExecutor,
) -> list[tuple[torch.Tensor, ...]]:
    """Computes the outputs of a node for each text, after its visit if it multiplies with a weight."""
    linear, instead = linear_of(node.outputs[0]), dict[int, Substitute]()
    if linear is not None and linear.x in node.inputs:  # a node that adds its bias does not read x
        inputs = values[linear.x] if linear.grouped else [x[0] for x in values[linear.x]]
        if linear.grouped:
            starts = values[operand(node, STARTS)]
            linear = replace(linear, starts=tuple(tuple(each[0].tolist()) for each in starts))
        instead.update((visit(linear, inputs) if visit is not None else None) or {})
        if linear.grouped:
            return [(y,) for y in _grouped(linear, inputs, instead, pool)]
    compute = [compute_of(node)] * values.num_texts
    for text, substitute in instead.items():
        compute[text] = partial(_linear, substitute)
    return list(pool.map(_call, compute, [node] * values.num_texts, *values.operands(node)))


def _call(compute: Compute, *operands: object) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():  # the mode belongs to a thread
        return compute(*operands)


def _linear(substitute: Substitute, node: ir.Node, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        F.linear(substitute.rounded(x), weight if substitute.weight is None else substitute.weight(0, len(weight))),
    )


def _grouped(
    linear: LinearLayer, inputs: Sequence[torch.Tensor], instead: Replacements, pool: ThreadPoolExecutor
) -> list[torch.Tensor]:
    """Computes experts one after another, so that each weight is read once for all texts, one at a time."""
    reader, experts = open_rows(linear.weight), linear.experts
    rows, epilogue = shape_of(linear.weight)[0] // experts, linear.nodes[-1].attributes["epilogue"].as_string()
    biases = None if linear.bias is None else read(linear.bias).view(experts, rows)
    inputs = [instead[text].rounded(x) if text in instead else x for text, x in enumerate(inputs)]
    results: list[list[torch.Tensor]] = [[] for _ in inputs]
    for expert in range(experts):
        begin, end = expert * rows, (expert + 1) * rows
        own = [text for text, starts in enumerate(linear.starts) if starts[expert] < starts[expert + 1]]
        shared = (
            reader(begin, end) if any(text not in instead or instead[text].weight is None for text in own) else None
        )

        def compute(text: int, expert: int = expert, shared: torch.Tensor | None = shared) -> torch.Tensor:
            with torch.inference_mode():  # the mode belongs to a thread
                weight = instead[text].weight if text in instead else None
                matrix = shared if weight is None else weight(expert * rows, (expert + 1) * rows)
                assert matrix is not None
                starts = linear.starts[text]
                x = inputs[text][starts[expert] : starts[expert + 1]]
                y = F.linear(x, matrix, None if biases is None else biases[expert])
                return GATES[epilogue](*y.chunk(2, dim=-1)) if epilogue in GATES else y

        for text, y in zip(own, pool.map(compute, own), strict=True):
            results[text].append(y)
    return [torch.cat(parts) for parts in results]


def _divided(model: ir.Model, head: LinearLayer | None) -> tuple[list[ir.Node], list[ir.Node]]:
    """Splits the nodes: those before the head, without transpositions of weights, and those after it."""
    before: list[ir.Node] = []
    tail: list[ir.Node] = []
    if head is None:
        return [node for node in model.graph if node.op_type != "Transpose"], []
    logits = {head.output}
    for node in model.graph:
        if logits.intersection(value for value in node.inputs if value is not None):
            tail.append(node)
            logits.update(node.outputs)
        elif node.op_type != "Transpose" and node not in head.nodes:
            before.append(node)
    return before, tail


def nodes_before_head(model: ir.Model, head: LinearLayer) -> list[ir.Node]:
    """Lists the nodes before the head, without transpositions of weights.

    Args:
        model: the graph.
        head: its head.
    """
    return _divided(model, head)[0]


def shared_operand(node: ir.Node, value: ir.Value | None) -> torch.Tensor | RowReader | None:
    """Returns an operand that all texts share: a weight as it is stored, or a reader of rows for a Gather."""
    if value is None or value.is_graph_input():  # a past, which is empty
        return None
    transpose = made_by(value, "Transpose")
    weight = value if transpose is None else transpose.inputs[0]
    assert weight is not None
    return open_rows(weight) if node.op_type == "Gather" else read(weight)


def _compact(rows: torch.Tensor) -> torch.Tensor:
    """Converts to BFLOAT16 where that loses nothing, as is so for most checkpoints."""
    small = rows.bfloat16()
    return small if small.float().equal(rows) else rows
