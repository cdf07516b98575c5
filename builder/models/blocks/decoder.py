"""Layers of attention and an MLP or experts, and what is in front of the first and behind the last."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from enginewright.builder.models.blocks.attention import Attention
from enginewright.builder.models.blocks.embedding import Embedding
from enginewright.builder.models.blocks.experts import Experts
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.builder.models.blocks.head import Head
from enginewright.builder.models.blocks.latent_attention import LatentAttention
from enginewright.builder.models.blocks.mlp import GatedMlp, Mlp
from enginewright.builder.models.blocks.norm import LayerNorm, RmsNorm
from enginewright.builder.models.blocks.rope import Rope, RopeTable
from enginewright.builder.weights import Weights

Norm = RmsNorm | LayerNorm


@dataclass(frozen=True)
class Layer:
    """x + attention(norm(x)), and then the same with the MLP; norms may be behind these parts, too, or only there."""

    attention: Attention | LatentAttention
    mlp: GatedMlp | Mlp | Experts
    norm: Norm  # all of the layer's norms are alike
    # Names of the norms in the checkpoint, of attention and of the MLP; None where there are none.
    before: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    rope: Rope | None = None  # None where positions are not in queries and keys

    def write(self, graph: GraphWriter, x: ir.Value, name: str, index: int, rope: RopeTable | None) -> ir.Value:
        """name: the layer's in the checkpoint. index: whose cache is read and written."""

        def added(x: ir.Value, part: int) -> ir.Value:
            h = self.norm.write(graph, x, f"{name}.{self.before[part]}") if self.before else x
            if part == 0:
                h = self.attention.write(graph, h, f"{name}.self_attn", index, rope)
            else:
                h = self.mlp.write(graph, h, f"{name}.mlp")
            return graph.add(x, self.norm.write(graph, h, f"{name}.{self.after[part]}") if self.after else h)

        return added(added(x, 0), 1)


def write_decoder(
    weights: Weights, max_positions: int, embedding: Embedding, layers: Sequence[Layer], norm: Norm, head: Head
) -> ir.Model:
    """The whole model, with the names that most checkpoints have. max_positions: the most that a sequence may have."""
    graph = GraphWriter(weights, max_positions)
    ropes = list({id(layer.rope): layer.rope for layer in layers if layer.rope is not None}.values())
    tables = {id(rope): rope.write(graph, f"rope.{n}" if n else "rope") for n, rope in enumerate(ropes)}
    x = embedding.write(graph, "model.embed_tokens")
    for index, layer in enumerate(layers):
        x = layer.write(graph, x, f"model.layers.{index}", index, tables.get(id(layer.rope)))
    return graph.finish(head.write(graph, norm.write(graph, x, "model.norm"), "model.embed_tokens"))
