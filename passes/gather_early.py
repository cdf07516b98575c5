"""Selects the rows that need logits as early as possible: right after the last attention, which needs all rows.

Gather(f(x, y), rows) becomes f(Gather(x, rows), Gather(y, rows)) for every f that works row by row. A step that reads a
prompt then computes the last layer's projection and MLP for only one of its rows.
"""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.graph import nodes_of, only_used_by, standard, typed
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins.experts.route import renamed
from enginewright.plugins.plugin import CODES
from enginewright.plugins.registry import op_of


@dataclass(frozen=True)
class GatherEarly:
    """Moves Gather before row-wise ops."""

    name: str = "gather_early"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        return PassResult(sum(_move_up(model, gather) for gather in nodes_of(model, "Gather")))


def _move_up(model: ir.Model, gather: ir.Node) -> int:
    """Moves a Gather before all nodes that allow it; returns their number."""
    source, rows = gather.inputs
    assert source is not None and rows is not None and source.shape is not None and rows.shape is not None
    if source.is_initializer() or rows.is_initializer() or gather.attributes.get_int("axis", 0) != 0:
        return 0  # an embedding
    old, new = source.shape[0], rows.shape[0]
    assert isinstance(new, ir.SymbolicDim)
    above = _above(model, gather)
    if not above:
        return 0
    chosen: dict[ir.Value, ir.Value] = {}
    for node in reversed(above):
        for index, value in enumerate(node.inputs):
            if value is None or value.shape is None or value.is_initializer() or value.producer() in above:
                continue
            if value not in chosen:
                assert value.dtype is not None and value.shape[0] == old
                chosen[value] = typed(f"{value.name}.chosen", value.dtype, (new, *value.shape.dims[1:]))
                earlier = standard("Gather", [value, rows], [chosen[value]], str(chosen[value].name), axis=0)
                model.graph.insert_before(node, earlier)
            node.replace_input_with(index, chosen[value])
        for output in node.outputs:
            assert output.shape is not None
            output.shape = ir.Shape([renamed(size, str(old), new) for size in output.shape.dims])
    (result,) = gather.outputs
    name, result.name = result.name, None
    ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
    source.name = name
    model.graph.remove(gather, safe=True)
    return len(above)


def _above(model: ir.Model, gather: ir.Node) -> list[ir.Node]:
    """Lists the nodes that the Gather can be moved before, the last one first."""
    staying: set[ir.Node] = set()
    while True:
        above: list[ir.Node] = []
        for node in reversed(tuple(model.graph)):
            read = [value for value in node.outputs if value.uses() or value.is_graph_output()]
            op = op_of(node)
            movable = read and op is not None and op.by_rows and node not in staying
            if movable and all(only_used_by(value, gather, *above) for value in read):
                above.append(node)
        # Rows of codes that other nodes read as well cannot be selected, so their readers stay where they are.
        stuck = {
            node
            for node in above
            for value in node.inputs
            if value is not None
            and value.dtype in CODES
            and not value.is_initializer()
            and value.producer() not in above
        }
        if not stuck:
            return above
        staying |= stuck
