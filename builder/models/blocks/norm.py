"""Norms of the residual stream, of the outputs of a layer's parts, and of heads."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, short
from enginewright.plugins.norm.layer_norm import LAYER_NORM
from enginewright.plugins.plugin import dims_of, width_of


@dataclass(frozen=True)
class RmsNorm:
    """x / √(mean(x²) + epsilon) · (weight + offset), over the last dimension."""

    epsilon: float  # added to the mean of squares
    offset: float = 0.0  # added to the weight: 1 where a checkpoint stores the weight less 1
    scale: float = 1.0  # scale of the result; multiplied into the weight, which is fp32
    weighted: bool = True  # True if there is a weight; otherwise it counts as 1
    weight_name: str = "weight"  # name of the weight in the checkpoint

    @staticmethod
    def read(config: ConfigReader, offset: float = 0.0, epsilon: float = 1e-6) -> "RmsNorm":
        """Reads the norm.

        Args:
            config: config of the model.
            offset: added to the weight.
            epsilon: epsilon if the config has none.
        """
        return RmsNorm(config.read_positive("rms_norm_eps", default=epsilon), offset)

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str) -> ir.Value:
        """Writes the norm of x."""
        width = width_of(x)
        if self.weighted:
            weight = graph.weights.tensor(f"{tensor}.{self.weight_name}", (width,), self.offset, self.scale)
        else:
            weight = graph.constant(f"norm_{width}_by_{self.scale}", np.full(width, self.scale, np.float32))
        return graph.op("RMSNormalization", [x, weight], short(tensor), dims_of(x), axis=-1, epsilon=self.epsilon)

    def write_by_head(self, graph: GraphWriter, x: ir.Value, tensor: str, head_dim: int) -> ir.Value:
        """Writes the norm of each head of x, [1, T, heads · head_dim]."""
        (batch, tokens, width), heads, name = dims_of(x), width_of(x) // head_dim, short(tensor)
        split = graph.constant(f"split_{heads}_heads_of_{head_dim}", np.array([0, 0, heads, head_dim], np.int64))
        joined = graph.constant(f"joined_{heads}_heads_of_{head_dim}", np.array([0, 0, width], np.int64))
        by_head = graph.op("Reshape", [x, split], f"{name}.heads", (batch, tokens, heads, head_dim))
        return graph.op("Reshape", [self.write(graph, by_head, tensor), joined], f"{name}.joined", dims_of(x))


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean(x)) / √(variance(x) + epsilon) · weight (+ bias), over the last dimension."""

    epsilon: float  # added to the variance
    bias: bool = True  # True if there is a bias
    scale: float = 1.0  # scale of the result; multiplied into weight and bias, which are fp32

    @staticmethod
    def read(config: ConfigReader, key: str, bias: bool = True) -> "LayerNorm":
        """Reads the norm.

        Args:
            config: config of the model.
            key: key of the epsilon.
            bias: True if there is a bias.
        """
        return LayerNorm(config.read_positive(key, default=1e-5), bias)

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str) -> ir.Value:
        """Writes the norm of x."""
        kinds = ("weight", "bias") if self.bias else ("weight",)
        vectors = [graph.weights.tensor(f"{tensor}.{kind}", (width_of(x),), scale=self.scale) for kind in kinds]
        settings = {"epsilon": self.epsilon, "to": int(ir.DataType.FLOAT), "group": 0}
        return graph.plugin(LAYER_NORM, [x, *vectors], short(tensor), **settings).outputs[0]
