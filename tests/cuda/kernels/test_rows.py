"""Quantized rows and gathered columns on CUDA, in emulation: the same bits as the formulas in fp32."""

import ml_dtypes
import numpy as np
import pytest

from enginewright.plan import Linear, linear, step_sizes
from enginewright.plugins.elementwise.gather_columns import LACKING
from enginewright.plugins.kernel import Matrix
from tests.emulator.kernels import SCHEDULES
from tests.helpers.cuda_call import NUMPY, CudaCall, Operand, as_bf16, empty, from_bf16, kernel_of, strided

TOKENS, COLUMNS, STRIDE, PADDED = linear(tokens=1), 330, 448, 384
SIZES = step_sizes(tokens=6, sequences=1, logit_rows=1)


def rows() -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((6, COLUMNS)).astype(np.float32) * 5
    x[1] = 0.0
    x[2] = 1e-37  # smaller than what has a factor
    x[3, 329] = np.inf
    x[4, 100] = np.nan
    x[5, 64:96] = np.arange(32) * 2.0 - 31  # codes that fall on halves
    x[5, 96:128] = np.arange(32) * 1e-3 * 2.0 ** np.arange(32)  # and small ones
    return x


def quantized(x: np.ndarray, group: int, to: str) -> tuple[np.ndarray, np.ndarray]:
    """q [rows, columns] and scale [rows, runs] as quantize_rows.py has them."""
    code_max, tiny_max = {"i8": (127, 2.0**-120), "e4m3": (448, 2.0**-118)}[to]
    q, scales = np.zeros(x.shape, NUMPY[to]), []
    for begin in range(0, COLUMNS, group or COLUMNS):
        run = x[:, begin : begin + (group or COLUMNS)]
        largest = np.abs(run).max(1, initial=0.0, keepdims=True)
        tiny = largest < np.float32(tiny_max)
        with np.errstate(all="ignore"):
            factor = np.where(tiny, np.float32(0), np.float32(code_max) / largest)
            numbers = np.nan_to_num(np.clip(run * factor, -code_max, code_max))
            scale = np.where(tiny, np.float32(0), largest / np.float32(code_max)) + (run * 0).sum(1, keepdims=True)
        codes = np.rint(numbers) if to == "i8" else numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        q[:, begin : begin + run.shape[1]] = codes
        scales.append(scale)
    return q, np.concatenate(scales, 1)


def check(call: CudaCall, operands: dict[str, Operand], role: str, x: np.ndarray, group: int) -> None:
    """Under every schedule; and each barrier is missed under one."""
    q, scale = quantized(x, group, operands[role].matrix.dtype)
    finite = np.isfinite(np.repeat(scale, group or COLUMNS, axis=1)[:, :COLUMNS])

    def differences(schedule: str) -> int:
        operands[role].values[:], operands["scale"].values[:] = 99, np.nan
        call.run(operands, SIZES, schedule)
        found, scales = operands[role].values, operands["scale"].values
        assert not found[:6, COLUMNS:PADDED].any()
        assert (found[:6, PADDED:] == 99).all() and (found[6:] == 99).all()
        assert np.isnan(scales[:6, scale.shape[1] :]).all() and np.isnan(scales[6:]).all()
        wrong = (found[:6, :COLUMNS] != q) & finite
        return int(wrong.sum()) + int((~np.equal(scales[:6, : scale.shape[1]], scale) & np.isfinite(scale)).sum())

    assert [differences(schedule) for schedule in SCHEDULES] == [0, 0, 0]
    for site in call.kernels.sites:
        with call.kernels.without(site):
            assert any(differences(schedule) for schedule in SCHEDULES), f"nothing is missed without {site}"


@pytest.mark.parametrize("to", ["i8", "e4m3"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_rows_are_quantized(dtype: str, group: int, to: str) -> None:
    x = rows()
    bits = as_bf16(np.nan_to_num(x, nan=9e9, posinf=1e9))
    x, stored = (from_bf16(bits), bits) if dtype == "bf16" else (x, x)
    operands = {
        "x": strided(dtype, TOKENS, stored, STRIDE),
        "q": empty(to, TOKENS, 6, COLUMNS, STRIDE, PADDED),
        "scale": empty("f32", TOKENS, 6, -(-COLUMNS // (group or COLUMNS)), 64),
    }
    call = CudaCall(kernel_of("QuantizeRows"), {role: one.matrix for role, one in operands.items()}, group=group)
    check(call, operands, "q", x, group)


@pytest.mark.parametrize("to", ["i8", "e4m3"])
def test_a_scale_is_nan_where_its_run_is_not_finite(to: str) -> None:
    x = rows()
    operands = {
        "x": strided("f32", TOKENS, x, STRIDE),
        "q": empty(to, TOKENS, 6, COLUMNS, STRIDE, PADDED),
        "scale": empty("f32", TOKENS, 6, 3, 64),
    }
    CudaCall(kernel_of("QuantizeRows"), {role: one.matrix for role, one in operands.items()}, group=128).run(
        operands, SIZES
    )
    lost = np.isnan(operands["scale"].values[:6, :3])
    assert lost.sum() == 2 and lost[3, 2] and lost[4, 0]


@pytest.mark.parametrize(("to", "group"), [("f32", 0), ("bf16", 0), ("i8", 0), ("i8", 32), ("e4m3", 0)])
@pytest.mark.parametrize("width", [COLUMNS, COLUMNS - 20])
def test_columns_are_gathered(to: str, group: int, width: int) -> None:
    """width: of x."""
    x = np.nan_to_num(rows(), nan=3.0, posinf=7.0)[:, :width]
    order = np.random.default_rng(1).integers(0, width, COLUMNS).astype(np.int32)
    padded = COLUMNS if to == "f32" else PADDED
    if to in ("f32", "bf16"):
        order[[3, COLUMNS - 1]] = -1
    expected = np.where(order < 0, np.float32(LACKING), x[:, order])
    operands = {
        "x": strided("f32", TOKENS, x, STRIDE),
        "columns": Operand(order, Matrix("i32", Linear(1), COLUMNS, COLUMNS, COLUMNS)),
        "out": empty(to, TOKENS, 6, COLUMNS, STRIDE, padded),
    }
    if to in ("i8", "e4m3"):
        operands["scale"] = empty("f32", TOKENS, 6, -(-COLUMNS // (group or COLUMNS)), 64)
    call = CudaCall(kernel_of("GatherColumns"), {role: one.matrix for role, one in operands.items()}, group=group)
    if to in ("i8", "e4m3"):
        check(call, operands, "out", expected, group)
        return
    call.run(operands, SIZES)
    out = operands["out"].values
    want = expected if to == "f32" else as_bf16(expected)
    np.testing.assert_array_equal(out[:6, :COLUMNS], want)
    untouched = np.isnan(out[:6, padded:]) if to == "f32" else out[:6, padded:] == 0x7FFF
    assert untouched.all() and not out[:6, COLUMNS:padded].any()
