"""Runs passes one after another, and checks the graph after each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import onnx
import onnx_ir as ir

from enginewright.errors import EngineError
from enginewright.passes.dump import dump_graph
from enginewright.plugins import plugin_of


@dataclass(frozen=True)
class PassResult:
    """The result of a pass."""

    rewrites: int  # number of changes to the graph
    refusals: tuple[str, ...] = ()  # sentences on parts of the graph that matched, and why each was left unchanged
    # facts about the engine that users should know; a fact about several weights is listed once for each
    notes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()  # sentences about the engine as a whole that users should know


class Pass(Protocol):
    """A rewrite of a graph, in place."""

    @property
    def name(self) -> str:
        """Name of the pass in tables and dumped files."""
        ...

    def __call__(self, model: ir.Model) -> PassResult:
        """Rewrites the graph in place."""
        ...


def run_passes(
    model: ir.Model,
    passes: Sequence[Pass],
    dump_graphs: Path | None = None,
    watch: Callable[[Pass, ir.Model], None] | None = None,
) -> dict[str, PassResult]:
    """Runs passes in order.

    Args:
        model: the graph, which is changed in place.
        passes: the passes.
        dump_graphs: a folder that gets one ONNX file for each pass, without weights: `00-imported.onnx`,
            `01-cleanup.onnx`, …; None writes none.
        watch: called with the pass and the graph before each pass; None is not called.

    Returns:
        Results by the passes' names; those of a pass that runs twice are added up.

    Raises:
        EngineError: a pass left an invalid graph; the message names the pass and the node.
    """
    results: dict[str, PassResult] = {}
    if dump_graphs is not None:
        dump_graph(model, dump_graphs / "00-imported.onnx")
    for index, each in enumerate(passes, start=1):
        if watch is not None:
            watch(each, model)
        result = each(model)
        try:
            check_graph(model)
        except EngineError as error:
            raise EngineError(f"the pass {each.name} left a broken graph", str(error), "Please report this.") from error
        if dump_graphs is not None:
            dump_graph(model, dump_graphs / f"{index:02d}-{each.name}.onnx")
        earlier = results.get(each.name, PassResult(0))
        results[each.name] = PassResult(
            earlier.rewrites + result.rewrites,
            earlier.refusals + result.refusals,
            earlier.notes + result.notes,
            earlier.facts + result.facts,
        )
    return results


def check_graph(model: ir.Model) -> None:
    """Checks that a graph is valid.

    Every value has a type, a shape and a unique name, and is written once, before it is read. Every op is known. Nodes
    of our own ops fit their schemas, and their outputs have the types and shapes that the schemas infer.

    Raises:
        EngineError: the graph is not valid; the message names the first invalid node or value.
    """
    graph = model.graph
    known = {*graph.inputs, *graph.initializers.values()}
    names: set[str | None] = {value.name for value in known}
    if len(names) < len(known):
        raise EngineError("two inputs or weights of the graph have one name")
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                raise EngineError(f"node {node.name} reads {value.name}", "which nothing before it writes")
        _check_op(node, graph.opset_imports[""])
        for value in node.outputs:
            if value.dtype is None or value.shape is None:
                raise EngineError(f"node {node.name} writes {value.name}", "whose type or shape is not known")
            if value.name in names:
                raise EngineError(f"node {node.name} writes {value.name}", "a name that is taken")
            names.add(value.name)
            known.add(value)
    for value in graph.outputs:
        if value not in known:
            raise EngineError(f"the graph outputs {value.name}", "which nothing writes")


def _check_op(node: ir.Node, opset: int) -> None:
    """Checks that an op is known, and that a node of our own fits its schema."""
    plugin = plugin_of(node)
    if plugin is None:
        if node.domain or not onnx.defs.has(node.op_type, opset, ""):
            raise EngineError(f"node {node.name} has an unknown op {node.domain}.{node.op_type}")
        return
    plugin.check(node)
    written = [_signature(value.dtype, value.shape) for value in node.outputs]
    inferred = [_signature(dtype, ir.Shape(dims)) for dtype, dims in plugin.infer(node)]
    if written != inferred:
        raise EngineError(f"node {node.name} writes {', '.join(written)}", f"not {', '.join(inferred)}")


def _signature(dtype: ir.DataType | None, shape: ir.Shape | None) -> str:
    return f"{dtype} {shape}"
