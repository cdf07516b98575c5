"""causal_conv@1, gated_delta@1, selective_state@1 and gated_rms_norm@1 against float64, on every instruction set; the
same bits however tokens are split into steps, alone or with other sequences."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch

from enginewright import _cpu
from tests import tolerances
from tests.helpers.kernel_runner import ONE_COLUMN, TOKENS, KernelRunner, Operands, weight
from tests.plugins.test_plugins_values import causal_conv, gated_delta, gated_rms_norm, selective_state

ISAS = _cpu.isa_names()
SLOTS = 7
SEQUENCES, SEQUENCE_ENDS = (0, 0, 1, 0, 0, 0), (1, 0, 1, 0, 0, 0)
LENGTHS = (1, 19, 8, 2, 5)  # tokens of each sequence: fewer than a convolution sees, a tile of the delta rule, more
ORDER = (3, 6, 0, 5, 1)  # their slots
Arrays = dict[str, npt.NDArray[np.float32]]
CONVOLUTIONS = [
    (11, 4, "silu", ()),
    (64, 3, "none", ("before", "behind")),
    (300, 4, "silu", ("bias",)),
    (33, 2, "none", ("bias", "before")),
    (5, 8, "silu", ()),
]
DELTAS = [(1, 1, 3, 5), (4, 2, 16, 16), (6, 2, 24, 33), (3, 3, 10, 50), (2, 1, 128, 128)]  # heads, key heads, K, V


def random_of(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


class Recurrence:
    """A kernel with a state of `elements` f32 in each of SLOTS slots, run over some tokens of some sequences."""

    def __init__(self, kernel: str, attributes: Mapping[str, int | float | str], elements: int, part: str) -> None:
        self.kernel, self.attributes, self.part = kernel, attributes, part
        self.slots = _cpu.StateSlots(2, SLOTS, [("other", 16, "f32"), (part, elements, "f32")])
        self.slots.places()[:] = 255  # NaN: a slot that no sequence has must not be read

    def state(self) -> npt.NDArray[np.float32]:
        return self.slots.tensor(1, self.part)

    def step(
        self,
        isa: str,
        rows: Mapping[str, npt.NDArray[np.float32]],
        weights: Mapping[str, _cpu.OperandSpec],
        counts: Sequence[int],
        slots: Sequence[int],
        threads: int = 1,
        out_dtype: str = "f32",
    ) -> npt.NDArray[np.float32]:
        """rows: what each token has, sequence after sequence. counts: tokens of each sequence."""
        tokens, first = sum(counts), next(iter(rows.values()))
        starts = np.cumsum([0, *counts], dtype=np.int32)
        runner = KernelRunner(
            isa,
            threads,
            tokens=tokens,
            sequences=len(counts),
            inputs={
                "query_start": (starts, SEQUENCE_ENDS, ONE_COLUMN),
                "state_slots.0": (np.array(slots, np.int32), SEQUENCES, ONE_COLUMN),
            },
        )
        operands: Operands = {name: runner.filled(torch.from_numpy(array)) for name, array in rows.items()}
        operands |= weights
        operands["state"] = _cpu.OperandSpec.state(self.slots, 1, self.part)
        operands["query_start"] = _cpu.OperandSpec.step("query_start")
        operands["slots"] = _cpu.OperandSpec.step("state_slots.0")
        width = rows["value"].shape[1] if "value" in rows else first.shape[1]
        out = runner.buffer(tokens, width, out_dtype, TOKENS)
        runner.call(self.kernel, {**operands, "out": out}, self.attributes)
        if out_dtype == "bf16":
            assert not runner.read_pad(out).any(), "what a GEMM reads after a row"
        return runner.read(out).numpy()


def inputs_of(rows: Arrays, states: npt.NDArray[np.float32], weights: Arrays) -> dict[str, npt.NDArray[np.float64]]:
    starts = np.cumsum([0, *LENGTHS])
    arrays = {**rows, **weights, "state": states, "query_start": starts, "slots": np.array(ORDER)}
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def check_cuts(recurrence: Recurrence, isa: str, rows: Arrays, weights: Mapping[str, _cpu.OperandSpec]) -> None:
    """Alone and in pieces, on another number of threads: the same bits, and the same states."""
    begin = random_of({"state": (SLOTS, recurrence.state().shape[1])}, 5)["state"]
    recurrence.state()[:] = begin
    together = recurrence.step(isa, rows, weights, LENGTHS, ORDER)
    states = recurrence.state().copy()
    recurrence.state()[:] = begin
    for (start, end), slot in zip(pairwise(np.cumsum([0, *LENGTHS])), ORDER, strict=True):
        for cut in ((start, end),) if slot == ORDER[-1] else ((start, start + 1), (start + 1, end)):
            if cut[0] == cut[1]:
                continue
            piece = {name: array[slice(*cut)] for name, array in rows.items()}
            alone = recurrence.step(isa, piece, weights, [cut[1] - cut[0]], [slot], threads=3)
            np.testing.assert_array_equal(alone, together[slice(*cut)])
    np.testing.assert_array_equal(recurrence.state(), states)
    untouched = sorted(set(range(SLOTS)) - set(ORDER))
    np.testing.assert_array_equal(states[untouched], begin[untouched])


@pytest.mark.parametrize(("channels", "width", "activation", "more"), CONVOLUTIONS)
@pytest.mark.parametrize("isa", ISAS)
def test_convolutions(isa: str, channels: int, width: int, activation: str, more: Sequence[str]) -> None:
    gates = [name for name in more if name != "bias"]
    rows = random_of(dict.fromkeys(("x", *gates), (sum(LENGTHS), channels)))
    given = random_of({"taps": (channels, width), **({"bias": (channels,)} if "bias" in more else {})}, 1)
    weights = {
        name: weight(torch.from_numpy(array), "r16_columns" if name == "taps" else "plain")
        for name, array in given.items()
    }
    attributes = {"activation": activation}
    recurrence = Recurrence("causal_conv@1", attributes, (width - 1) * channels, "conv")
    states = random_of({"state": (SLOTS, width - 1, channels)}, 2)["state"]
    recurrence.state()[list(ORDER)] = states.reshape(SLOTS, -1)[list(ORDER)]
    for dtype in ("f32", "bf16"):
        recurrence.state()[list(ORDER)] = states.reshape(SLOTS, -1)[list(ORDER)]
        actual = recurrence.step(isa, rows, weights, LENGTHS, ORDER, threads=2, out_dtype=dtype)
        new, out = causal_conv(inputs_of(rows, states, given), attributes)
        bound = tolerances.BF16_ROUNDING if dtype == "bf16" else 0.0
        assert (np.abs(actual - out) <= bound * np.abs(out) + tolerances.RECURRENCE_F32 * np.abs(out).max()).all()
        np.testing.assert_allclose(recurrence.state()[list(ORDER)], new.reshape(SLOTS, -1)[list(ORDER)], rtol=1e-6)
    check_cuts(recurrence, isa, rows, weights)


def laid_out(states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[…, heads, K, V] as the kernel has it: 16 columns of V after the other, and what is left of them."""
    columns = states.shape[-1]
    parts = [states[..., begin : begin + 16].reshape(*states.shape[:-2], -1) for begin in range(0, columns, 16)]
    return np.concatenate(parts, axis=-1).reshape(len(states), -1)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "k", "v"), DELTAS)
@pytest.mark.parametrize("isa", ISAS)
def test_delta_rules(isa: str, heads: int, key_heads: int, k: int, v: int, by_row: bool) -> None:
    """by_row: each row of a state has a decay of its own."""
    tokens, decays = sum(LENGTHS), heads * (k if by_row else 1)
    rows = random_of(
        {
            "value": (tokens, heads * v),
            **dict.fromkeys(("query", "key"), (tokens, key_heads * k)),
            "decay": (tokens, decays),
            "beta": (tokens, heads),
        }
    )
    rows["decay"][0] = 50.0  # where a softplus is its argument
    given = random_of({"log_a": (heads,), "dt_bias": (decays,)}, 1)
    weights = {name: weight(torch.from_numpy(array)) for name, array in given.items()}
    attributes = {"heads": heads, "key_heads": key_heads, "scale": k**-0.5, "epsilon": 1e-6}
    recurrence = Recurrence("gated_delta@1", attributes, heads * k * v, "state")
    states = random_of({"state": (SLOTS, heads, k, v)}, 2)["state"]
    recurrence.state()[list(ORDER)] = laid_out(states)[list(ORDER)]
    actual = recurrence.step(isa, rows, weights, LENGTHS, ORDER, threads=2)
    new, out = gated_delta(inputs_of(rows, states, given), attributes)
    assert np.abs(actual - out).max() <= tolerances.RECURRENCE_F32 * np.abs(out).max()
    stored, expected = recurrence.state()[list(ORDER)], laid_out(new.astype(np.float32))[list(ORDER)]
    assert np.abs(stored - expected).max() <= tolerances.RECURRENCE_F32 * np.abs(expected).max()
    check_cuts(recurrence, isa, rows, weights)


@pytest.mark.parametrize(("heads", "key_heads", "k", "v"), DELTAS)
@pytest.mark.parametrize("isa", ISAS)
def test_selective_states(isa: str, heads: int, key_heads: int, k: int, v: int) -> None:
    tokens = sum(LENGTHS)
    rows = random_of(
        {
            "value": (tokens, heads * v),
            **dict.fromkeys(("query", "key"), (tokens, key_heads * k)),
            "decay": (tokens, heads),
        }
    )
    rows["decay"][:2] = [[50.0] * heads, [-50.0] * heads]  # where a softplus is its argument, and below the least
    given = random_of(dict.fromkeys(("log_a", "dt_bias", "skip"), (heads,)), 1)
    weights = {name: weight(torch.from_numpy(array)) for name, array in given.items()}
    attributes = {"heads": heads, "key_heads": key_heads, "dt_min": 0.01}
    recurrence = Recurrence("selective_state@1", attributes, heads * k * v, "state")
    states = random_of({"state": (SLOTS, heads, k, v)}, 2)["state"]
    recurrence.state()[list(ORDER)] = laid_out(states)[list(ORDER)]
    actual = recurrence.step(isa, rows, weights, LENGTHS, ORDER, threads=2)
    new, out = selective_state(inputs_of(rows, states, given), attributes)
    assert np.abs(actual - out).max() <= tolerances.RECURRENCE_F32 * np.abs(out).max()
    stored, expected = recurrence.state()[list(ORDER)], laid_out(new.astype(np.float32))[list(ORDER)]
    assert np.abs(stored - expected).max() <= tolerances.RECURRENCE_F32 * np.abs(expected).max()
    check_cuts(recurrence, isa, rows, weights)


NORMS = [
    (128, 3, 128, "after"),
    (33, 1, 33, "after"),
    (10, 7, 10, "after"),
    (16, 4, 64, "before"),
    (21, 2, 21, "before"),
]


@pytest.mark.parametrize(("run", "runs", "width", "gate"), NORMS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
@pytest.mark.parametrize("isa", ISAS)
def test_gated_norms(isa: str, dtype: str, run: int, runs: int, width: int, gate: str) -> None:
    arrays = random_of({"x": (5, runs * run), "z": (5, runs * run), "weight": (width,)})
    runner = KernelRunner(isa, 2, tokens=5)
    out = runner.buffer(5, runs * run, dtype)
    operands: Operands = {name: runner.filled(torch.from_numpy(arrays[name])) for name in ("x", "z")}
    operands |= {"weight": weight(torch.from_numpy(arrays["weight"])), "out": out}
    scale = runner.buffer(5, 1, "f32")
    if dtype == "i8":
        operands["scale"] = scale
    attributes = {"epsilon": 1e-6, "group": 0, "run": run, "gate": gate}
    runner.call("gated_rms_norm@1", operands, attributes)
    doubles = {name: array.astype(np.float64) for name, array in arrays.items()}
    (expected,) = gated_rms_norm(doubles, {**attributes, "to": int(ir.DataType.FLOAT)})
    actual = runner.read(out).numpy().astype(np.float64)
    bound = tolerances.RECURRENCE_F32 * np.abs(expected).max()
    if dtype == "i8":
        scales = runner.read(scale).numpy().astype(np.float64)
        np.testing.assert_allclose(scales[:, 0], np.abs(expected).max(axis=1) / 127, rtol=1e-5)
        actual, bound = actual * scales, 0.501 * scales
    elif dtype == "bf16":
        bound = bound + tolerances.BF16_ROUNDING * np.abs(expected)
    assert (np.abs(actual - expected) <= bound).all()


def test_work_is_that_of_the_states() -> None:
    """A state is read and written once a step, whatever the number of tokens."""
    recurrence = Recurrence("causal_conv@1", {"activation": "none"}, 3 * 10, "conv")
    runner = KernelRunner(
        ISAS[0],
        tokens=5,
        sequences=2,
        inputs={
            "query_start": (np.array([0, 2, 5], np.int32), SEQUENCE_ENDS, ONE_COLUMN),
            "slots": (np.array([1, 0], np.int32), SEQUENCES, ONE_COLUMN),
        },
    )
    operands: Operands = {name: runner.filled(torch.ones(5, 10)) for name in ("x", "out")}
    operands |= {name: _cpu.OperandSpec.step(name) for name in ("query_start", "slots")}
    operands |= {"taps": weight(torch.ones(10, 4), "r16_columns")}
    operands |= {"state": _cpu.OperandSpec.state(recurrence.slots, 0, "conv")}
    runner.call("causal_conv@1", operands, {"activation": "none"})
    work = runner.work()
    assert work["kv_bytes"] == 2 * 2 * 3 * 10 * 4 and work["fp32_ops"] == 5 * 10 * 2 * 4


WRONG: list[tuple[str, dict[str, object], str]] = [
    ("taps", {"taps": ((12, 4), "r16_columns")}, "with a row for each column of 'x'"),
    ("plain", {"taps": ((11, 4), "plain")}, "f32 in r16_columns"),
    ("long", {"taps": ((11, 9), "r16_columns"), "elements": 88}, "2 to 8 columns"),
    ("state", {"elements": 34}, "'state' must have 33 f32 a sequence, not 34 f32"),
    ("activation", {"activation": "relu"}, "silu or none"),
    ("slot", {"slots": [7]}, r"slots\[0\] is 7, outside 0 … 6"),
    ("start", {"query_start": "slots"}, "must have one number|must be the input 'query_start'"),
]


@pytest.mark.parametrize(("name", "changed", "why"), WRONG, ids=[name for name, _, _ in WRONG])
def test_what_does_not_fit_is_refused(name: str, changed: Mapping[str, object], why: str) -> None:
    shape, layout = changed.get("taps", ((11, 4), "r16_columns"))  # type: ignore[misc]
    recurrence = Recurrence("causal_conv@1", {}, int(changed.get("elements", 33)), "conv")  # type: ignore[call-overload]
    runner = KernelRunner(
        ISAS[0],
        tokens=1,
        inputs={
            "query_start": (np.array([0, 1], np.int32), SEQUENCE_ENDS, ONE_COLUMN),
            "slots": (np.array(changed.get("slots", [0]), np.int32), SEQUENCES, ONE_COLUMN),
        },
    )
    operands: Operands = {name: runner.filled(torch.ones(1, 11)) for name in ("x", "out")}
    operands |= {
        "taps": weight(torch.ones(shape), layout),
        "state": _cpu.OperandSpec.state(recurrence.slots, 0, "conv"),
        "query_start": _cpu.OperandSpec.step(str(changed.get("query_start", "query_start"))),
        "slots": _cpu.OperandSpec.step("slots"),
    }
    with pytest.raises(ValueError, match=why):
        runner.call("causal_conv@1", operands, {"activation": str(changed.get("activation", "silu"))})


def test_slots_are_copied_and_zeroed_whole() -> None:
    slots = _cpu.StateSlots(2, 3, [("conv", 5, "f32"), ("state", 7, "f32")])
    assert slots.nbytes == 3 * 2 * 12 * 4 and not slots.places().any()
    slots.tensor(0, "conv")[1] = 1.0
    slots.tensor(1, "state")[1] = 2.0
    slots.copy([(1, 2), (2, 0)])
    np.testing.assert_array_equal(slots.places()[0], slots.places()[1])
    slots.scrub([1])
    assert not slots.places()[1].any() and (slots.tensor(1, "state")[0] == 2.0).all()
    for call, why in (
        (lambda: slots.copy([(0, 3)]), "no slot 3"),
        (lambda: slots.scrub([-1]), "no slot -1"),
        (lambda: slots.copy([(1, 1)]), "copied onto itself"),
        (lambda: slots.tensor(2, "conv"), "no layer 2"),
        (lambda: slots.tensor(0, "key"), "no tensor 'key'"),
        (lambda: _cpu.StateSlots(1, 1, [("conv", 5, "bf16")]), "holds f32, not bf16"),
        (lambda: _cpu.StateSlots(1, 1, []), "has no size"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
