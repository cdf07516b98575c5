"""Llama 1 to 3, and the many that are built like it: SmolLM, TinyLlama, Yi, … https://arxiv.org/abs/2302.13971"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.common.rope import read_rope
from enginewright.builder.models.common.sizes import Sizes, read_activation
from enginewright.builder.models.common.writer import GraphWriter
from enginewright.builder.weights import Weights


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    sizes = Sizes.read(config)
    attention_bias = config.read(bool, "attention_bias", default=False)
    mlp_bias = config.read(bool, "mlp_bias", default=False)
    activation = read_activation(config, "hidden_act", default="silu")
    tied = config.read(bool, "tie_word_embeddings", default=False)
    weights.ignore("rotary_emb.inv_freq")  # a buffer that old checkpoints have saved

    write = GraphWriter(weights, sizes)
    table = write.rope_table(read_rope(config, sizes))
    x = write.embedding("model.embed_tokens")
    for layer in range(sizes.layers):
        name = f"model.layers.{layer}"
        h = write.rms_norm(x, f"{name}.input_layernorm")
        q, k, v = write.qkv(h, f"{name}.self_attn", attention_bias)
        h = write.attention(write.rotate(q, table), write.rotate(k, table), v, scale=sizes.head_dim**-0.5)
        x = write.add(x, write.linear(h, f"{name}.self_attn.o_proj", sizes.hidden, attention_bias))
        h = write.rms_norm(x, f"{name}.post_attention_layernorm")
        x = write.add(x, write.gated_mlp(h, f"{name}.mlp", activation, mlp_bias))
    h = write.rms_norm(x, "model.norm")
    return write.finish(write.head(h, tied_to="model.embed_tokens" if tied else None))
