"""Adapters that PEFT has saved, with random numbers, and prepared for engines."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import PreTrainedModel

from enginewright.builder.adapters import Adapter
from enginewright.builder.adapters.prepare import prepare
from enginewright.runtime.engine import Engine

# Layer of an expert → transformers' parameter with those of all of them, and half of its rows.
LAYERS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None)}


def trained(model: PreTrainedModel, folder: Path, seed: int = 0, **lora: Any) -> PeftModel:
    """PEFT's model with an adapter of random numbers, which is saved to a folder.

    Args:
        lora: choices of LoraConfig.
    """
    torch.manual_seed(seed)
    copied = copy.deepcopy(model)
    # PEFT takes names of shared experts for those of others, as they were named before transformers 5.
    copied.config.model_type = "unnamed"
    adapted = get_peft_model(copied, LoraConfig(**{"r": 7, "lora_alpha": 5, **lora})).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter *= 1 + 0.3 * torch.rand_like(parameter)
            elif parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    copied.config.model_type = model.config.model_type
    return adapted


def trained_experts(model: PreTrainedModel, folder: Path, seed: int = 0) -> PreTrainedModel:
    """A model with an adapter of some experts' layers, as PEFT saved it when each was a module; saved to a folder.

    Some experts have all three layers changed, some only one, and some none; ranks differ.
    """
    torch.manual_seed(seed)
    adapted, tensors = copy.deepcopy(model), dict[str, torch.Tensor]()
    ranks = {r"experts\.1\.gate_proj": 11, "gate_proj": 4, "down_proj": 3}  # the first one that fits
    config = {"peft_type": "LORA", "r": 7, "lora_alpha": 5, "rank_pattern": ranks, "target_modules": [*LAYERS]}
    with torch.no_grad():
        for layer, block in enumerate(adapted.model.layers):
            parameters = dict(block.mlp.experts.named_parameters())
            for expert in range(len(parameters["down_proj"])):
                for place, name in enumerate(LAYERS):
                    if expert % 4 == 0 or (expert % 4 == 2 and place != layer % 3):
                        continue
                    parameter, half = LAYERS[name]
                    matrix = parameters[parameter][expert]
                    matrix = matrix if half is None else matrix.chunk(2)[half]
                    rank = 11 if (expert, name) == (1, "gate_proj") else ranks.get(name, 7)
                    a, b = torch.randn(rank, matrix.shape[1]) * 0.2, torch.randn(matrix.shape[0], rank) * 0.2
                    matrix += 5 / rank * b @ a
                    module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                    tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return adapted


def prepared(engine: Path, folder: Path) -> Path:
    """The adapter of a folder as a file for an engine."""
    with Engine.open(engine) as opened:
        return prepare(Adapter(folder), opened, folder.with_suffix(".lora")).path


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits  # type: ignore[no-any-return]
