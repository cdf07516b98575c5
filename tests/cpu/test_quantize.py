"""Rows quantized to int8, alone and after a norm, on every instruction set of this machine."""

import pytest
import torch

from enginewright import _cpu
from tests.helpers.gemm_problem import runs_of
from tests.helpers.kernel_runner import Buffer, KernelRunner, Operands, weight

ISAS = _cpu.isa_names()
COLUMNS = [1, 15, 64, 100, 577]
ROWS = 7


def rows_of(columns: int) -> torch.Tensor:
    """Rows of all sizes; ties among them, zeros, and what is too small to divide by."""
    x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(columns))
    x[1] *= 1e30
    x[2] = torch.arange(columns) % 255 / 2 - 63.5  # ties in half of the columns, if -63.5 is the largest
    x[2, 0] = 63.5
    x[3] = 0
    x[4] *= 2.0**-126 / x[4].abs().max()
    x[5] *= 2.0**-119 / x[5].abs().max()
    return x


def quantized(x: torch.Tensor, group: int = 0, given: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes by the definition, in fp32 throughout. given: amax of each row; None: that of each group's numbers."""
    runs = runs_of(x.float(), group)
    largest = runs.abs().amax(dim=2, keepdim=True)
    if given is not None:
        largest = given[:, None].expand_as(largest)
    tiny = largest < 2.0**-120
    factor = torch.where(tiny, 0.0, torch.full_like(largest, 127) / largest)  # 127 / largest would round twice
    codes = (runs * factor).round().clamp(-127, 127).flatten(1)[:, : x.shape[1]]
    return codes, torch.where(tiny, 0.0, largest / 127).squeeze(2)


def outputs(runner: KernelRunner, columns: int, group: int = 0) -> tuple[Buffer, Buffer]:
    runs = -(-columns // group) if group else 1
    return runner.buffer(ROWS, columns, "i8"), runner.buffer(ROWS, runs, "f32")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("threads", "group"), [(1, 0), (3, 0), (3, 32), (1, 96), (1, 1024)])
def test_quantize_rows(isa: str, columns: int, dtype: torch.dtype, threads: int, group: int) -> None:
    x = rows_of(columns).to(dtype)
    runner = KernelRunner(isa, threads, tokens=ROWS)
    q, scale = outputs(runner, columns, group)
    runner.call("quantize_rows@1", {"x": runner.filled(x), "q": q, "scale": scale}, {"group": group})
    codes, scales = quantized(x, group)
    assert torch.equal(runner.read(q), codes) and torch.equal(runner.read(scale), scales)
    assert not runner.read_pad(q).any()
    codes, _ = quantized(x)
    assert (codes.abs().amax(dim=1) == torch.tensor([127, 127, 127, 0, 0, 127, 127])).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("column", [0, 17, 76])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen_in_the_scale_of_its_row_alone(isa: str, column: int, value: float) -> None:
    x = rows_of(77)
    expected, _ = quantized(x)
    x[1, column] = x[3, column] = value
    runner = KernelRunner(isa, tokens=ROWS)
    q, scale = outputs(runner, 77)
    runner.call("quantize_rows@1", {"x": runner.filled(x), "q": q, "scale": scale}, {"group": 0})
    finite = [0, 2, 4, 5, 6]
    assert runner.read(scale)[[1, 3]].isnan().all()
    assert torch.equal(runner.read(scale)[finite], quantized(x)[1][finite])
    assert torch.equal(runner.read(q)[finite], expected[finite])
    assert runner.read(q).abs().max() <= 127 and not runner.read_pad(q).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kernel", ["rms_norm@1", "add_rms_norm@1"])
@pytest.mark.parametrize("group", [0, 32])
def test_a_norm_quantizes_what_it_would_have_written(isa: str, columns: int, kernel: str, group: int) -> None:
    x, delta, gain = (rows_of(columns) for _ in range(3))
    delta = delta.roll(1, dims=0)
    x, delta = x.clamp(-9, 9), delta.clamp(-9, 9)
    gain = gain[0]
    runner = KernelRunner(isa, 2, tokens=ROWS)
    operands: Operands = {"x": runner.filled(x), "weight": weight(gain)}
    name, total = "out", runner.buffer(ROWS, columns, "f32")
    if kernel == "add_rms_norm@1":
        name = "normed"
        operands |= {"delta": runner.filled(delta), "sum": total}
    plain = runner.buffer(ROWS, columns, "f32")
    runner.call(kernel, operands | {name: plain}, {"epsilon": 1e-5})
    q, scale = outputs(runner, columns, group)
    runner.call(kernel, operands | {name: q, "scale": scale}, {"epsilon": 1e-5, "group": group})
    codes, scales = quantized(runner.read(plain), group)
    assert torch.equal(runner.read(q), codes) and torch.equal(runner.read(scale), scales)
    assert not runner.read_pad(q).any()
    if kernel == "add_rms_norm@1":
        assert torch.equal(runner.read(total), x + delta)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("share", [1, 0.6])
def test_columns_are_quantized_in_their_new_order(isa: str, columns: int, group: int, share: float) -> None:
    """share: of the columns that are wanted."""
    x, order = rows_of(columns).clamp(-9, 9), torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    order = order[: max(int(share * columns), 1)]
    runner = KernelRunner(isa, 2, tokens=ROWS)
    q, scale = outputs(runner, len(order), group)
    operands: Operands = {"x": runner.filled(x), "columns": weight(order.int()), "out": q, "scale": scale}
    runner.call("gather_columns@1", operands, {"group": group})
    codes, scales = quantized(x[:, order], group)
    assert torch.equal(runner.read(q), codes) and torch.equal(runner.read(scale), scales)
    assert not runner.read_pad(q).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("group", [0, 32])
def test_scales_that_are_given(isa: str, columns: int, group: int) -> None:
    """Codes are clipped; a row with a NaN has no scale all the same."""
    x = rows_of(columns).clamp(-9, 9)
    given = torch.rand(runs_of(x, group).shape[1], generator=torch.Generator().manual_seed(columns)) * 3 + 0.1
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    for kernel, operands, expected, attributes in (
        ("quantize_rows@1", {}, x, {}),
        ("gather_columns@1", {"columns": weight(order.int())}, x[:, order], {}),
        ("rms_norm@1", {"weight": weight(torch.ones(columns))}, None, {"epsilon": 1e-5}),
    ):
        runner = KernelRunner(isa, 2, tokens=ROWS)
        q, scale = outputs(runner, columns, group)
        operands |= {"x": runner.filled(x), "q" if kernel == "quantize_rows@1" else "out": q, "scale": scale}
        runner.call(kernel, {**operands, "largest": weight(given)}, {"group": group, **attributes})
        if expected is None:
            expected = normed_rows(isa, x)
        codes, scales = quantized(expected, group, given)
        assert torch.equal(runner.read(q), codes) and torch.equal(runner.read(scale), scales)
    x[2, 0] = torch.nan
    runner = KernelRunner(isa, tokens=ROWS)
    q, scale = outputs(runner, columns, group)
    operands = {"x": runner.filled(x), "largest": weight(given), "q": q, "scale": scale}
    runner.call("quantize_rows@1", operands, {"group": group})
    assert runner.read(scale).isnan().nonzero().tolist() == [[2, 0]]


def normed_rows(isa: str, x: torch.Tensor) -> torch.Tensor:
    """The rows that the same kernel gives without quantizing."""
    runner = KernelRunner(isa, tokens=ROWS)
    out = runner.buffer(*x.shape, "f32")
    operands: Operands = {"x": runner.filled(x), "weight": weight(torch.ones(x.shape[1])), "out": out}
    runner.call("rms_norm@1", operands, {"epsilon": 1e-5, "group": 0})
    return runner.read(out)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("'scale' must be f32, not bf16", {"scale": (1, "bf16")}),
        ("'scale' must have 1 columns, not 2", {"scale": (2, "f32")}),
        ("'out' must have 32 columns, not 33", {"out": (33, "i8")}),
        ("'scale' belongs to an output of i8", {"out": (32, "f32")}),
        ("a row is quantized as a whole", {"weight": 16}),
        ("the operand 'scale' is missing", {"scale": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_operands_of_a_norm_are_refused(
    message: str, change: dict[str, tuple[int, str] | int | None]
) -> None:
    runner = KernelRunner("portable")
    width = change.get("weight", 32)
    assert isinstance(width, int)
    operands: Operands = {"x": runner.filled(torch.zeros(1, 32)), "weight": weight(torch.ones(width))}
    for name, default in (("out", (32, "i8")), ("scale", (1, "f32"))):
        buffer = change.get(name, default)
        if isinstance(buffer, tuple):
            operands[name] = runner.buffer(1, *buffer)
    with pytest.raises(ValueError, match=message):
        runner.call("rms_norm@1", operands, {"epsilon": 1e-5, "group": 0})


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("'q' must be i8, not bf16", {"q": (32, "bf16")}),
        ("'q' must have 32 columns, not 31", {"q": (31, "i8")}),
        ("'x' must be f32, not i8", {"x": torch.zeros(1, 32, dtype=torch.int8)}),
        ("no operand 'bias'", {"bias": (32, "f32")}),
        ("'largest' must be a weight", {"largest": (1, "f32")}),
        ("multiple of 32", {"group": 16}),
        ("'scale' must have 2 columns, not 1", {"group": 32, "x": torch.zeros(1, 33), "q": (33, "i8")}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_operands_are_refused(message: str, change: dict[str, tuple[int, str] | torch.Tensor]) -> None:
    runner = KernelRunner("portable")
    given = {"x": torch.zeros(1, 32), "q": (32, "i8"), "scale": (1, "f32"), **change}
    group = given.pop("group", 0)
    operands: Operands = {
        name: runner.filled(value) if isinstance(value, torch.Tensor) else runner.buffer(1, *value)
        for name, value in given.items()
    }
    with pytest.raises(ValueError, match=message):
        runner.call("quantize_rows@1", operands, {"group": group})
