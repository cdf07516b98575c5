"""Weights that are computed when somebody reads them: fused, rounded, quantized."""

from collections.abc import Callable

import onnx_ir as ir
import torch

ONNX_DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int8: ir.DataType.INT8,
    torch.float8_e4m3fn: ir.DataType.FLOAT8E4M3FN,
    torch.uint8: ir.DataType.UINT8,
}


def as_torch(tensor: ir.TensorProtocol) -> torch.Tensor:
    """The values of a tensor; a lazy one is read now."""
    while isinstance(tensor, ir.LazyTensor):
        tensor = tensor.raw()  # the function that was given; a cache is never asked for
    if isinstance(tensor, ir.tensor_adapters.TorchTensor):
        raw: torch.Tensor = tensor.raw
        return raw
    return torch.from_numpy(tensor.numpy().copy())


def read(value: ir.Value) -> torch.Tensor:
    """The values of an initializer."""
    assert value.const_value is not None, f"{value.name} is no initializer"
    return as_torch(value.const_value)


def derived(name: str, dtype: torch.dtype, shape: tuple[int, ...], compute: Callable[[], torch.Tensor]) -> ir.Value:
    """An initializer whose values `compute` gives, each time they are read; nothing is kept."""

    def evaluate() -> ir.TensorProtocol:
        values = compute()
        assert values.dtype == dtype and tuple(values.shape) == shape, f"{name}: {values.dtype} {values.shape}"
        return ir.tensor_adapters.TorchTensor(values, name=name)

    tensor = ir.LazyTensor(evaluate, ONNX_DTYPES[dtype], ir.Shape(shape), cache=False, name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape), const_value=tensor)


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """The shape of an initializer."""
    assert value.shape is not None, value.name
    return tuple(int(size) for size in value.shape.numpy())
