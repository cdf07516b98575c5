"""Every reference against numpy in float64, written here from the op's description."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from enginewright.plugins import PLUGINS
from enginewright.plugins.elementwise.gather_columns import LACKING
from enginewright.plugins.plugin import CODES
from tests import tolerances
from tests.helpers.onnx_run import Array, run
from tests.helpers.plugin_cases import CASES, GEMM_CODES, INDICES, ROWS, SIZES, Case, feed, model_of, name_of

Doubles = npt.NDArray[np.float64]
Inputs = Mapping[str, Doubles]
Attributes = Mapping[str, float]


def rms_norm(x: Doubles, weight: Doubles, epsilon: float) -> Doubles:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


def by_runs(values: Doubles, group: float, width: int) -> Doubles:
    """Repeats each group's value for each of its columns."""
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


def by_expert(product: Callable[[Inputs, Attributes], Doubles]) -> Callable[[Inputs, Attributes], Doubles]:
    """Extends a product to rows with experts: each expert's rows are multiplied with its part of all other operands."""

    def either(x: Inputs, a: Attributes) -> Doubles:
        if "starts" not in x:
            return product(x, a)
        starts = x["starts"][0].astype(int)
        of_rows = {name: x[name] for name in ("x", "x_scale") if name in x}
        of_experts = {name: np.split(x[name], len(starts) - 1) for name in x.keys() - of_rows.keys() - {"starts"}}
        return np.concatenate(
            [
                product(
                    {name: rows[begin:end] for name, rows in of_rows.items()}
                    | {name: parts[expert] for name, parts in of_experts.items()},
                    a,
                )
                for expert, (begin, end) in enumerate(pairwise(starts))
            ]
        )

    return either


def route(x: Inputs, a: Attributes) -> list[Doubles]:
    weight, (*outer, width) = x["weight"], x["x"].shape
    experts, top = len(weight), int(a["top"])
    logits = x["x"].reshape(-1, width) @ weight.T + x.get("bias", 0.0)
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax = exponents / exponents.sum(axis=1, keepdims=True)
    scores = softmax if a["scores"] == "softmax" else 1 / (1 + np.exp(-logits))
    shares, chosen = [], []
    for row in scores:
        choice = row + x.get("correction", np.zeros(experts))
        groups = np.split(choice, int(a["groups"]))
        value = [np.sort(group)[-int(a["group_best"]) :].sum() for group in groups]
        open_groups = np.argsort(value)[::-1][: int(a["chosen_groups"])]
        is_open = np.repeat(np.isin(np.arange(len(groups)), open_groups), len(groups[0]))
        best = [int(expert) for expert in np.argsort(-choice, kind="stable") if is_open[expert]][:top]
        share = row[best] / (row[best].sum() if a["normalized"] else 1) * a["scale"]
        shares.append(share)
        chosen.append(best)
    copies = sorted((expert, token, j) for token, best in enumerate(chosen) for j, expert in enumerate(best))
    places = np.zeros((len(scores), top))
    for place, (_, token, j) in enumerate(copies):
        places[token, j] = place
    starts = [[sum(copy[0] < expert for copy in copies) for expert in range(experts + 1)]]
    return [places.reshape(*outer, top), np.array(shares).reshape(*outer, top), np.array(starts, np.float64)]


def combined(x: Inputs, a: Attributes) -> Doubles:
    mixed: Doubles = np.einsum("...jh,...j->...h", x["y"][x["places"].astype(int)], x["share"])
    share = 1 / (1 + np.exp(-x["gate"])) if "gate" in x else 1.0
    return mixed + share * x.get("shared", np.zeros(1))


def sorted_rows(x: Inputs, a: Attributes) -> Doubles | list[Doubles]:
    top = x["places"].shape[-1]
    rows = np.zeros((x["places"].size, x["x"].shape[-1]))
    rows[x["places"].astype(int).flatten()] = np.repeat(x["x"].reshape(-1, x["x"].shape[-1]), top, axis=0)
    return written_to(rows, a, x.get("largest"))


def product(x: Doubles, weight: Doubles, rest: Inputs, a: Attributes) -> Doubles:
    y = np.einsum("...k,nk->...n", x, weight) + rest.get("bias", 0.0)
    gate, up = np.split(y, 2, axis=-1)
    if a["epilogue"] == "swiglu":
        return gate * 0.5 * (1 + np.tanh(gate / 2)) * up
    if a["epilogue"] == "geglu":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if a["epilogue"] == "swiglu_clamped":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    return y


def rotate(x: Doubles, cos: Doubles, sin: Doubles, heads: int) -> Doubles:
    """Rotates complex numbers: dimension i is the real part, and i + R/2 the imaginary one."""
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
    if stored == ir.DataType.UINT8:  # one group of 32, of which zeros are the rest
        minimum = np.minimum(rows.min(axis=-1, keepdims=True), 0)
        first, scale = low(minimum), low((np.maximum(rows.max(axis=-1, keepdims=True), 0) - minimum) / 15)
        return low(np.round((rows - first) / scale).clip(0, 15) * scale + first)
    codes, scale = quantized(rows, 0, to=stored)
    return codes * scale


def written(pool: Doubles, rows: Doubles, slots: Doubles, a: Attributes) -> Doubles:
    result = pool.copy()
    for slot, row in zip(slots.astype(int), rows, strict=True):
        heads = row.reshape(pool.shape[1:])
        result[slot] = as_stored(heads, a["stored"])
    return result


def attend(q: Doubles, k: Doubles, v: Doubles, scale: float, softcap: float, sink: float = -np.inf) -> Doubles:
    """One query head [D] to all keys [n, D] that it sees, and to a sink, which has no value."""
    scores = k @ q * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max())
    return weights @ v / (weights.sum() + np.exp(sink - scores.max()))


def sink_of(x: Inputs, head: int) -> float:
    return float(x["sinks"][head]) if "sinks" in x else -np.inf


def paged_attention(x: Inputs, a: Attributes) -> Doubles:
    heads, kv_heads, size = int(a["heads"]), int(a["kv_heads"]), int(a["block_size"])
    out = np.empty_like(x["q"]).reshape(len(x["q"]), heads, -1)
    starts = x["query_start"].astype(int)
    for sequence, (start, end) in enumerate(pairwise(starts)):
        blocks = x["block_table"][sequence].astype(int)
        for token in range(start, end):
            position = int(x["kv_len"][sequence]) - (end - token)
            oldest = max(0, position - int(a["window"]) + 1) if a["window"] else 0
            visible_end = min(position + int(a["lookahead"]) + 1, int(x["kv_len"][sequence]))
            slots = [blocks[p // size] * size + p % size for p in range(oldest, visible_end)]
            for head in range(heads):
                k, v = (x[f"{kind}_pool"][slots, head // (heads // kv_heads)] for kind in ("key", "value"))
                q = x["q"][token].reshape(heads, -1)[head]
                q = as_stored(q, a["stored"]) if a["queries"] == ir.DataType.INT8 else q
                out[token, head] = attend(q, k, v, a["scale"], a["softcap"], sink_of(x, head))
    return out.reshape(x["q"].shape)


def window_attention(x: Inputs, a: Attributes) -> list[Doubles]:
    heads, kv_heads = int(a["q_num_heads"]), int(a["kv_num_heads"])
    (tokens, _), past = x["q"][0].shape, x["past_key"].shape[2]
    present = [
        np.concatenate([x[f"past_{kind}"][0], x[name][0].reshape(tokens, kv_heads, -1).swapaxes(0, 1)], axis=1)
        for kind, name in (("key", "k"), ("value", "v"))
    ]
    y = np.empty_like(x["q"][0]).reshape(tokens, heads, -1)
    for token in range(tokens):
        seen = slice(
            max(0, past + token - int(a["window"]) + 1) if a["window"] else 0, past + token + 1 + int(a["lookahead"])
        )
        for head in range(heads):
            k, v = (each[head // (heads // kv_heads), seen] for each in present)
            q = x["q"][0, token].reshape(heads, -1)[head]
            y[token, head] = attend(q, k, v, a["scale"], a["softcap"], sink_of(x, head))
    return [y.reshape(x["q"].shape), *(each[None] for each in present)]


def hadamard(x: Doubles, head_dim: int) -> Doubles:
    """Heads of twice an odd number: their columns are pairs, of which the sum and the difference are over sqrt(2)."""
    assert head_dim % 4 == 2
    pairs = x.reshape(len(x), -1, 2)
    return np.stack([pairs.sum(axis=-1), pairs[..., 0] - pairs[..., 1]], axis=-1).reshape(x.shape) / np.sqrt(2)


def kv_write(x: Inputs, a: Attributes) -> list[Doubles]:
    if a["stored"] == ir.DataType.UINT8:
        x = {**x, **{name: hadamard(x[name], int(a["head_dim"])) for name in ("q", "k")}}
    return [x["q"], *(written(x[f"{kind}_pool"], x[kind[0]], x["slots"], a) for kind in ("key", "value"))]


def rope_kv_write(x: Inputs, a: Attributes) -> list[Doubles]:
    q, k = x["q"], x["k"]
    if "cos" in x:
        q, k = (rotate(each, x["cos"], x["sin"], int(a[heads])) for each, heads in ((q, "heads"), (k, "kv_heads")))
    return kv_write({**x, "q": q, "k": k}, a)


def rope_queries(x: Inputs, a: Attributes) -> Doubles:
    q = rotate(x["q"], x["cos"], x["sin"], int(a["heads"])) if "cos" in x else x["q"]
    return hadamard(q, int(a["head_dim"])) if a["stored"] == ir.DataType.UINT8 else q


def by_head(x: Inputs, a: Attributes) -> Doubles:
    heads = int(a["heads"])
    weights = x["weight"].reshape(heads, -1, x["weight"].shape[1])
    parts = x["x"].reshape(*x["x"].shape[:-1], heads, -1)
    return np.concatenate([parts[..., head, :] @ weights[head].T for head in range(heads)], axis=-1)


def with_rope(q: Doubles, q_rope: Doubles, cos: Doubles, sin: Doubles, heads: int) -> Doubles:
    """[tokens, heads, C + R]"""
    parts = (q, rotate(q_rope, cos, sin, heads))
    return np.concatenate([part.reshape(len(q), heads, -1) for part in parts], axis=-1)


def latent_attention(x: Inputs, a: Attributes) -> list[Doubles]:
    heads, latent_dim = int(a["heads"]), x["c"].shape[-1]
    q = with_rope(x["q"][0], x["q_rope"][0], x["cos"][0], x["sin"][0], heads)
    new = with_rope(x["c"][0], x["k_rope"][0], x["cos"][0], x["sin"][0], 1)[:, 0]
    keys = np.concatenate([x["past_latent"][0, 0], new])
    y = np.empty((len(q), heads, latent_dim))
    for token in range(len(q)):
        seen = keys[: len(keys) - len(q) + token + 1]
        for head in range(heads):
            y[token, head] = attend(q[token, head], seen, seen[:, :latent_dim], a["scale"], 0.0)
    return [y.reshape(1, len(q), -1), keys[None, None]]


def latent_write(x: Inputs, a: Attributes) -> list[Doubles]:
    q = with_rope(x["q"], x["q_rope"], x["cos"], x["sin"], int(a["heads"]))
    new = with_rope(x["c"], x["k_rope"], x["cos"], x["sin"], 1)
    bf16 = {"stored": ir.DataType.BFLOAT16}
    return [q.reshape(len(q), -1), written(x["latent_pool"], new.reshape(len(new), -1), x["slots"], bf16)]


def latent_paged_attention(x: Inputs, a: Attributes) -> Doubles:
    """Paged attention to the pool as keys and as values, of which some columns are left."""
    pools = {"key_pool": x["latent_pool"], "value_pool": x["latent_pool"]}
    attributes = {**a, "kv_heads": 1, "window": 0, "lookahead": 0, "softcap": 0.0, "queries": ir.DataType.BFLOAT16}
    y = paged_attention({**x, **pools}, attributes).reshape(len(x["q"]), int(a["heads"]), -1)
    return y[..., : int(a["value_dim"])].reshape(len(y), -1)


def rope_table(x: Inputs, a: Attributes) -> list[Doubles]:
    angles = (x["positions"][..., None] * x["inv_freq"]).astype(np.float32).astype(np.float64)  # as the op says
    return [np.cos(angles) * a["scale"], np.sin(angles) * a["scale"]]


def quantized(x: Doubles, group: float, given: Doubles | None = None, to: float = ir.DataType.INT8) -> list[Doubles]:
    width = x.shape[-1]
    starts = np.arange(0, width, int(group) or width)
    largest = np.maximum.reduceat(np.abs(x), starts, axis=-1)
    if given is not None:
        largest = np.broadcast_to(given, largest.shape)
    kind = np.dtype(CODES[ir.DataType(to)].torch)
    code_max = np.iinfo(kind).max if kind == np.int8 else float(ml_dtypes.finfo(kind).max)
    numbers = (x * code_max / by_runs(largest, group, width)).clip(-code_max, code_max)
    return [(np.round(numbers) if kind == np.int8 else numbers).astype(kind).astype(np.float64), largest / code_max]


def normed(x: Doubles, weight: Doubles, a: Attributes, given: Doubles | None) -> list[Doubles]:
    return written_to(rms_norm(x, weight, a["epsilon"]), a, given)


def written_to(result: Doubles, a: Attributes, given: Doubles | None) -> list[Doubles]:
    return quantized(result, a["group"], given, a["to"]) if a["to"] in CODES else [result]


def add_rms_norm(x: Inputs, a: Attributes) -> list[Doubles]:
    total = x["x"] + x["delta"]
    return [total, *normed(total, x["weight"], a, x.get("largest"))]


def by_token(x: Inputs, tokens: int) -> list[tuple[int, int]]:
    """Each token, and the slot of its sequence."""
    if "slots" not in x:
        return [(token, 0) for token in range(tokens)]
    starts, slots = x["query_start"].astype(int), x["slots"].astype(int)
    return [(t, slots[s]) for s, (start, end) in enumerate(pairwise(starts)) for t in range(start, end)]


def sigmoid(x: Doubles) -> Doubles:
    return 1 / (1 + np.exp(-x))


def causal_conv(x: Inputs, a: Mapping[str, float | str]) -> list[Doubles]:
    width = x["x"].shape[-1]
    rows = {name: x[name].reshape(-1, width) for name in ("x", "before", "behind") if name in x}
    state, out = x["state"].copy(), np.empty_like(rows["x"])
    for token, slot in by_token(x, len(out)):
        seen = np.vstack([state[slot], rows["x"][token] * rows.get("before", np.ones_like(out))[token]])
        y = (seen * x["taps"].T).sum(axis=0) + x.get("bias", 0.0)
        y = y * sigmoid(y) if a["activation"] == "silu" else y
        out[token] = y * rows.get("behind", np.ones_like(out))[token]
        state[slot] = seen[1:]
    return [state, out.reshape(x["x"].shape)]


def gated_delta(x: Inputs, a: Attributes) -> list[Doubles]:
    heads, key_heads = int(a["heads"]), int(a["key_heads"])
    rows = {name: x[name].reshape(-1, x[name].shape[-1]) for name in ("query", "key", "value", "decay", "beta")}
    state, out = x["state"].copy(), np.empty_like(rows["value"]).reshape(len(rows["value"]), heads, -1)
    for token, slot in by_token(x, len(out)):
        for head in range(heads):
            of_key = [rows[name][token].reshape(key_heads, -1)[head * key_heads // heads] for name in ("query", "key")]
            q, k = (each / np.sqrt(each @ each + a["epsilon"]) for each in of_key)
            # Of the head, or of each row of its state.
            decay, bias = rows["decay"][token].reshape(heads, -1)[head], x["dt_bias"].reshape(heads, -1)[head]
            step = np.log1p(np.exp(decay + bias))
            kept = state[slot, head] * np.exp(-np.exp(x["log_a"][head]) * step)[:, None]
            wrong = rows["value"][token].reshape(heads, -1)[head] - k @ kept
            state[slot, head] = kept + np.outer(k, sigmoid(rows["beta"][token, head]) * wrong)
            out[token, head] = a["scale"] * q @ state[slot, head]
    return [state, out.reshape(x["value"].shape)]


def selective_state(x: Inputs, a: Attributes) -> list[Doubles]:
    heads, key_heads = int(a["heads"]), int(a["key_heads"])
    rows = {name: x[name].reshape(-1, x[name].shape[-1]) for name in ("query", "key", "value", "decay")}
    state, out = x["state"].copy(), np.empty_like(rows["value"]).reshape(len(rows["value"]), heads, -1)
    for token, slot in by_token(x, len(out)):
        for head in range(heads):
            q, k = (rows[name][token].reshape(key_heads, -1)[head * key_heads // heads] for name in ("query", "key"))
            dt = max(np.log1p(np.exp(rows["decay"][token, head] + x["dt_bias"][head])), a["dt_min"])
            value = rows["value"][token].reshape(heads, -1)[head]
            kept = state[slot, head] * np.exp(-np.exp(x["log_a"][head]) * dt)
            state[slot, head] = kept + np.outer(k, dt * value)
            out[token, head] = q @ state[slot, head] + x["skip"][head] * value
    return [state, out.reshape(x["value"].shape)]


def gather_columns(x: Inputs) -> Doubles:
    columns = x["columns"].astype(int)
    return np.where(columns < 0, LACKING, x["x"][..., columns])


def gated_rms_norm(x: Inputs, a: Mapping[str, Any]) -> list[Doubles]:
    gate, shape = x["z"] * sigmoid(x["z"]), x["x"].shape
    gated = (x["x"] * gate if a["gate"] == "before" else x["x"]).reshape(*shape[:-1], -1, a["run"])
    weight = x["weight"].reshape(-1, a["run"])
    normed = rms_norm(gated, weight, a["epsilon"]).reshape(shape)
    return written_to(normed if a["gate"] == "before" else normed * gate, a, None)


def layer_norm(x: Inputs, a: Attributes) -> list[Doubles]:
    off = x["x"] - x["x"].mean(axis=-1, keepdims=True)
    normed = off / np.sqrt((off**2).mean(axis=-1, keepdims=True) + a["epsilon"]) * x["weight"] + x.get("bias", 0.0)
    return written_to(normed, a, x.get("largest"))


def mean_rows(x: Inputs, a: Attributes) -> Doubles:
    return np.stack([x["x"][begin:end].mean(axis=0) for begin, end in pairwise(x["query_start"].astype(int))])


def pool(x: Inputs, a: Attributes) -> Doubles:
    rows = x["x"]
    return {"first": rows[:, :1], "last": rows[:, -1:], "mean": rows.mean(axis=1, keepdims=True)}[str(a["pooling"])]


ACTIVATIONS: Mapping[str, Callable[[Doubles], Doubles]] = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * np.vectorize(lambda y: 0.5 * math.erfc(-y / math.sqrt(2)))(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def activation(x: Inputs, a: Attributes) -> list[Doubles]:
    function = ACTIVATIONS[str(a["activation"])]
    if "gate" not in x:
        return written_to(function(x["x"]), a, x.get("largest"))
    each = x["x"].shape[-1] // x["gate"].shape[-1]
    return written_to(x["x"] * np.repeat(function(x["gate"]), each, axis=-1), a, x.get("largest"))


EXPECTED: Mapping[str, Callable[[Inputs, Attributes], Doubles | list[Doubles]]] = {
    "Activation": activation,
    "AddRmsNorm": add_rms_norm,
    "CausalConv": causal_conv,
    "WindowAttention": window_attention,
    "EmbedBf16": lambda x, a: x["table"][x["tokens"].astype(int)] * a["scale"],
    "EmbedPositions": lambda x, a: x["table"][x["positions"].astype(int)],
    "EmbedW8": lambda x, a: (x["table"] * x["table_scale"][:, None])[x["tokens"].astype(int)] * a["scale"],
    "GatedDelta": gated_delta,
    "GatedRmsNorm": gated_rms_norm,
    "GatherColumns": lambda x, a: written_to(gather_columns(x), a, x.get("largest")),
    "GemmBf16": by_expert(gemm),
    "GemmFp8A16": by_expert(gemm),
    "GemmFp8A8": lambda x, a: gemm({**x, "x": x["x"] * by_runs(x["x_scale"], a["group"], x["x"].shape[-1])}, a),
    "GemmW8A16": by_expert(gemm),
    "GemmMxfp4A16": by_expert(mxfp4_gemm),
    "GemmMxfp4A8": by_expert(mxfp4_gemm),
    "GemmW4A16": by_expert(integer_gemm),
    "GemmW4A8": by_expert(integer_gemm),
    "GemmW8A8": by_expert(integer_gemm),
    "HeadGemm": by_head,
    "HeadLinear": by_head,
    "LatentAttention": latent_attention,
    "LatentPagedAttention": latent_paged_attention,
    "LatentWrite": latent_write,
    "KvWrite": kv_write,
    "LayerNorm": layer_norm,
    "MeanRows": mean_rows,
    "Pool": pool,
    "PagedAttention": paged_attention,
    "CombineExperts": combined,
    "GroupedLinear": by_expert(gemm),
    "Route": route,
    "SortRows": sorted_rows,
    "PositionScale": lambda x, a: x["x"] * (1 + a["beta"] * np.log(1 + x["positions"] // a["original"]))[..., None],
    "QuantizeRows": lambda x, a: written_to(x["x"], a, x.get("largest")),
    "RmsNorm": lambda x, a: normed(x["x"], x["weight"], a, x.get("largest")),
    "Rope": lambda x, a: rotate(x["x"], x["cos"], x["sin"], int(a["heads"])),
    "RopeKvWrite": rope_kv_write,
    "RopeQueries": rope_queries,
    "Scale": lambda x, a: x["x"] * x["factor"],
    "RopeTable": rope_table,
    "SelectiveState": selective_state,
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


@pytest.mark.parametrize("to", GEMM_CODES)
def test_rows_that_are_not_finite_have_no_scale_and_rows_of_nothing_have_scale_0(to: ir.DataType) -> None:
    (case,) = (
        case
        for case in CASES
        if case.op == "QuantizeRows" and case.attributes == {"to": to, "group": 0} and case.operands == {"x": ROWS}
    )
    x = np.random.default_rng(0).standard_normal((7, 11)).astype(np.float32)
    x[1, 3], x[2, 10], x[3, 0], x[4], x[5] = np.nan, np.inf, -np.inf, 0.0, x[5] * np.float32(2.0**-125)
    codes, scale = run(model_of(case.node()), {"x": x}).values()
    codes, code_max = codes.astype(np.float64), 127 if to == ir.DataType.INT8 else 448
    assert np.isnan(scale[1:4]).all() and not scale[4:6].any() and not codes[4:6].any()
    assert (scale[[0, 6]] > 0).all() and (np.abs(codes[[0, 6]]).max(axis=1) == code_max).all()
