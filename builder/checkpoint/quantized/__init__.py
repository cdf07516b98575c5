"""Checkpoints that are already quantized: a file for each format, named after the `quant_method` of its config.json."""

from enginewright.builder.checkpoint.quantized.find import format_name, read_format
from enginewright.builder.checkpoint.quantized.format import QuantizedFormat

__all__ = ["QuantizedFormat", "format_name", "read_format"]
