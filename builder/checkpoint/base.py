"""A checkpoint as the builder sees it: a config, a tokenizer, and tensors that are read one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from enginewright.builder.pooling import Pooling


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer as the engine stores it."""

    tokenizer_json: bytes  # tokenizers' own JSON
    config: Mapping[str, Any]  # bos_token, add_bos_token, …: keys of tokenizer_config.json
    chat_template: str | None  # a Jinja template; None: there is none


class TensorSource(Protocol):
    """Tensors by name, read one at a time."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its stored dtype (GGUF: dequantized to float32). Nothing is kept."""


class Checkpoint(TensorSource, Protocol):
    """Tensor names and shapes are those of the Hugging Face model, whatever the files hold."""

    @property
    def name(self) -> str:
        """Last part of where it came from: `SmolLM2-135M-Instruct`."""

    @property
    def origin(self) -> str | None:
        """The repository on the hub and its commit, as a package URL; None: the files do not say."""

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json, with `model_type`."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """generation_config.json, or {}."""

    @property
    def tokenizer(self) -> TokenizerFiles: ...

    @property
    def pooling(self) -> Pooling | None:
        """What makes vectors of texts; None where the model generates text."""

    def source_hashes(self) -> Mapping[str, str]:
        """File name -> SHA-256 of every file that the engine depends on."""
