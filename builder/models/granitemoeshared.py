"""Granite with experts in all layers, and a shared MLP that all tokens go through.

https://arxiv.org/abs/2405.04324
"""

import onnx_ir as ir

from enginewright.builder.config import ConfigReader
from enginewright.builder.models import granitemoe
from enginewright.builder.weights import Weights

HARMLESS = granitemoe.HARMLESS


def build(config: ConfigReader, weights: Weights) -> ir.Model:
    """Builds the dense graph of a model of this family."""
    return granitemoe.build(config, weights, has_shared=True)
