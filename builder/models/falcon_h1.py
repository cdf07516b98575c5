"""Falcon H1: attention and Mamba-2 in parallel in every layer, and factors on projections.

https://arxiv.org/abs/2507.22448
"""

from dataclasses import replace

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Attention,
    Embedding,
    GatedMlp,
    Head,
    Heads,
    Layer,
    Mamba2,
    RmsNorm,
    SideBySide,
    write_decoder,
)
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

_NO_BIAS = Harmless("Layers with a factor have no bias.", (False,))
HARMLESS = {
    "attention_bias": _NO_BIAS,
    "mlp_bias": _NO_BIAS,
    "projectors_bias": _NO_BIAS,
    "mamba_chunk_size": Harmless("It says how states are computed, and changes rounding at most."),
    "mamba_use_mlp": Harmless("Every layer has an MLP.", (True,)),
    "num_logits_to_keep": Harmless("It says what transformers returns in addition to the last logits."),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, epsilon=1e-5), Head.read(config)
    embedding = replace(embedding, scale=_factor(config, "embedding_multiplier"))
    last = replace(norm, scale=_factor(config, "lm_head_multiplier"))
    heads, mlp, count = Heads.read(config), GatedMlp.read(config), read_layer_count(config)
    mamba = _read_mamba(config, embedding.hidden, norm.epsilon)
    inner = _factor(config, "attention_in_multiplier")
    attention = Attention(heads, scale=heads.dim**-0.5 * inner**2 * _factor(config, "key_multiplier"))
    _multiply(config, weights, count, embedding.hidden, mlp.width, mamba, inner)
    rope, max_positions = read_rope(config, heads.dim), config.read_size("max_position_embeddings")
    config.refuse_unread(HARMLESS)

    both, names = SideBySide(attention, mamba, "mamba"), ("self_attn", "feed_forward")
    layers = [Layer(both, mlp, norm, names, ("input_layernorm", "pre_ff_layernorm"), rope=rope)] * count
    return write_decoder(weights, max_positions, embedding, layers, last, head, norm_name="model.final_layernorm")


def _factor(config: ConfigReader, key: str) -> float:
    return config.read_positive(key, default=1.0)


def _factors(config: ConfigReader, key: str, count: int) -> list[float]:
    factors = config.read_list(float, key) or [1.0] * count
    if len(factors) != count:
        raise config.error(f"{key} has {len(factors)} factors, not {count}")
    return factors


def _read_mamba(config: ConfigReader, hidden: int, epsilon: float) -> Mamba2:
    expanded = config.read_size("mamba_expand", default=2, maximum=MAX_COLUMNS) * hidden
    default = expanded if config.has("mamba_d_ssm") else 1024  # a null differs from a missing key
    mamba = Mamba2.read(config, config.read_size("mamba_d_ssm", default=default, maximum=MAX_COLUMNS), epsilon)
    if mamba.bias:
        raise config.unsupported("mamba_proj_bias = True", _NO_BIAS.reason)
    norm_first = config.read(bool, "mamba_norm_before_gate", default=True)
    has_norm = config.read(bool, "mamba_rms_norm", default=False)
    return replace(mamba, gate=("after" if norm_first else "before") if has_norm else "alone")


def _multiply(
    config: ConfigReader, weights: Weights, layers: int, hidden: int, width: int, mamba: Mamba2, inner: float
) -> None:
    """Multiplies factors into weights; `inner`, of the input of attention, goes into the output's for values."""
    rows = (mamba.heads * mamba.dim,) * 2 + (mamba.groups * mamba.state,) * 2 + (mamba.heads,)  # of z, v, B, C, dt
    read = _factor(config, "ssm_in_multiplier")
    projected = [(count, own * read) for count, own in zip(rows, _factors(config, "ssm_multipliers", 5), strict=True)]
    gate, down = _factors(config, "mlp_multipliers", 2)
    mamba_out, attention_out = _factor(config, "ssm_out_multiplier"), _factor(config, "attention_out_multiplier")
    for name in (f"model.layers.{layer}" for layer in range(layers)):
        weights.multiply(f"{name}.mamba.in_proj", *projected)
        weights.multiply(f"{name}.mamba.out_proj", (hidden, mamba_out))
        weights.multiply(f"{name}.self_attn.o_proj", (hidden, inner * attention_out))
        weights.multiply(f"{name}.feed_forward.gate_proj", (width, gate))
        weights.multiply(f"{name}.feed_forward.down_proj", (hidden, down))
