"""Qwen3, dense: norms on each head of q and k, and no biases unless the config says so.
https://arxiv.org/abs/2505.09388"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.blocks import Attention, Embedding, GatedMlp, GraphWriter, Head, Heads, RmsNorm
from enginewright.builder.models.blocks.layers import read_upper_windows
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    heads, mlp = Heads.read(config, default_dim=128), GatedMlp.read(config)
    bias = config.read(bool, "attention_bias", default=False)
    attentions = [
        Attention(heads, bias=bias, output_bias=bias, head_norm=norm, window=window)
        for window in read_upper_windows(config)
    ]
    rope, max_positions = read_rope(config, heads.dim), config.read_size("max_position_embeddings")
    config.refuse_unread()

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
