"""Layers of a mixer and an MLP or experts, from the embedding before the first to the head after the last."""

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

TokenMlp = GatedMlp | Mlp | Experts  # works on each token alone
Norm = RmsNorm | LayerNorm


@dataclass(frozen=True)
class SideBySide:
    """Attention and a recurrence in parallel: both read x, and their results are added."""

    attention: Attention  # attention
    recurrence: Mamba2  # recurrence
    name: str  # name of the recurrence in the checkpoint, a sibling of the attention's

    def write(self, graph: GraphWriter, x: ir.Value, tensor: str, layer: int, rope: RopeTable | None) -> ir.Value:
        """Writes both, and their sum.

        Args:
            graph: graph to write into.
            x: input.
            tensor: name of the attention in the checkpoint.
            layer: index of the layer.
            rope: rotation; None: there is none.
        """
        h = self.recurrence.write(graph, x, f"{tensor.rpartition('.')[0]}.{self.name}", layer)
        return graph.add(h, self.attention.write(graph, x, tensor, layer, rope))


# Mixes each token with the ones before it, in encoders also with those after it.
Mixer = Attention | LatentAttention | GatedDeltaNet | KimiDelta | Mamba2 | ShortConv | SideBySide


@dataclass(frozen=True)
class Layer:
    """x + mixer(norm(x)), then the same with the MLP; norms may also, or only, come after these parts."""

    mixer: Mixer | None  # mixer; None: the layer only has an MLP
    mlp: TokenMlp | None  # MLP or experts; None: the layer only has a mixer
    norm: Norm  # config of all of the layer's norms
    names: tuple[str, str] = ("self_attn", "mlp")  # names of the mixer and of the MLP in the checkpoint
    # Names of the norms before mixer and MLP in the checkpoint; None: there are none.
    before: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None  # names of the norms after mixer and MLP; None: there are none
    rope: Rope | None = None  # rotation; None: queries and keys have no positions

    def write(self, graph: GraphWriter, x: ir.Value, name: str, index: int, rope: RopeTable | None) -> ir.Value:
        """Writes the layer.

        Args:
            graph: graph to write into.
            x: residual stream.
            name: name of the layer in the checkpoint.
            index: index of the layer, and of its cache or state.
            rope: rotation; None: there is none.
        """
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
    """Parts of a model, for `write_decoder`."""

    max_positions: int  # longest sequence
    embedding: Embedding  # embedding
    layers: Sequence[Layer]  # layers in order
    norm: Norm  # last norm
    head: Head  # head


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
    """Writes the whole model, with the names that most checkpoints have.

    Args:
        weights: weights of the checkpoint.
        max_positions: positions of the longest sequence.
        embedding: embedding.
        layers: layers in order.
        norm: last norm.
        head: head.
        embedding_name: name of the embedding in the checkpoint.
        norm_name: name of the last norm in the checkpoint.
    """
    graph = GraphWriter(weights, max_positions)
    ropes = list({id(layer.rope): layer.rope for layer in layers if layer.rope is not None}.values())
    tables = {id(rope): rope.write(graph, f"rope.{n}" if n else "rope") for n, rope in enumerate(ropes)}
    x = embedding.write(graph, embedding_name)
    for index, layer in enumerate(layers):
        x = layer.write(graph, x, f"model.layers.{index}", index, tables.get(id(layer.rope)))
        graph.end_layer(x)
    return graph.finish(head.write(graph, norm.write(graph, x, norm_name), embedding_name))
