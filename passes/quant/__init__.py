"""Quantization methods: one file and one frozen config each."""

from enginewright.passes.quant.bf16 import Bf16
from enginewright.passes.quant.fp8 import Fp8
from enginewright.passes.quant.int4_rtn import Int4Rtn
from enginewright.passes.quant.int8_wo import Int8Wo
from enginewright.passes.quant.method import QuantConfig
from enginewright.passes.quant.w8a8 import W8A8

METHODS: tuple[type[QuantConfig], ...] = (Bf16, Int8Wo, W8A8, Int4Rtn, Fp8)


def quant_config(name: str) -> QuantConfig:
    """The method that `--quant` names, with its defaults. Raises KeyError for a name that is none."""
    return {method.name: method for method in METHODS}[name]()


__all__ = ["METHODS", "W8A8", "Bf16", "Fp8", "Int4Rtn", "Int8Wo", "QuantConfig", "quant_config"]
