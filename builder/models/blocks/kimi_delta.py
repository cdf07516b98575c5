"""Kimi's delta attention: a gated delta net in whose states each channel of a key decays by itself.

https://arxiv.org/abs/2510.26692
"""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.models.blocks.graph import GraphWriter, LayerState
from enginewright.builder.models.blocks.norm import RmsNorm
from enginewright.builder.models.blocks.rope import RopeTable
from enginewright.plugins.plugin import width_of
from enginewright.plugins.recurrence.causal_conv import CAUSAL_CONV
from enginewright.plugins.recurrence.gated_delta import GATED_DELTA

NORM_EPSILON = 1e-6  # for queries and keys; the model's code has it as a constant
PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class KimiDelta:
    """o(norm(delta(silu(conv(q(x))), …k…, …v…, f(x), b(x))) · sigmoid(g(x))), as wide as x.

    f and g are products of two matrices, with as many columns in between as a head.
    """

    heads: int  # number of heads
    dim: int  # columns of a head of queries, keys and values
    width: int  # width of the convolutions in tokens, the current one included
    norm: RmsNorm  # norm of each head

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
        columns, name, weights = self.heads * self.dim, f"layers.{layer}.linear_attention", graph.weights
        self._find_taps(graph, tensor)
        shapes = {f"conv_{part}": (self.width - 1, columns) for part in PARTS}
        past = graph.past_state(layer, LayerState({**shapes, "state": (self.heads, self.dim, self.dim)}))
        mixed, present = list[ir.Value](), dict[str, ir.Value]()
        for part in PARTS:
            projected = graph.linear(x, f"{tensor}.{part}_proj", columns)
            taps = weights.taps(f"{tensor}.{part}_conv1d.weight", columns, self.width)
            present[f"conv_{part}"], y = graph.plugin(
                CAUSAL_CONV,
                [projected, taps, None, None, None, past[f"conv_{part}"]],
                f"{name}.conv_{part}",
                activation="silu",
                to=int(ir.DataType.FLOAT),
            ).outputs
            mixed.append(y)
            y.name = f"{name}.{part}"
        # In transformers they are in a submodule.
        gate = weights.first_of(f"{tensor}.dt_bias", f"{tensor}.forget_gate.dt_bias").removesuffix(".dt_bias")
        decay = graph.linear(graph.linear(x, f"{gate}.f_a_proj", self.dim), f"{gate}.f_b_proj", columns)
        beta = graph.linear(x, f"{tensor}.b_proj", self.heads)
        log_a, dt_bias = weights.exact(f"{gate}.A_log", self.heads), weights.exact(f"{gate}.dt_bias", columns)
        state, y = graph.plugin(
            GATED_DELTA,
            [*mixed, decay, beta, log_a, dt_bias, past["state"]],
            name,
            heads=self.heads,
            key_heads=self.heads,
            scale=self.dim**-0.5,
            epsilon=NORM_EPSILON,
        ).outputs
        y.name = f"{name}.out"
        graph.present_state(layer, **present, state=state)
        normed = self.norm.write_by_head(graph, y, f"{tensor}.o_norm", self.dim)
        z = graph.linear(graph.linear(x, f"{tensor}.g_a_proj", self.dim), f"{tensor}.g_b_proj", columns)
        gated = graph.activation("sigmoid", normed, f"{name}.gated", z)
        return graph.linear(gated, f"{tensor}.o_proj", width_of(x))

    def _find_taps(self, graph: GraphWriter, tensor: str) -> None:
        """Cuts the taps of all three convolutions, which transformers stores in one tensor."""
        columns, names = self.heads * self.dim, [f"{tensor}.{part}_conv1d" for part in PARTS]
        fused = f"{tensor}.conv1d"
        if graph.weights.first_of(f"{names[0]}.weight", f"{fused}.weight").startswith(fused):
            rows = {name: range(part * columns, (part + 1) * columns) for part, name in enumerate(names)}
            graph.weights.cut(fused, rows)
