"""The part of a layer that looks at each token by itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.config import MOST_COLUMNS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, short
from enginewright.plugins.plugin import dims_of, width_of


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) · up(x)), as wide as x."""

    width: int  # columns of gate and up each
    activation: str  # one of ACTIVATIONS
    bias: bool = False  # of gate, up and down

    @staticmethod
    def read(config: ConfigReader, *keys: str, activation: str = "silu", bias: bool = False) -> "GatedMlp":
        """keys: the names that the activation may have. activation: where the config does not say it."""
        keys = keys or ("hidden_act",)
        activation = config.read(str, *keys, default=activation)
        if activation not in ACTIVATIONS:
            raise config.unsupported(f"{keys[0]} = {activation!r}", f"Implemented are {', '.join(ACTIVATIONS)}.")
        return GatedMlp(config.read_size("intermediate_size", most=MOST_COLUMNS), activation, bias)

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str) -> ir.Value:
        name = short(tensor)
        gate = graph.linear(x, f"{tensor}.gate_proj", self.width, self.bias)
        up = graph.linear(x, f"{tensor}.up_proj", self.width, self.bias)
        active = ACTIVATIONS[self.activation](graph, gate, name)
        gated = graph.op("Mul", [active, up], f"{name}.gated", dims_of(up))
        return graph.linear(gated, f"{tensor}.down_proj", width_of(x), self.bias)


def _gelu_tanh(graph: GraphWriter, x: ir.Value, name: str) -> ir.Value:
    return graph.op("Gelu", [x], f"{name}.active", dims_of(x), approximate="tanh")


def _silu(graph: GraphWriter, x: ir.Value, name: str) -> ir.Value:
    sigmoid = graph.op("Sigmoid", [x], f"{name}.sigmoid", dims_of(x))
    return graph.op("Mul", [x, sigmoid], f"{name}.active", dims_of(x))


# By the name in config.json: what writes it, of a value and the name of its block.
ACTIVATIONS: Mapping[str, Callable[[GraphWriter, ir.Value, str], ir.Value]] = {
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": _silu,
}
