"""Gated delta net, in the place of attention. https://arxiv.org/abs/2412.06464"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.config import MAX_HEAD_DIM, MAX_HEADS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, LayerState
from enginewright.builder.models.blocks.layers import check_conv_activation, read_taps
from enginewright.builder.models.blocks.rope import RopeTable
from enginewright.builder.weights import Weights
from enginewright.plugins.norm.gated_rms_norm import GATED_RMS_NORM
from enginewright.plugins.plugin import width_of
from enginewright.plugins.recurrence.causal_conv import CAUSAL_CONV
from enginewright.plugins.recurrence.gated_delta import GATED_DELTA

NORM_EPSILON = 1e-6  # for queries and keys; the models' code has it as a constant


@dataclass(frozen=True)
class GatedDeltaNet:
    """out(norm(delta(silu(conv(qkv(x))), a(x), b(x))) · silu(z(x))), as wide as x."""

    heads: int  # heads of values
    key_heads: int  # heads of queries and keys, each for heads / key_heads heads of values
    key_dim: int  # columns of a head
    dim: int  # columns of a head of values
    width: int  # width of the convolution in tokens, the current one included
    epsilon: float  # epsilon of the norm
    fused: bool = False  # True if the checkpoint fuses q, k, v and z in one tensor, by key head, and b and a in another

    @staticmethod
    def read(config: ConfigReader, epsilon: float, fused: bool = False) -> "GatedDeltaNet":
        """Reads the block.

        Args:
            config: config of the model.
            epsilon: epsilon of the norm.
            fused: True if tensors are fused.
        """
        check_conv_activation(config)
        heads = config.read_size("linear_num_value_heads", default=32, maximum=MAX_HEADS)
        key_heads = config.read_size("linear_num_key_heads", default=16, maximum=MAX_HEADS)
        if heads % key_heads:
            raise config.error(
                f"linear_num_value_heads is {heads}, which is not a multiple of linear_num_key_heads, {key_heads}"
            )
        return GatedDeltaNet(
            heads,
            key_heads,
            config.read_size("linear_key_head_dim", default=128, maximum=MAX_HEAD_DIM),
            config.read_size("linear_value_head_dim", default=128, maximum=MAX_HEAD_DIM),
            read_taps(config, "linear_conv_kernel_dim", 4),
            epsilon,
            fused,
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
        keys, values, name = self.key_heads * self.key_dim, self.heads * self.dim, f"layers.{layer}.linear_attention"
        if self.fused:
            self._cut(graph.weights, tensor)
        projected = {"qkv": 2 * keys + values, "z": values, "b": self.heads, "a": self.heads}
        qkv, z, b, a = (graph.linear(x, f"{tensor}.in_proj_{part}", width) for part, width in projected.items())
        past = graph.past_state(
            layer,
            LayerState({"conv": (self.width - 1, 2 * keys + values), "state": (self.heads, self.key_dim, self.dim)}),
        )
        taps = graph.weights.taps(f"{tensor}.conv1d.weight", 2 * keys + values, self.width)
        conv, mixed = graph.plugin(
            CAUSAL_CONV,
            [qkv, taps, None, None, None, past["conv"]],
            f"{name}.conv",
            activation="silu",
            to=int(ir.DataType.FLOAT),
        ).outputs
        mixed.name = f"{name}.mixed"
        q, k, v = graph.split(mixed, f"{name}.qkv", keys, keys, values)
        log_a, dt_bias = (graph.weights.exact(f"{tensor}.{each}", self.heads) for each in ("A_log", "dt_bias"))
        state, y = graph.plugin(
            GATED_DELTA,
            [q, k, v, a, b, log_a, dt_bias, past["state"]],
            name,
            heads=self.heads,
            key_heads=self.key_heads,
            scale=self.key_dim**-0.5,
            epsilon=NORM_EPSILON,
        ).outputs
        y.name = f"{name}.out"
        graph.present_state(layer, conv=conv, state=state)
        weight = graph.weights.tensor(f"{tensor}.norm.weight", (self.dim,))
        normed = graph.plugin(
            GATED_RMS_NORM,
            [y, z, weight],
            f"{name}.normed",
            epsilon=self.epsilon,
            run=self.dim,
            gate="after",
            to=int(ir.DataType.FLOAT),
            group=0,
        ).outputs[0]
        return graph.linear(normed, f"{tensor}.out_proj", width_of(x))

    def _cut(self, weights: Weights, tensor: str) -> None:
        """Cuts fused tensors, which have for each key head its q and k, and v and z of all heads that share it."""
        shared = self.heads // self.key_heads
        wide, narrow = (self.key_dim, self.key_dim, shared * self.dim, shared * self.dim), (shared, shared)
        q, k, v, z = _rows(self.key_heads, wide)
        b, a = _rows(self.key_heads, narrow)
        fused, gates = f"{tensor}.in_proj_qkvz", f"{tensor}.in_proj_ba"
        weights.cut(fused, {f"{tensor}.in_proj_qkv": [*q, *k, *v], f"{tensor}.in_proj_z": z})
        weights.cut(gates, {f"{tensor}.in_proj_b": b, f"{tensor}.in_proj_a": a})


def _rows(groups: int, widths: Sequence[int]) -> list[list[int]]:
    """Lists the rows of each kind, in the order of groups, where each group has rows of every kind in turn."""
    starts = [sum(widths[:kind]) for kind in range(len(widths))]
    return [
        [group * sum(widths) + start + row for group in range(groups) for row in range(width)]
        for start, width in zip(starts, widths, strict=True)
    ]
