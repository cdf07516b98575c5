"""Parts that LFM2's families share: double-gated short convolutions in most layers, attention in the others."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks.attention import Attention, Heads
from enginewright.builder.models.blocks.decoder import Layer, TokenMlp, write_decoder
from enginewright.builder.models.blocks.embedding import Embedding
from enginewright.builder.models.blocks.head import Head
from enginewright.builder.models.blocks.layers import read_kinds, read_taps
from enginewright.builder.models.blocks.norm import RmsNorm
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.models.blocks.short_conv import ShortConv
from enginewright.builder.weights import Weights

MLP_NAMES = ("w1", "w3", "w2")  # of gate, up and down in the checkpoint


def build_lfm2(
    config: ConfigReader,
    weights: Weights,
    mlps: Sequence[TokenMlp],
    attends: Sequence[bool],
    harmless: Mapping[str, Harmless],
) -> ir.Model:
    """Builds the dense graph.

    Args:
        config: config of the model.
        weights: weights of the checkpoint.
        mlps: MLP of each layer.
        attends: True for each layer with attention, if the config has no `layer_types`.
        harmless: keys that cannot change a result.
    """
    embedding, norm = Embedding.read(config), RmsNorm(config.read_positive("norm_eps", default=1e-5))
    # As in transformers, the older key counts if both are present.
    tied = config.read(bool, "tie_word_embeddings", default=True)
    head = Head(embedding.vocab, config.read(bool, "tie_embedding", default=tied))
    attention = Attention(
        Heads.read(config), head_norm=norm, norm_names=("q_layernorm", "k_layernorm"), output_name="out_proj"
    )
    conv = ShortConv(read_taps(config, "conv_L_cache", 3), config.read(bool, "conv_bias", default=False))
    attends = read_kinds(config, {"full_attention": True, "conv": False}, attends)
    rope = read_rope(config, attention.heads.dim, default_theta=1_000_000.0)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(harmless)

    layers = [
        Layer(
            attention if own else conv,
            mlp,
            norm,
            ("self_attn" if own else "conv", "feed_forward"),
            ("operator_norm", "ffn_norm"),
            rope=rope,
        )
        for own, mlp in zip(attends, mlps, strict=True)
    ]
    return write_decoder(weights, max_positions, embedding, layers, norm, head, norm_name="model.embedding_norm")
