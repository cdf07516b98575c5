"""Layers of a mixer and an MLP or experts, and what is in front of the first and behind the last."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from enginewright.builder.models.blocks.attention import Attention
from enginewright.builder.models.blocks.embedding import Embedding
from enginewright.builder.models.blocks.experts import Experts
from enginewright.builder.models.blocks.gated_delta_net import GatedDeltaNet
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.models.blocks.head import Head
from enginewright.builder.models.blocks.kimi_delta import KimiDelta
from enginewright.builder.models.blocks.latent_attention import LatentAttention
from enginewright.builder.models.blocks.mamba2 import Mamba2
from enginewright.builder.models.blocks.mlp import GatedMlp, Mlp
from enginewright.builder.models.blocks.norm import LayerNorm, RmsNorm
from enginewright.builder.models.blocks.rope import Rope, RopeTable
from enginewright.builder.models.blocks.short_conv import ShortConv
from enginewright.builder.weights import Weights

TokenMlp = GatedMlp | Mlp | Experts  # looks at each token by itself
Norm = RmsNorm | LayerNorm


@dataclass(frozen=True)
class SideBySide:
    """Attention and a recurrence that both read x, and whose results are added."""

    attention: Attention
    recurrence: Mamba2
    name: str  # the recurrence's in the checkpoint, beside that of the attention

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str, layer: int, rope: RopeTable | None) -> ir.Value:
        h = self.recurrence.write(graph, x, f"{tensor.rpartition('.')[0]}.{self.name}", layer)
        return graph.add(h, self.attention.write(graph, x, tensor, layer, rope))


# Looks at the tokens before.
Mixer = Attention | LatentAttention | GatedDeltaNet | KimiDelta | Mamba2 | ShortConv | SideBySide


@dataclass(frozen=True)
class Layer:
    """x + mixer(norm(x)), and then the same with the MLP; norms may be behind these parts, too, or only there."""

    mixer: Mixer | None  # None in a layer that is an MLP alone
    mlp: TokenMlp | None  # None in a layer that is a mixer alone
    norm: Norm  # all of the layer's norms are alike
    names: tuple[str, str] = ("self_attn", "mlp")  # in the checkpoint, of the mixer and of the MLP
    # Names of the norms in the checkpoint, of the mixer and of the MLP; None where there are none.
    before: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    rope: Rope | None = None  # None where positions are not in queries and keys

    def write(self, graph: GraphWriter, x: ir.Value, name: str, index: int, rope: RopeTable | None) -> ir.Value:
        """name: the layer's in the checkpoint. index: whose cache or state is read and written."""
        for part, block in enumerate((self.mixer, self.mlp)):
            if block is None:
                continue
            h, own = x, f"{name}.{self.names[part]}"
            if self.before:
                h = self.norm.write(graph, h, f"{name}.{self.before[part]}")
            h = block.write(graph, h, own) if isinstance(block, TokenMlp) else block.write(graph, h, own, index, rope)
            if self.after:
                h = self.norm.write(graph, h, f"{name}.{self.after[part]}")
            x = graph.add(x, h)
        return x


class DecoderParts(NamedTuple):
    """What `write_decoder` puts a model together of."""

    max_positions: int
    embedding: Embedding
    layers: Sequence[Layer]
    norm: Norm
    head: Head


def write_decoder(
    weights: Weights,
    max_positions: int,
    embedding: Embedding,
    layers: Sequence[Layer],
    norm: Norm,
    head: Head,
    embedding_name: str = "model.embed_tokens",
    norm_name: str = "model.norm",
) -> ir.Model:
    """The whole model, with the names that most checkpoints have. max_positions: the most that a sequence may have."""
    graph = GraphWriter(weights, max_positions)
    ropes = list({id(layer.rope): layer.rope for layer in layers if layer.rope is not None}.values())
    tables = {id(rope): rope.write(graph, f"rope.{n}" if n else "rope") for n, rope in enumerate(ropes)}
    x = embedding.write(graph, embedding_name)
    for index, layer in enumerate(layers):
        x = layer.write(graph, x, f"model.layers.{index}", index, tables.get(id(layer.rope)))
        graph.end_layer(x)
    return graph.finish(head.write(graph, norm.write(graph, x, norm_name), embedding_name))
