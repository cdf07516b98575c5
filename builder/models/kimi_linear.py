"""Kimi Linear: delta attention with a decay for each channel, latent attention without positions in every fourth layer,
and DeepSeek V3's experts. https://arxiv.org/abs/2510.26692"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from enginewright.builder.config import MAX_HEAD_DIM, MAX_HEADS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import (
    Embedding,
    ExpertNames,
    Experts,
    GatedMlp,
    Head,
    KimiDelta,
    LatentAttention,
    Layer,
    RmsNorm,
    Routing,
    write_decoder,
)
from enginewright.builder.models.blocks.layers import check_conv_activation, read_kinds, read_layer_count, read_taps
from enginewright.builder.models.blocks.rope import Rope
from enginewright.builder.weights import Weights

_NO_ROPE = "Attention has no positions in this family."
HARMLESS = {
    "head_dim": Harmless("qk_nope_head_dim, qk_rope_head_dim and v_head_dim say what a head has."),
    "mla_use_nope": Harmless(_NO_ROPE, (True,)),
    "moe_layer_freq": Harmless("Every layer after the dense ones has experts.", (1,)),
    "moe_router_activation_func": Harmless("Experts are chosen by sigmoids.", ("sigmoid",)),
    "num_nextn_predict_layers": Harmless("No layer predicts further tokens.", (0,)),
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "pretraining_tp": Harmless("It says in how many parts products were summed in training; the sums are the same."),
    "rope_parameters": Harmless(_NO_ROPE),
    "rope_scaling": Harmless(_NO_ROPE),
    "rope_theta": Harmless(_NO_ROPE),
    "use_grouped_topk": Harmless("Experts are chosen from groups, of which there may be one.", (True,)),
}
NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2", shared="shared_experts")


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, epsilon=1e-5), Head.read(config)
    attention = LatentAttention.read(config, None, whole_head=None)
    kimi, attends = _read_delta(config, norm)
    mlp = GatedMlp.read(config)
    shared = "num_shared_experts" if config.has("num_shared_experts") else "n_shared_experts"
    routing = Routing.read_grouped(config, "num_local_experts", "num_experts", scale=2.446)
    experts = replace(Experts.read_shared(config, routing, mlp, shared), names=NAMES)
    dense = config.read(int, "first_k_dense_replace", default=1)
    default = [layer >= dense for layer in range(len(attends))]
    is_sparse = read_kinds(config, {"dense": False, "sparse": True}, default, "mlp_layer_types")
    max_positions = config.read_size("max_position_embeddings", "model_max_length")
    config.refuse_unread(HARMLESS)
    for part in ("gate", "up", "down"):  # transformers saves dense layers under the name of sparse ones
        weights.renamed(f".mlp.{part}_proj.weight", f".{NAMES.block}.{part}_proj.weight")

    # A rope without rotation: every angle is 0.
    still = Rope(np.zeros(attention.heads.rope_dim // 2, np.float32))
    layers = [
        Layer(attention if attend else kimi, experts if sparse else mlp, norm, rope=still if attend else None)
        for attend, sparse in zip(attends, is_sparse, strict=True)
    ]
    return write_decoder(weights, max_positions, embedding, layers, norm, head)


def _read_delta(config: ConfigReader, norm: RmsNorm) -> tuple[KimiDelta, Sequence[bool]]:
    """Reads the block, and the layers that attend instead. Published configs have a section, and count from 1."""
    check_conv_activation(config)
    count = read_layer_count(config)
    attends: Sequence[bool] = [layer > 0 and layer % 4 == 0 for layer in range(count)]
    attends = read_kinds(config, {"full_attention": True, "linear_attention": False}, attends)
    own = config.section("linear_attn_config")
    if own is None:
        return _delta(config, norm, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"), attends
    full, linear = (own.read_list(int, key) or [] for key in ("full_attn_layers", "kda_layers"))
    if sorted(full + linear) != [*range(1, count + 1)]:
        raise own.error(f"full_attn_layers and kda_layers do not have each of {count} layers once")
    kimi = _delta(own, norm, "num_heads", "head_dim", "short_conv_kernel_size")
    own.refuse_any_unread()
    return kimi, [layer + 1 in full for layer in range(count)] if config.holds("layer_types", None) else attends


def _delta(config: ConfigReader, norm: RmsNorm, heads: str, dim: str, taps: str) -> KimiDelta:
    """Reads the block; heads, dim and taps are keys of the config."""
    count = config.read_size(heads, default=32, maximum=MAX_HEADS)
    return KimiDelta(count, config.read_size(dim, default=128, maximum=MAX_HEAD_DIM), read_taps(config, taps, 4), norm)
