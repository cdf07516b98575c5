"""Norms, embeddings and elementwise kernels against float64, on every instruction set of this machine."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from enginewright import _cpu
from enginewright.plugins.elementwise.gather_columns import LACKING
from tests.helpers.kernel_runner import ONE_COLUMN, TOKENS, KernelRunner, Operands, weight
from tests.tolerances import BF16_ROUNDING, LAYER_NORM_F32, NORM_F32, SOFTCAP_F32, TANH_GELU_SILU

ISAS = _cpu.isa_names()
ROWS = (0, 0, 0, 1, 0, 0)  # Linear: logit_rows
THREADS = [1, 2, 3]
isas = pytest.mark.parametrize("isa", ISAS)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def rms_norm(x: torch.Tensor, w: torch.Tensor, epsilon: float) -> torch.Tensor:
    """float64, over runs of len(w) columns."""
    runs = x.double().reshape(len(x), -1, len(w))
    normed = runs / (runs.square().mean(dim=-1, keepdim=True) + epsilon).sqrt() * w.double()
    return normed.reshape(x.shape)


def assert_close(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative to each value, with an absolute floor at the size of the tolerance."""
    assert result.isfinite().all()
    error = (result.double() - expected).abs() / expected.abs().clamp(min=1.0)
    assert error.max() < tolerance


def relative_bf16(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((result.double() - expected).abs() / expected.abs().clamp(min=1e-30)).max())


@isas
@pytest.mark.parametrize(("columns", "width"), [(577, 577), (7, 7), (64, 64), (576, 64), (192, 48), (21, 7), (1, 1)])
@pytest.mark.parametrize("threads", THREADS)
def test_rms_norm(isa: str, columns: int, width: int, threads: int) -> None:
    x, w = randn(5, columns) * 3, randn(width)
    runner = KernelRunner(isa, threads, tokens=5)
    source, out, half = runner.filled(x), runner.buffer(5, columns, "f32"), runner.buffer(5, columns, "bf16")
    for target in (out, half):
        runner.call("rms_norm@1", {"x": source, "weight": weight(w), "out": target}, {"epsilon": 1e-5})
    expected = rms_norm(x, w, 1e-5)
    assert_close(runner.read(out), expected, NORM_F32)
    assert torch.equal(runner.read(half), runner.read(out).bfloat16().float())
    assert not runner.read_pad(half).any()
    assert runner.read_pad(out).isnan().all()


@isas
def test_rms_norm_in_place_on_a_column_view(isa: str) -> None:
    x, w = randn(3, 200), randn(48)
    runner = KernelRunner(isa, tokens=3)
    whole = runner.filled(x)
    view = whole.view(20, 96)
    runner.call("rms_norm@1", {"x": view, "weight": weight(w), "out": view}, {"epsilon": 1e-6})
    assert_close(runner.read(view), rms_norm(x[:, 20:116], w, 1e-6), NORM_F32)
    assert torch.equal(runner.read(whole)[:, :20], x[:, :20])
    assert torch.equal(runner.read(whole)[:, 116:], x[:, 116:])


@isas
@pytest.mark.parametrize("columns", [577, 64, 7, 1])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(isa: str, columns: int, biased: bool) -> None:
    x, w, b = randn(5, columns) * 3 + 2, randn(columns), randn(columns + 1)[:columns]
    runner = KernelRunner(isa, 2, tokens=5)
    source, out, half = runner.filled(x), runner.buffer(5, columns, "f32"), runner.buffer(5, columns, "bf16")
    codes, scale = runner.buffer(5, columns, "i8"), runner.buffer(5, 1, "f32")
    operands: Operands = {"x": source, "weight": weight(w), **({"bias": weight(b)} if biased else {})}
    for target in ({"out": out}, {"out": half}, {"out": codes, "scale": scale}):
        runner.call("layer_norm@1", operands | target, {"epsilon": 1e-5, "group": 0})
    off = x.double() - x.double().mean(dim=-1, keepdim=True)
    expected = off / (off.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * w.double()
    assert_close(runner.read(out), expected + b.double() if biased else expected, LAYER_NORM_F32)
    assert torch.equal(runner.read(half), runner.read(out).bfloat16().float())
    assert not runner.read_pad(half).any() and not runner.read_pad(codes).any()
    restored = runner.read(codes).double() * runner.read(scale).double()
    assert ((restored - runner.read(out)).abs() <= runner.read(scale) * 0.501).all()


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.relu().square(),
}


@isas
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations(isa: str, name: str) -> None:
    """Over all sizes of numbers, in pieces of a wide row, rounded, as codes; NaN stays NaN."""
    x = torch.linspace(-12, 12, 3 * 1031).reshape(3, 1031)
    runner = KernelRunner(isa, 2, tokens=3)
    source, out, half = runner.filled(x), runner.buffer(3, 1031, "f32"), runner.buffer(3, 1031, "bf16")
    codes, scale = runner.buffer(3, 1031, "i8"), runner.buffer(3, 1, "f32")
    for target in ({"out": out}, {"out": half}, {"out": codes, "scale": scale}):
        runner.call("activation@1", {"x": source, **target}, {"activation": name, "group": 0})
    result, expected = runner.read(out), FUNCTIONS[name](x.double())
    assert ((result - expected).abs() / expected.abs().clamp(min=1e-3)).max() < TANH_GELU_SILU
    assert torch.equal(runner.read(half), result.bfloat16().float())
    assert not runner.read_pad(half).any() and not runner.read_pad(codes).any()
    assert ((runner.read(codes) * runner.read(scale) - result).abs() <= runner.read(scale) * 0.501).all()
    lost = runner.filled(torch.full((3, 7), torch.nan))
    runner.call("activation@1", {"x": lost, "out": lost}, {"activation": name, "group": 0})
    assert runner.read(lost).isnan().all()


@isas
def test_position_scale(isa: str) -> None:
    """The kernel works in place on columns of a wider row; positions lie around multiples of the original length."""
    x, positions = randn(5, 90), np.array([0, 15, 16, 33, 131071], np.int32)
    runner = KernelRunner(isa, 2, tokens=5, inputs={"positions": (positions, TOKENS, ONE_COLUMN)})
    whole = runner.filled(x)
    view = whole.view(20, 37)
    operands = {"x": view, "positions": _cpu.OperandSpec.step("positions"), "out": view}
    runner.call("position_scale@1", operands, {"beta": 0.3, "original": 16})
    factors = 1 + 0.3 * np.log(1.0 + positions // 16)
    assert_close(runner.read(view), x[:, 20:57].double() * torch.from_numpy(factors)[:, None], 3e-7)
    assert torch.equal(runner.read(whole)[:, :20], x[:, :20])
    assert torch.equal(runner.read(whole)[:, 57:], x[:, 57:])


@isas
def test_scale(isa: str) -> None:
    """The kernel works in place on columns of a wider row."""
    x = randn(5, 90)
    runner = KernelRunner(isa, 2, tokens=5)
    whole = runner.filled(x)
    view = whole.view(20, 37)
    runner.call("scale@1", {"x": view, "factor": weight(torch.tensor([0.37])), "out": view}, {})
    assert torch.equal(runner.read(view), x[:, 20:57] * torch.tensor(0.37))
    assert torch.equal(runner.read(whole)[:, :20], x[:, :20])
    assert torch.equal(runner.read(whole)[:, 57:], x[:, 57:])


@isas
def test_rows_of_a_table_of_positions(isa: str) -> None:
    table, positions = randn(31, 90), np.array([30, 0, 7, 7, 1], np.int32)
    runner = KernelRunner(isa, 2, tokens=5, inputs={"positions": (positions, TOKENS, ONE_COLUMN)})
    out = runner.buffer(5, 90, "f32")
    operands = {"x": weight(table), "rows": _cpu.OperandSpec.step("positions"), "out": out}
    runner.call("gather_rows@1", operands, {})
    assert torch.equal(runner.read(out), table[positions])


@isas
@pytest.mark.parametrize("gates", [90, 6, 1])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gates(isa: str, gates: int, dtype: str) -> None:
    """Each of a gate's numbers is for columns / gates of x; x and gate are columns of wider rows."""
    x, gate = randn(5, 90), randn(5, gates) * 3
    runner = KernelRunner(isa, 2, tokens=5)
    out = runner.buffer(5, 90, dtype)
    operands = {
        "x": runner.filled(torch.cat([x, x], dim=1)).view(90, 90),
        "gate": runner.filled(torch.cat([x, gate], dim=1)).view(90, gates),
        "out": out,
    }
    runner.call("activation@1", operands, {"activation": "sigmoid", "group": 0})
    expected = x.double() * gate.double().sigmoid().repeat_interleave(90 // gates, dim=1)
    if dtype == "bf16":
        assert relative_bf16(runner.read(out), expected) < BF16_ROUNDING
    else:
        assert_close(runner.read(out), expected, TANH_GELU_SILU)


@isas
@pytest.mark.parametrize("columns", [577, 16, 3])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("in_place", [False, True])
def test_add_rms_norm(isa: str, columns: int, dtype: str, in_place: bool) -> None:
    x, delta, w = randn(5, columns), randn(5, columns) * 2, randn(columns)
    runner = KernelRunner(isa, 2, tokens=5)
    source, addend = runner.filled(x), runner.filled(delta)
    total = source if in_place else runner.buffer(5, columns, "f32")
    normed = runner.buffer(5, columns, dtype)
    operands: Operands = {"x": source, "delta": addend, "weight": weight(w)}
    runner.call("add_rms_norm@1", operands | {"sum": total, "normed": normed}, {"epsilon": 1e-5})
    assert torch.equal(runner.read(total), x + delta)
    expected = rms_norm(x + delta, w, 1e-5)
    if dtype == "bf16":
        assert relative_bf16(runner.read(normed), expected) < BF16_ROUNDING
        assert not runner.read_pad(normed).any()
    else:
        assert_close(runner.read(normed), expected, NORM_F32)


@isas
def test_a_norm_of_zeros_is_zero(isa: str) -> None:
    runner = KernelRunner(isa)
    out = runner.buffer(1, 50, "f32")
    zeros = runner.filled(torch.zeros(1, 50))
    runner.call("rms_norm@1", {"x": zeros, "weight": weight(torch.ones(50)), "out": out}, {"epsilon": 1e-6})
    assert not runner.read(out).any()


def embed_runner(isa: str, tokens: list[int], threads: int = 1) -> KernelRunner:
    inputs = {"tokens": (np.array(tokens, np.int32), TOKENS, (1, 0, 0, 0, 0, 0))}
    return KernelRunner(isa, threads, tokens=len(tokens), inputs=inputs)


@isas
@pytest.mark.parametrize("width", [577, 64, 1])
@pytest.mark.parametrize("threads", THREADS)
def test_embed(isa: str, width: int, threads: int) -> None:
    tokens = [0, 36, 17, 16, 15, 36]
    bf16 = randn(37, width).bfloat16()
    i8 = torch.randint(-127, 128, (37, width), generator=torch.Generator().manual_seed(width)).to(torch.int8)
    scale = randn(37).abs() + 0.1
    runner = embed_runner(isa, tokens, threads)
    step = _cpu.OperandSpec.step("tokens")
    out, out8 = runner.buffer(6, width, "f32"), runner.buffer(6, width, "f32")
    runner.call("embed_bf16@1", {"tokens": step, "table": weight(bf16, "r16"), "out": out}, {"scale": 1.0})
    assert torch.equal(runner.read(out), bf16.float()[tokens])
    assert runner.read_pad(out).isnan().all()
    operands: Operands = {"tokens": step, "table": weight(i8, "r16"), "table_scale": weight(scale), "out": out8}
    runner.call("embed_w8@1", operands, {"scale": 2.5})
    assert torch.equal(runner.read(out8), ((i8.float() * scale[:, None]) * 2.5)[tokens])


@isas
@pytest.mark.parametrize("token", [-1, 37, 2**31 - 1, -(2**31)])
def test_a_token_outside_of_the_table_is_refused(isa: str, token: int) -> None:
    runner = embed_runner(isa, [3, token])
    out = runner.buffer(2, 8, "f32")
    table = weight(randn(37, 8).bfloat16(), "r16")
    with pytest.raises(ValueError, match=rf"tokens\[1\] is {token}, outside 0 … 36"):
        runner.call(
            "embed_bf16@1", {"tokens": _cpu.OperandSpec.step("tokens"), "table": table, "out": out}, {"scale": 1}
        )
    assert runner.read(out).isnan().all(), "nothing is written by a step that is refused"


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_gather_rows(isa: str, dtype: torch.dtype) -> None:
    rows = np.array([4, 0, 4], np.int32)
    runner = KernelRunner(isa, 2, tokens=5, logit_rows=3, inputs={"logit_rows": (rows, ROWS, (1, 0, 0, 0, 0, 0))})
    x = (9 * randn(5, 70)).to(dtype)
    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int8: "i8"}
    out = runner.buffer(3, 70, names[dtype], ROWS)
    runner.call("gather_rows@1", {"x": runner.filled(x), "rows": _cpu.OperandSpec.step("logit_rows"), "out": out})
    assert torch.equal(runner.read(out), x.float()[[4, 0, 4]])
    assert runner.read_pad(out).isnan().all() if dtype == torch.float32 else not runner.read_pad(out).any()
    runner.arrays[0][1] = 5
    with pytest.raises(ValueError, match=r"logit_rows\[1\] is 5, outside 0 … 4"):
        runner.run()


@isas
@pytest.mark.parametrize("columns", [5, 16, 1024, 2500])
@pytest.mark.parametrize("threads", THREADS)
def test_softcap(isa: str, columns: int, threads: int) -> None:
    x = randn(3, columns) * 40
    x[0, :5] = torch.tensor([0.0, 1e-20, -1e-3, float("inf"), float("-inf")])
    runner = KernelRunner(isa, threads, tokens=3)
    out = runner.buffer(3, columns, "f32")
    runner.call("softcap@1", {"x": runner.filled(x), "out": out}, {"cap": 30.0})
    expected = 30.0 * torch.tanh(x.double() / 30.0)
    error = (runner.read(out).double() - expected).abs() / expected.abs().clamp(min=1e-30)
    assert error.max() < SOFTCAP_F32
    assert runner.read_pad(out).isnan().all()


@isas
def test_softcap_of_nan_is_nan(isa: str) -> None:
    runner = KernelRunner(isa)
    out = runner.buffer(1, 2, "f32")
    runner.call("softcap@1", {"x": runner.filled(torch.tensor([[float("nan"), 1.0]])), "out": out}, {"cap": 5.0})
    assert runner.read(out)[0, 0].isnan() and runner.read(out)[0, 1].isfinite()


@isas
@pytest.mark.parametrize("columns", [1, 77, 1100])
def test_cast(isa: str, columns: int) -> None:
    x = randn(3, columns)
    x[0, 0], x[1, 0], x[2, 0] = float("inf"), float("nan"), 3.3895e38  # the last one rounds to infinity
    runner = KernelRunner(isa, 2, tokens=3)
    half, back = runner.buffer(3, columns, "bf16"), runner.buffer(3, columns, "f32")
    runner.call("cast@1", {"x": runner.filled(x), "out": half})
    runner.call("cast@1", {"x": half, "out": back})
    assert torch.equal(runner.read(half).nan_to_num(7.0), x.bfloat16().float().nan_to_num(7.0))
    assert torch.equal(runner.read(back).nan_to_num(7.0), x.bfloat16().float().nan_to_num(7.0))
    assert runner.read(half)[1, 0].isnan()
    assert not runner.read_pad(half).any()


@isas
@pytest.mark.parametrize("columns", [1, 77, 1100])
def test_add(isa: str, columns: int) -> None:
    a, b = randn(3, columns), randn(3, columns) * 5
    runner = KernelRunner(isa, 3, tokens=3)
    out = runner.buffer(3, columns, "f32")
    runner.call("add@1", {"a": runner.filled(a), "b": runner.filled(b), "out": out})
    assert torch.equal(runner.read(out), a + b)
    assert runner.read_pad(out).isnan().all()


@isas
@pytest.mark.parametrize(("columns", "wanted"), [(1, 1), (1, 33), (77, 77), (77, 5), (1100, 1100), (300, 1111)])
@pytest.mark.parametrize("threads", THREADS)
def test_gather_columns(isa: str, columns: int, wanted: int, threads: int) -> None:
    """Some columns twice, others not at all; and some that x lacks."""
    x = randn(5, columns)
    order = torch.randint(-1, columns, (wanted,), generator=torch.Generator().manual_seed(columns), dtype=torch.int32)
    order[wanted // 2], order[-1] = -1, columns - 1
    expected = torch.cat([x, torch.full((5, 1), LACKING)], 1)[:, order]
    runner = KernelRunner(isa, threads, tokens=5)
    operands: Operands = {"x": runner.filled(x), "columns": weight(order)}
    out, half = runner.buffer(5, wanted, "f32"), runner.buffer(5, wanted, "bf16")
    for target in (out, half):
        runner.call("gather_columns@1", operands | {"out": target})
    assert torch.equal(runner.read(out), expected)
    assert runner.read_pad(out).isnan().all()
    assert torch.equal(runner.read(half), expected.bfloat16().float())
    assert not runner.read_pad(half).any()


@isas
def test_gather_columns_of_a_column_view(isa: str) -> None:
    x, order = randn(5, 200), torch.arange(95, -1, -1, dtype=torch.int32)
    runner = KernelRunner(isa, tokens=5)
    view, out = runner.filled(x).view(20, 96), runner.buffer(5, 96, "f32")
    runner.call("gather_columns@1", {"x": view, "columns": weight(order), "out": out})
    assert torch.equal(runner.read(out), x[:, 20:116].flip(1))


@pytest.mark.parametrize("wrong", [-2, 64, 2**31 - 1, -(2**31)])
def test_columns_that_are_not_there_are_refused(wrong: int) -> None:
    order = torch.arange(64, dtype=torch.int32)
    order[17] = wrong
    runner = KernelRunner("portable")
    x, out = runner.buffer(1, 64, "f32"), runner.buffer(1, 64, "f32")
    with pytest.raises(ValueError, match="names columns that 'x' does not have"):
        runner.call("gather_columns@1", {"x": x, "columns": weight(order), "out": out})


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": torch.nn.functional.silu,
    "geglu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@isas
@pytest.mark.parametrize("epilogue", list(ACTIVATIONS))
def test_activations_over_their_whole_range(isa: str, epilogue: str) -> None:
    """Through a GEMM with the identity as its gate rows, and up rows that give one."""
    values = torch.cat((torch.linspace(-120, 120, 241), torch.tensor([1e-30, -1e-30, 3e38, -3e38]))).bfloat16()
    x = torch.stack((values, torch.ones_like(values)), dim=1)
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).bfloat16()
    runner = KernelRunner(isa, tokens=len(x))
    out = runner.buffer(len(x), 1, "f32")
    operands: Operands = {"x": runner.filled(x), "weight": weight(rows, "r16_pairs"), "out": out}
    runner.call("gemm_bf16@1", operands, {"epilogue": epilogue})
    expected = ACTIVATIONS[epilogue](values.double())
    error = (runner.read(out)[:, 0].double() - expected).abs() / expected.abs().clamp(min=1e-3)
    assert error.max() < TANH_GELU_SILU


@pytest.mark.parametrize(
    ("kernel", "names", "attributes", "message"),
    [
        ("rms_norm@1", {"x": 64, "out": 64}, {"epsilon": 1e-5}, "'weight' is missing"),
        ("rms_norm@1", {"x": 64, "out": 64, "w": 48}, {"epsilon": 1e-5}, "does not divide"),
        ("rms_norm@1", {"x": 64, "out": 63, "w": 64}, {"epsilon": 1e-5}, "'out' must have 64 columns"),
        ("rms_norm@1", {"x": 64, "out": 64, "w": 64}, {}, "'epsilon' is missing"),
        ("rms_norm@1", {"x": 64, "out": 64, "w": 64}, {"epsilon": float("nan")}, "must be finite"),
        ("rms_norm@1", {"x": 64, "out": 64, "w": 64}, {"epsilon": 1.0, "eps": 1.0}, "no attribute 'eps'"),
        ("softcap@1", {"x": 64, "out": 64}, {"cap": 0.0}, "must be positive"),
        ("softcap@1", {"x": 64, "out": 64}, {"cap": "a"}, "must be a number"),
        ("add@1", {"a": 64, "b": 65, "out": 64}, {}, "'b' must have 64 columns"),
        ("cast@1", {"x": 64, "out": 64, "y": 64}, {}, "no operand 'y'"),
        ("gather_rows@1", {"x": 64, "out": 64, "rows": 64}, {}, "'rows' must be i32"),
        ("gather_columns@1", {"x": 64, "out": 64, "columns": 64}, {}, "'columns' must be i32"),
    ],
)
def test_malformed_operands_are_refused(
    kernel: str, names: dict[str, int], attributes: dict[str, int | float | str], message: str
) -> None:
    runner = KernelRunner("portable")
    operands: Operands = {name: runner.buffer(1, columns, "f32") for name, columns in names.items() if name != "w"}
    if "w" in names:
        operands["weight"] = weight(torch.ones(names["w"]))
    with pytest.raises(ValueError, match=message):
        runner.call(kernel, operands, attributes)


@isas
@pytest.mark.parametrize("columns", [577, 64, 7, 1])
@pytest.mark.parametrize("threads", THREADS)
def test_mean_rows(isa: str, columns: int, threads: int) -> None:
    """Means of sequences of several lengths are right, and have the same bits in another batch."""
    starts = [0, 1, 8, 21]
    x = randn(starts[-1], columns)
    ends, texts = (1, 0, 1, 0, 0, 0), (0, 0, 1, 0, 0, 0)

    def means(rows: torch.Tensor, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = {"query_start": (np.array(starts), ends, ONE_COLUMN)}
        runner = KernelRunner(isa, threads, tokens=len(rows), sequences=len(starts) - 1, inputs=inputs)
        out, half = (runner.buffer(len(starts) - 1, columns, dtype, texts) for dtype in ("f32", "bf16"))
        for target in (out, half):
            operands = {"x": runner.filled(rows), "query_start": _cpu.OperandSpec.step("query_start"), "out": target}
            runner.call("mean_rows@1", operands, {})
        assert not runner.read_pad(half).any() and runner.read_pad(out).isnan().all()
        return runner.read(out), runner.read(half)

    found, half = means(x, starts)
    expected = torch.stack([x[begin:end].double().mean(dim=0) for begin, end in pairwise(starts)])
    assert_close(found, expected, NORM_F32)
    assert torch.equal(half, found.bfloat16().float())
    assert torch.equal(means(x[8:], [0, 13])[0], found[2:])
