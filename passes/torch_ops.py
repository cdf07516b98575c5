"""The ops of a dense graph in torch, in fp32: only those that importers write."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch.nn import functional as F

from enginewright.errors import EngineError
from enginewright.plugins.elementwise.gather_columns import LACKING
from enginewright.plugins.experts.route import MIN_SUM
from enginewright.plugins.gemm.gemm import CLAMPED_LIMIT, CLAMPED_SLOPE
from enginewright.plugins.plugin import DOMAIN, float_of, int_of

Compute = Callable[..., tuple[torch.Tensor, ...]]  # (node, *inputs) → outputs; later ones may be left out


def compute_of(node: ir.Node) -> Compute:
    """Returns the function that computes a node.

    Raises:
        EngineError: the op is unknown.
    """
    known = _OPS.get((node.domain, node.op_type))
    if known is None:
        raise EngineError(
            f"node {node.name} ({node.op_type}) has an op that cannot be streamed", "", "Please report this."
        )
    return known


def _linear(node: ir.Node, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiplies with a transposed weight, which is given as stored, [N, K]."""
    return (F.linear(x, weight),)


def _gather(node: ir.Node, rows: Callable[[int, int], torch.Tensor], tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gathers rows of a table that is read by rows, so that it is never in memory as a whole."""
    return (torch.cat([rows(token, token + 1) for token in tokens[0].tolist()]).unsqueeze(0),)


def _rms_norm(node: ir.Node, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (F.rms_norm(x, weight.shape, weight, node.attributes.get_float("epsilon", 1e-5)),)


def _reshape(node: ir.Node, x: torch.Tensor, shape: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.reshape([size or x.shape[axis] for axis, size in enumerate(shape.tolist())]),)


def _split(node: ir.Node, x: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(x, sizes.tolist(), dim=int_of(node, "axis"))


def _rope_table(node: ir.Node, positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, ...]:
    angles, scale = positions.float().unsqueeze(-1) * inv_freq, float_of(node, "scale")
    return angles.cos() * scale, angles.sin() * scale


def _rotate(node: ir.Node, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (rotate(x, cos, sin, int_of(node, "num_heads")),)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotates each head of x [1, T, heads · head_dim]: its first half of rotated columns against the second."""
    by_head, half = torch.unflatten(x, -1, (heads, -1)), cos.shape[-1]
    first, second = by_head[..., :half], by_head[..., half : 2 * half]  # [1, T, heads, half]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    rotated = [first * cos - second * sin, second * cos + first * sin, by_head[..., 2 * half :]]
    return torch.cat(rotated, dim=-1).flatten(2)


def _attention(
    node: ir.Node, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    """Attends from the first position on, without a past; WindowAttention may have sinks after its past."""
    sinks: torch.Tensor | None = others[2] if node.domain == DOMAIN and len(others) > 2 else None
    heads, kv_heads = int_of(node, "q_num_heads"), int_of(node, "kv_num_heads")
    q, k, v = (
        torch.unflatten(x, -1, (count, -1)).transpose(1, 2) for x, count in ((q, heads), (k, kv_heads), (v, kv_heads))
    )
    scale, softcap = float_of(node, "scale"), float_of(node, "softcap")
    window, lookahead = node.attributes.get_int("window", 0), node.attributes.get_int("lookahead", 0)
    causal = node.attributes.get_int("is_causal", 1) == 1
    if not softcap and not window and not lookahead and sinks is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
        return (y.transpose(1, 2).flatten(2),)
    token_index = torch.arange(q.shape[2])
    distance = token_index.unsqueeze(1) - token_index
    hidden = (distance < -(lookahead if causal else math.inf)) | (distance >= (window or math.inf))
    ys = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head * kv_heads // heads].transpose(1, 2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].expand(*scores.shape[:-1], 1)], dim=-1)
        ys.append(scores.softmax(-1)[..., : len(token_index)] @ v[:, head * kv_heads // heads])
    return (torch.cat(ys, dim=-1),)


def _head_linear(node: ir.Node, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    heads = int_of(node, "heads")
    by_head = torch.unflatten(x[0], -1, (heads, -1)).transpose(0, 1)  # [heads, T, K]
    y = by_head @ torch.unflatten(weight, 0, (heads, -1)).transpose(1, 2)
    return (y.transpose(0, 1).flatten(1).unsqueeze(0),)


def _latent_attention(
    node: ir.Node,
    q: torch.Tensor,
    q_rope: torch.Tensor,
    c: torch.Tensor,
    k_rope: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    _: Any,
) -> tuple[torch.Tensor, ...]:
    """Attends causally from the first position on, without a past."""
    heads = int_of(node, "heads")
    rotated_q, rotated_k = rotate(q_rope, cos, sin, heads), rotate(k_rope, cos, sin, 1)
    by_head = [torch.unflatten(x, -1, (heads, -1)).transpose(1, 2) for x in (q, rotated_q)]
    queries, keys = torch.cat(by_head, dim=-1), torch.cat([c, rotated_k], dim=-1).unsqueeze(1)
    # Values are as wide as keys here, and the columns after the latent vector are left out of the result.
    y = F.scaled_dot_product_attention(
        queries, keys, keys, is_causal=True, scale=float_of(node, "scale"), enable_gqa=True
    )
    return (y[..., : c.shape[-1]].transpose(1, 2).flatten(2),)


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def _activation(node: ir.Node, x: torch.Tensor, gate: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    function = _ACTIVATIONS[node.attributes["activation"].as_string()]
    if gate is None:
        return (function(x),)
    return ((torch.unflatten(x, -1, (gate.shape[-1], -1)) * function(gate).unsqueeze(-1)).flatten(-2),)


def _layer_norm(
    node: ir.Node, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    return (F.layer_norm(x, weight.shape, weight, bias, float_of(node, "epsilon")),)


def _position_scale(node: ir.Node, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    lengths = positions.div(int_of(node, "original"), rounding_mode="floor").float()
    return (x * (1 + float_of(node, "beta") * torch.log(1 + lengths)).unsqueeze(-1),)


def _pool(node: ir.Node, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pooling = node.attributes["pooling"].as_string()
    if pooling == "mean":
        return (x.mean(1, keepdim=True),)
    return (x[:, :1] if pooling == "first" else x[:, -1:],)


def _softcap(node: ir.Node, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cap = float_of(node, "cap")
    return (torch.tanh(x / cap) * cap,)


def _causal_conv(
    node: ir.Node,
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Convolves from the first position on. The new state has no reader, and is left empty."""
    u = x if before is None else before * x
    padded = F.pad(u.transpose(1, 2), (taps.shape[1] - 1, 0))  # [1, C, W - 1 + tokens]
    y = F.conv1d(padded, taps.unsqueeze(1), bias, groups=taps.shape[0]).transpose(1, 2)
    if node.attributes["activation"].as_string() == "silu":
        y = F.silu(y)
    return torch.empty(0), y if after is None else after * y


def _gated_delta(
    node: ir.Node,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Computes plugins/recurrence/gated_delta.py from the first position on. The new state has no reader."""
    heads, key_heads, epsilon = int_of(node, "heads"), int_of(node, "key_heads"), float_of(node, "epsilon")

    def by_head(x: torch.Tensor) -> torch.Tensor:
        split = torch.unflatten(x[0], -1, (key_heads, -1))
        normed = split * (split.square().sum(-1, keepdim=True) + epsilon).rsqrt()
        return normed.repeat_interleave(heads // key_heads, dim=1)  # [tokens, heads, K]

    q, k, v = by_head(query) * float_of(node, "scale"), by_head(key), torch.unflatten(value[0], -1, (heads, -1))
    softplus = torch.unflatten(F.softplus(decay[0] + dt_bias), -1, (heads, -1))  # [tokens, heads, 1 or K]
    g, b = torch.exp(-log_a.exp()[:, None] * softplus), torch.sigmoid(beta[0])
    state = torch.zeros(heads, k.shape[2], v.shape[2])
    out = torch.empty_like(v)
    for token in range(len(v)):
        state *= g[token].unsqueeze(2)
        delta = b[token, :, None] * (v[token] - torch.einsum("hkv,hk->hv", state, k[token]))
        state += k[token].unsqueeze(2) * delta.unsqueeze(1)
        out[token] = torch.einsum("hkv,hk->hv", state, q[token])
    return torch.empty(0), out.flatten(1).unsqueeze(0)


def _selective_state(
    node: ir.Node,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Computes plugins/recurrence/selective_state.py from the first position on. The new state has no reader."""
    heads, key_heads = int_of(node, "heads"), int_of(node, "key_heads")
    q, k = (
        torch.unflatten(x[0], -1, (key_heads, -1)).repeat_interleave(heads // key_heads, dim=1) for x in (query, key)
    )
    v = torch.unflatten(value[0], -1, (heads, -1))
    dt = F.softplus(decay[0] + dt_bias).clamp(min=float_of(node, "dt_min"))
    g, state, out = torch.exp(-log_a.exp() * dt), torch.zeros(heads, k.shape[2], v.shape[2]), torch.empty_like(v)
    for token in range(len(v)):
        state *= g[token, :, None, None]
        state += k[token].unsqueeze(2) * (dt[token, :, None] * v[token]).unsqueeze(1)
        out[token] = torch.einsum("hkv,hk->hv", state, q[token]) + skip.unsqueeze(1) * v[token]
    return torch.empty(0), out.flatten(1).unsqueeze(0)


def _gated_rms_norm(
    node: ir.Node, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    gates_first, run = node.attributes["gate"].as_string() == "before", int_of(node, "run")
    gated = x * F.silu(z) if gates_first else x
    normed = F.rms_norm(torch.unflatten(gated, -1, (-1, run)), (run,), eps=float_of(node, "epsilon"))
    scaled = normed.flatten(-2) * weight.repeat(x.shape[-1] // len(weight))
    return (scaled if gates_first else scaled * F.silu(z),)


def _route(
    node: ir.Node,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    logits, experts, top = F.linear(x, weight, bias), len(weight), int_of(node, "top")
    softmax = node.attributes["scores"].as_string() == "softmax"
    scores = logits.softmax(-1) if softmax else logits.sigmoid()  # [1, T, E]
    choice = scores if correction is None else scores + correction
    if (groups := int_of(node, "groups")) > 1:
        by_group = torch.unflatten(choice, -1, (groups, -1))  # [1, T, groups, E / groups]
        value = by_group.topk(int_of(node, "group_best"), dim=-1).values.sum(-1)
        left = _top_indices(value, int_of(node, "chosen_groups"))
        is_left = torch.zeros_like(value, dtype=torch.bool).scatter(-1, left, True)
        choice = by_group.masked_fill(~is_left.unsqueeze(-1), -math.inf).flatten(-2)
    chosen = _top_indices(choice, top)
    share = scores.gather(-1, chosen)
    if int_of(node, "normalized"):
        share = share / share.sum(-1, keepdim=True).clamp(min=MIN_SUM)
    flat = chosen.flatten()
    copies = flat.argsort(stable=True)
    rows = torch.empty_like(flat).scatter(0, copies, torch.arange(len(flat)))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(flat, minlength=experts).cumsum(0)])
    return rows.view_as(chosen), share * float_of(node, "scale"), starts.unsqueeze(0)


def _top_indices(values: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the indices of the largest values along the last axis; of equal values, the lower index first."""
    return values.argsort(dim=-1, descending=True, stable=True)[..., :count]


def _sort_rows(node: ir.Node, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
    copies = places.flatten().argsort()
    return (x.flatten(0, 1)[copies // places.shape[-1]],)


def _combine_experts(
    node: ir.Node,
    y: torch.Tensor,
    places: torch.Tensor,
    share: torch.Tensor,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    mixed = (y[places] * share.unsqueeze(-1)).sum(-2)
    if shared is not None:
        mixed = mixed + (shared if gate is None else shared * torch.sigmoid(gate))
    return (mixed,)


def _clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=CLAMPED_LIMIT)
    return (up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT) + 1) * gate * torch.sigmoid(CLAMPED_SLOPE * gate)


# Gated epilogues of plugins/gemm/gemm.py, as functions of gate and up.
GATES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swiglu_clamped": _clamped,
}

_OPS: Mapping[tuple[str, str], Compute] = {
    ("", "Gather"): _gather,
    ("", "MatMul"): _linear,
    ("", "Add"): lambda node, a, b: (a + b,),
    ("", "Mul"): lambda node, a, b: (a * b,),
    ("", "Sigmoid"): lambda node, x: (torch.sigmoid(x),),
    ("", "Gelu"): lambda node, x: (F.gelu(x, approximate=node.attributes["approximate"].as_string()),),
    ("", "RMSNormalization"): _rms_norm,
    ("", "Reshape"): _reshape,
    ("", "Split"): _split,
    ("", "RotaryEmbedding"): _rotate,
    ("", "Attention"): _attention,
    (DOMAIN, "CausalConv"): _causal_conv,
    (DOMAIN, "GatedDelta"): _gated_delta,
    (DOMAIN, "GatedRmsNorm"): _gated_rms_norm,
    (DOMAIN, "SelectiveState"): _selective_state,
    (DOMAIN, "Activation"): _activation,
    (DOMAIN, "EmbedPositions"): lambda node, positions, table: (table[positions],),
    (DOMAIN, "Pool"): _pool,
    (DOMAIN, "PositionScale"): _position_scale,
    (DOMAIN, "Scale"): lambda node, x, factor: (x * factor,),
    (DOMAIN, "LayerNorm"): _layer_norm,
    (DOMAIN, "GatherColumns"): lambda node, x, columns: (x[..., columns.long()].where(columns >= 0, LACKING),),
    (DOMAIN, "RopeTable"): _rope_table,
    (DOMAIN, "WindowAttention"): _attention,
    (DOMAIN, "HeadLinear"): _head_linear,
    (DOMAIN, "LatentAttention"): _latent_attention,
    (DOMAIN, "CombineExperts"): _combine_experts,
    (DOMAIN, "Route"): _route,
    (DOMAIN, "Softcap"): _softcap,
    (DOMAIN, "SortRows"): _sort_rows,
}
