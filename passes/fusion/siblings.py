"""Fuses linear layers with the same input into one: their weights are stacked, and the product is split."""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.passes.graph import LinearLayer, only_used_by, replace, standard, typed
from enginewright.passes.quant.method import stack_weights
from enginewright.passes.weights import shape_of, stacked


def stack(siblings: Sequence[LinearLayer], part: str) -> str | None:
    """Fuses linear layers into MatMul(x, Transpose(stacked weights)) (+ Add) and Split.

    Args:
        siblings: layers with the same input.
        part: last part of the fused layer's name, in place of the siblings' own: `qkv_proj`.

    Returns:
        The reason why it was refused, or None if it was done.
    """
    first = siblings[0]
    names = " and ".join(str(one.output.name) for one in siblings)
    if len({one.weight for one in siblings}) < len(siblings):
        return f"{names} share a weight."
    if any(one.x is not first.x for one in siblings):
        return f"{names} have different inputs."
    if len({one.bias is None for one in siblings}) > 1:
        return f"Only some of {names} have a bias."
    for one in siblings:
        if not only_used_by(one.nodes[0].outputs[0], one.nodes[1]) or one.nodes[1].outputs[0].is_graph_output():
            return f"The product or the weight of {one.output.name} is used elsewhere, too."

    graph = first.nodes[1].graph
    assert graph is not None and first.x.shape is not None
    sizes = [shape_of(one.weight)[0] for one in siblings]
    width, depth = sum(sizes), shape_of(first.weight)[1]
    tensor, name = _renamed(str(first.weight.name), part), _renamed(str(first.output.name), part)
    weight = stack_weights(tensor, [one.weight for one in siblings])
    if isinstance(weight, str):
        return weight
    graph.register_initializer(weight)
    dims = (*first.x.shape.dims[:-1], width)
    across = typed(f"{name}.transposed", ir.DataType.FLOAT, (depth, width))
    fused = typed(name, ir.DataType.FLOAT, dims)
    nodes = [_transpose(weight, across)]
    biases = [one.bias for one in siblings if one.bias is not None]
    if biases:
        product = typed(f"{name}.product", ir.DataType.FLOAT, dims)
        tensor = _renamed(str(biases[0].name), part)
        bias = stacked(tensor, biases)
        graph.register_initializer(bias)
        nodes.append(standard("MatMul", [first.x, across], [product], f"{name}.product"))
        nodes.append(standard("Add", [product, bias], [fused], name))
    else:
        nodes.append(standard("MatMul", [first.x, across], [fused], name))
    lengths = ir.Value(
        name=f"{name}.sizes",
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape((len(sizes),)),
        const_value=ir.tensor(sizes, dtype=ir.DataType.INT64, name=f"{name}.sizes"),
    )
    graph.register_initializer(lengths)
    parts = [typed("", ir.DataType.FLOAT, (*first.x.shape.dims[:-1], size)) for size in sizes]
    nodes.append(standard("Split", [fused, lengths], parts, f"{name}.split", axis=-1))
    outputs = [one.output for one in siblings]
    # The first product is after x and before every user of any of them, so the new nodes take its place.
    order = {node: index for index, node in enumerate(graph)}
    old = sorted(
        (node for one in siblings for node in one.nodes), key=lambda node: (node.op_type != "MatMul", order[node])
    )
    replace(old, nodes, list(zip(outputs, parts, strict=True)))
    return None


def _transpose(weight: ir.Value, across: ir.Value) -> ir.Node:
    return ir.Node(
        "",
        "Transpose",
        [weight],
        [ir.AttrInt64s("perm", [1, 0])],
        outputs=[across],
        name=across.name,
    )


def _renamed(name: str, part: str) -> str:
    """Replaces a layer's last name: `model.layers.0.self_attn.q_proj.weight` → `….self_attn.qkv_proj.weight`."""
    layer, dot, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        layer, dot, kind = name, "", ""
    return f"{layer.rpartition('.')[0]}.{part}{dot}{kind}"
