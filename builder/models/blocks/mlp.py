"""The part of a layer that looks at each token by itself."""

from collections.abc import Callable, Mapping, Sequence
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
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # in the checkpoint

    @staticmethod
    def read(config: ConfigReader, *keys: str, activation: str = "silu", bias: bool = False) -> "GatedMlp":
        """keys: the names that the activation may have. activation: where the config does not say it."""
        return GatedMlp(
            config.read_size("intermediate_size", most=MOST_COLUMNS),
            read_activation(config, *keys, default=activation),
            bias,
        )

    def cut_fused(self, tensor: str) -> dict[str, Sequence[int]]:
        """The rows of gate and up where they are one tensor, one behind the other: for Weights.cut."""
        rows = {"gate": range(self.width), "up": range(self.width, 2 * self.width)}
        return {f"{tensor}.{part}_proj": part_rows for part, part_rows in rows.items()}

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str) -> ir.Value:
        name = short(tensor)
        gate_name, up_name, down_name = self.names
        gate = graph.linear(x, f"{tensor}.{gate_name}", self.width, self.bias)
        up = graph.linear(x, f"{tensor}.{up_name}", self.width, self.bias)
        active = ACTIVATIONS[self.activation](graph, gate, name)
        gated = graph.op("Mul", [active, up], f"{name}.gated", dims_of(up))
        return graph.linear(gated, f"{tensor}.{down_name}", width_of(x), self.bias)


def read_activation(config: ConfigReader, *keys: str, default: str = "silu") -> str:
    """One of ACTIVATIONS, from the first of these keys that is there."""
    keys = keys or ("hidden_act",)
    activation = config.read(str, *keys, default=default)
    if activation not in ACTIVATIONS:
        raise config.unsupported(f"{keys[0]} = {activation!r}", f"Implemented are {', '.join(ACTIVATIONS)}.")
    return activation


@dataclass(frozen=True)
class Mlp:
    """down(activation(up(x))), as wide as x."""

    width: int  # columns of up
    activation: str  # one of PLAIN_ACTIVATIONS
    bias: bool = True  # of both
    up_name: str = "c_fc"  # in the checkpoint
    down_name: str = "c_proj"  # in the checkpoint

    @staticmethod
    def read(config: ConfigReader, width: int, bias: bool = True, *, key: str, activation: str) -> "Mlp":
        """key: what the config calls the activation; `activation` where it does not say it."""
        activation = config.read(str, key, default=activation)
        if activation not in PLAIN_ACTIVATIONS:
            raise config.unsupported(f"{key} = {activation!r}", f"Implemented are {', '.join(PLAIN_ACTIVATIONS)}.")
        return Mlp(width, activation, bias)

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str) -> ir.Value:
        up = graph.linear(x, f"{tensor}.{self.up_name}", self.width, self.bias)
        active = graph.activation(PLAIN_ACTIVATIONS[self.activation], up, f"{short(tensor)}.active")
        return graph.linear(active, f"{tensor}.{self.down_name}", width_of(x), self.bias)


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

# By the name in config.json: that of plugins/elementwise/activation.py, for MLPs without a gate.
PLAIN_ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "silu": "silu",
}
