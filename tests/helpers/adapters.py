"""Adapters that PEFT has saved, with random numbers, and prepared for engines."""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from enginewright.builder.adapters import Adapter
from enginewright.builder.adapters.prepare import prepare
from enginewright.runtime.engine import Engine


def trained(model: PreTrainedModel, folder: Path, seed: int = 0, **lora: Any) -> PeftModel:
    """PEFT's model with an adapter of random numbers, which is saved to a folder.

    Args:
        lora: choices of LoraConfig.
    """
    torch.manual_seed(seed)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**{"r": 7, "lora_alpha": 5, **lora})).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter *= 1 + 0.3 * torch.rand_like(parameter)
            elif parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    return adapted


def prepared(engine: Path, folder: Path) -> Path:
    """The adapter of a folder as a file for an engine."""
    with Engine.open(engine) as opened:
        return prepare(Adapter(folder), opened, folder.with_suffix(".lora")).path


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits  # type: ignore[no-any-return]
