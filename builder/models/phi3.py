"""Phi 3, 3.5 and 4, mini to medium: q, k and v are one tensor, and gate and up are; LongRoPE.

https://arxiv.org/abs/2404.14219
"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Attention,
    Embedding,
    GatedMlp,
    Head,
    Heads,
    Layer,
    RmsNorm,
    write_decoder,
)
from enginewright.builder.models.blocks.layers import read_layer_count, read_window
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "embd_pdrop": Harmless("It is about training, which is over."),
    "resid_pdrop": Harmless("It is about training, which is over."),
    "attention_bias": Harmless("Its layers have none.", (False,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, epsilon=1e-5), Head.read(config)
    heads, mlp = Heads.read(config), GatedMlp.read(config)
    original = config.read_size("original_max_position_embeddings", default=4096)
    rope = read_rope(config, heads.dim, part=1.0, original_positions=original)
    layer = Layer(Attention(heads, window=read_window(config)), mlp, norm, rope=rope)
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)

    for index in range(len(layers)):
        name = f"model.layers.{index}"
        weights.cut(f"{name}.self_attn.qkv_proj", heads.cut_fused(f"{name}.self_attn"))
        weights.cut(f"{name}.mlp.gate_up_proj", mlp.cut_fused(f"{name}.mlp"))
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
