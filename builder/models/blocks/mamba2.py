"""Mamba-2, in the place of attention. https://arxiv.org/abs/2405.21060"""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.config import MAX_HEAD_DIM, MAX_HEADS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, LayerState
from enginewright.builder.models.blocks.layers import check_conv_activation, read_taps
from enginewright.builder.models.blocks.rope import RopeTable
from enginewright.plugins.norm.gated_rms_norm import GATED_RMS_NORM
from enginewright.plugins.plugin import width_of
from enginewright.plugins.recurrence.causal_conv import CAUSAL_CONV
from enginewright.plugins.recurrence.selective_state import SELECTIVE_STATE


@dataclass(frozen=True)
class Mamba2:
    """out(norm(scan(silu(conv(v, B, C)), dt) · silu(z))), as wide as x, where all of them are in_proj(x)."""

    heads: int  # number of heads
    dim: int  # columns of a head
    groups: int  # groups of B and C, each for heads / groups heads
    state: int  # columns of B and of C
    width: int  # width of the convolution in tokens, the current one included
    epsilon: float  # epsilon of the norm, which is over each group's heads together
    bias: bool = False  # True if in_proj and out_proj have a bias
    conv_bias: bool = True  # True if the convolution has a bias
    dt_min: float = 0.0  # smallest step
    gate: str = "before"  # multiplication by z "before" or "after" the norm; "alone": there is no norm

    @staticmethod
    def read(config: ConfigReader, values: int, epsilon: float) -> "Mamba2":
        """Reads the block from a config whose keys begin with `mamba_`.

        Args:
            config: config of the model.
            values: columns of all heads.
            epsilon: epsilon of the norm.
        """
        check_conv_activation(config)
        heads = config.read_size("mamba_n_heads", default=128, maximum=MAX_HEADS)
        groups = config.read_size("mamba_n_groups", default=1, maximum=MAX_HEADS)
        if config.holds("mamba_d_head", "auto") or config.holds("mamba_d_head", None):
            dim = values // heads
        else:
            dim = config.read_size("mamba_d_head", maximum=MAX_HEAD_DIM)
        if heads * dim != values:
            raise config.error(f"mamba_n_heads is {heads}, and mamba_d_head {dim}, but all heads have {values} columns")
        if heads % groups:
            raise config.error(f"mamba_n_heads is {heads}, which is not a multiple of mamba_n_groups, {groups}")
        limits = config.read(list, "time_step_limit", default=[0.0, None])
        if len(limits) != 2 or limits[0] != 0 or limits[1] not in (None, float("inf"), {"__float__": "Infinity"}):
            raise config.unsupported(f"time_step_limit = {limits}", "Implemented is [0, Infinity].")
        return Mamba2(
            heads,
            dim,
            groups,
            state=config.read_size("mamba_d_state", default=256, maximum=MAX_HEAD_DIM),
            width=read_taps(config, "mamba_d_conv", 4),
            epsilon=epsilon,
            bias=config.read(bool, "mamba_proj_bias", default=False),
            conv_bias=config.read(bool, "mamba_conv_bias", default=True),
        )

    def write(
        self, graph: GraphWriter, x: ir.Value, tensor: str, layer: int, rope: RopeTable | None = None
    ) -> ir.Value:
        """Writes the block.

        Args:
            graph: graph to write into.
            x: input.
            tensor: name of the block in the checkpoint.
            layer: index of the layer, and of its states.
            rope: not used: states already depend on the order of tokens.
        """
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
        if self.gate == "alone":
            gated = graph.activation("silu", y, f"{name}.gated", gate=z)
            return graph.linear(gated, f"{tensor}.out_proj", width_of(x), self.bias)
        weight = graph.weights.tensor(f"{tensor}.norm.weight", (values,))
        normed = graph.plugin(
            GATED_RMS_NORM,
            [y, z, weight],
            f"{name}.normed",
            epsilon=self.epsilon,
            run=values // self.groups,
            gate=self.gate,
            to=int(ir.DataType.FLOAT),
            group=0,
        ).outputs[0]
        return graph.linear(normed, f"{tensor}.out_proj", width_of(x), self.bias)
