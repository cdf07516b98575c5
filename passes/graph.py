"""Queries and edits of graphs that passes share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from enginewright.plugins.elementwise.gather_columns import GATHER_COLUMNS
from enginewright.plugins.elementwise.softcap import SOFTCAP
from enginewright.plugins.experts.combine_experts import COMBINE_EXPERTS
from enginewright.plugins.experts.grouped_linear import GROUPED_LINEAR, STARTS
from enginewright.plugins.experts.route import experts_of
from enginewright.plugins.plugin import DOMAIN, operand, optional


def made_by(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """Returns the node that writes a value, if it has this op.

    Args:
        value: a value, or None.
        op_type: name of the op.
        domain: domain of the op; "" is ONNX's own.
    """
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == domain else None


def only_used_by(value: ir.Value, *nodes: ir.Node) -> bool:
    """Checks if only these nodes read a value; a graph output has a reader outside.

    Args:
        value: the value.
        nodes: its allowed readers.
    """
    return not value.is_graph_output() and all(user in nodes for user in value.consumers())


def nodes_of(model: ir.Model, *op_types: str, domain: str = "") -> Iterator[ir.Node]:
    """Yields the nodes of these ops; the graph may be rewritten meanwhile.

    Args:
        model: the graph.
        op_types: names of ops.
        domain: domain of the ops; "" is ONNX's own.
    """
    for node in tuple(model.graph):
        if node.op_type in op_types and node.domain == domain and node.graph is not None:
            yield node


def replace(old: Sequence[ir.Node], new: Sequence[ir.Node], values: Sequence[tuple[ir.Value, ir.Value]]) -> None:
    """Replaces nodes by others, at the position of the first old one.

    Args:
        old: nodes to remove.
        new: nodes to insert.
        values: (old, new) values: the new one takes the old one's name and readers, with its own dtype and shape.
    """
    graph = old[0].graph
    assert graph is not None
    for before, after in values:
        after.name = before.name
        before.name = None
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
    graph.insert_before(old[0], new)
    graph.remove(old, safe=True)


def standard(
    op_type: str, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value], name: str, **attributes: int | float
) -> ir.Node:
    """Makes a node of a standard op.

    Args:
        op_type: name of the op.
        inputs: its inputs.
        outputs: values that it writes.
        name: name of the node.
        attributes: attributes of the op.
    """
    converted = [ir.convenience.convert_attribute(*item) for item in attributes.items()]
    return ir.Node("", op_type, inputs, converted, outputs=outputs, name=name)


def typed(name: str, dtype: ir.DataType, dims: Sequence[int | ir.SymbolicDim]) -> ir.Value:
    """Makes a value.

    Args:
        name: its name.
        dtype: its number type.
        dims: its shape.
    """
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(dims))


@dataclass(frozen=True)
class LinearLayer:
    """A product x weightᵀ (+ bias) of a graph: MatMul(x, Transpose(weight)), and Add if there is a bias.

    GroupedLinear is one, too: that of several experts, each over its own rows of x.
    """

    x: ir.Value  # input, [..., K]
    weight: ir.Value  # initializer, [N, K]; for experts, their matrices one after another: [E · N, K]
    bias: ir.Value | None  # initializer, [N], or None
    output: ir.Value  # output, [..., N]
    nodes: tuple[ir.Node, ...]  # Transpose, MatMul, Add, where the Transpose may have other users; or GroupedLinear
    # For experts while texts stream (passes/streaming.py): first row of each expert in each text, [E + 1].
    starts: tuple[tuple[int, ...], ...] = ()

    @property
    def grouped(self) -> bool:
        """True if it is a GroupedLinear."""
        return self.nodes[-1].op_type == GROUPED_LINEAR.name

    @property
    def experts(self) -> int:
        """Number of matrices in the weight."""
        return experts_of(operand(self.nodes[-1], STARTS)) if self.grouped else 1

    def rows_of(self, expert: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Selects the rows of the layer's inputs that one expert reads.

        Args:
            expert: index of the expert.
            inputs: input of the layer in each text, [tokens, K].
        """
        if not self.starts:
            return list(inputs)
        return [x[starts[expert] : starts[expert + 1]] for x, starts in zip(inputs, self.starts, strict=True)]


def linears_of(model: ir.Model) -> Iterator[LinearLayer]:
    """Yields all linear layers; layers that share a weight are yielded once each."""
    for node in nodes_of(model, "MatMul"):
        if (linear := linear_of(node.outputs[0])) is not None:
            yield linear
    for node in nodes_of(model, GROUPED_LINEAR.name, domain=DOMAIN):
        if (linear := linear_of(node.outputs[0])) is not None:
            yield linear


def linear_of(output: ir.Value | None) -> LinearLayer | None:
    """Returns the linear layer that writes a value, if one does."""
    if output is not None and (node := made_by(output, GROUPED_LINEAR.name, DOMAIN)) is not None:
        return LinearLayer(operand(node, 0), operand(node, 1), optional(node, 2), output, (node,))
    add = made_by(output, "Add")
    product, bias = (output, None) if add is None else (add.inputs[0], add.inputs[1])
    if bias is not None and not (bias.is_initializer() and bias.shape is not None and len(bias.shape) == 1):
        return None
    matmul = made_by(product, "MatMul")
    if matmul is None or output is None:
        return None
    x, across = matmul.inputs
    transpose = made_by(across, "Transpose")
    if x is None or transpose is None:
        return None
    (weight,) = transpose.inputs
    if weight is None or not weight.is_initializer():
        return None
    nodes = (transpose, matmul) if add is None else (transpose, matmul, add)
    if add is not None and not only_used_by(matmul.outputs[0], add):
        return None
    return LinearLayer(x, weight, bias, output, nodes)


def head_of(model: ir.Model) -> LinearLayer | None:
    """Returns the linear layer that makes logits; None in an embedding model."""
    logits: ir.Value | None = next((value for value in model.graph.outputs if value.name == "logits"), None)
    if logits is None:
        return None
    for plugin in (SOFTCAP, GATHER_COLUMNS, COMBINE_EXPERTS):
        node = made_by(logits, plugin.name, DOMAIN)
        logits = logits if node is None else node.inputs[0]
    head = linear_of(logits)
    assert head is not None, "no linear layer makes the logits"
    return head
