"""What Granite's families share: factors on embeddings, on what layers add, and on logits; experts, and an MLP beside
them that all tokens go through."""

from dataclasses import replace

from enginewright.builder.config import MOST_COLUMNS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks.attention import Attention, Heads
from enginewright.builder.models.blocks.embedding import Embedding
from enginewright.builder.models.blocks.experts import ExpertNames, Experts, Routing
from enginewright.builder.models.blocks.mlp import GatedMlp, read_activation
from enginewright.builder.models.blocks.norm import RmsNorm
from enginewright.builder.weights import Weights

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns beside the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
}
BLOCK, SHARED = "block_sparse_moe", "shared_mlp"  # in a layer's name


def read_scaled(config: ConfigReader) -> tuple[Embedding, RmsNorm, RmsNorm]:
    """The embedding, the norm of the layers, and that of their end, with the factors in them.

    Where each layer adds r · h to x, x / r is carried along, to which h is added: norms of it are norms of x, with an
    epsilon of 1 / r² of theirs.
    """
    added = config.read_positive("residual_multiplier", default=1.0)
    norm = RmsNorm.read(config)
    norm = replace(norm, epsilon=norm.epsilon / added**2)
    scale = config.read_positive("embedding_multiplier", default=1.0) / added
    last = replace(norm, scale=1.0 / config.read_positive("logits_scaling", default=1.0))
    return replace(Embedding.read(config), scale=scale), norm, last


def read_attention(config: ConfigReader) -> Attention:
    bias = config.read(bool, "attention_bias", default=False)
    scale = config.read_positive("attention_multiplier", default=1.0)
    return Attention(Heads.read(config), bias=bias, output_bias=bias, scale=scale)


def read_shared(config: ConfigReader, default: int) -> GatedMlp | None:
    """default: its width, where the config does not say it; with 0 there is none."""
    if config.read(int, "shared_intermediate_size", default=default) == 0:
        return None
    width = config.read_size("shared_intermediate_size", default=default, most=MOST_COLUMNS)
    return GatedMlp(width, read_activation(config))


def read_experts(config: ConfigReader, weights: Weights, shared: GatedMlp | None) -> Experts:
    for end, stored in (
        ("experts.gate_up_proj", "input_linear.weight"),
        ("experts.down_proj", "output_linear.weight"),
        ("router.weight", "router.layer.weight"),
    ):
        weights.renamed(f"{BLOCK}.{end}", f"{BLOCK}.{stored}")
    return Experts(
        Routing.read(config, "num_local_experts"),
        Experts.read_width(config, "intermediate_size"),
        Experts.read_activation(config),
        shared=shared,
        names=ExpertNames(router="router", shared=SHARED),
    )


def cut_shared(weights: Weights, layers: int, hidden: int, mlp: GatedMlp, name: str) -> None:
    """The shared MLP is beside the experts in the checkpoint, with gate and up in one tensor.

    Args:
        name: what the block calls it, behind the layer's name.
    """
    for layer in (f"model.layers.{index}" for index in range(layers)):
        weights.cut(f"{layer}.{SHARED}.input_linear", mlp.cut_fused(f"{layer}.{name}"))
        weights.cut(f"{layer}.{SHARED}.output_linear", {f"{layer}.{name}.down_proj": range(hidden)})
