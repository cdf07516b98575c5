"""Granite with experts in all layers, and an MLP beside them that all tokens go through.
https://arxiv.org/abs/2405.04324"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models import granitemoe
from enginewright.builder.weights import Weights

HARMLESS = granitemoe.HARMLESS


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    return granitemoe.build(config, weights, has_shared=True)
