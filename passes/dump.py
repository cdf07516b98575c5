"""Writes a graph for people to look at: an ONNX file that names its weights and does not hold them."""

from pathlib import Path

import onnx_ir as ir

INLINE_BYTES = 1024  # constants up to this size are worth seeing


def dump_graph(model: ir.Model, path: Path) -> None:
    """Write `path`. Weights stand as external data in a file that is not there: nothing is read to write this."""
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
