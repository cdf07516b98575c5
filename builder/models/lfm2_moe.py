"""LFM2 with experts by corrected sigmoids after a few dense layers. https://arxiv.org/abs/2511.23404"""

import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import ExpertNames, Experts, GatedMlp, Routing, lfm2
from enginewright.builder.models.blocks.layers import read_layer_count
from enginewright.builder.weights import Weights

GATE, UP, DOWN = lfm2.MLP_NAMES
HARMLESS = {
    "output_router_logits": Harmless("It says what transformers returns in addition to the logits."),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    count, dense = read_layer_count(config), config.read(int, "num_dense_layers", default=2)
    mlp = GatedMlp(config.read_size("intermediate_size", maximum=MAX_COLUMNS), "silu", names=lfm2.MLP_NAMES)
    # transformers adds a millionth to the sum that shares are divided by, of sigmoids that are far above it.
    routing = Routing.read(
        config,
        scores="sigmoid",
        correction=("expert_bias",) if config.read(bool, "use_expert_bias", default=True) else (),
        normalized=config.read(bool, "norm_topk_prob", default=True),
        scale=config.read_positive("routed_scaling_factor", default=1.0),
    )
    experts = Experts(routing, Experts.read_width(config), names=ExpertNames(gate=GATE, up=UP, down=DOWN))
    if not config.has("layer_types"):
        raise config.error("layer_types is missing")
    mlps = [mlp if layer < dense else experts for layer in range(count)]
    return lfm2.build_lfm2(config, weights, mlps, [False] * count, HARMLESS)
