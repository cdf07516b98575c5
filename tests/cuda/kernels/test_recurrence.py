"""Recurrences on CUDA, in emulation, against float64; and the same bits however tokens are cut."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import onnx_ir as ir
import pytest

from enginewright.plan import Linear, linear, step_sizes
from enginewright.plugins import PLUGINS
from enginewright.plugins.kernel import CudaKernel, Matrix
from tests import tolerances
from tests.cpu.test_recurrence import LENGTHS, ORDER, SLOTS, Arrays, inputs_of, random_of
from tests.emulator.kernels import SCHEDULES
from tests.helpers.cuda_call import POISON, CudaCall, Operand, as_bf16, empty, from_bf16, strided, vector
from tests.plugins.test_plugins_values import causal_conv, gated_delta, gated_rms_norm, selective_state

TOKENS = linear(tokens=1)
GAP = 7  # f32 after a slot's own, which belong to other layers


def binding_of(op: str) -> CudaKernel:
    binding = PLUGINS[op].kernels["cuda"]
    assert isinstance(binding, CudaKernel)
    return binding


class Recurrence:
    """A call with a state: `shape` f32 in each of SLOTS slots, those that no sequence has NaN."""

    def __init__(
        self,
        op: str,
        rows: Arrays,
        weights: Mapping[str, Operand],
        shape: Sequence[int],
        out: str = "f32",
        **more: object,
    ) -> None:
        self.rows, self.weights, self.shape, self.out_dtype = rows, weights, shape, out
        self.width = rows["value" if "value" in rows else "x"].shape[1]
        elements = int(np.prod(shape))
        self.stride = elements + GAP
        self.memory = np.full((SLOTS, self.stride), np.nan, np.float32)
        self.state_matrix = Matrix("f32", Linear(), elements, elements, elements, block_stride=4 * self.stride)
        operands = self.operands(LENGTHS, ORDER, rows)
        self.call = CudaCall(binding_of(op), {role: one.matrix for role, one in operands.items()}, **more)  # type: ignore[arg-type]

    def operands(self, counts: Sequence[int], slots: Sequence[int], rows: Arrays) -> dict[str, Operand]:
        tokens = sum(counts)
        given = {
            name: strided("f32", TOKENS, array, -(-array.shape[1] // 64) * 64 + 64) for name, array in rows.items()
        }
        stride = -(-self.width // 64) * 64 + 64
        padded = -(-self.width // 64) * 64
        out = empty(self.out_dtype, TOKENS, tokens, self.width, stride, padded if self.out_dtype == "bf16" else None)
        return {
            **given,
            **self.weights,
            "state": Operand(self.memory, self.state_matrix),
            "query_start": vector("i32", np.cumsum([0, *counts])),
            "slots": vector("i32", np.array(slots)),
            "out": out,
        }

    def begin(self, states: np.ndarray) -> None:
        self.memory[:] = np.nan
        self.memory[list(ORDER), :-GAP] = states.reshape(SLOTS, -1)[list(ORDER)]

    def step(
        self, counts: Sequence[int], slots: Sequence[int], rows: Arrays, schedule: str = SCHEDULES[0]
    ) -> np.ndarray:
        operands = self.operands(counts, slots, rows)
        sizes = step_sizes(tokens=sum(counts), sequences=len(counts), logit_rows=1)
        self.call.run(operands, sizes, schedule)
        whole = operands["out"].values
        poison = np.array(POISON[self.out_dtype], whole.dtype)
        np.testing.assert_array_equal(whole[sum(counts) :], poison)
        padded = operands["out"].matrix.padded
        np.testing.assert_array_equal(whole[: sum(counts), padded:], poison)
        assert not whole[: sum(counts), self.width : padded].any()
        return whole[: sum(counts), : self.width]

    def check(self, states: np.ndarray, expected: np.ndarray, new: np.ndarray) -> None:
        """Near float64; the same on all schedules, alone, and in pieces; not without a barrier."""
        self.begin(states)
        first = self.step(LENGTHS, ORDER, self.rows)
        actual = from_bf16(first) if self.out_dtype == "bf16" else first
        rounding = tolerances.BF16_ROUNDING if self.out_dtype == "bf16" else 0.0
        bound = 4 * tolerances.RECURRENCE_F32 * np.abs(expected).max() + rounding * np.abs(expected)
        assert (np.abs(actual - expected) <= bound).all()
        after = self.memory.copy()
        error = np.abs(after[:, :-GAP] - new.reshape(SLOTS, -1))[list(ORDER)]
        assert error.max() <= 4 * tolerances.RECURRENCE_F32 * np.abs(new).max()
        assert np.isnan(np.delete(after, list(ORDER), axis=0)).all() and np.isnan(after[:, -GAP:]).all()
        for schedule in SCHEDULES[1:]:
            self.begin(states)
            np.testing.assert_array_equal(self.step(LENGTHS, ORDER, self.rows, schedule), first)
        self.begin(states)
        for (start, end), slot in zip(pairwise(np.cumsum([0, *LENGTHS])), ORDER, strict=True):
            for cut in ((start, start + 1), (start + 1, end)):
                if cut[0] < cut[1]:
                    piece = {name: array[slice(*cut)] for name, array in self.rows.items()}
                    np.testing.assert_array_equal(self.step([cut[1] - cut[0]], [slot], piece), first[slice(*cut)])
        np.testing.assert_array_equal(self.memory, after)
        for site in self.call.kernels.sites:
            with self.call.kernels.without(site):
                noticed = False
                for schedule in SCHEDULES:
                    self.begin(states)
                    noticed |= not np.array_equal(self.step(LENGTHS, ORDER, self.rows, schedule), first)
                assert noticed, f"nothing is missed without the barrier at {site}"


CONVOLUTIONS = [
    (70, 4, "silu", (), "f32"),
    (130, 3, "none", ("before", "behind"), "bf16"),
    (11, 2, "silu", ("bias",), "f32"),
]


@pytest.mark.parametrize(("channels", "width", "activation", "more", "out"), CONVOLUTIONS)
def test_convolutions(channels: int, width: int, activation: str, more: Sequence[str], out: str) -> None:
    gates = [name for name in more if name != "bias"]
    rows = random_of(dict.fromkeys(("x", *gates), (sum(LENGTHS), channels)))
    given = random_of({"taps": (channels, width), **({"bias": (channels,)} if "bias" in more else {})}, 1)
    blocks = np.zeros((-(-channels // 16) * 16, width), np.float32)
    blocks[:channels] = given["taps"]
    laid_out = blocks.reshape(-1, 16, width).swapaxes(1, 2).copy()
    weights = {"taps": Operand(laid_out, Matrix("f32", Linear(channels), width, width, width, "r16_columns"))}
    if "bias" in more:
        weights["bias"] = vector("f32", given["bias"])
    states = random_of({"state": (SLOTS, width - 1, channels)}, 2)["state"]
    new, expected = causal_conv(inputs_of(rows, states, given), {"activation": activation})
    recurrence = Recurrence("CausalConv", rows, weights, (width - 1, channels), out, activation=activation)
    recurrence.check(states, expected, new)


HEADS = [(3, 3, 10, 50), (4, 2, 128, 40), (2, 1, 200, 20)]  # heads, key heads, K, V


RULES = [(True, False), (True, True), (False, False)]  # delta, by_row
LINEAR = [(*heads, *rule) for heads in HEADS for rule in RULES]
SOME_LINEAR = LINEAR[::4]  # each of both


@pytest.mark.parametrize(("heads", "key_heads", "k", "v", "delta", "by_row"), SOME_LINEAR)
def test_linear_recurrences(heads: int, key_heads: int, k: int, v: int, delta: bool, by_row: bool) -> None:
    """by_row: each row of a state has a decay of its own."""
    tokens, decays = sum(LENGTHS), heads * (k if by_row else 1)
    shapes = {"query": (tokens, key_heads * k), "key": (tokens, key_heads * k), "value": (tokens, heads * v)}
    rows = random_of({**shapes, "decay": (tokens, decays), **({"beta": (tokens, heads)} if delta else {})})
    rows["decay"][:2] = [[50.0] * decays, [-50.0] * decays]
    given = random_of({"log_a": (heads,), "dt_bias": (decays,), **({} if delta else {"skip": (heads,)})}, 1)
    weights = {name: vector("f32", array) for name, array in given.items()}
    states = random_of({"state": (SLOTS, heads, k, v)}, 2)["state"]
    more = {"scale": k**-0.5, "epsilon": 1e-6} if delta else {"dt_min": 0.01}
    attributes = {"heads": heads, "key_heads": key_heads, **more}
    new, expected = (gated_delta if delta else selective_state)(inputs_of(rows, states, given), attributes)
    op = "GatedDelta" if delta else "SelectiveState"
    recurrence = Recurrence(op, rows, weights, (heads, k, v), batch_invariant=True, **attributes)  # token by token
    recurrence.check(states, expected, new)


@pytest.mark.parametrize(
    ("run", "runs", "width", "gate", "to"),
    [
        (33, 3, 33, "after", "f32"),
        (16, 5, 80, "before", "bf16"),
        (10, 7, 10, "after", "i8"),
        (70, 1, 70, "before", "i8"),
    ],
)
def test_gated_norms(run: int, runs: int, width: int, gate: str, to: str) -> None:
    arrays = random_of({"x": (5, runs * run), "z": (5, runs * run), "weight": (width,)})
    columns = runs * run
    operands = {name: strided("f32", TOKENS, arrays[name], 192) for name in ("x", "z")}
    operands["weight"] = vector("f32", arrays["weight"])
    operands["out"] = empty(to, TOKENS, 5, columns, 192, None if to == "f32" else 128)
    if to == "i8":
        operands["scale"] = empty("f32", TOKENS, 5, 1, 64)
    attributes = {"epsilon": 1e-6, "group": 0, "run": run, "gate": gate}
    call = CudaCall(binding_of("GatedRmsNorm"), {role: one.matrix for role, one in operands.items()}, **attributes)
    doubles = {name: array.astype(np.float64) for name, array in arrays.items()}
    (expected,) = gated_rms_norm(doubles, {**attributes, "to": int(ir.DataType.FLOAT)})
    sizes = step_sizes(tokens=5, sequences=1, logit_rows=1)
    results = []
    for schedule in SCHEDULES:
        call.run(operands, sizes, schedule)
        results.append(operands["out"].values[:5].copy())
    np.testing.assert_array_equal(results[1:], results[:-1])
    got = results[0][:, :columns]
    bound = tolerances.RECURRENCE_F32 * np.abs(expected).max()
    if to == "i8":
        scale = operands["scale"].values[:5, :1].astype(np.float64)
        assert (np.abs(got * scale - expected) <= 0.501 * scale).all()
    elif to == "bf16":
        wanted = from_bf16(as_bf16(expected.astype(np.float32)))
        assert (np.abs(from_bf16(got) - wanted) <= tolerances.BF16_ROUNDING * np.abs(wanted) + bound).all()
    else:
        assert (np.abs(got - expected) <= bound).all()
    assert not results[0][:, columns : operands["out"].matrix.padded].any()
    for site in call.kernels.sites:
        with call.kernels.without(site):
            missed = False
            for schedule in SCHEDULES:
                operands["out"].values[:] = POISON[to]
                call.run(operands, sizes, schedule)
                missed |= not np.array_equal(operands["out"].values[:5], results[0])
            assert missed, f"nothing is missed without the barrier at {site}"
