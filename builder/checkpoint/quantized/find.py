"""Finds the file that reads a quantized checkpoint, by the name in its config."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

from enginewright.builder.checkpoint.base import Checkpoint
from enginewright.builder.checkpoint.quantized.format import QuantizedFormat
from enginewright.builder.config import ConfigReader
from enginewright.builder.tensors import Tensors

PACKAGE = "enginewright.builder.checkpoint.quantized.formats"
OpenFormat = Callable[[ConfigReader, Tensors], QuantizedFormat]


def format_names() -> list[str]:
    """Lists every `quant_method` that can be read."""
    folder = Path(__file__).parent / "formats"
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules([str(folder)]))


def format_name(checkpoint: Checkpoint) -> str | None:
    """Returns the `quant_method` of a checkpoint; None if it is not quantized."""
    section = ConfigReader(checkpoint.config).section("quantization_config")
    return None if section is None else section.read(str, "quant_method").lower()


def read_format(config: ConfigReader, tensors: Tensors) -> QuantizedFormat | None:
    """Opens the format in which a checkpoint's weights are stored; None if they are not quantized.

    Args:
        config: config.json.
        tensors: tensors of the checkpoint.

    Raises:
        UnsupportedModelError: the format is not implemented; the message names it.
        EngineError: the quantization_config cannot be used.
    """
    section = config.section("quantization_config")
    if section is None:
        return None
    name = section.read(str, "quant_method").lower()
    if name not in format_names():
        raise section.unsupported(
            f"quant_method = {name!r}",
            f"Implemented are {', '.join(format_names())}. Build from the original checkpoint, and use --quant.",
        )
    open = cast(OpenFormat, importlib.import_module(f"{PACKAGE}.{name.replace('-', '_')}").open)
    return open(section, tensors)
