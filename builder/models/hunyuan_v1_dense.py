"""Hunyuan 0.5B to 7B, dense: llama with norms on each head of q and k, after their rotation.

https://github.com/Tencent-Hunyuan/Hunyuan-7B
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
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "attention_head_dim": Harmless("It repeats head_dim, which is what the reference reads."),
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
    "use_cla": Harmless("Each layer has keys and values of its own.", (False,)),
    "use_qk_norm": Harmless("Queries and keys are normalized.", (True,)),
    "use_rotary_pos_emb": Harmless("Positions are in queries and keys.", (True,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, epsilon=1e-5), Head.read(config)
    bias = config.read(bool, "attention_bias", default=False)
    attention = Attention(
        Heads.read(config),
        bias=bias,
        output_bias=bias,
        head_norm=norm,
        norms_rotated=True,
        norm_names=("query_layernorm", "key_layernorm"),
    )
    layer = Layer(attention, GatedMlp.read(config), norm, rope=read_rope(config, attention.heads.dim))
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
