"""Parts that Granite's families share: factors of embeddings, residuals and logits, and experts with a shared MLP."""

from dataclasses import replace

from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks.attention import Attention, Heads
from enginewright.builder.models.blocks.embedding import Embedding
from enginewright.builder.models.blocks.experts import ExpertNames, Experts, Routing
from enginewright.builder.models.blocks.mlp import GatedMlp, read_activation
from enginewright.builder.models.blocks.norm import RmsNorm
from enginewright.builder.weights import Weights

HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
    "router_aux_loss_coef": Harmless("It is about training, which is over."),
}
BLOCK, SHARED = "block_sparse_moe", "shared_mlp"  # in a layer's name


def read_scaled(config: ConfigReader) -> tuple[Embedding, RmsNorm, RmsNorm]:
    """Reads the embedding, the norm of the layers, and the last norm, with the factors applied.

    Where each layer adds r · h to x, the graph keeps x / r and adds h to it: norms of x / r equal norms of x with an
    epsilon divided by r².
    """
    added = config.read_positive("residual_multiplier", default=1.0)
    norm = RmsNorm.read(config)
    norm = replace(norm, epsilon=norm.epsilon / added**2)
    scale = config.read_positive("embedding_multiplier", default=1.0) / added
    last = replace(norm, scale=1.0 / config.read_positive("logits_scaling", default=1.0))
    return replace(Embedding.read(config), scale=scale), norm, last


def read_attention(config: ConfigReader) -> Attention:
    """Reads attention."""
    bias = config.read(bool, "attention_bias", default=False)
    scale = config.read_positive("attention_multiplier", default=1.0)
    return Attention(Heads.read(config), bias=bias, output_bias=bias, scale=scale)


def read_shared(config: ConfigReader, default: int) -> GatedMlp | None:
    """Reads the shared MLP; None if its width is 0.

    Args:
        config: config of the model.
        default: its width if the config has none.
    """
    if config.read(int, "shared_intermediate_size", default=default) == 0:
        return None
    width = config.read_size("shared_intermediate_size", default=default, maximum=MAX_COLUMNS)
    return GatedMlp(width, read_activation(config))


def read_experts(config: ConfigReader, weights: Weights, shared: GatedMlp | None) -> Experts:
    """Reads the experts.

    Args:
        config: config of the model.
        weights: weights, whose tensors get the usual names.
        shared: shared MLP; None: there is none.
    """
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
    """Cuts the shared MLP, a sibling of the experts in the checkpoint with gate and up in one tensor.

    Args:
        weights: weights to cut.
        layers: number of layers.
        hidden: columns of the residual stream.
        mlp: the shared MLP.
        name: name of the MLP's tensors in the block, below the layer's name.
    """
    for layer in (f"model.layers.{index}" for index in range(layers)):
        weights.cut(f"{layer}.{SHARED}.input_linear", mlp.cut_fused(f"{layer}.{name}"))
        weights.cut(f"{layer}.{SHARED}.output_linear", {f"{layer}.{name}.down_proj": range(hidden)})
