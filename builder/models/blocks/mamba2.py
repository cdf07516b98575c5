"""Mamba-2, in the place of attention. https://arxiv.org/abs/2405.21060"""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.models.blocks.graph import GraphWriter, LayerState
from enginewright.builder.models.blocks.rope import RopeTable
from enginewright.plugins.causal_conv import CAUSAL_CONV
from enginewright.plugins.gated_rms_norm import GATED_RMS_NORM
from enginewright.plugins.plugin import width_of
from enginewright.plugins.selective_state import SELECTIVE_STATE


@dataclass(frozen=True)
class Mamba2:
    """out(norm(scan(silu(conv(v, B, C)), dt) · silu(z))), as wide as x, where all of them are in_proj(x)."""

    heads: int
    dim: int  # columns of a head
    groups: int  # of B and C, each for heads / groups heads
    state: int  # columns of B and of C
    width: int  # tokens that the convolution sees, its own included
    epsilon: float  # of the norm, which is of each group's heads together
    bias: bool = False  # of in_proj and out_proj
    conv_bias: bool = True
    dt_min: float = 0.0  # the least step

    def write(
        self, graph: GraphWriter, x: ir.Value, tensor: str, layer: int, rope: RopeTable | None = None
    ) -> ir.Value:
        """layer: whose states they are. rope: not used, since a state has seen tokens in their order."""
        values, keys, name = self.heads * self.dim, self.groups * self.state, f"layers.{layer}.mamba"
        mixed_width = values + 2 * keys
        projected = graph.linear(x, f"{tensor}.in_proj", values + mixed_width + self.heads, self.bias)
        z, mixed, dt = graph.split(projected, f"{name}.parts", values, mixed_width, self.heads)
        past = graph.past_state(
            layer, LayerState({"conv": (self.width - 1, mixed_width), "state": (self.heads, self.state, self.dim)})
        )
        taps = graph.weights.taps(f"{tensor}.conv1d.weight", mixed_width, self.width)
        bias = graph.weights.tensor(f"{tensor}.conv1d.bias", (mixed_width,)) if self.conv_bias else None
        conv, convolved = graph.plugin(
            CAUSAL_CONV,
            [mixed, taps, bias, None, None, past["conv"]],
            f"{name}.conv",
            activation="silu",
            to=int(ir.DataType.FLOAT),
        ).outputs
        convolved.name = f"{name}.convolved"
        v, b, c = graph.split(convolved, f"{name}.vbc", values, keys, keys)
        numbers = (graph.weights.exact(f"{tensor}.{each}", self.heads) for each in ("A_log", "dt_bias", "D"))
        state, y = graph.plugin(
            SELECTIVE_STATE,
            [c, b, v, dt, *numbers, past["state"]],
            name,
            heads=self.heads,
            key_heads=self.groups,
            dt_min=self.dt_min,
        ).outputs
        y.name = f"{name}.out"
        graph.present_state(layer, conv=conv, state=state)
        weight = graph.weights.tensor(f"{tensor}.norm.weight", (values,))
        normed = graph.plugin(
            GATED_RMS_NORM,
            [y, z, weight],
            f"{name}.normed",
            epsilon=self.epsilon,
            run=values // self.groups,
            gate="before",
            to=int(ir.DataType.FLOAT),
            group=0,
        ).outputs[0]
        return graph.linear(normed, f"{tensor}.out_proj", width_of(x), self.bias)
