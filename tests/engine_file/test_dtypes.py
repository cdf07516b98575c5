"""The table of dtypes, against the dtypes of C++, CUDA, torch and ONNX."""

import re
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from enginewright import _cpu
from enginewright.dtypes import DTYPES, DType
from enginewright.plugins.plugin import CODES

CUDA_SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cuda"


def test_cpp_has_the_same_table() -> None:
    assert _cpu.dtypes() == [(name, dtype.bits) for name, dtype in DTYPES.items()]


def test_cuda_has_the_same_names() -> None:
    (names,) = re.findall(r"enum class Type \{ (.*) \};", (CUDA_SOURCES / "dtype.cuh").read_text())
    assert names.split(", ") == list(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_graphs_and_torch_have_numbers_of_this_size(dtype: DType) -> None:
    kind, byte_bits = getattr(torch, dtype.torch), max(dtype.bits, 8)
    assert kind.itemsize * 8 == ir.DataType[dtype.onnx].bitwidth == byte_bits
    assert dtype.bytes == (dtype.bits // 8 if byte_bits == dtype.bits else 0)


def test_codes_reach_as_far_as_their_numbers_do() -> None:
    assert {ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN} <= CODES.keys()
    for dtype in CODES.values():
        kind = getattr(torch, dtype.torch)
        assert dtype.largest == (torch.finfo if kind.is_floating_point else torch.iinfo)(kind).max
        tiny, largest = (torch.tensor(number) for number in (dtype.tiny, dtype.largest))
        assert (largest / tiny).isfinite() and (largest / (tiny / 4)).isinf()
