"""Where the channels of a linear layer's input can be scaled without another op: what writes them is a weight's rows.

y = (x / s) (W · s)ᵀ for any s, so that channels of x and of W can share what is hard to quantize between them
(https://arxiv.org/abs/2211.10438, https://arxiv.org/abs/2306.00978). 1 / s moves into what is before:

    a norm's weight                      QKV, gate and up
    V's rows, by KV head                 O: all query heads of a KV head read the same channels
    up's rows                            down: act(gate) · up is linear in up
"""

from dataclasses import dataclass

import onnx_ir as ir
import torch

from enginewright.passes.fusion.gated import gated_product
from enginewright.passes.graph import LinearLayer, head_of, linear_of, made_by, nodes_of, only_used_by
from enginewright.passes.quant.method import stored
from enginewright.passes.weights import read, scale, shape_of
from enginewright.plugins import DOMAIN
from enginewright.plugins.plugin import int_of


@dataclass(frozen=True)
class Site:
    """x: what is scaled, and who reads it. before: weights whose rows [first, first + channels) write its channels.

    repeats: how many runs of head_dim channels of x, one behind the other, come from one run of `before`.
    """

    linears: tuple[LinearLayer, ...]
    before: tuple[ir.Value, ...]
    first: int
    channels: int
    repeats: int = 1
    head_dim: int = 1

    @property
    def x(self) -> ir.Value:
        return self.linears[0].x

    def narrow(self, columns: torch.Tensor) -> torch.Tensor:
        """[K] → [channels]: the largest of the columns that come from one channel."""
        return columns.view(-1, self.repeats, self.head_dim).amax(1).flatten()

    def widen(self, channels: torch.Tensor) -> torch.Tensor:
        """[channels] → [K]."""
        return channels.view(-1, 1, self.head_dim).expand(-1, self.repeats, -1).flatten()

    def apply(self, factors: torch.Tensor) -> None:
        """Divide x by these factors [channels], and multiply the weights that read it."""
        for linear in self.linears:
            scale(linear.weight, columns=self.widen(factors))
        for weight in self.before:
            rows = torch.ones(shape_of(weight)[0])
            rows[self.first : self.first + self.channels] = 1 / factors
            scale(weight, rows=rows)


def sites(model: ir.Model) -> tuple[list[Site], list[str]]:
    """All of a dense graph, in its order; and why other linear layers have none, a sentence each."""
    readers: dict[ir.Value, list[LinearLayer]] = {}
    head = head_of(model)
    for node in nodes_of(model, "MatMul"):
        linear = linear_of(node.outputs[0])
        if linear is not None and linear.weight is not head.weight:
            readers.setdefault(linear.x, []).append(linear)
    found: list[Site] = []
    refusals: list[str] = []
    for x, linears in readers.items():
        site = _site(x, tuple(linears))
        if isinstance(site, Site):
            found.append(site)
        else:
            refusals.append(f"The input of {linears[0].output.name} cannot be scaled: {site}")
    return found, refusals


def _site(x: ir.Value, linears: tuple[LinearLayer, ...]) -> Site | str:
    if not only_used_by(x, *(linear.nodes[1] for linear in linears)):
        return "others than linear layers read it."
    if any(stored(linear.weight) for linear in linears):
        return "a weight that reads it is quantized already."
    norm = made_by(x, "RMSNormalization")
    if norm is not None:
        weight = norm.inputs[1]
        assert weight is not None
        return (
            Site(linears, (weight,), 0, shape_of(weight)[0])
            if only_used_by(weight, norm)
            else "its norm's weight is shared."
        )
    attention = made_by(x, "Attention") or made_by(x, "CausalWindow", DOMAIN)
    if attention is not None:
        heads, kv_heads = int_of(attention, "q_num_heads"), int_of(attention, "kv_num_heads")
        head_dim = shape_of(linears[0].weight)[1] // heads
        return _rows(attention.inputs[2], attention, linears, heads // kv_heads, head_dim)
    gated = gated_product(node) if (node := made_by(x, "Mul")) is not None else None
    if node is not None and gated is not None:
        return _rows(gated.up, node, linears)
    return "nothing before it takes the scale."


def _rows(
    value: ir.Value | None, user: ir.Node, linears: tuple[LinearLayer, ...], repeats: int = 1, head_dim: int = 1
) -> Site | str:
    """Where a value is rows of a linear layer, perhaps one of several that were stacked."""
    if value is None or not only_used_by(value, user):
        return "others read what it is made of."
    first, split = 0, made_by(value, "Split")
    if split is not None and split.inputs[1] is not None:
        first = int(read(split.inputs[1])[: split.outputs.index(value)].sum())
    linear = linear_of(value if split is None else split.inputs[0])
    if linear is None or stored(linear.weight):
        return "no weight that is free to change writes it."
    channels = shape_of(linears[0].weight)[1] // repeats
    before = (linear.weight,) if linear.bias is None else (linear.weight, linear.bias)
    return Site(linears, before, first, channels, repeats, head_dim)
