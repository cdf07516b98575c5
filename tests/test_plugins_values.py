"""Every reference against numpy in float64, written here from the op's description."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from enginewright.plugins import PLUGINS
from enginewright.plugins.plugin import CODES
from tests import tolerances
from tests.helpers.onnx_run import Array, run
from tests.helpers.plugin_cases import CASES, INDICES, ROWS, SIZES, Case, feed, model_of, name_of

Doubles = npt.NDArray[np.float64]
Inputs = Mapping[str, Doubles]
Attributes = Mapping[str, float]


def rms_norm(x: Doubles, weight: Doubles, epsilon: float) -> Doubles:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


def by_runs(values: Doubles, group: float, width: int) -> Doubles:
    """What each run has, for each of its columns."""
    return np.repeat(values, int(group) or width, axis=-1)[..., :width]


def gemm(x: Inputs, a: Attributes) -> Doubles:
    scale = x.get("scale", np.ones(1))
    scale = by_runs(scale, a["group"], x["weight"].shape[1]) if scale.ndim == 2 else scale[:, None]
    return product(x["x"], x["weight"] * scale, x, a)


def integer_gemm(x: Inputs, a: Attributes) -> Doubles:
    width = x["x"].shape[-1]
    if x["scale"].ndim == 1:
        weight = x["weight"] * x["scale"][:, None]
    else:
        zero = by_runs(x["zero"], a["group"], width) if "zero" in x else 8
        weight = (x["weight"] - zero) * by_runs(x["scale"], a["group"], width)
    scaled = x["x"] * by_runs(x["x_scale"], a["group"], width) if "x_scale" in x else x["x"]
    return product(scaled, weight, x, a)


def mxfp4_gemm(x: Inputs, a: Attributes) -> Doubles:
    numbers = x["weight"].astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return integer_gemm({**x, "weight": 2 * numbers, "zero": np.zeros_like(x["scale"])}, a)


def product(x: Doubles, weight: Doubles, rest: Inputs, a: Attributes) -> Doubles:
    y = np.einsum("...k,nk->...n", x, weight) + rest.get("bias", 0.0)
    gate, up = np.split(y, 2, axis=-1)
    if a["epilogue"] == "swiglu":
        return gate * 0.5 * (1 + np.tanh(gate / 2)) * up
    if a["epilogue"] == "geglu":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    return y


def rotate(x: Doubles, cos: Doubles, sin: Doubles, heads: int) -> Doubles:
    """As complex numbers: dimension i is the real part, and i + R/2 the imaginary one."""
    by_head = x.reshape(len(x), heads, -1).copy()
    half = cos.shape[1]
    turned = (by_head[..., :half] + 1j * by_head[..., half : 2 * half]) * (cos + 1j * sin)[:, None]
    by_head[..., : 2 * half] = np.concatenate([turned.real, turned.imag], axis=-1)
    return by_head.reshape(x.shape)


def low(x: Doubles) -> Doubles:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def as_stored(rows: Doubles, stored: float) -> Doubles:
    if stored == ir.DataType.BFLOAT16:
        return low(rows)
    if stored == ir.DataType.INT8:
        codes, scale = quantized(rows, 0)
        return codes * scale
    scale = np.abs(rows).max(axis=-1, keepdims=True) / 448
    return (rows / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def written(pool: Doubles, rows: Doubles, slots: Doubles, a: Attributes) -> Doubles:
    result = pool.copy()
    for slot, row in zip(slots.astype(int), rows, strict=True):
        heads = row.reshape(pool.shape[1:])
        result[slot] = as_stored(heads, a["stored"])
    return result


def attend(q: Doubles, k: Doubles, v: Doubles, scale: float, softcap: float) -> Doubles:
    """One query head [D] to all keys [n, D] that it sees."""
    scores = k @ q * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


def paged_attention(x: Inputs, a: Attributes) -> Doubles:
    heads, kv_heads, size = int(a["heads"]), int(a["kv_heads"]), int(a["block_size"])
    out = np.empty_like(x["q"]).reshape(len(x["q"]), heads, -1)
    starts = x["query_start"].astype(int)
    for sequence, (start, end) in enumerate(pairwise(starts)):
        blocks = x["block_table"][sequence].astype(int)
        for token in range(start, end):
            position = int(x["kv_len"][sequence]) - (end - token)
            oldest = max(0, position - int(a["window"]) + 1) if a["window"] else 0
            slots = [blocks[p // size] * size + p % size for p in range(oldest, position + 1)]
            for head in range(heads):
                k, v = (x[f"{kind}_pool"][slots, head // (heads // kv_heads)] for kind in ("key", "value"))
                q = x["q"][token].reshape(heads, -1)[head]
                q = as_stored(q, a["stored"]) if a["queries"] == ir.DataType.INT8 else q
                out[token, head] = attend(q, k, v, a["scale"], a["softcap"])
    return out.reshape(x["q"].shape)


def causal_window(x: Inputs, a: Attributes) -> list[Doubles]:
    heads, kv_heads = int(a["q_num_heads"]), int(a["kv_num_heads"])
    (tokens, _), past = x["q"][0].shape, x["past_key"].shape[2]
    present = [
        np.concatenate([x[f"past_{kind}"][0], x[name][0].reshape(tokens, kv_heads, -1).swapaxes(0, 1)], axis=1)
        for kind, name in (("key", "k"), ("value", "v"))
    ]
    y = np.empty_like(x["q"][0]).reshape(tokens, heads, -1)
    for token in range(tokens):
        seen = slice(max(0, past + token - int(a["window"]) + 1), past + token + 1)
        for head in range(heads):
            k, v = (each[head // (heads // kv_heads), seen] for each in present)
            y[token, head] = attend(x["q"][0, token].reshape(heads, -1)[head], k, v, a["scale"], a["softcap"])
    return [y.reshape(x["q"].shape), *(each[None] for each in present)]


def rope_kv_write(x: Inputs, a: Attributes) -> list[Doubles]:
    k = rotate(x["k"], x["cos"], x["sin"], int(a["kv_heads"]))
    return [
        rotate(x["q"], x["cos"], x["sin"], int(a["heads"])),
        written(x["key_pool"], k, x["slots"], a),
        written(x["value_pool"], x["v"], x["slots"], a),
    ]


def rope_table(x: Inputs, a: Attributes) -> list[Doubles]:
    angles = (x["positions"][..., None] * x["inv_freq"]).astype(np.float32).astype(np.float64)  # as the op says
    return [np.cos(angles) * a["scale"], np.sin(angles) * a["scale"]]


def quantized(x: Doubles, group: float, given: Doubles | None = None, to: float = ir.DataType.INT8) -> list[Doubles]:
    width = x.shape[-1]
    starts = np.arange(0, width, int(group) or width)
    largest = np.maximum.reduceat(np.abs(x), starts, axis=-1)
    if given is not None:
        largest = np.broadcast_to(given, largest.shape)
    most = 127 if to == ir.DataType.INT8 else 448
    numbers = (x * most / by_runs(largest, group, width)).clip(-most, most)
    if to == ir.DataType.INT8:
        return [np.round(numbers), largest / most]
    return [numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float64), largest / most]


def normed(x: Doubles, weight: Doubles, a: Attributes, given: Doubles | None) -> list[Doubles]:
    return written_to(rms_norm(x, weight, a["epsilon"]), a, given)


def written_to(result: Doubles, a: Attributes, given: Doubles | None) -> list[Doubles]:
    return quantized(result, a["group"], given, a["to"]) if a["to"] in CODES else [result]


def add_rms_norm(x: Inputs, a: Attributes) -> list[Doubles]:
    total = x["x"] + x["delta"]
    return [total, *normed(total, x["weight"], a, x.get("largest"))]


EXPECTED: Mapping[str, Callable[[Inputs, Attributes], Doubles | list[Doubles]]] = {
    "AddRmsNorm": add_rms_norm,
    "CausalWindow": causal_window,
    "EmbedBf16": lambda x, a: x["table"][x["tokens"].astype(int)] * a["scale"],
    "EmbedW8": lambda x, a: (x["table"] * x["table_scale"][:, None])[x["tokens"].astype(int)] * a["scale"],
    "GatherColumns": lambda x, a: written_to(x["x"][..., x["columns"].astype(int)], a, x.get("largest")),
    "GemmBf16": gemm,
    "GemmFp8A16": gemm,
    "GemmFp8A8": lambda x, a: gemm({**x, "x": x["x"] * by_runs(x["x_scale"], a["group"], x["x"].shape[-1])}, a),
    "GemmW8A16": gemm,
    "GemmMxfp4A16": mxfp4_gemm,
    "GemmMxfp4A8": mxfp4_gemm,
    "GemmW4A16": integer_gemm,
    "GemmW4A8": integer_gemm,
    "GemmW8A8": integer_gemm,
    "KvWrite": lambda x, a: [written(x[f"{kind}_pool"], x[kind[0]], x["slots"], a) for kind in ("key", "value")],
    "PagedAttention": paged_attention,
    "QuantizeRows": lambda x, a: written_to(x["x"], a, x.get("largest")),
    "RmsNorm": lambda x, a: normed(x["x"], x["weight"], a, x.get("largest")),
    "Rope": lambda x, a: rotate(x["x"], x["cos"], x["sin"], int(a["heads"])),
    "RopeKvWrite": rope_kv_write,
    "RopeTable": rope_table,
    "Softcap": lambda x, a: a["cap"] * np.tanh(x["x"] / a["cap"]),
}


def test_every_reference_has_its_numpy() -> None:
    assert set(EXPECTED) == set(PLUGINS)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_references_are_numpys(case: Case) -> None:
    feeds = {name: feed(name, operand, SIZES, INDICES) for name, operand in case.operands.items()}
    doubles = {name: array.astype(np.float64) for name, array in feeds.items()}
    expected = EXPECTED[case.op](doubles, case.attributes)  # type: ignore[arg-type]
    outputs = [*run(model_of(case.node()), feeds).values()]
    for actual, wanted in zip(outputs, expected if isinstance(expected, list) else [expected], strict=True):
        _compare(actual, wanted)


def _compare(actual: Array, expected: Doubles) -> None:
    error = np.abs(actual.astype(np.float64) - expected)
    rounding = tolerances.BF16_ROUNDING if actual.dtype == ml_dtypes.bfloat16 else 0.0
    assert (error <= rounding * np.abs(expected) + tolerances.REFERENCE_F32 * np.abs(expected).max()).all()


@pytest.mark.parametrize("to", CODES)
def test_rows_that_are_not_finite_have_no_scale_and_rows_of_nothing_have_scale_0(to: ir.DataType) -> None:
    (case,) = (
        case
        for case in CASES
        if case.op == "QuantizeRows" and case.attributes == {"to": to, "group": 0} and case.operands == {"x": ROWS}
    )
    x = np.random.default_rng(0).standard_normal((7, 11)).astype(np.float32)
    x[1, 3], x[2, 10], x[3, 0], x[4], x[5] = np.nan, np.inf, -np.inf, 0.0, x[5] * np.float32(2.0**-125)
    codes, scale = run(model_of(case.node()), {"x": x}).values()
    codes, most = codes.astype(np.float64), 127 if to == ir.DataType.INT8 else 448
    assert np.isnan(scale[1:4]).all() and not scale[4:6].any() and not codes[4:6].any()
    assert (scale[[0, 6]] > 0).all() and (np.abs(codes[[0, 6]]).max(axis=1) == most).all()
