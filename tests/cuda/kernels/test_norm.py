"""RMS and layer normalization on CUDA, in emulation, against float64."""

import ml_dtypes
import numpy as np
import pytest

from enginewright.plan import linear, step_sizes
from enginewright.plugins import PLUGINS
from enginewright.plugins.kernel import CudaKernel, expression
from tests.emulator.kernels import SCHEDULES, Kernels
from tests.helpers.cuda_call import POISON, CudaCall, Operand, empty, strided, vector

ROWS, STRIDE, COLUMNS, EPSILON = 5, 192, 70, 1e-5
TYPES = {"f32": ("Type::f32", np.float32), "i8": ("Type::i8", np.int8), "e4m3": ("Type::e4m3", np.uint8)}
LARGEST = {"i8": 127, "e4m3": 448}
ERROR = {"i8": 1 / 127, "e4m3": 2.0**-4}  # of a code, over the largest number: a step


def _expression(to: str, group: int, add: bool) -> str:
    return expression(
        "rms_norm",
        "RmsNorm",
        rows=0,
        columns=COLUMNS,
        x_stride=STRIDE,
        delta_stride=STRIDE,
        sum_stride=STRIDE,
        y_stride=STRIDE,
        padded=128,
        group=group,
        scale_stride=64,
        type=TYPES[to][0],
        add=add,
        epsilon=EPSILON,
    )


CASES = [
    ("f32", 0, True),
    ("f32", 0, False),
    ("i8", 32, True),
    ("e4m3", 32, False),
    ("i8", 0, False),
    ("e4m3", 0, True),
]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels([("rms_norm.cuh", _expression(*case)) for case in CASES])


@pytest.mark.parametrize(("to", "group", "add"), CASES)
def test_rows_are_normalized(kernels: Kernels, to: str, group: int, add: bool) -> None:
    """3 of 5 rows, 70 columns of 192: what lies outside keeps its poison; columns up to 128 are zeros."""
    rng = np.random.default_rng(0)
    x, delta = rng.standard_normal((2, ROWS, STRIDE)).astype(np.float32)
    x[1] = 0.0
    delta[1] = 0.0
    weight = rng.standard_normal(COLUMNS).astype(np.float32)
    sizes = np.array([3, 1, 1, 1, 1], np.int32)

    def run(schedule: str) -> list[np.ndarray]:
        total, scale = (np.full((ROWS, width), np.nan, np.float32) for width in (STRIDE, 64))
        y = np.full((ROWS, STRIDE), 99, TYPES[to][1])
        of_codes = scale if to in LARGEST else None
        arguments = (sizes, x, delta if add else None, weight, total if add else None, y, of_codes)
        kernels.launch(_expression(to, group, add), [ROWS], 256, (COLUMNS + 24) * 4, *arguments, schedule=schedule)
        return [total, y, scale]

    total, y, scale = run("forward")
    summed = (x + delta if add else x)[:3, :COLUMNS].astype(np.float64)
    want = summed / np.sqrt((summed * summed).mean(-1, keepdims=True) + EPSILON) * weight
    if to in LARGEST:
        runs = group or COLUMNS
        codes = (y.view(ml_dtypes.float8_e4m3fn) if to == "e4m3" else y)[:3, :COLUMNS].astype(np.float64)
        got = codes * np.repeat(scale[:3], runs, axis=-1)[:, :COLUMNS].astype(np.float64)
        assert np.abs(got - want).max() <= np.abs(want).max() * ERROR[to]
        assert abs(codes[0]).max() == LARGEST[to] and np.isnan(scale[3:]).all()
    else:
        np.testing.assert_allclose(y[:3, :COLUMNS], want, rtol=2e-6)
    assert (y[:3, COLUMNS:128] == 0).all() and (y[:3, 128:] == 99).all() and (y[3:] == 99).all()
    assert np.array_equal(total[:3, :COLUMNS], (x + delta)[:3, :COLUMNS]) if add else np.isnan(total).all()
    for schedule in SCHEDULES[1:]:
        for got, again in zip([total, y, scale], run(schedule), strict=True):
            np.testing.assert_array_equal(again, got)
    for site in kernels.sites:
        with kernels.without(site):
            assert any(not np.array_equal(again, y) for schedule in SCHEDULES for _, again, _ in [run(schedule)]), (
                f"nothing is missed without the barrier at {site}"
            )


@pytest.mark.parametrize(("to", "group", "biased"), [("f32", 0, True), ("i8", 32, False), ("e4m3", 0, True)])
def test_layer_norms(to: str, group: int, biased: bool) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((3, COLUMNS)) + 2).astype(np.float32)
    weight, bias = rng.standard_normal((2, COLUMNS)).astype(np.float32)
    runs = -(-COLUMNS // group) if group else 1
    kernel = PLUGINS["LayerNorm"].kernels["cuda"]
    assert isinstance(kernel, CudaKernel)

    def operands() -> dict[str, Operand]:
        return {
            "x": strided("f32", linear(tokens=1), x, STRIDE),
            "weight": vector("f32", weight),
            **({"bias": vector("f32", bias)} if biased else {}),
            "out": empty(to, linear(tokens=1), 3, COLUMNS, STRIDE, COLUMNS if to == "f32" else 128),
            **({"scale": empty("f32", linear(tokens=1), 3, runs, 64)} if to in LARGEST else {}),
        }

    matrices = {role: operand.matrix for role, operand in operands().items()}
    call = CudaCall(kernel, matrices, epsilon=EPSILON, group=group)

    def run(schedule: str) -> dict[str, np.ndarray]:
        of_step = operands()
        call.run(of_step, step_sizes(tokens=3, sequences=1, logit_rows=1), schedule)
        return {role: of_step[role].values for role in ("out", "scale") if role in of_step}

    written = run(SCHEDULES[0])
    off = x - x.mean(-1, keepdims=True, dtype=np.float64)
    want = off / np.sqrt((off * off).mean(-1, keepdims=True) + EPSILON) * weight + (bias if biased else 0)
    y = written["out"][:3, :COLUMNS]
    if to in LARGEST:
        codes = (y.copy().view(ml_dtypes.float8_e4m3fn) if to == "e4m3" else y).astype(np.float64)
        got = codes * np.repeat(written["scale"][:3, :runs], group or COLUMNS, axis=-1)[:, :COLUMNS]
        assert np.abs(got - want).max() <= np.abs(want).max() * ERROR[to]
    else:
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=2e-6)
    assert (written["out"][3:] == POISON[to]).all() or np.isnan(written["out"][3:]).all()
    for schedule in SCHEDULES[1:]:
        for role, again in run(schedule).items():
            np.testing.assert_array_equal(again, written[role])
    for site in call.kernels.sites:
        with call.kernels.without(site):
            assert any(
                not np.array_equal(again, written[role], equal_nan=role == "scale")
                for schedule in SCHEDULES
                for role, again in run(schedule).items()
            ), f"nothing is missed without the barrier at {site}"
