"""Qwen3, dense: norms on each head of q and k, and no biases unless the config says so.
https://arxiv.org/abs/2505.09388"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.common.rope import read_rope
from enginewright.builder.models.common.sizes import Sizes, read_activation, read_optional_windows
from enginewright.builder.models.common.writer import GraphWriter
from enginewright.builder.weights import Weights


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    sizes = Sizes.read(config, default_head_dim=128)
    attention_bias = config.read(bool, "attention_bias", default=False)
    activation = read_activation(config, "hidden_act", default="silu")
    tied = config.read(bool, "tie_word_embeddings", default=False)

    write = GraphWriter(weights, sizes)
    table = write.rope_table(read_rope(config, sizes))
    x = write.embedding("model.embed_tokens")
    for layer, window in enumerate(read_optional_windows(config, sizes.layers)):
        name = f"model.layers.{layer}"
        h = write.rms_norm(x, f"{name}.input_layernorm")
        q, k, v = write.qkv(h, f"{name}.self_attn", attention_bias)
        q = write.rotate(write.head_norm(q, f"{name}.self_attn.q_norm"), table)
        k = write.rotate(write.head_norm(k, f"{name}.self_attn.k_norm"), table)
        h = write.attention(q, k, v, scale=sizes.head_dim**-0.5, window=window)
        x = write.add(x, write.linear(h, f"{name}.self_attn.o_proj", sizes.hidden, attention_bias))
        h = write.rms_norm(x, f"{name}.post_attention_layernorm")
        x = write.add(x, write.gated_mlp(h, f"{name}.mlp", activation))
    h = write.rms_norm(x, "model.norm")
    return write.finish(write.head(h, tied_to="model.embed_tokens" if tied else None))
