"""The ops of a dense graph in torch, in fp32: those that importers write, and no others."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch.nn import functional as F

from enginewright.errors import EngineError
from enginewright.plugins.plugin import DOMAIN, float_of, int_of

Compute = Callable[..., tuple[torch.Tensor, ...]]  # (node, *inputs) → outputs; later ones may be left out


def compute_of(node: ir.Node) -> Compute:
    """What computes a node.

    Raises:
        EngineError: its op is not known.
    """
    known = _OPS.get((node.domain, node.op_type))
    if known is None:
        raise EngineError(
            f"node {node.name} ({node.op_type}) is of no op that can be streamed", "", "Please report this."
        )
    return known


def _linear(node: ir.Node, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """MatMul with a transposed weight [N, K], which is given as it is stored."""
    return (F.linear(x, weight),)


def _gather(node: ir.Node, rows: Callable[[int, int], torch.Tensor], tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of a table that is read by rows, so that it is never here whole."""
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
    first, second = torch.unflatten(x, -1, (int_of(node, "num_heads"), -1)).chunk(
        2, dim=-1
    )  # [1, T, heads, head_dim / 2]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return (torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(2),)


def _attention(node: ir.Node, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Causal, from the first position on: there is no past."""
    heads, kv_heads = int_of(node, "q_num_heads"), int_of(node, "kv_num_heads")
    q, k, v = (
        torch.unflatten(x, -1, (count, -1)).transpose(1, 2) for x, count in ((q, heads), (k, kv_heads), (v, kv_heads))
    )
    scale, softcap = float_of(node, "scale"), float_of(node, "softcap")
    window = node.attributes.get_int("window", 0)
    if not softcap and not window:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return (y.transpose(1, 2).flatten(2),)
    at = torch.arange(q.shape[2])
    back = at.unsqueeze(1) - at
    hidden = (back < 0) | (back >= (window or math.inf))
    ys = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head * kv_heads // heads].transpose(1, 2) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        ys.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, head * kv_heads // heads])
    return (torch.cat(ys, dim=-1),)


def _softcap(node: ir.Node, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cap = float_of(node, "cap")
    return (torch.tanh(x / cap) * cap,)


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
    (DOMAIN, "GatherColumns"): lambda node, x, columns: (x[..., columns.long()],),
    (DOMAIN, "RopeTable"): _rope_table,
    (DOMAIN, "CausalWindow"): _attention,
    (DOMAIN, "Softcap"): _softcap,
}
