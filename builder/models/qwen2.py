"""Qwen2 and Qwen2.5: biases on q, k and v; sliding windows in the upper layers of some.
https://arxiv.org/abs/2407.10671"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import Attention, Embedding, GatedMlp, GraphWriter, Head, Heads, RmsNorm
from enginewright.builder.models.blocks.layers import read_upper_windows
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {"use_mrope": Harmless("Positions are numbers, not times, rows and columns of pictures.", (False,))}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    heads, mlp = Heads.read(config), GatedMlp.read(config)
    attentions = [Attention(heads, bias=True, window=window) for window in read_upper_windows(config)]
    rope, max_positions = read_rope(config, heads.dim), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    weights.ignore("rotary_emb.inv_freq")

    graph = GraphWriter(weights, max_positions)
    table = rope.write(graph)
    x = embedding.write(graph, "model.embed_tokens")
    for layer, attention in enumerate(attentions):
        name = f"model.layers.{layer}"
        h = norm.write(graph, x, f"{name}.input_layernorm")
        x = graph.add(x, attention.write(graph, h, f"{name}.self_attn", layer, table))
        h = norm.write(graph, x, f"{name}.post_attention_layernorm")
        x = graph.add(x, mlp.write(graph, h, f"{name}.mlp"))
    h = norm.write(graph, x, "model.norm")
    return graph.finish(head.write(graph, h, "model.embed_tokens"))
