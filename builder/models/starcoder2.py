"""StarCoder 2: layer norms, an MLP without a gate, biases, and a window. https://arxiv.org/abs/2402.19173"""

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import Attention, Embedding, Head, Heads, Layer, LayerNorm, Mlp, write_decoder
from enginewright.builder.models.blocks.layers import read_layer_count, read_window
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

HARMLESS = {
    "activation_function": Harmless("The reference reads hidden_act."),
    "attention_softmax_in_fp32": Harmless("It says how the reference rounds."),
    "embedding_dropout": Harmless("It is about training, which is over."),
    "layer_norm_epsilon": Harmless("The reference reads norm_epsilon."),
    "mlp_type": Harmless("The MLP has no gate.", ("default",)),
    "norm_type": Harmless("Norms take off the mean, and have a bias.", ("layer_norm",)),
    "residual_dropout": Harmless("It is about training, which is over."),
    "scale_attention_softmax_in_fp32": Harmless("It says how the reference rounds."),
    "scale_attn_weights": Harmless("Scores are divided by the root of head_dim.", (True,)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm = Embedding.read(config), LayerNorm.read(config, "norm_epsilon")
    head, bias = Head.read(config, tied=True), config.read(bool, "use_bias", default=True)
    width = config.read_size("intermediate_size", maximum=MAX_COLUMNS)
    mlp = Mlp.read(config, width, bias, key="hidden_act", activation="gelu_pytorch_tanh")
    attention = Attention(Heads.read(config), bias=bias, output_bias=bias, window=read_window(config))
    layer = Layer(attention, mlp, norm, rope=read_rope(config, attention.heads.dim))
    layers, max_positions = [layer] * read_layer_count(config), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)
    return write_decoder(weights, max_positions, embedding, layers, norm, head)
