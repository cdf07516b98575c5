"""Gemma 3, text: local and global layers with a rope each, norms around both parts of a layer, scaled embeddings.
https://arxiv.org/abs/2503.19786"""

import onnx_ir as ir
import torch

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.common.rope import Rope, rope_from
from enginewright.builder.models.common.sizes import Sizes, read_activation, read_windows
from enginewright.builder.models.common.writer import GraphWriter
from enginewright.builder.weights import Weights


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    sizes = Sizes.read(config, default_head_dim=256)
    attention_bias = config.read(bool, "attention_bias", default=False)
    activation = read_activation(config, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    tied = config.read(bool, "tie_word_embeddings", default=True)
    scale = config.read_positive("query_pre_attn_scalar", default=256.0) ** -0.5
    attention_cap = config.read(float, "attn_logit_softcapping", default=0.0)
    logits_cap = config.read(float, "final_logit_softcapping", default=0.0)
    local, everywhere = _ropes(config, sizes)

    write = GraphWriter(weights, sizes)
    local_table, global_table = write.rope_table(local, "rope.local"), write.rope_table(everywhere, "rope.global")
    # The scale is a weight's neighbour: in the reference it has the precision of the table.
    x = write.embedding("model.embed_tokens", scale=torch.tensor(sizes.hidden**0.5, dtype=torch.bfloat16).item())
    for layer, window in enumerate(_windows(config, sizes)):
        name, table = f"model.layers.{layer}", local_table if window else global_table
        h = write.rms_norm(x, f"{name}.input_layernorm", offset=1.0)
        q, k, v = write.qkv(h, f"{name}.self_attn", attention_bias)
        q = write.rotate(write.head_norm(q, f"{name}.self_attn.q_norm", offset=1.0), table)
        k = write.rotate(write.head_norm(k, f"{name}.self_attn.k_norm", offset=1.0), table)
        h = write.attention(q, k, v, scale=scale, softcap=attention_cap, window=window)
        h = write.linear(h, f"{name}.self_attn.o_proj", sizes.hidden, attention_bias)
        x = write.add(x, write.rms_norm(h, f"{name}.post_attention_layernorm", offset=1.0))
        h = write.rms_norm(x, f"{name}.pre_feedforward_layernorm", offset=1.0)
        h = write.gated_mlp(h, f"{name}.mlp", activation)
        x = write.add(x, write.rms_norm(h, f"{name}.post_feedforward_layernorm", offset=1.0))
    h = write.rms_norm(x, "model.norm", offset=1.0)
    return write.finish(write.head(h, tied_to="model.embed_tokens" if tied else None, softcap=logits_cap))


def _windows(config: ConfigReader, sizes: Sizes) -> list[int]:
    """Every so many layers (`sliding_window_pattern`), one that sees everything."""
    every = config.read_size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    slides = [bool((layer + 1) % every) for layer in range(sizes.layers)]
    return read_windows(config, slides, config.read(int, "sliding_window", default=4096))


def _ropes(config: ConfigReader, sizes: Sizes) -> tuple[Rope, Rope]:
    """Of the local layers, and of the global ones. Old configs scale only the global one, by `rope_scaling`."""
    local_theta = config.read_positive("rope_local_base_freq", default=10_000.0)
    global_theta = config.read_positive("rope_theta", default=1_000_000.0)
    parameters = config.section("rope_parameters") or ConfigReader({})
    local = rope_from(parameters.section("sliding_attention"), local_theta, sizes)
    scaling, newer = config.section("rope_scaling"), parameters.section("full_attention")
    if scaling is not None and newer is not None:
        raise config.unsupported("both rope_scaling and rope_parameters are given", "Leave one of them.")
    parameters.refuse_any_unread()
    return local, rope_from(scaling or newer, global_theta, sizes)
