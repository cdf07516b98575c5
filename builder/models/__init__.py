"""Families of models that can be built, one file each, named after its `model_type`."""

import difflib
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, ModuleType
from typing import Any, cast

import msgspec
import onnx_ir as ir

from enginewright.builder.checkpoint.base import Checkpoint
from enginewright.builder.checkpoint.quantized import read_format
from enginewright.builder.config import ConfigReader
from enginewright.builder.pooling import Pooling
from enginewright.builder.tensors import AssumedTensors, Tensors
from enginewright.builder.weights import Weights
from enginewright.builder.wrappers import WRAPPERS, TextModelTensors, text_config
from enginewright.embedding import EmbeddingConfig
from enginewright.errors import UnsupportedModelError

Build = Callable[[ConfigReader, Weights], ir.Model]
ALIASES = {"kimi_k2": "deepseek_v3"}  # types that equal another one


def model_types() -> list[str]:
    """Lists every `model_type` that can be built."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)


def build_graph(checkpoint: Checkpoint, max_seq_len: int | None = None) -> ir.Model:
    """Builds the dense graph of a checkpoint, in standard ONNX and a few plugin ops, without reading a tensor.

    Inputs: tokens, positions INT64 [1, T]; past_key.<i>, past_value.<i> FLOAT [1, kv_heads, P, head_dim].
    Outputs: logits FLOAT [1, T, vocab], in an embedding model embedding or score FLOAT [1, 1, width];
    present_key.<i>, present_value.<i> FLOAT [1, kv_heads, P + T, head_dim].

    Args:
        checkpoint: the checkpoint.
        max_seq_len: positions of the longest sequence to support; None means the model's own limit.

    Raises:
        UnsupportedModelError: the model is of an unknown type, or has a feature that is not implemented.
        EngineError: config and tensors do not fit together.
    """
    config = text_config(checkpoint.config)
    if config is checkpoint.config:
        return _build(config, Tensors(checkpoint), max_seq_len, pooling=checkpoint.pooling)
    part = TextModelTensors(checkpoint)
    return _build(config, Tensors(part), max_seq_len, part.notes, checkpoint.pooling)


def build_mtp_graph(checkpoint: Checkpoint, max_seq_len: int | None = None) -> ir.Model | None:
    """Builds the dense graph of a checkpoint's multi-token prediction (blocks/mtp.py); None if it has none.

    Its inputs and outputs are those of `build_graph`, plus an input hidden_before FLOAT [1, T, hidden size].

    Args:
        checkpoint: the checkpoint.
        max_seq_len: as in `build_graph`.

    Raises:
        UnsupportedModelError: it has a feature that is not implemented.
        EngineError: config and tensors do not fit together.
    """
    config = text_config(checkpoint.config)
    tensors = Tensors(checkpoint if config is checkpoint.config else TextModelTensors(checkpoint))
    reader, weights = _open(config, tensors, max_seq_len)
    build = getattr(_module(reader.read(str, "model_type")), "build_mtp", None)
    model = build(reader, weights) if build is not None else None
    if model is not None:
        model.metadata_props["enginewright.notes"] = json.dumps(weights.notes)
    return cast(ir.Model | None, model)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuses a model that cannot be built by its config alone, without its weights.

    Args:
        config: content of config.json.

    Raises:
        UnsupportedModelError: the type of the model, its rope, its quantization or another feature is not implemented.
        EngineError: the config cannot be used.
    """
    _build(text_config(config), AssumedTensors(), pooling=Pooling("mean"))  # any pooling: none refuses anything


def keeps_latent_vectors(config: Mapping[str, Any]) -> bool:
    """Returns True if a model caches one latent vector for each token and layer; config: content of config.json.

    Families without latent attention refuse the key.
    """
    return text_config(config).get("kv_lora_rank") is not None


def _build(
    values: Mapping[str, Any],
    tensors: Tensors,
    max_seq_len: int | None = None,
    notes: Mapping[str, int] = MappingProxyType({}),
    pooling: Pooling | None = None,
) -> ir.Model:
    config, weights = _open(values, tensors, max_seq_len)
    if pooling is not None:
        config.pooling = replace(pooling, embedding=_with_dimensions(pooling.embedding, config))
    if pooling is not None and not any(name.startswith("model.") for name in tensors.names):
        weights.inside("")  # the form of a model that was saved without a head
    model = cast(Build, _module(config.read(str, "model_type")).build)(config, weights)
    weights.refuse_left_over()
    weights.note_none_quantized()
    model.metadata_props["enginewright.notes"] = json.dumps({**notes, **weights.notes})
    model.metadata_props["enginewright.warnings"] = json.dumps(config.warnings)
    return model


def _open(values: Mapping[str, Any], tensors: Tensors, max_seq_len: int | None) -> tuple[ConfigReader, Weights]:
    config = ConfigReader(values, max_seq_len=max_seq_len)
    return config, Weights(tensors, read_format(config, tensors))


def _with_dimensions(embedding: EmbeddingConfig, config: ConfigReader) -> EmbeddingConfig:
    """Adds the shorter dimensions that a model was trained for: https://arxiv.org/abs/2205.13147"""
    dimensions = config.read_list(int, "matryoshka_dimensions")
    any_dimensions = config.read(bool, "is_matryoshka", default=False)
    if not dimensions:
        return msgspec.structs.replace(embedding, any_dimensions=any_dimensions or embedding.any_dimensions)
    if any(number <= 0 for number in dimensions):
        raise config.error(f"matryoshka_dimensions is {dimensions}, with a number that is not above 0")
    return msgspec.structs.replace(embedding, dimensions=tuple(dimensions))


def _module(model_type: str) -> ModuleType:
    model_type = ALIASES.get(model_type, model_type)
    if model_type not in model_types():
        known = sorted([*model_types(), *WRAPPERS, *ALIASES])
        nearest = difflib.get_close_matches(model_type, known, n=1)
        raise UnsupportedModelError(
            f"models of type {model_type!r} are not implemented",
            f"the known types are {', '.join(known)}",
            f"Did you mean {nearest[0]}?" if nearest else "",
        )
    return importlib.import_module(f"{__name__}.{model_type}")
