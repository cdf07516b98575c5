"""A value that is only ever read as bfloat16 is written as bfloat16: the Cast goes into the node before it."""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.passes.graph import nodes_of, norms_rows, replace
from enginewright.passes.pass_manager import PassResult
from enginewright.plugins import plugin_of
from enginewright.plugins.rms_norm import RMS_NORM


@dataclass(frozen=True)
class RoundInProducer:
    name: str = "round_in_producer"

    def __call__(self, model: ir.Model) -> PassResult:
        rewrites, refusals = 0, []
        for cast in tuple(nodes_of(model, "Cast")):
            if cast.graph is None:
                continue  # gone together with another one of the same value
            refusal = _round(cast)
            rewrites += refusal is None
            refusals += [refusal] if refusal else []
        return PassResult(rewrites, tuple(refusals))


def _round(cast: ir.Node) -> str | None:
    (value,) = cast.inputs
    assert value is not None
    to, producer = cast.attributes["to"].as_int(), value.producer()
    if producer is None:
        return f"{cast.name} rounds an input of the graph."
    users = tuple(value.consumers())
    if value.is_graph_output() or any(user.op_type != "Cast" or user.attributes["to"].as_int() != to for user in users):
        return f"{value.name} is used unrounded, too."
    if not _can_round(value, producer):
        return f"{producer.name} ({producer.op_type}) cannot round."
    rounding = _rounding(producer, to)
    rounding.name = producer.name
    outputs = dict(zip(producer.outputs, rounding.outputs, strict=True))
    rounded = outputs.pop(value)
    rounded.name = value.name
    for user in users:
        ir.convenience.replace_all_uses_with(user.outputs[0], rounded, replace_graph_outputs=True)
    graph = producer.graph
    assert graph is not None
    graph.remove(users, safe=True)
    replace([producer], [rounding], list(outputs.items()))
    return None


def _can_round(value: ir.Value, producer: ir.Node) -> bool:
    """Whether the node can write this value rounded: `to` is of a node's last output, and nothing is rounded twice."""
    if value.dtype != ir.DataType.FLOAT or value is not producer.outputs[-1]:
        return False
    plugin = plugin_of(producer)
    if plugin is None:
        return producer.op_type == "RMSNormalization" and norms_rows(producer)
    return "to" in plugin.attributes


def _rounding(producer: ir.Node, to: int) -> ir.Node:
    """The node that does what `producer` does, and rounds."""
    plugin = plugin_of(producer)
    if plugin is None:
        return RMS_NORM.node(producer.inputs, epsilon=producer.attributes.get_float("epsilon", 1e-5), to=to)
    attributes = {name: attribute.value for name, attribute in producer.attributes.items()}
    return plugin.node(producer.inputs, **{**attributes, "to": to})
