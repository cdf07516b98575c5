"""Interface of a checkpoint: a config, a tokenizer, and tensors that are read one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from enginewright.builder.pooling import Pooling


@dataclass(frozen=True)
class TensorInfo:
    """Facts about a tensor that are known without reading it."""

    dtype: torch.dtype  # number type
    shape: tuple[int, ...]  # shape


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer, in the form that the engine stores."""

    tokenizer_json: bytes  # JSON of the tokenizers library
    config: Mapping[str, Any]  # bos_token, add_bos_token, …: keys of tokenizer_config.json
    chat_template: str | None  # Jinja template; None: there is none


class TensorSource(Protocol):
    """Tensors by name, read one at a time."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name → facts about the tensor."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor, in its stored dtype (GGUF: dequantized to float32). Nothing is kept."""


class Checkpoint(TensorSource, Protocol):
    """A checkpoint, with the tensor names and shapes of the Hugging Face model, whatever the files hold."""

    @property
    def name(self) -> str:
        """Last part of its path or hub id: `SmolLM2-135M-Instruct`."""

    @property
    def origin(self) -> str | None:
        """Package URL of the repository on the hub, with the commit; None if the files do not say."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Content of config.json, with `model_type`."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Content of generation_config.json, or {}."""

    @property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer."""
        ...

    @property
    def pooling(self) -> Pooling | None:
        """Pooling of an embedding model; None if the model generates text."""

    def source_hashes(self) -> Mapping[str, str]:
        """Computes file name → SHA-256 of every file that the engine depends on."""
