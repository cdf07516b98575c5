"""MLPs: the part of a layer that works on each token alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, short
from enginewright.plugins.plugin import dims_of, width_of


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) · up(x)), as wide as x."""

    width: int  # columns of gate and up each
    activation: str  # one of ACTIVATIONS
    bias: bool = False  # True if gate, up and down have a bias
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names of gate, up and down in the checkpoint

    @staticmethod
    def read(config: ConfigReader, *keys: str, activation: str = "silu", bias: bool = False) -> "GatedMlp":
        """Reads the MLP.

        Args:
            config: config of the model.
            keys: possible keys of the activation.
            activation: activation if the config has none.
            bias: True if the layers have a bias.
        """
        return GatedMlp(
            config.read_size("intermediate_size", maximum=MAX_COLUMNS),
            read_activation(config, *keys, default=activation),
            bias,
        )

    def cut_fused(self, tensor: str) -> dict[str, Sequence[int]]:
        """Returns the rows of gate and up in one fused tensor, for Weights.cut.

        Args:
            tensor: name of the block, whose gate and up follow each other in the fused tensor.
        """
        rows = {"gate": range(self.width), "up": range(self.width, 2 * self.width)}
        return {f"{tensor}.{part}_proj": part_rows for part, part_rows in rows.items()}

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str) -> ir.Value:
        """Writes the MLP."""
        name = short(tensor)
        gate_name, up_name, down_name = self.names
        gate = graph.linear(x, f"{tensor}.{gate_name}", self.width, self.bias)
        up = graph.linear(x, f"{tensor}.{up_name}", self.width, self.bias)
        active = ACTIVATIONS[self.activation](graph, gate, name)
        gated = graph.op("Mul", [active, up], f"{name}.gated", dims_of(up))
        return graph.linear(gated, f"{tensor}.{down_name}", width_of(x), self.bias)


def read_activation(config: ConfigReader, *keys: str, default: str = "silu") -> str:
    """Reads one of ACTIVATIONS from the first of these keys that is present."""
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
    bias: bool = True  # True if up and down have a bias
    up_name: str = "c_fc"  # name of up in the checkpoint
    down_name: str = "c_proj"  # name of down in the checkpoint

    @staticmethod
    def read(config: ConfigReader, width: int, bias: bool = True, *, key: str, activation: str) -> "Mlp":
        """Reads the MLP.

        Args:
            config: config of the model.
            width: columns of up.
            bias: True if the layers have a bias.
            key: key of the activation.
            activation: activation if the config has none.
        """
        activation = config.read(str, key, default=activation)
        if activation not in PLAIN_ACTIVATIONS:
            raise config.unsupported(f"{key} = {activation!r}", f"Implemented are {', '.join(PLAIN_ACTIVATIONS)}.")
        return Mlp(width, activation, bias)

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str) -> ir.Value:
        """Writes the MLP."""
        up = graph.linear(x, f"{tensor}.{self.up_name}", self.width, self.bias)
        active = graph.activation(PLAIN_ACTIVATIONS[self.activation], up, f"{short(tensor)}.active")
        return graph.linear(active, f"{tensor}.{self.down_name}", width_of(x), self.bias)


def _gelu_tanh(graph: GraphWriter, x: ir.Value, name: str) -> ir.Value:
    return graph.op("Gelu", [x], f"{name}.active", dims_of(x), approximate="tanh")


def _silu(graph: GraphWriter, x: ir.Value, name: str) -> ir.Value:
    sigmoid = graph.op("Sigmoid", [x], f"{name}.sigmoid", dims_of(x))
    return graph.op("Mul", [x, sigmoid], f"{name}.active", dims_of(x))


# Writers by the activation's name in config.json: (graph, value, name of the block) → activated value.
ACTIVATIONS: Mapping[str, Callable[[GraphWriter, ir.Value, str], ir.Value]] = {
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": _silu,
}

# Names in plugins/elementwise/activation.py by those in config.json, for MLPs without a gate.
PLAIN_ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "silu": "silu",
}
