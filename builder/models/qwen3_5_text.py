"""Qwen3.5, text, dense: gated delta nets, and attention in every fourth layer. https://arxiv.org/abs/2412.06464"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless
from enginewright.builder.models.blocks import GatedMlp, hybrid
from enginewright.builder.models.blocks.decoder import DecoderParts, Layer
from enginewright.builder.weights import Weights

HARMLESS = {
    **hybrid.HARMLESS,
    "mlp_only_layers": Harmless("All layers have the same kind of MLP.", ([],)),
}


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    parts, _ = _read(config)
    return hybrid.build_hybrid(weights, parts)


def build_mtp(config: ConfigReader, weights: Weights) -> ir.Model | None:
    """Builds the graph of the multi-token prediction layer; None if the checkpoint has none."""
    return hybrid.build_hybrid_mtp(config, weights, *_read(config))


def _read(config: ConfigReader) -> tuple[DecoderParts, Layer]:
    return hybrid.read_hybrid(config, lambda config, layers: [GatedMlp.read(config)] * layers, HARMLESS)
