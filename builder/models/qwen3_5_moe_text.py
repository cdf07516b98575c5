"""Qwen3.5, text, with experts beside one that all tokens share, in all layers. https://arxiv.org/abs/2412.06464"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models import qwen3_next
from enginewright.builder.models.blocks import hybrid
from enginewright.builder.weights import Weights

HARMLESS = qwen3_next.HARMLESS


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    return hybrid.build_hybrid(config, weights, hybrid.read_experts, HARMLESS)
