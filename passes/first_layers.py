"""Cuts a model down to its first layers, its last norm and its head: a smaller model that proposes draft tokens.

https://arxiv.org/abs/2404.16710
"""

import json
import re

import onnx_ir as ir

from enginewright.errors import UsageError
from enginewright.passes.cleanup import Cleanup

STATE = re.compile(r"(?:past|present)_\w+\.(?P<layer>\d+)")


def first_layers(model: ir.Model, count: int) -> ir.Model:
    """Copies a dense graph without the layers above the first `count`. Weights keep their names and values.

    Args:
        model: the dense graph.
        count: layers that stay.

    Raises:
        UsageError: the model has no more layers than that.
    """
    model = model.clone()
    ends: list[str] = json.loads(model.metadata_props["enginewright.layer_ends"])
    if not 0 < count < len(ends):
        raise UsageError(
            f"the model has {len(ends)} layers, and its first {count} cannot be its draft",
            "a draft has some of the layers, but not all",
            f"Take 1 to {len(ends) - 1}." if len(ends) > 1 else "",
        )
    graph, values = model.graph, {value.name: value for node in model.graph for value in node.outputs}
    ir.convenience.replace_all_uses_with(values[ends[-1]], values[ends[count - 1]])
    graph.outputs[:] = [value for value in graph.outputs if _is_kept(value, count)]
    Cleanup()(model)
    graph.inputs[:] = [value for value in graph.inputs if _is_kept(value, count)]
    for kind in ("enginewright.kv_groups", "enginewright.state_groups"):
        groups = json.loads(model.metadata_props[kind])
        kept = [{**group, "layers": [layer for layer in group["layers"] if layer < count]} for group in groups]
        model.metadata_props[kind] = json.dumps([group for group in kept if group["layers"]])
    model.metadata_props["enginewright.layer_ends"] = json.dumps(ends[:count])
    return model


def _is_kept(value: ir.Value, count: int) -> bool:
    """Checks if a graph's input or output belongs to one of the first layers, or to no layer."""
    state = STATE.fullmatch(str(value.name))
    return state is None or int(state["layer"]) < count
