"""Lengths (DoRA) and biases of experts: what PEFT refuses is refused with its reason, and what it saves is read."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from enginewright.builder.adapters import Adapter, MergedCheckpoint, open_merged
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.errors import UnsupportedModelError
from tests import tolerances
from tests.adapters.test_merge import CONFIG, EXPERTS, WEIGHTS, as_model
from tests.helpers.adapters import logits, prepared, trained, trained_experts
from tests.helpers.tiny import MemoryCheckpoint, saved, tiny_config, tiny_model

REFUSED: list[dict[str, Any]] = [{"use_dora": True}, {"lora_bias": True}]


def edited(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Changes the files of an adapter."""
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | config))
    save_file(load_file(folder / WEIGHTS) | tensors, folder / WEIGHTS)


def with_parts(folder: Path, choice: dict[str, Any], end: str = "") -> None:
    """Adds lengths or biases to all modules of an adapter whose names end so, as PEFT would save them."""
    part = "lora_magnitude_vector" if "use_dora" in choice else "lora_B.bias"
    added = {
        name.replace("lora_B.weight", part): 1 + 0.3 * torch.rand(len(values))
        for name, values in load_file(folder / WEIGHTS).items()
        if name.endswith(f"{end}.lora_B.weight")
    }
    assert added
    edited(folder, choice, added)


@pytest.mark.parametrize("choice", REFUSED, ids=list)
def test_what_peft_refuses_of_parameters(choice: dict[str, Any], tmp_path: Path) -> None:
    """Neither PEFT nor this project has DoRA or biases with target_parameters, by the config or by the tensors."""
    (name,) = choice
    model = tiny_model(config := tiny_config("qwen3_moe"))
    with pytest.raises(ValueError, match=f"ParamWrapper does not work with {name}=True"):
        trained(model, tmp_path / "never", **EXPERTS, **choice)
    trained(model, tmp_path, **EXPERTS)
    edited(tmp_path, choice, {})
    with pytest.raises(ValueError, match=f"ParamWrapper does not work with {name}=True"):
        PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"{name} with target_parameters: PEFT has neither .*\n.*Train it"):
        Adapter(tmp_path)
    edited(tmp_path, {name: False}, {})
    with_parts(tmp_path, {name: False}, "experts")
    with pytest.raises(UnsupportedModelError, match=r"experts.* is of experts: PEFT has neither .*\n.*Train it"):
        open_merged(MemoryCheckpoint.of(model, config), [str(tmp_path)])


@pytest.mark.parametrize("choice", REFUSED, ids=list)
def test_layers_of_single_experts(choice: dict[str, Any], tmp_path: Path) -> None:
    """PEFT refuses them since experts are one parameter in transformers. Merged, they are what they were before."""
    (name,) = choice
    model = tiny_model(tiny_config("qwen3_moe"))
    saved(copy.deepcopy(model).to(torch.bfloat16), tmp_path / "base")
    base, folder = open_checkpoint(str(tmp_path / "base")), tmp_path / "adapter"
    trained_experts(model, folder)
    with_parts(folder, choice)
    with pytest.raises(ValueError, match=f"ParamWrapper does not work with {name}=True"):
        PeftModel.from_pretrained(copy.deepcopy(model), folder)
    build_engine(base, BuildConfig(gate=None), engine := tmp_path / "tiny.engine")
    with pytest.raises(UnsupportedModelError, match=r"single expert's layer, which PEFT with"):
        prepared(engine, folder)
    if name == "lora_bias":
        with pytest.raises(UnsupportedModelError, match=r"experts\.\d\.\w+\.bias, which the checkpoint does not have"):
            open_merged(base, [str(folder)])
        return
    merged, tensors = open_merged(base, [str(folder)]), load_file(folder / WEIGHTS)
    checked = 0
    for module in Adapter(folder).updates:
        a, b, length = (
            tensors[f"base_model.model.{module}.{part}"]
            for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        )
        whole = base.read(f"{module}.weight").float() + 5 / len(a) * b @ a
        expected = whole * (length / whole.norm(dim=1))[:, None]
        assert torch.allclose(merged.read(f"{module}.weight"), expected, rtol=0, atol=1e-6), module
        checked += 1
    assert checked > 20


def test_biases_of_all_layers(tmp_path: Path) -> None:
    """bias="all" saves those of linear layers and routers, and none of experts: what PEFT loads again is merged."""
    model = tiny_model(config := tiny_config("gpt_oss"))
    trained(model, tmp_path, **EXPERTS, bias="all")
    names = load_file(tmp_path / WEIGHTS)
    assert any(name.endswith("router.bias") for name in names)
    assert not any("experts" in name and "bias" in name for name in names)
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    checkpoint, tokens = MemoryCheckpoint.of(model, config), torch.arange(5, 28)[None]
    merged = MergedCheckpoint(checkpoint, [Adapter(tmp_path)])
    assert (logits(as_model(merged), tokens) - logits(again, tokens)).abs().max() < tolerances.DENSE_LOGITS
    build_engine(checkpoint, BuildConfig(gate=None), engine := tmp_path / "tiny.engine")
    with pytest.raises(UnsupportedModelError, match=r"mlp\.router, which it cannot .*\n?.*routers"):
        prepared(engine, tmp_path)
