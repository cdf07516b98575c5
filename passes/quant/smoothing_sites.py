"""Finds inputs of linear layers whose channels can be scaled without another op, since rows of a weight write them.

y = (x / s) (W · s)ᵀ for any s, so that channels of x and of W can share what is hard to quantize
(https://arxiv.org/abs/2211.10438, https://arxiv.org/abs/2306.00978). 1 / s moves into the weights before:

    a norm's weight                      QKV, gate and up; those of all experts, and their router, which stays exact
    V's rows, by KV head                 O: all query heads of a KV head read the same channels
    up's rows                            down: act(gate) · up is linear in up; relu(up)² takes the root of s
    an expert's own up                   the same expert's down, with factors of its own
    a projection before experts          gate and up of all of them
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from enginewright.passes.fusion.gated import gated_product
from enginewright.passes.graph import LinearLayer, head_of, linear_of, linears_of, made_by, only_used_by
from enginewright.passes.quant.method import stored
from enginewright.passes.weights import read, scale, shape_of
from enginewright.plugins import DOMAIN
from enginewright.plugins.elementwise.activation import ACTIVATION
from enginewright.plugins.experts.route import ROUTE
from enginewright.plugins.experts.sort_rows import SORT_ROWS
from enginewright.plugins.gemm.gemm import GATED
from enginewright.plugins.plugin import int_of, operand


@dataclass(frozen=True)
class Site:
    """A value that can be scaled, and the weights that have to be scaled with it."""

    linears: tuple[LinearLayer, ...]  # layers that read it; those of experts, if there are any, come first
    before: tuple[ir.Value, ...]  # weights and biases that write it
    first: int  # row of each matrix in `before` that writes the first channel
    channels: int  # number of channels
    repeats: int = 1  # groups of head_dim channels, one after another, that come from one group of `before`
    head_dim: int = 1  # channels of a group
    experts: int = 1  # experts with factors of their own
    power: float = 1.0  # power of `before` in the scaled value
    routers: tuple[ir.Value, ...] = ()  # weights [experts, K] of routers that read it and are not rounded any further

    def narrow(self, columns: torch.Tensor) -> torch.Tensor:
        """Reduces [K] to [channels]: the maximum of the columns that come from one channel."""
        return columns.view(-1, self.repeats, self.head_dim).amax(1).flatten()

    def widen(self, factors: torch.Tensor) -> torch.Tensor:
        """Repeats [..., channels] for the columns that come from them, [..., K]."""
        runs = torch.unflatten(factors, -1, (-1, 1, self.head_dim))
        return runs.expand(*[-1] * factors.dim(), self.repeats, -1).flatten(-3)

    def apply(self, factors: torch.Tensor) -> None:
        """Divides the value by these factors [experts, channels], and multiplies the weights that read it."""
        for weight in (*(linear.weight for linear in self.linears), *self.routers):
            scale(weight, columns=self.widen(factors))
        for weight in self.before:
            rows = torch.ones(self.experts, shape_of(weight)[0] // self.experts)
            rows[:, self.first : self.first + self.channels] = factors ** -(1 / self.power)
            scale(weight, rows=rows.flatten())


def sites(model: ir.Model) -> tuple[list[Site], list[str]]:
    """Finds the sites of a dense graph.

    Args:
        model: the dense graph.

    Returns:
        The sites, and the reasons why other linear layers have none, a sentence each.
    """
    readers: dict[ir.Value, list[LinearLayer]] = {}
    head = head_of(model)
    kept = None if head is None else head.weight
    for linear in linears_of(model):
        if linear.weight is not kept:
            read_by = readers.setdefault(operand(_entry(linear), 0), [])
            read_by.insert(0 if linear.grouped else len(read_by), linear)
    found: list[Site] = []
    refusals: list[str] = []
    for x, linears in readers.items():
        site = _site(x, tuple(linears))
        if isinstance(site, Site):
            found.append(site)
        else:
            refusals.append(f"The input of {linears[0].output.name} cannot be scaled: {site}")
    return found, refusals


def _entry(linear: LinearLayer) -> ir.Node:
    """Returns the node through which a layer reads: the one that sorts its rows by expert, or its product."""
    sort = made_by(linear.x, SORT_ROWS.name, DOMAIN)
    if sort is not None and only_used_by(linear.x, *linear.nodes):
        return sort
    return linear.nodes[0] if linear.grouped else linear.nodes[1]


def _site(x: ir.Value, linears: tuple[LinearLayer, ...]) -> Site | str:
    routes = [user for user in x.consumers() if user.op_type == ROUTE.name and user.domain == DOMAIN]
    if not only_used_by(x, *(_entry(linear) for linear in linears), *routes):
        return "ops other than linear layers read it."
    if any(stored(linear.weight) for linear in linears):
        return "a weight that reads it is quantized already."
    norm = made_by(x, "RMSNormalization")
    if norm is not None:
        weight = norm.inputs[1]
        assert weight is not None
        routers = tuple(operand(route, 1) for route in routes)
        return (
            Site(linears, (weight,), 0, shape_of(weight)[0], routers=routers)
            if only_used_by(weight, norm)
            else "its norm's weight is shared."
        )
    if routes:
        return "a router reads it, and no norm is before it."
    attention = made_by(x, "Attention") or made_by(x, "WindowAttention", DOMAIN)
    if attention is not None:
        heads, kv_heads = int_of(attention, "q_num_heads"), int_of(attention, "kv_num_heads")
        head_dim = shape_of(linears[0].weight)[1] // heads
        return _rows(attention.inputs[2], [attention], linears, heads // kv_heads, head_dim)
    gated = gated_product(node) if (node := made_by(x, "Mul")) is not None else None
    if node is not None and gated is not None:
        return _rows(gated.up, [node], linears)
    activation = made_by(x, ACTIVATION.name, DOMAIN)
    if (
        activation is not None
        and activation.attributes["activation"].as_string() == "relu2"
        and len(activation.inputs) == 1
    ):
        return _rows(activation.inputs[0], [activation], linears, power=2)
    return _rows(x, [_entry(linear) for linear in linears], linears)


def _rows(
    value: ir.Value | None,
    users: Sequence[ir.Node],
    linears: tuple[LinearLayer, ...],
    repeats: int = 1,
    head_dim: int = 1,
    power: float = 1.0,
) -> Site | str:
    """Makes the site of a value that rows of a linear layer write, perhaps one of several that were stacked."""
    if value is None or not only_used_by(value, *users):
        return "other ops read what it is made of."
    first, split = 0, made_by(value, "Split")
    if split is not None and split.inputs[1] is not None:
        first = int(read(split.inputs[1])[: split.outputs.index(value)].sum())
    linear = linear_of(value if split is None else split.inputs[0])
    if linear is None or stored(linear.weight):
        return "no weight that is free to change writes it."
    channels = shape_of(linears[0].weight)[1] // repeats
    if linear.grouped:
        epilogue = linear.nodes[0].attributes["epilogue"].as_string()
        if epilogue == "swiglu_clamped":
            return "its product is clamped."
        first += channels if epilogue in GATED else 0  # gates come first
    before = (linear.weight,) if linear.bias is None else (linear.weight, linear.bias)
    return Site(linears, before, first, channels, repeats, head_dim, linear.experts, power)
