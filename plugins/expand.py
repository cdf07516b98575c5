"""Makes a graph of standard ops only: every op of ours is replaced by its reference."""

import onnx_ir as ir

from enginewright.plugins.plugin import DOMAIN
from enginewright.plugins.registry import plugin_of
from enginewright.plugins.writer import Writer


def expand_references(model: ir.Model) -> ir.Model:
    """Copies a graph with references inlined, so that onnxruntime runs it. Weights are shared and not read."""
    expanded = model.clone()
    graph = expanded.graph
    for node in list(graph):
        plugin = plugin_of(node)
        if plugin is None:
            continue
        plugin.check(node)
        write = Writer()
        results = [_own(write, node, value) for value in plugin.reference(write, node)]
        ir.convenience.replace_nodes_and_values(graph, node, [node], write.nodes, node.outputs, results)
    graph.opset_imports.pop(DOMAIN, None)
    return expanded


def _own(write: Writer, node: ir.Node, value: ir.Value) -> ir.Value:
    """Makes sure that a value is not one of the node's inputs, so that it may take an output's name."""
    return write.op("Identity", value) if value in node.inputs else value
