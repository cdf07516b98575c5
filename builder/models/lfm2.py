"""LFM2: short convolutions with two gates in most layers, attention with norms by head in the others.
https://arxiv.org/abs/2511.23404"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.builder.config import MOST_COLUMNS, ConfigReader
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
from enginewright.builder.models.blocks.layers import read_kinds, read_layer_count, read_taps
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.models.blocks.short_conv import ShortConv
from enginewright.builder.weights import Weights

_TRAINING = "It is about initial values, or about layouts of training."
HARMLESS = {
    "block_dim": Harmless("It says hidden_size once more."),
    "block_mlp_init_scale": Harmless(_TRAINING),
    "block_norm_eps": Harmless("It is norm_eps under an older name, and that is what transformers reads."),
    "block_out_init_scale": Harmless(_TRAINING),
    "block_use_swiglu": Harmless("The MLP is gated by silu.", (True,)),
    "block_use_xavier_init": Harmless(_TRAINING),
    "conv_dim": Harmless("Convolutions are as wide as the residual, whatever it says, in transformers, too."),
    "conv_dim_out": Harmless("Convolutions are as wide as the residual, whatever it says, in transformers, too."),
    "conv_use_xavier_init": Harmless(_TRAINING),
    "num_heads": Harmless("It says num_attention_heads once more."),
    "use_pos_enc": Harmless("Attention rotates queries and keys.", (True,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    embedding = Embedding.read(config)
    norm = RmsNorm(config.read_positive("norm_eps", default=1e-5))
    # As transformers has it: the older key counts, where both are there.
    tied = config.read(bool, "tie_word_embeddings", default=True)
    head = Head(embedding.vocab, config.read(bool, "tie_embedding", default=tied))
    mlp = GatedMlp(_mlp_width(config), "silu", names=("w1", "w3", "w2"))
    attention = Attention(
        Heads.read(config), head_norm=norm, norm_names=("q_layernorm", "k_layernorm"), output_name="out_proj"
    )
    conv = ShortConv(read_taps(config, "conv_L_cache", 3), config.read(bool, "conv_bias", default=False))
    attends = _layers_that_attend(config)
    rope = read_rope(config, attention.heads.dim, default_theta=1_000_000.0)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)

    layers = [
        Layer(
            attention if own else conv,
            mlp,
            norm,
            ("self_attn" if own else "conv", "feed_forward"),
            ("operator_norm", "ffn_norm"),
            rope=rope,
        )
        for own in attends
    ]
    return write_decoder(weights, max_positions, embedding, layers, norm, head, norm_name="model.embedding_norm")


def _mlp_width(config: ConfigReader) -> int:
    """What the config names is two thirds of it, rounded up, where it says so."""
    width = config.read_size("block_ff_dim", "intermediate_size", most=MOST_COLUMNS)
    multiple = config.read_size("block_multiple_of", default=256, most=MOST_COLUMNS)
    factor = config.read_positive("block_ffn_dim_multiplier", default=1.0)
    if not config.read(bool, "block_auto_adjust_ff_dim", default=True):
        return width
    adjusted = int(factor * int(2 * width / 3))
    return max(-(-adjusted // multiple), 1) * multiple


def _layers_that_attend(config: ConfigReader) -> Sequence[bool]:
    count = read_layer_count(config)
    indices = config.read_list(int, "full_attn_idxs")
    kinds = {"full_attention": True, "conv": False}
    default = [indices is None or layer in indices for layer in range(count)]
    return read_kinds(config, kinds, default)
