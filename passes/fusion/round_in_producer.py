"""Moves a Cast or a QuantizeRows into the node before it, where all readers of its output want the same rounding."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.graph import nodes_of, replace
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins import DOMAIN, plugin_of
from enginewright.plugins.norm.rms_norm import RMS_NORM, norms_rows
from enginewright.plugins.plugin import CODES


@dataclass(frozen=True)
class RoundInProducer:
    """Makes nodes write rounded or quantized outputs in place of a Cast or a QuantizeRows after them."""

    name: str = "round_in_producer"  # name of the pass

    def __call__(self, model: ir.Model) -> PassResult:
        rewrites, refusals = 0, []
        for node in (*nodes_of(model, "Cast"), *nodes_of(model, "QuantizeRows", domain=DOMAIN)):
            if node.graph is None:
                continue  # removed together with another user of the same value
            refusal = _round(node)
            rewrites += refusal is None
            refusals += [refusal] if refusal else []
        return PassResult(rewrites, tuple(refusals))


def _rounds_to(node: ir.Node) -> ir.DataType | None:
    """Returns the output dtype of a Cast or a QuantizeRows; None for other nodes."""
    return ir.DataType(node.attributes["to"].as_int()) if node.op_type in ("Cast", "QuantizeRows") else None


def _round(node: ir.Node) -> str | None:
    value = node.inputs[0]
    assert value is not None
    to, producer = _rounds_to(node), value.producer()
    assert to is not None
    if producer is None:
        return f"{node.name} rounds an input of the graph."
    users = tuple(value.consumers())
    if value.is_graph_output() or any(_rounds_to(user) != to for user in users):
        return f"{value.name} is used unrounded, too."
    if not _can_round(value, producer, to):
        return f"{producer.name} ({producer.op_type}) cannot {'quantize' if to in CODES else 'round'}."
    ways = {(user.attributes.get_int("group", 0), tuple(user.inputs[1:])) for user in users}
    if len(ways) > 1:
        return f"{value.name} is quantized in several ways."
    ((group, amax),) = ways
    rounding = _rounding(producer, int(to), group, amax)
    rounding.name = producer.name
    last = len(producer.outputs) - 1  # `to` is the type of this output; the scale of codes follows
    rounded = rounding.outputs[last:]
    for old, new in zip(node.outputs, rounded, strict=True):
        new.name = value.name if new is rounded[0] else old.name
    _take_place(users, rounded)
    replace([producer], [rounding], [*zip(producer.outputs[:last], rounding.outputs[:last], strict=True)])
    return None


def _take_place(users: Sequence[ir.Node], values: Sequence[ir.Value]) -> None:
    """Replaces the outputs of these nodes by `values`, and removes the nodes."""
    for user in users:
        for old, new in zip(user.outputs, values, strict=True):
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph = users[0].graph
    assert graph is not None
    graph.remove(users, safe=True)


def _can_round(value: ir.Value, producer: ir.Node, to: ir.DataType) -> bool:
    """Checks if the node can round this output: it is the node's last one, and is not rounded yet."""
    if value.dtype != ir.DataType.FLOAT or value is not producer.outputs[-1]:
        return False
    plugin = plugin_of(producer)
    if plugin is None:
        return producer.op_type == "RMSNormalization" and norms_rows(producer)
    return "to" in plugin.attributes and (to not in CODES or plugin.outputs[-1] == "scale?")


def _rounding(producer: ir.Node, to: int, group: int, amax: Sequence[ir.Value | None]) -> ir.Node:
    """Makes a node that computes the same as `producer`, and rounds its output."""
    plugin = plugin_of(producer)
    if plugin is None:
        epsilon = producer.attributes.get_float("epsilon", 1e-5)
        return RMS_NORM.node([*producer.inputs, *amax], epsilon=epsilon, to=to, group=group)
    attributes = {name: attribute.value for name, attribute in producer.attributes.items()}
    changed = {"to": to}
    if to in CODES:  # otherwise the attribute belongs to the node's input
        changed["group"] = group
    return plugin.node([*producer.inputs, *amax], **{**attributes, **changed})
