"""CUDA kernels that treat each element of a row alike, embeddings, and rope tables: in emulation, against numpy."""

import numpy as np
import pytest
import torch

from enginewright.builder.lower import PackedForm, pack
from enginewright.plan import Linear, linear, step_sizes
from enginewright.plugins.kernel import Matrix
from enginewright.runtime.device.cuda.sampling import SAMPLED_ROW
from tests.helpers.cuda_call import NUMPY, CudaCall, Operand, as_bf16, empty, from_bf16, kernel_of, strided, vector
from tests.tolerances import BF16_ROUNDING, TANH_GELU_SILU

TOKENS, LOGIT_ROWS = linear(tokens=1), linear(logit_rows=1)
SIZES = step_sizes(tokens=5, sequences=2, logit_rows=3)


def run(op: str, operands: dict[str, Operand], **attributes: float | str) -> Operand:
    call = CudaCall(kernel_of(op), {role: operand.matrix for role, operand in operands.items()}, **attributes)
    call.run(operands, SIZES)
    return operands["out"]


def check_outside(out: Operand, rows: int) -> None:
    """Checks that only the step's rows were written, up to `padded` columns, with zeros after the last column."""
    values, matrix = out.values, out.matrix
    poison = empty(matrix.dtype, matrix.rows, 0, matrix.columns, matrix.stride).values[:1]
    assert (values[:rows, matrix.columns : matrix.padded] == 0).all()
    np.testing.assert_array_equal(values[:rows, matrix.padded :], np.repeat(poison, rows, 0)[:, matrix.padded :])
    np.testing.assert_array_equal(values[rows:], np.repeat(poison, len(values) - rows, 0))


@pytest.mark.parametrize("columns", [70, 4099])
def test_sums(columns: int) -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 5, columns)).astype(np.float32)
    out = empty("f32", TOKENS, 5, columns, columns + 64)
    operands = {
        "a": strided("f32", TOKENS, a, columns + 7),
        "b": strided("f32", TOKENS, b, columns + 1),
        "out": out,
    }
    run("Add", operands)
    np.testing.assert_array_equal(out.values[:5, :columns], a + b)
    check_outside(out, 5)


def test_casts_round_to_nearest_even_and_pad_with_zeros() -> None:
    x = np.random.default_rng(2).standard_normal((5, 70)).astype(np.float32)
    x[0, :3] = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF], np.uint32).view(np.float32)
    out = run("Cast", {"x": strided("f32", TOKENS, x, 77), "out": empty("bf16", TOKENS, 5, 70, 192, 128)})
    np.testing.assert_array_equal(out.values[:5, :70], as_bf16(x))
    check_outside(out, 5)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8", "e4m3"])
def test_rows_are_gathered(dtype: str) -> None:
    x = 9 * np.random.default_rng(3).standard_normal((5, 70)).astype(np.float32)
    stored = as_bf16(x) if dtype == "bf16" else x.astype(NUMPY[dtype]) if dtype == "i8" else x
    stored = np.abs(x).astype(np.uint8) if dtype == "e4m3" else stored  # bits
    padded = 70 if dtype == "f32" else 128
    rows = Operand(np.array([4, 0, 4], np.int32), Matrix("i32", LOGIT_ROWS, 1, 1, 1))
    operands = {
        "x": strided(dtype, TOKENS, stored, 192, padded),
        "rows": rows,
        "out": empty(dtype, LOGIT_ROWS, 3, 70, 192, padded),
    }
    out = run("Gather", operands)
    np.testing.assert_array_equal(out.values[:3, :70], stored[[4, 0, 4]])
    check_outside(out, 3)


def test_scale() -> None:
    x = np.random.default_rng(5).standard_normal((3, 70)).astype(np.float32)
    factor = Operand(np.array([0.37], np.float32), Matrix("f32", Linear(1), 1, 1, 1))
    operands = {
        "x": strided("f32", LOGIT_ROWS, x, 77),
        "factor": factor,
        "out": empty("f32", LOGIT_ROWS, 3, 70, 192),
    }
    out = run("Scale", operands)
    np.testing.assert_array_equal(out.values[:3, :70], x * factor.values)
    check_outside(out, 3)


def test_softcap() -> None:
    x = 40 * np.random.default_rng(4).standard_normal((3, 70)).astype(np.float32)
    operands = {"x": strided("f32", LOGIT_ROWS, x, 77), "out": empty("f32", LOGIT_ROWS, 3, 70, 192)}
    out = run("Softcap", operands, cap=30.0)
    np.testing.assert_allclose(out.values[:3, :70], 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6)
    check_outside(out, 3)


FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.relu().square(),
}


@pytest.mark.parametrize(
    ("function", "dtype", "gates"),
    [("sigmoid", "f32", 70), ("sigmoid", "bf16", 7), ("silu", "i8", 1), ("gelu", "f32", 0), ("gelu_tanh", "e4m3", 0),
     ("relu2", "bf16", 0)],
)  # fmt: skip
def test_activations(function: str, dtype: str, gates: int) -> None:
    x, gate = np.random.default_rng(8).standard_normal((2, 5, 70)).astype(np.float32) * 4
    out = empty(dtype, TOKENS, 5, 70, 192, 70 if dtype == "f32" else 128)
    operands = {"x": strided("f32", TOKENS, x, 77), "out": out, "scale": empty("f32", TOKENS, 5, 1, 64)}
    if dtype not in ("i8", "e4m3"):
        del operands["scale"]
    if gates:
        operands["gate"] = strided("f32", TOKENS, gate[:, :gates], 91)
    run("Activation", operands, activation=function, group=0)
    expected = FUNCTIONS[function](torch.from_numpy(gate[:, :gates] if gates else x).double()).numpy()
    if gates:
        expected = x * np.repeat(expected, 70 // gates, axis=1)
    values = out.values[:5, :70]
    if dtype in ("i8", "e4m3"):
        numbers = values if dtype == "i8" else torch.from_numpy(values).view(torch.float8_e4m3fn).float().numpy()
        scale = operands["scale"].values[:5, :1]
        error = np.abs(numbers * scale - expected)
        assert (error <= (0.501 * scale if dtype == "i8" else 2.0**-4 * np.abs(expected) + scale * 2.0**-9)).all()
        np.testing.assert_allclose(scale[:, 0], np.abs(expected).max(axis=1) / (127 if dtype == "i8" else 448), 1e-5)
    else:
        numbers, rounding = (values, 0.0) if dtype == "f32" else (from_bf16(values), BF16_ROUNDING)
        error = np.abs(numbers - expected)
        assert (error <= rounding * np.abs(expected) + TANH_GELU_SILU * np.maximum(np.abs(expected), 1e-3)).all()
    check_outside(out, 5)


def test_activations_of_several_rows_a_token() -> None:
    """Activations of experts: three rows for each of five tokens."""
    rows, x = linear(tokens=3), np.random.default_rng(12).standard_normal((15, 70)).astype(np.float32)
    out = empty("bf16", rows, 15, 70, 192, 128)
    run("Activation", {"x": strided("f32", rows, x, 77), "out": out}, activation="relu2", group=0)
    np.testing.assert_array_equal(from_bf16(out.values[:15, :70]), from_bf16(as_bf16(np.maximum(x, 0) ** 2)))
    check_outside(out, 15)


def test_rope_alone() -> None:
    """The first 6 of 10 columns of each head turn."""
    x = np.random.default_rng(9).standard_normal((5, 70)).astype(np.float32)
    angles = np.random.default_rng(10).standard_normal((5, 3)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    out = empty("f32", TOKENS, 5, 70, 77)
    tables = {"cos": strided("f32", TOKENS, cos, 5), "sin": strided("f32", TOKENS, sin, 5)}
    run("Rope", {"x": strided("f32", TOKENS, x, 91), **tables, "out": out}, heads=7)
    heads = x.reshape(5, 7, 10)
    first, second, rest = heads[..., :3], heads[..., 3:6], heads[..., 6:]
    c, s = cos[:, None], sin[:, None]
    expected = np.concatenate([first * c - second * s, second * c + first * s, rest], axis=-1)
    np.testing.assert_array_equal(out.values[:5, :70], expected.reshape(5, 70))
    check_outside(out, 5)


def test_positions_scale_rows() -> None:
    x, positions = (
        np.random.default_rng(11).standard_normal((5, 70)).astype(np.float32),
        np.array([0, 15, 16, 33, 131071]),
    )
    out = empty("f32", TOKENS, 5, 70, 77)
    operands = {"x": strided("f32", TOKENS, x, 91), "positions": vector("i32", positions), "out": out}
    run("PositionScale", operands, beta=0.3, original=16)
    np.testing.assert_allclose(out.values[:5, :70], x * (1 + 0.3 * np.log(1 + positions // 16))[:, None], rtol=3e-7)
    check_outside(out, 5)


def test_rows_of_a_table_of_positions() -> None:
    table, positions = (
        np.random.default_rng(12).standard_normal((31, 70)).astype(np.float32),
        np.array([30, 0, 7, 7, 1]),
    )
    out = empty("f32", TOKENS, 5, 70, 77)
    weight = Operand(table, Matrix("f32", Linear(31), 70, 70, 70))
    run("EmbedPositions", {"x": weight, "rows": vector("i32", positions), "out": out})
    np.testing.assert_array_equal(out.values[:5, :70], table[positions])
    check_outside(out, 5)


@pytest.mark.parametrize(("op", "dtype"), [("EmbedBf16", "bf16"), ("EmbedW8", "i8")])
def test_embeddings_read_the_table_as_the_file_has_it(op: str, dtype: str) -> None:
    generator = torch.Generator().manual_seed(5)
    rows, columns = 37, 70
    if dtype == "i8":
        table = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    else:
        table = torch.randn((rows, columns), generator=generator).to(torch.bfloat16)
    scale = np.random.default_rng(6).uniform(0.1, 2, rows).astype(np.float32)
    form = PackedForm(dtype, (rows, columns), "r16")
    packed = np.frombuffer(b"".join(pack(table, form)), np.uint8)
    tokens = np.array([0, 36, 15, 16, 36], np.int32)
    sampled = np.zeros(3, SAMPLED_ROW)  # by the step before: two of the tokens, and one that this step does not have
    sampled["token"], sampled["status"], sampled["logprob"] = [15, 7, 36], 0, -0.5
    operands = {
        "tokens": vector("i32", np.array([0, 36, -1, 16, -3])),
        "sampled": vector("i32", sampled.view(np.int32)),
        "known": empty("i32", TOKENS, 5, 1, 1),
        "table": Operand(packed, Matrix(dtype, Linear(rows), columns, columns, columns, "r16")),
        "out": empty("f32", TOKENS, 5, columns, 77),
    }
    if dtype == "i8":
        operands["table_scale"] = vector("f32", scale)
    out = run(op, operands, scale=8.5)
    want = table.float().numpy()[tokens]
    want = want * scale[tokens, None] * np.float32(8.5) if dtype == "i8" else want * np.float32(8.5)
    np.testing.assert_array_equal(out.values[:5, :columns], want)
    check_outside(out, 5)
    assert operands["known"].values.reshape(-1).tolist() == [*tokens.tolist(), -1, -1]


def test_rope_tables() -> None:
    positions = np.array([0, 1, 77, 4095, 131071], np.int32)
    frequencies = (10000.0 ** -(np.arange(0, 70, 2) / 70)).astype(np.float32)
    cos, sin = empty("f32", TOKENS, 5, 35, 64), empty("f32", TOKENS, 5, 35, 64)
    operands = {
        "positions": vector("i32", positions),
        "inv_freq": vector("f32", frequencies),
        "cos": cos,
        "sin": sin,
    }
    matrices = {role: operand.matrix for role, operand in operands.items()}
    CudaCall(kernel_of("RopeTable"), matrices, scale=1.5).run(operands, SIZES)
    angles = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)
    np.testing.assert_allclose(cos.values[:5, :35], 1.5 * np.cos(angles), atol=2e-7)
    np.testing.assert_allclose(sin.values[:5, :35], 1.5 * np.sin(angles), atol=2e-7)
    for out in (cos, sin):
        check_outside(out, 5)


def test_bits_of_bf16_are_those_of_torch() -> None:
    x = np.random.default_rng(7).standard_normal(1000).astype(np.float32)
    rounded = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(from_bf16(as_bf16(x)), rounded)
