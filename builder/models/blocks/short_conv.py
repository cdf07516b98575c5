"""LFM2's double-gated short convolution, in the place of attention. https://arxiv.org/abs/2511.23404"""

from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.models.blocks.graph import GraphWriter, LayerState
from enginewright.builder.models.blocks.rope import RopeTable
from enginewright.plugins.plugin import width_of
from enginewright.plugins.recurrence.causal_conv import CAUSAL_CONV


@dataclass(frozen=True)
class ShortConv:
    """out(c · conv(b · v)), as wide as x, where b, c and v are in_proj(x)."""

    width: int  # width of the convolution in tokens, the current one included
    bias: bool = False  # True if all three have a bias

    def write(
        self, graph: GraphWriter, x: ir.Value, tensor: str, layer: int, rope: RopeTable | None = None
    ) -> ir.Value:
        """Writes the block.

        Args:
            graph: graph to write into.
            x: input.
            tensor: name of the block in the checkpoint.
            layer: index of the layer, and of its state.
            rope: not used: the state already depends on the order of tokens.
        """
        channels, name = width_of(x), f"layers.{layer}.conv"
        projected = graph.linear(x, f"{tensor}.in_proj", 3 * channels, self.bias)
        before, after, v = graph.split(projected, f"{name}.gates", channels, channels, channels)
        taps = graph.weights.taps(f"{tensor}.conv.weight", channels, self.width)
        bias = graph.weights.tensor(f"{tensor}.conv.bias", (channels,)) if self.bias else None
        past = graph.past_state(layer, LayerState({"conv": (self.width - 1, channels)}))
        node = graph.plugin(
            CAUSAL_CONV,
            [v, taps, bias, before, after, past["conv"]],
            name,
            activation="none",
            to=int(ir.DataType.FLOAT),
        )
        state, y = node.outputs
        y.name = f"{name}.out"
        graph.present_state(layer, conv=state)
        return graph.linear(y, f"{tensor}.out_proj", channels, self.bias)
