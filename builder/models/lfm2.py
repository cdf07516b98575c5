"""LFM2: short convolutions with two gates in most layers, attention with norms by head in the others.
https://arxiv.org/abs/2511.23404"""

import onnx_ir as ir

from enginewright.builder.config import MOST_COLUMNS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import GatedMlp, lfm2
from enginewright.builder.models.blocks.layers import read_layer_count
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
    count, attending = read_layer_count(config), config.read_list(int, "full_attn_idxs")
    attends = [attending is None or layer in attending for layer in range(count)]
    mlp = GatedMlp(_mlp_width(config), "silu", names=lfm2.MLP_NAMES)
    return lfm2.build_lfm2(config, weights, [mlp] * count, attends, HARMLESS)


def _mlp_width(config: ConfigReader) -> int:
    """What the config names is two thirds of it, rounded up, where it says so."""
    width = config.read_size("block_ff_dim", "intermediate_size", most=MOST_COLUMNS)
    multiple = config.read_size("block_multiple_of", default=256, most=MOST_COLUMNS)
    factor = config.read_positive("block_ffn_dim_multiplier", default=1.0)
    if not config.read(bool, "block_auto_adjust_ff_dim", default=True):
        return width
    adjusted = int(factor * int(2 * width / 3))
    return max(-(-adjusted // multiple), 1) * multiple
