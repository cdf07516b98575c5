"""Writes a dense graph as an ONNX file in standard ops, for onnxruntime and others."""

import os
import shutil
import tempfile
from pathlib import Path

import onnx_ir as ir
import torch

from enginewright.errors import EngineError
from enginewright.new_file import replace_file
from enginewright.output_file import require_writable
from enginewright.plugins import DOMAIN, expand_references
from enginewright.runtime.count import format_bytes

EMBED_LIMIT_BYTES = 1 << 30  # bytes of weights inside the file; protobuf ends at 2 GiB
DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}


def export_onnx(model: ir.Model, path: Path, dtype: str = "fp32", embed_limit_bytes: int = EMBED_LIMIT_BYTES) -> None:
    """Writes a dense graph in one of DTYPES.

    fp16 keeps positions, rotary tables, softmax, softcaps and windowed attention in fp32. Activations have fp16's
    range: some models that were trained in bf16 (Gemma 3) exceed it.

    Args:
        model: the dense graph.
        path: the ONNX file.
        dtype: one of DTYPES.
        embed_limit_bytes: limit of weights inside the file; if there are more, they go to `<path>.data` next to it.

    Raises:
        UsageError: there is no such folder, or `path` cannot be a file.
        EngineError: the disk has no space, or a weight is out of fp16's range. Nothing is left under `path` then.
    """
    path = Path(os.path.realpath(path))
    standard = expand_references(_in_half(model) if DTYPES[dtype] == ir.DataType.FLOAT16 else model)
    size_bytes = sum(value.const_value.nbytes for value in standard.graph.initializers.values() if value.const_value)
    data = f"{path.name}.data" if size_bytes > embed_limit_bytes else None
    names = [data, path.name] if data else [path.name]
    for name in names:
        require_writable(path.with_name(name), regular=True)
    _check_space(path, size_bytes)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            try:
                ir.save(standard, Path(folder, path.name), external_data=data)
            except ir.serde.SerdeError as error:  # wraps the error of reading a weight
                raise _root(error) from None
            for name in names:
                replace_file(Path(folder, name), path.with_name(name))
    except OSError as error:
        raise EngineError(f"{path} cannot be written", error.strerror or str(error)) from error


def _check_space(path: Path, size_bytes: int) -> None:
    """Raises EngineError if the disk has no space for a file of this size; an old file stays until the end."""
    free_bytes = shutil.disk_usage(path.absolute().parent).free
    if size_bytes > free_bytes:
        why = f"it takes {format_bytes(size_bytes)}, {format_bytes(free_bytes)} are free"
        raise EngineError(f"the disk has no space for {path}", why, "Make space, or name another disk.")


def _root(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _root(error.__cause__)


def _in_half(model: ir.Model) -> ir.Model:
    """Copies a graph with FLOAT16 for FLOAT; the ops of our domain compute in FLOAT, between casts."""
    half = model.clone()
    graph = half.graph
    tables = {v for v in graph.initializers.values() if all(node.domain == DOMAIN for node, _ in v.uses())}
    for value in [*graph.inputs, *graph.initializers.values()]:
        if value.dtype == ir.DataType.FLOAT and value not in tables:
            value.type = ir.TensorType(ir.DataType.FLOAT16)
            if value.const_value is not None:
                value.const_value = _half_tensor(value.const_value)
    widened: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.domain == DOMAIN:
            _keep_in_float(graph, node, widened)
            continue
        for output in node.outputs:
            if output.dtype == ir.DataType.FLOAT:
                output.type = ir.TensorType(ir.DataType.FLOAT16)
        if node.op_type == "Attention":
            node.attributes["softmax_precision"] = ir.AttrInt64("softmax_precision", ir.DataType.FLOAT.value)
    return half


def _keep_in_float(graph: ir.Graph, node: ir.Node, widened: dict[ir.Value, ir.Value]) -> None:
    """Puts casts around a node. widened: FLOAT16 value → its FLOAT copy, which earlier nodes made."""
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == ir.DataType.FLOAT16:
            if value not in widened:
                cast = _cast(value, ir.DataType.FLOAT, f"{value.name}.widened")
                graph.insert_before(node, cast)
                widened[value] = cast.outputs[0]
            node.replace_input_with(index, widened[value])
    for value in list(node.outputs):
        if value.dtype != ir.DataType.FLOAT:
            continue
        name = value.name
        cast = _cast(value, ir.DataType.FLOAT16, f"{name}.half")
        value.name = f"{name}.float"
        uses = [use for use in value.uses() if use.node is not cast]
        for user, index in uses:
            user.replace_input_with(index, cast.outputs[0])
        cast.outputs[0].name = name
        graph.insert_after(node, cast)
        for index, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[index] = cast.outputs[0]


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    output = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
    return ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype.value)], outputs=[output], name=name)


def _half_tensor(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    def evaluate() -> ir.TensorProtocol:
        values = torch.from_numpy(tensor.numpy().copy()).to(torch.float16)
        if values.isinf().any():
            raise EngineError(
                f"tensor {tensor.name} cannot be written in fp16", "it has values beyond ±65504", "Export in fp32."
            )
        return ir.tensor_adapters.TorchTensor(values, name=tensor.name)

    return ir.LazyTensor(evaluate, ir.DataType.FLOAT16, ir.Shape(tensor.shape.numpy()), cache=False, name=tensor.name)
