"""Qwen's hybrids: gated delta nets, and attention with an output gate in every n-th layer."""

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks.attention import Attention, Heads
from enginewright.builder.models.blocks.decoder import DecoderParts, Layer, write_decoder
from enginewright.builder.models.blocks.embedding import Embedding
from enginewright.builder.models.blocks.experts import Experts, Routing
from enginewright.builder.models.blocks.gated_delta_net import GatedDeltaNet
from enginewright.builder.models.blocks.head import Head
from enginewright.builder.models.blocks.layers import read_kinds, read_layer_count, read_sparse_layers
from enginewright.builder.models.blocks.mlp import GatedMlp, read_activation
from enginewright.builder.models.blocks.mtp import LEFT_OUT, MtpNames, write_mtp
from enginewright.builder.models.blocks.norm import RmsNorm
from enginewright.builder.models.blocks.rope import read_rope
from enginewright.builder.weights import Weights

_DRAFTS = "It is about draft tokens, which answers do not depend on."
MTP = MtpNames(
    prefix="mtp.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    joined="mtp.fc",
    layer="mtp.layers.0",
    norm="mtp.norm",
)
HARMLESS = {
    "attn_output_gate": Harmless("Attention has an output gate.", (True,)),
    "mamba_ssm_dtype": Harmless("States are kept in fp32.", ("float32",)),
    "mtp_num_hidden_layers": Harmless(_DRAFTS),
    "mtp_use_dedicated_embeddings": Harmless(_DRAFTS),
}


def read_hybrid(
    config: ConfigReader,
    read_mlps: Callable[[ConfigReader, int], Sequence[GatedMlp | Experts]],
    harmless: Mapping[str, Harmless] = HARMLESS,
    fused: bool = False,
) -> tuple[DecoderParts, Layer]:
    """Reads the whole model, and its layer of multi-token prediction.

    Args:
        config: config of the model.
        read_mlps: (config, number of layers) → the MLP of each layer.
        harmless: keys that cannot change a result.
        fused: as in GatedDeltaNet.
    """
    embedding, norm, head = Embedding.read(config), RmsNorm.read(config, offset=1.0), Head.read(config)
    heads, bias = Heads.read(config, default_dim=256), config.read(bool, "attention_bias", default=False)
    attention = Attention(heads, bias=bias, output_bias=bias, head_norm=norm, gated=True)
    recurrence = GatedDeltaNet.read(config, norm.epsilon, fused)
    attends = _read_attends(config)
    mlps = read_mlps(config, len(attends))
    rope = read_rope(config, heads.dim, part=0.25, sectioned=True)
    max_positions = config.read_size("max_position_embeddings")
    config.refuse_unread(harmless)
    layers = [
        Layer(attention, mlp, norm, rope=rope)
        if is_attention
        else Layer(recurrence, mlp, norm, names=("linear_attn", "mlp"), rope=rope)
        for is_attention, mlp in zip(attends, mlps, strict=True)
    ]
    mtp_layer = Layer(attention, mlps[-1], norm, rope=rope)
    return DecoderParts(max_positions, embedding, layers, norm, head), mtp_layer


def build_hybrid(weights: Weights, parts: DecoderParts) -> ir.Model:
    """Builds the dense graph of a hybrid."""
    weights.leave_out("mtp.", LEFT_OUT)
    return write_decoder(weights, *parts)


def build_hybrid_mtp(config: ConfigReader, weights: Weights, parts: DecoderParts, layer: Layer) -> ir.Model | None:
    """Builds the graph of the multi-token prediction layer; None if the checkpoint has none.

    Args:
        config: config of the model.
        weights: weights of the checkpoint.
        parts: parts of the model.
        layer: the layer.
    """
    if not weights.has_any("mtp."):
        return None
    if config.read(bool, "mtp_use_dedicated_embeddings", default=False):
        raise config.unsupported("mtp_use_dedicated_embeddings", "Draft layers have to use the model's embedding.")
    weights.leave_out("mtp.layers.1.", "of a second multi-token prediction layer: the first one makes all draft tokens")
    return write_mtp(weights, parts, layer, MTP)


def read_experts(config: ConfigReader, layers: int) -> Sequence[GatedMlp | Experts]:
    """Reads experts with a gated shared MLP, or plain MLPs in the layers that the config names.

    Args:
        config: config of the model.
        layers: number of layers.

    Returns:
        The MLP of each layer.
    """
    activation = read_activation(config)
    shared = GatedMlp(config.read_size("shared_expert_intermediate_size", maximum=MAX_COLUMNS), activation)
    normalized = config.read(bool, "norm_topk_prob", default=True)
    experts = Experts(
        Routing.read(config, "num_experts", "num_local_experts", normalized=normalized),
        Experts.read_width(config),
        Experts.read_activation(config),
        shared=shared,
        shared_is_gated=True,
    )
    is_sparse = read_sparse_layers(config)
    width = config.read_size("intermediate_size", default=shared.width, maximum=MAX_COLUMNS)
    plain = GatedMlp(width, activation)
    return [experts if sparse else plain for sparse in is_sparse[:layers]]


def _read_attends(config: ConfigReader) -> Sequence[bool]:
    """Reads which layers attend; without a list, every n-th one does."""
    interval = config.read_size("full_attention_interval", default=4)
    default = [(layer + 1) % interval == 0 for layer in range(read_layer_count(config))]
    return read_kinds(config, {"full_attention": True, "linear_attention": False}, default)
