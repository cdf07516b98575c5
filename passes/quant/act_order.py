"""Sorts the columns of weights that were quantized in another order than theirs (GPTQ's act-order).

Columns of a group are spread over such a weight, and kernels need them side by side. Once they are sorted, x has to be
sorted as well. Where x is the product of a gated MLP, that is free: the rows of its two projections move instead.
Elsewhere x is gathered, once for all layers that read it, if all of them have the same order. GPTQ orders columns by x
alone, so they do; layers that do not are read as FLOAT, each in its own order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from enginewright.passes.fusion.gated import gated_product
from enginewright.passes.graph import LinearLayer, linear_of, made_by, nodes_of, only_used_by, typed
from enginewright.passes.origin import Origin
from enginewright.passes.pass_manager import PassResult
from enginewright.passes.quant.method import StoredTensor
from enginewright.passes.weights import RowReader, RowsTensor, open_rows, shape_of
from enginewright.plugins.elementwise.gather_columns import GATHER_COLUMNS

RESTORED = "integers in act-order, and not in that of the other layers that read the same, are restored to bfloat16"


class ActOrdered(RowsTensor):
    """A weight whose groups hold columns in another order; it reads as FLOAT [N, K], columns in their own order.

    Column j of `by_groups` is column order[j] of this tensor.
    """

    def __init__(self, whole: RowsTensor, order: torch.Tensor, by_groups: StoredTensor) -> None:
        super().__init__(str(whole.name), torch.float32, tuple(whole.shape.numpy()), whole.open, whole.origin)
        self.order, self.by_groups = order, by_groups

    def set_origin(self, origin: Origin | None) -> None:
        """Says where the numbers of a new tensor come from, and those of `by_groups` in its order."""
        super().set_origin(origin)
        self.by_groups.set_origin(origin.sorted_columns(self.order) if origin else None)


@dataclass(frozen=True)
class SortColumns:
    """Stores act-ordered weights by groups, and sorts what they are multiplied with."""

    name: str = "sort_columns"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        by_input: dict[ir.Value, list[LinearLayer]] = {}
        for matmul in nodes_of(model, "MatMul"):
            if (linear := linear_of(matmul.outputs[0])) is not None:
                by_input.setdefault(linear.x, []).append(linear)
        rewrites, notes = 0, []
        for x, linears in by_input.items():
            ordered = [one.weight.const_value for one in linears if isinstance(one.weight.const_value, ActOrdered)]
            if not ordered:
                continue
            if not _have_one_order(linears):
                notes += [RESTORED] * len(ordered)
                continue
            order = ordered[0].order
            producers = _producers(linears[0])
            if producers is not None:
                for value in (value for one in producers for value in (one.weight, one.bias) if value is not None):
                    value.const_value = _reordered(value, order)
            else:
                _gather(x, order, linears)
            for linear, weight in zip(linears, ordered, strict=True):
                linear.weight.const_value = weight.by_groups
            rewrites += len(linears)
        return PassResult(rewrites, notes=tuple(notes))


def _have_one_order(linears: Sequence[LinearLayer]) -> bool:
    """Checks if all of these layers can be sorted in the same way."""
    weights = [one.weight.const_value for one in linears]
    orders = [weight.order for weight in weights if isinstance(weight, ActOrdered)]
    alike = len(orders) == len(linears) and all(torch.equal(order, orders[0]) for order in orders)
    return alike and all(_has_weights_alone(one) for one in linears)


def _gather(x: ir.Value, order: torch.Tensor, linears: Sequence[LinearLayer]) -> None:
    """Makes these layers read x in an order."""
    first = linears[0].nodes[1]  # nodes were found in the graph's order
    graph = first.graph
    assert graph is not None
    name = f"{x.name}.order"
    columns = typed(name, ir.DataType.INT32, tuple(order.shape))
    columns.const_value = ir.tensor(order.int().numpy(), name=name)
    graph.register_initializer(columns)
    gather = GATHER_COLUMNS.node([x, columns], to=int(ir.DataType.FLOAT), group=0)
    gather.name = gather.outputs[0].name = f"{x.name}.sorted"
    graph.insert_before(first, gather)
    for linear in linears:
        linear.nodes[1].replace_input_with(0, gather.outputs[0])


def _producers(linear: LinearLayer) -> tuple[LinearLayer, LinearLayer] | None:
    """Finds the two projections whose rows are the columns of x, if nothing else reads them."""
    product = made_by(linear.x, "Mul")
    gated = gated_product(product) if product is not None else None
    if product is None or gated is None or not only_used_by(linear.x, linear.nodes[1]):
        return None
    gate, up = linear_of(gated.gate), linear_of(gated.up)
    if gate is None or up is None:
        return None
    inner = [gate.output, up.output, *(node.outputs[0] for node in gated.nodes[:-1])]
    alone = all(only_used_by(value, *gated.nodes) for value in inner) and gate.weight is not up.weight
    return (gate, up) if alone and _has_weights_alone(gate) and _has_weights_alone(up) else None


def _has_weights_alone(linear: LinearLayer) -> bool:
    """Checks that no other layer reads this layer's weight or bias."""
    transpose, matmul = linear.nodes[:2]
    if not only_used_by(linear.weight, transpose) or not only_used_by(transpose.outputs[0], matmul):
        return False
    return linear.bias is None or len(linear.bias.uses()) == 1


def _reordered(value: ir.Value, order: torch.Tensor) -> RowsTensor:
    """Reads a weight or a bias with its rows in another order."""
    tensor = value.const_value
    assert isinstance(tensor, RowsTensor), value.name
    if isinstance(tensor, ActOrdered):
        by_groups = _reordered(tensor.by_groups.initializer(), order)
        assert isinstance(by_groups, StoredTensor)
        return ActOrdered(_rows(tensor, order), tensor.order, by_groups)
    if isinstance(tensor, StoredTensor):
        parts = [_reordered(part, order).initializer() for part in tensor.parts]
        return StoredTensor(str(tensor.name), tensor.stored_as, parts)
    return _rows(tensor, order)


def _rows(tensor: RowsTensor, order: torch.Tensor) -> RowsTensor:
    value = tensor.initializer()

    def open() -> RowReader:
        whole = open_rows(value)(0, len(order))
        return lambda begin, end: whole[order[begin:end]]

    origin = tensor.origin.picked(order) if tensor.origin else None
    return RowsTensor(str(tensor.name), tensor.torch_dtype, shape_of(value), open, origin)
