"""A LoRA adapter in a GGUF file, with the names and the order of rows of the Hugging Face model's layers.

Source: llama.cpp, convert_lora_to_gguf.py, which converts the product B · A as it does the layer's weight, so that rows
of B are reordered as those of the weight; and src/llama-adapter.h, which scales the product by alpha / rank, or by 1 if
alpha is 0.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from enginewright.builder.adapters.peft_config import MAX_PATTERNS, PeftConfig
from enginewright.builder.checkpoint.base import TensorInfo
from enginewright.builder.checkpoint.files import sha256
from enginewright.builder.checkpoint.gguf.families import find_family
from enginewright.builder.checkpoint.gguf.family import GgufFamily
from enginewright.builder.checkpoint.gguf.file import check_type, read_tensor
from enginewright.builder.checkpoint.gguf.header import GgufTensor, read_header
from enginewright.builder.checkpoint.gguf.tensors import change_of, linear_weight
from enginewright.errors import EngineError, UnsupportedModelError
from enginewright.plan import Plan

SUFFIX = ".gguf"
PREFIX = "base_model.model."  # PEFT's prefix of every name
PARTS = {"lora_a": "lora_A", "lora_b": "lora_B"}  # end of a name in the file → PEFT's
ALPHA, INVOCATION_TOKENS = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
# Keys that change no number, with those of `general.`: hints for a user, and the kind, which is checked.
HARMLESS = ("adapter.lora.task_name", "adapter.lora.prompt_prefix", "adapter.type")
PEFT_INSTEAD = "Use the adapter that PEFT has saved, a folder or OWNER/NAME on the hub."


def attention_heads(plan: Plan) -> Mapping[str, Any]:
    """Numbers of attention heads of an engine, by their keys in config.json; {} if it has no attention."""
    calls = (call.attributes for call in plan.calls if {"heads", "kv_heads"} <= call.attributes.keys())
    return next(({"num_attention_heads": one["heads"], "num_key_value_heads": one["kv_heads"]} for one in calls), {})


class _Factor(NamedTuple):
    """One of the two matrices of a layer."""

    stored: GgufTensor  # tensor of the file
    restore: Callable[[torch.Tensor], torch.Tensor]  # its numbers → those of PEFT's tensor


class GgufAdapterFile:
    """The tensors of an adapter's GGUF file under PEFT's names, as float32.

    Args:
        path: the file.
        base: number of attention heads of the base model, and of its keys and values, by their keys in config.json,
            which the file does not have.

    Attributes:
        name: the file's name without its end.
        config: its choices.
        tensors: PEFT's name → form of a tensor.

    Raises:
        UnsupportedModelError: the file is no adapter, or changes something that is not implemented.
        EngineError: the file is damaged.
    """

    def __init__(self, path: Path, base: Mapping[str, Any]) -> None:
        self.name, self._path = path.stem, path
        header = read_header(path)
        self._metadata = header.metadata
        self._check_metadata()
        family = find_family(header)
        self._factors = dict(self._factor(stored, family, base) for stored in header.tensors.values())
        for stored in {factor.stored.type: factor.stored for factor in self._factors.values()}.values():
            check_type(stored)
        self.tensors = {name: TensorInfo(torch.float32, factor.stored.shape) for name, factor in self._factors.items()}
        self.config = self._read_config()

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor; name: PEFT's name."""
        factor = self._factors[name]
        values = read_tensor(self._path, factor.stored)
        try:
            return factor.restore(values)
        except (RuntimeError, KeyError) as error:  # KeyError: the base has no attention
            raise EngineError(
                f"tensor {factor.stored.name} of the adapter {self.name} has shape {list(factor.stored.shape)}",
                "it does not fit the base model's attention heads",
            ) from error

    def source_hashes(self) -> Mapping[str, str]:
        """Returns the file's name → SHA-256."""
        return self._source_hashes

    @cached_property
    def _source_hashes(self) -> Mapping[str, str]:
        return {self._path.name: sha256(self._path)}

    def _check_metadata(self) -> None:
        kind = self._metadata.get("general.type")
        if kind != "adapter":
            raise UnsupportedModelError(f"{self._path} is not an adapter", f"its general.type is {kind!r}")
        if (form := self._metadata.get("adapter.type")) != "lora":
            raise UnsupportedModelError(
                f"{self._path} is an adapter of type {form!r}", "lora can be used", PEFT_INSTEAD
            )
        known = (*HARMLESS, ALPHA, INVOCATION_TOKENS)
        unknown = [key for key in self._metadata if not key.startswith("general.") and key not in known]
        if unknown:
            raise UnsupportedModelError(
                f"{unknown[0]} of the adapter {self.name} is not known",
                "an adapter that is used without a part of it computes something else",
                PEFT_INSTEAD,
            )

    def _factor(self, stored: GgufTensor, family: GgufFamily, base: Mapping[str, Any]) -> tuple[str, _Factor]:
        weight, _, end = stored.name.rpartition(".")
        name = linear_weight(family, weight) if end in PARTS else None
        if name is None:
            raise UnsupportedModelError(
                f"tensor {stored.name} of the adapter {self.name} is not known",
                f"linear layers of {family.architecture} can be changed",
                PEFT_INSTEAD,
            )
        restore: Callable[[torch.Tensor], torch.Tensor] = partial(change_of(family, name), base)
        module = name.removesuffix(".weight")
        return f"{PREFIX}{module}.{PARTS[end]}.weight", _Factor(stored, restore if end == "lora_b" else _unchanged)

    def _read_config(self) -> PeftConfig:
        alpha = self._metadata.get(ALPHA)
        if not isinstance(alpha, float) or not math.isfinite(alpha):
            raise EngineError(f"{ALPHA} of the adapter {self.name} is {alpha!r}", "it must be a number")
        tokens = self._metadata.get(INVOCATION_TOKENS, [])
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise EngineError(f"{INVOCATION_TOKENS} of the adapter {self.name} is {tokens!r:.80}")
        ranks = {
            name.removeprefix(PREFIX).removesuffix(".lora_A.weight"): info.shape[0]
            for name, info in self.tensors.items()
            if name.endswith(".lora_A.weight")
        }
        (rank, _), *_ = Counter(ranks.values()).most_common(1) or [(1, 0)]
        others = {re.compile(f"{re.escape(module)}$"): own for module, own in ranks.items() if own != rank}
        if len(others) > MAX_PATTERNS:
            raise UnsupportedModelError(
                f"{len(others)} layers of the adapter {self.name} have other ranks than {rank}",
                f"at most {MAX_PATTERNS} can",
                PEFT_INSTEAD,
            )
        return PeftConfig(
            rank=rank,
            alpha=alpha or rank,
            rank_pattern=others,
            alpha_pattern={} if alpha else dict(others),
            use_rslora=False,
            use_dora=False,
            fan_in_fan_out=False,
            adapts_experts=False,
            invocation_tokens=tuple(token for token in tokens if isinstance(token, int)),
            token_indices={},
        )


def _unchanged(values: torch.Tensor) -> torch.Tensor:
    return values
