"""Gemma 2: local and global layers in turn, norms around both parts of a layer, soft caps.

https://arxiv.org/abs/2408.00118
"""

from dataclasses import replace

import onnx_ir as ir
import torch

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
from enginewright.builder.models.blocks.layers import read_layer_count, read_window, read_windows
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

BEFORE = ("input_layernorm", "pre_feedforward_layernorm")
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
HARMLESS = {"use_bidirectional_attention": Harmless("Every token only attends to those before it.", (False,))}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm = Embedding.read(config), RmsNorm.read(config, offset=1.0)
    # The scale is a weight's neighbour: in the reference it has the precision of the table.
    embedding = replace(embedding, scale=torch.tensor(embedding.hidden**0.5, dtype=torch.bfloat16).item())
    head = Head.read(config, tied=True, softcap=_read_cap(config, "final_logit_softcapping", 30.0))
    mlp = GatedMlp.read(config, "hidden_activation", "hidden_act", activation="gelu_pytorch_tanh")
    bias = config.read(bool, "attention_bias", default=False)
    attention = Attention(
        Heads.read(config, default_dim=256),
        scale=config.read_positive("query_pre_attn_scalar", default=256.0) ** -0.5,
        bias=bias,
        output_bias=bias,
        softcap=_read_cap(config, "attn_logit_softcapping", 50.0),
    )
    rope, max_positions = read_rope(config, attention.heads.dim), config.read_size("max_position_embeddings")
    slides = [index % 2 == 0 for index in range(read_layer_count(config))]
    layers = [
        Layer(replace(attention, window=window), mlp, norm, before=BEFORE, after=AFTER, rope=rope)
        for window in read_windows(config, slides, read_window(config, default=4096))
    ]
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, norm, head)


def _read_cap(config: ConfigReader, key: str, default: float) -> float:
    return config.read(float, key, default=0.0 if config.has(key) else default)
