"""Llama 1 to 3, and the many that are built like it: SmolLM, TinyLlama, Yi, … https://arxiv.org/abs/2302.13971"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import Attention, Embedding, GatedMlp, GraphWriter, Head, Heads, RmsNorm
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "is_llama_config": Harmless("It is a remark in SmolLM2's configs."),
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
    "rope_interleaved": Harmless("The halves of a head are rotated against each other.", (False,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config), Head.read(config)
    bias = config.read(bool, "attention_bias", default=False)
    attention = Attention(Heads.read(config), bias=bias, output_bias=bias)
    mlp = GatedMlp.read(config, bias=config.read(bool, "mlp_bias", default=False))
    layers, rope = read_layer_count(config), read_rope(config, attention.heads.dim)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    weights.ignore("rotary_emb.inv_freq")  # a buffer that old checkpoints have saved

    graph = GraphWriter(weights, max_positions)
    table = rope.write(graph)
    x = embedding.write(graph, "model.embed_tokens")
    for layer in range(layers):
        name = f"model.layers.{layer}"
        h = norm.write(graph, x, f"{name}.input_layernorm")
        x = graph.add(x, attention.write(graph, h, f"{name}.self_attn", layer, table))
        h = norm.write(graph, x, f"{name}.post_attention_layernorm")
        x = graph.add(x, mlp.write(graph, h, f"{name}.mlp"))
    h = norm.write(graph, x, "model.norm")
    return graph.finish(head.write(graph, h, "model.embed_tokens"))
