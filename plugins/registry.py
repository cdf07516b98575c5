"""The ops of the domain `enginewright`: one line each."""

from collections.abc import Mapping

import onnx_ir as ir

from enginewright.errors import EngineError
from enginewright.plugins.causal_window import CAUSAL_WINDOW
from enginewright.plugins.plugin import DOMAIN, Plugin
from enginewright.plugins.rope_table import ROPE_TABLE
from enginewright.plugins.softcap import SOFTCAP

PLUGINS: Mapping[str, Plugin] = {
    plugin.name: plugin
    for plugin in (
        CAUSAL_WINDOW,
        ROPE_TABLE,
        SOFTCAP,
    )
}


def plugin_of(node: ir.Node) -> Plugin | None:
    """The plugin of a node, None for a standard op.

    Raises:
        EngineError: the node is of our domain, and we have no such op.
    """
    if node.domain != DOMAIN:
        return None
    plugin = PLUGINS.get(node.op_type)
    if plugin is None:
        raise EngineError(
            f"node {node.name} is of an unknown op {DOMAIN}.{node.op_type}", f"known: {', '.join(PLUGINS)}"
        )
    return plugin
