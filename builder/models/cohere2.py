"""Command R7B and Command A: attention and MLP in parallel, windows with a rope in three layers of four, and none of
either in the fourth. https://arxiv.org/abs/2504.00698"""

from dataclasses import replace

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import Attention, Embedding, GatedMlp, GraphWriter, Head, Heads, LayerNorm
from enginewright.builder.models.blocks.layers import read_layer_count, read_window, read_windows
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "layer_switch": Harmless("It repeats sliding_window_pattern."),
    "order_of_interleaved_layers": Harmless("Of each pattern, the last layer sees everything.", ("local_attn_first",)),
    "position_embedding_type": Harmless("Neighbouring columns are rotated against each other.", ("rope_gptj",)),
    "rotary_pct": Harmless("Whole heads are rotated.", (1.0, 1)),
    "use_embedding_sharing": Harmless("The head is the embedding's table.", (True,)),
    "use_gated_activation": Harmless("The MLP has a gate.", (True,)),
    "use_parallel_block": Harmless("Attention and MLP read the same norm.", (True,)),
    "use_parallel_embedding": Harmless("It says how training cut the table."),
    "use_qk_norm": Harmless("Queries and keys are as they are projected.", (False,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm = Embedding.read(config), LayerNorm.read(config, "layer_norm_eps", bias=False)
    head, bias = Head.read(config, tied=True), config.read(bool, "attention_bias", default=False)
    last = replace(norm, scale=config.read_positive("logit_scale", default=0.0625))
    heads, mlp = Heads.read(config), GatedMlp.read(config)
    attention = Attention(heads, bias=bias, output_bias=bias)
    rope, max_positions = read_rope(config, heads.dim, interleaved=True), config.read_size("max_position_embeddings")
    every = config.read_size("sliding_window_pattern", "_sliding_window_pattern", default=4)
    slides = [(layer + 1) % every != 0 for layer in range(read_layer_count(config))]
    windows = read_windows(config, slides, read_window(config, default=4096))
    config.refuse_unread(HARMLESS)

    graph = GraphWriter(weights, max_positions)
    table, x = rope.write(graph), embedding.write(graph, "model.embed_tokens")
    for layer, window in enumerate(windows):
        name = f"model.layers.{layer}"
        h, own = norm.write(graph, x, f"{name}.input_layernorm"), replace(attention, window=window)
        x = graph.add(x, own.write(graph, h, f"{name}.self_attn", layer, table if window else None))
        x = graph.add(x, mlp.write(graph, h, f"{name}.mlp"))
        graph.end_layer(x)
    h = last.write(graph, x, "model.norm")
    return graph.finish(head.write(graph, h, "model.embed_tokens"))
