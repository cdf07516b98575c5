"""Gemma 3, text: local and global layers with a rope each, norms around both parts of a layer, scaled embeddings.

https://arxiv.org/abs/2503.19786
"""

from dataclasses import replace

import onnx_ir as ir
import torch

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.blocks import Attention, Embedding, GatedMlp, GraphWriter, Head, Heads, RmsNorm
from enginewright.builder.models.blocks.layers import read_layer_count, read_windows
from enginewright.builder.models.blocks.pooling import refuse_without
from enginewright.builder.models.blocks.rope import read_local_and_global
from enginewright.builder.weights import Weights
from enginewright.plugins.attention.masked_attention import EVERYTHING


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm = Embedding.read(config), RmsNorm.read(config, offset=1.0)
    # The scale is a weight's neighbour: in the reference it has the precision of the table.
    embedding = replace(embedding, scale=torch.tensor(embedding.hidden**0.5, dtype=torch.bfloat16).item())
    head = Head.read(config, tied=True, softcap=config.read(float, "final_logit_softcapping", default=0.0))
    mlp = GatedMlp.read(config, "hidden_activation", "hidden_act", activation="gelu_pytorch_tanh")
    bias = config.read(bool, "attention_bias", default=False)
    attention = Attention(
        Heads.read(config, default_dim=256),
        scale=config.read_positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        bias=bias,
        output_bias=bias,
        head_norm=norm,
    )
    if (cap := config.read(float, "attn_logit_softcapping", default=None)) is not None:
        config.warn(f"attn_logit_softcapping = {cap} is not applied: transformers reads it, and caps no scores with it")
    windows = _windows(config)
    max_positions = config.read_size("max_position_embeddings")
    local_theta = config.read_positive("rope_local_base_freq", default=10_000.0)
    global_theta = config.read_positive("rope_theta", default=1_000_000.0)
    local, everywhere = read_local_and_global(config, local_theta, global_theta, attention.heads.dim, max_positions)
    both_ways = config.read(bool, "use_bidirectional_attention", default=False)
    if both_ways:  # EmbeddingGemma, https://arxiv.org/abs/2509.20354
        refuse_without(config)
    config.refuse_unread()

    graph = GraphWriter(weights, max_positions)
    local_table, global_table = local.write(graph, "rope.local"), everywhere.write(graph, "rope.global")
    x = embedding.write(graph, "model.embed_tokens")
    for layer, window in enumerate(windows):
        name, table = f"model.layers.{layer}", local_table if window else global_table
        h = norm.write(graph, x, f"{name}.input_layernorm")
        h = _seeing(attention, window, both_ways).write(graph, h, f"{name}.self_attn", layer, table)
        x = graph.add(x, norm.write(graph, h, f"{name}.post_attention_layernorm"))
        h = norm.write(graph, x, f"{name}.pre_feedforward_layernorm")
        h = mlp.write(graph, h, f"{name}.mlp")
        x = graph.add(x, norm.write(graph, h, f"{name}.post_feedforward_layernorm"))
        graph.end_layer(x)
    h = norm.write(graph, x, "model.norm")
    return graph.finish(head.write(graph, h, "model.embed_tokens"))


def _seeing(attention: Attention, window: int, both_ways: bool) -> Attention:
    """Sets the context of a layer's tokens: before them, or on both sides, with a window around them."""
    if not both_ways:
        return replace(attention, window=window)
    reach = window // 2
    return replace(attention, window=reach + 1 if window else 0, lookahead=reach if window else EVERYTHING)


def _windows(config: ConfigReader) -> list[int]:
    """Reads the windows: one layer of every `sliding_window_pattern` has none."""
    every = config.read_size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    slides = [bool((layer + 1) % every) for layer in range(read_layer_count(config))]
    return read_windows(config, slides, config.read(int, "sliding_window", default=4096))
