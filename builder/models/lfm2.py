"""LFM2: short convolutions with two gates in most layers, attention with norms by head in the others.

https://arxiv.org/abs/2511.23404
"""

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import GatedMlp, lfm2
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.weights import Weights

_TRAINING = "It is about initial values, or about layouts of training."
HARMLESS = {
    "block_dim": Harmless("It repeats hidden_size."),
    "block_mlp_init_scale": Harmless(_TRAINING),
    "block_norm_eps": Harmless("It is norm_eps under an older name, and that is what transformers reads."),
    "block_out_init_scale": Harmless(_TRAINING),
    "block_use_swiglu": Harmless("The MLP is gated by silu.", (True,)),
    "block_use_xavier_init": Harmless(_TRAINING),
    "conv_dim": Harmless("Convolutions are always as wide as the residual, as in transformers."),
    "conv_dim_out": Harmless("Convolutions are always as wide as the residual, as in transformers."),
    "conv_use_xavier_init": Harmless(_TRAINING),
    "num_heads": Harmless("It repeats num_attention_heads."),
    "use_pos_enc": Harmless("Attention rotates queries and keys.", (True,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    count, attending = read_layer_count(config), config.read_list(int, "full_attn_idxs")
    attends = [attending is None or layer in attending for layer in range(count)]
    mlp = GatedMlp(_mlp_width(config), "silu", names=lfm2.MLP_NAMES)
    return lfm2.build_lfm2(config, weights, [mlp] * count, attends, HARMLESS)


def _mlp_width(config: ConfigReader) -> int:
    """Reads the width of MLPs; if the config says so, it is two thirds of its number, rounded up."""
    width = config.read_size("block_ff_dim", "intermediate_size", maximum=MAX_COLUMNS)
    multiple = config.read_size("block_multiple_of", default=256, maximum=MAX_COLUMNS)
    factor = config.read_positive("block_ffn_dim_multiplier", default=1.0)
    if not config.read(bool, "block_auto_adjust_ff_dim", default=True):
        return width
    adjusted = int(factor * int(2 * width / 3))
    return max(-(-adjusted // multiple), 1) * multiple
