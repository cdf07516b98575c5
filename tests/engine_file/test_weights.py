"""Every weight of an engine, restored in numpy by the words of docs/engine-file.md, is what the builder made it of."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch

from enginewright.builder import build
from enginewright.builder.assembly import Assembly, assemble
from enginewright.engine_file import EngineFile
from enginewright.passes.quant import METHODS, Fp8, Int4Rtn, Int8Sq, QuantConfig
from enginewright.passes.quant.method import stored
from enginewright.passes.weights import open_rows, shape_of
from tests.build.test_method_engines import CALIBRATION
from tests.helpers.tiny import MemoryCheckpoint

Array = npt.NDArray[Any]
QUANTS: list[QuantConfig] = [
    *(method() for method in METHODS),
    Int4Rtn(64, zero_points=True),
    Int4Rtn(0),
    Fp8(fp8_scales="tensor"),
    Fp8(fp8_scales="block"),
    Int8Sq(32, "static"),
]
SOME = [
    QUANTS[n] for n, quant in enumerate(QUANTS) if quant.name in ("bf16", "w8a8", "mxfp4", "auto") or n >= len(METHODS)
]
LAYOUTS = {"plain", "r16", "r16_pairs", "r16_columns", "r16_columns_pairs"}
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def elements(data: bytes, dtype: str) -> Array:
    """Elements in the order of their indices, but of `u4` and `e2m1`: bytes. bf16 and e4m3 as FLOAT."""
    if dtype == "bf16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    if dtype == "e4m3":
        code = np.frombuffer(data, np.uint8).astype(np.int32)
        exponent, mantissa = code >> 3 & 15, code & 7
        size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
        return np.where(code & 0x80, -size, size).astype(np.float32)
    return np.frombuffer(data, {"f32": "<f4", "i32": "<i4", "i8": "i1", "u4": "u1", "e2m1": "u1"}[dtype])


def matrix(data: bytes, dtype: str, rows: int, columns: int, layout: str) -> Array:
    """[rows, columns] of one matrix."""
    if layout.endswith("_pairs"):
        halves, height = [], -(-rows // 2 // 16)  # blocks of a half
        blocks = np.frombuffer(data, np.uint8).reshape(height, 2, -1)
        for half in (0, 1):
            halves.append(matrix(blocks[:, half].tobytes(), dtype, rows // 2, columns, layout.removesuffix("_pairs")))
        return np.concatenate(halves)
    numbers = elements(data, dtype)
    if layout == "plain":
        return numbers.reshape(rows, columns)
    n, k = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    if layout == "r16_columns":
        return numbers[(n // 16 * columns + k) * 16 + n % 16]
    padded = -(-columns // 64) * 64
    if dtype in ("u4", "e2m1"):
        line = n // 16 * padded // 8 + k // 8
        byte = numbers[line * 64 + 4 * (n % 16) + k % 4]
        return np.where(k % 8 < 4, byte & 15, byte >> 4)
    depth = 2 if dtype == "bf16" else 4
    return numbers[((n // 16 * padded // depth + k // depth) * 16 + n % 16) * depth + k % depth]


class Reader:
    """An engine's weights, by what its file says alone."""

    def __init__(self, path: Path) -> None:
        with EngineFile.open(path) as file:
            self.forms = {name: form for name, form in file.manifest.sections.items() if name.startswith("weights/")}
            self.data = {name: bytes(file.section(name)) for name in self.forms}
            calls = json.loads(bytes(file.section("plan/cpu")))["calls"]
        self.groups = {
            call["operands"]["weight"]["name"]: call["attributes"]["group"]
            for call in calls
            if "group" in call["attributes"] and call["operands"].get("weight", {}).get("in") == "weights"
        }

    def tensor(self, name: str) -> Array | None:
        """[columns], or [rows, columns] with the rows of all matrices."""
        form = self.forms.get(f"weights/{name}")
        if form is None:
            return None
        assert form.shape is not None and form.dtype is not None and form.layout is not None
        *outer, columns = form.shape
        if not outer:
            return elements(self.data[f"weights/{name}"], form.dtype)
        *matrices, rows = outer
        count, data = (matrices or [1])[0], self.data[f"weights/{name}"]
        size = len(data) // count
        parts = [data[one * size : (one + 1) * size] for one in range(count)]
        return np.concatenate([matrix(part, form.dtype, rows, columns, form.layout) for part in parts])

    def restored(self, name: str) -> Array:
        codes, scale, zero = (self.tensor(f"{name}{part}") for part in ("", ".scale", ".zero"))
        dtype = self.forms[f"weights/{name}"].dtype
        assert codes is not None
        if scale is None:
            return codes
        columns = codes.shape[1]

        def wide(of_groups: Array) -> Array:
            if of_groups.ndim == 1:
                return of_groups[:, None]
            group = self.groups[name] or columns
            return of_groups[:, np.arange(columns) // group]

        if dtype == "u4":
            codes = codes - (np.float32(8) if zero is None else wide(zero).astype(np.float32))
        elif dtype == "e2m1":
            codes = E2M1_DOUBLED[codes]
        return codes.astype(np.float32) * wide(scale)


def made_of(weight: ir.Value, quant: QuantConfig, dtype: str) -> torch.Tensor:
    """The weight that the builder restores from the codes that it makes or has chosen."""
    if stored(weight) or dtype in ("f32", "bf16"):
        values = open_rows(weight)(0, shape_of(weight)[0])
        return values.bfloat16().float() if dtype == "bf16" else values
    names = {torch.int8: "i8", torch.uint8: "u4", torch.float8_e4m3fn: "e4m3"}
    first = quant.outputs("w", 1, 64)[0][1]
    config = quant if names.get(first) == dtype or (dtype == "e2m1" and first == torch.uint8) else quant.tables
    return config.restore(*(open_rows(part)(0, shape_of(part)[0]) for part in config.weights(weight)))


def has_groups(reader: Reader) -> bool:
    """True if gates and ups have a scale for each group."""
    return any(len(form.shape or ()) > 1 for name, form in reader.forms.items() if name.endswith("gate_up_proj.scale"))


@pytest.mark.parametrize("quant", SOME, ids=str)
def test_a_reader_in_numpy_restores_every_weight(
    quant: QuantConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has experts, whose gates and ups lie in pairs, and several groups, of which the last one is short."""
    (tmp_path / "data.txt").write_text(CALIBRATION)
    data = str(tmp_path / "data.txt") if quant.calibrated else None
    assemblies: list[Assembly] = []
    monkeypatch.setattr(build, "assemble", lambda *rest: assemblies.append(assemble(*rest)) or assemblies[-1])
    checkpoint = MemoryCheckpoint.tiny("qwen3_moe", hidden_size=80, num_hidden_layers=2, mlp_only_layers=[0])
    build.build_engine(checkpoint, build.BuildConfig(quant=quant, gate=None, calib_data=data), tmp_path / "x.engine")

    reader = Reader(tmp_path / "x.engine")
    names = {name.removeprefix("weights/") for name in reader.forms}
    layouts = {form.layout for form in reader.forms.values()}
    assert layouts == (LAYOUTS if has_groups(reader) else LAYOUTS - {"r16_columns_pairs"})
    weights = assemblies[-1].dense.graph.initializers  # builds that calibrate have made a plan before
    assert names - weights.keys() == {name for name in names if name.endswith((".scale", ".zero", ".largest"))}
    for name in names & weights.keys():
        form = reader.forms[f"weights/{name}"]
        expected = made_of(weights[name], quant, str(form.dtype))
        np.testing.assert_array_equal(reader.restored(name), expected.numpy(), err_msg=f"{name} {form}")
