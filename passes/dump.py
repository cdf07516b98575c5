"""Writes a graph for people to look at: an ONNX file that names its weights without their values."""

from pathlib import Path

import onnx_ir as ir

INLINE_BYTES = 1024  # bytes; constants up to this size are written with their values


def dump_graph(model: ir.Model, path: Path) -> None:
    """Writes a graph to `path`, without reading a weight: weights refer to an external file that does not exist.

    Args:
        model: the graph.
        path: the ONNX file.
    """
    shell = model.clone()
    for value in shell.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None, value.name
        if isinstance(tensor, ir.LazyTensor) or tensor.nbytes > INLINE_BYTES:
            value.const_value = ir.ExternalTensor(
                "weights", 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=str(value.name)
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    ir.save(shell, path)
