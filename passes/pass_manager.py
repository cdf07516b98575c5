"""Runs passes one after the other, and checks the graph after each."""

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
    """rewrites: how often the pass changed the graph. refusals: why it did not where it might have, a sentence each.
    notes: what people should know of the engine, one for each weight or other thing that it is true of.
    """

    rewrites: int
    refusals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Pass(Protocol):
    """Graph → graph, in place. name: as tables and dumped files call it."""

    @property
    def name(self) -> str: ...

    def __call__(self, model: ir.Model) -> PassResult: ...


def run_passes(
    model: ir.Model,
    passes: Sequence[Pass],
    dump_graphs: Path | None = None,
    watch: Callable[[Pass, ir.Model], None] | None = None,
) -> dict[str, PassResult]:
    """Run passes in order; the results by name (a pass that runs twice is counted twice under one name).

    Args:
        dump_graphs: a folder for one ONNX file a pass, without weights: `00-imported.onnx`, `01-cleanup.onnx`, …
        watch: called before each pass.

    Raises:
        EngineError: a pass left a graph that is none; the message names the pass and the node.
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
        before = results.get(each.name, PassResult(0))
        results[each.name] = PassResult(
            before.rewrites + result.rewrites, before.refusals + result.refusals, before.notes + result.notes
        )
    return results


def check_graph(model: ir.Model) -> None:
    """Every value is written once and before it is read, typed and shaped, and has a name of its own; every op is
    known; those of ours fit their schema, and their outputs are what it infers.

    Raises:
        EngineError: the first node that breaks this.
    """
    graph = model.graph
    known = {*graph.inputs, *graph.initializers.values()}
    names: set[str | None] = {value.name for value in known}
    if len(names) < len(known):
        raise EngineError("two inputs or weights of the graph have one name")
    opset = graph.opset_imports[""]
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                raise EngineError(f"node {node.name} reads {value.name}", "which nothing before it writes")
        plugin = plugin_of(node)
        if plugin is not None:
            plugin.check(node)
            written = [_said(value.dtype, value.shape) for value in node.outputs]
            inferred = [_said(dtype, ir.Shape(dims)) for dtype, dims in plugin.infer(node)]
            if written != inferred:
                raise EngineError(f"node {node.name} writes {', '.join(written)}", f"not {', '.join(inferred)}")
        elif node.domain or not onnx.defs.has(node.op_type, opset, ""):
            raise EngineError(f"node {node.name} is of an unknown op {node.domain}.{node.op_type}")
        for value in node.outputs:
            if value.dtype is None or value.shape is None:
                raise EngineError(f"node {node.name} writes {value.name}", "whose type or shape is not known")
            if value.name in names:
                raise EngineError(f"node {node.name} writes {value.name}", "a name that is taken")
            names.add(value.name)
            known.add(value)
    for value in graph.outputs:
        if value not in known:
            raise EngineError(f"the graph gives {value.name}", "which nothing writes")


def _said(dtype: ir.DataType | None, shape: ir.Shape | None) -> str:
    return f"{dtype} {shape}"
