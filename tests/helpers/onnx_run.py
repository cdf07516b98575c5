"""Runs graphs in onnxruntime, the oracle of every rewrite."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from enginewright.plugins import expand_references

Array = npt.NDArray[np.generic]


class Oracle:
    """A graph in onnxruntime, the references of our ops inlined. bfloat16 and FP8 are ml_dtypes' types outside."""

    def __init__(self, model: ir.Model) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        # Nothing of onnxruntime's own fusions: the graph is run as it is written.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        data = ir.to_proto(expand_references(model)).SerializeToString()
        self.session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.dtypes = {value.name: value.dtype for value in model.graph.outputs}

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        values = {name: _to_ort(array) for name, array in feeds.items()}
        names = [output.name for output in self.session.get_outputs()]
        results = self.session.run_with_ort_values(names, values)
        return {name: _from_ort(value, self.dtypes[name]) for name, value in zip(names, results, strict=True)}


def run(model: ir.Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    return Oracle(model)(feeds)


def _to_ort(array: Array) -> onnxruntime.OrtValue:
    if array.dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        bits = np.ascontiguousarray(array).view(f"u{array.itemsize}")
        dtype = ir.DataType.from_numpy(array.dtype)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, dtype.value)
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _from_ort(value: onnxruntime.OrtValue, dtype: ir.DataType | None) -> Array:
    import torch

    if dtype == ir.DataType.FLOAT8E4M3FN:
        return value.numpy().view(ml_dtypes.float8_e4m3fn)
    if dtype != ir.DataType.BFLOAT16:
        return value.numpy()
    return torch.from_dlpack(value._ortvalue.to_dlpack()).view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
