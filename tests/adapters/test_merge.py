"""Adapters that PEFT has saved, merged by the builder, against the models that PEFT runs unmerged, in fp32."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from enginewright.builder.adapters import Adapter, MergedCheckpoint, open_merged
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.models import build_graph
from enginewright.errors import EngineError, UnsupportedModelError, UsageError
from tests import tolerances
from tests.helpers.adapters import logits, trained
from tests.helpers.command import run_engine
from tests.helpers.graphs import content
from tests.helpers.tiny import HYBRIDS, MemoryCheckpoint, saved, tiny_checkpoint, tiny_config, tiny_model

LINEARS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
TIED = {"tie_word_embeddings": True}
EXPERTS: dict[str, Any] = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def as_model(merged: MergedCheckpoint) -> PreTrainedModel:
    """transformers' model of a checkpoint, in fp32, without rounding."""
    stored = {name: merged.read(name).float() for name in merged.tensors}
    is_tied = "lm_head.weight" not in stored
    model = tiny_model({**merged.config, "tie_word_embeddings": is_tied})
    missing, unexpected = model.load_state_dict(stored, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if is_tied else set())
    return model


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"target_modules": LINEARS}),
    ("llama", {}, {"r": 1, "target_modules": "all-linear"}),
    ("llama", {}, {"r": 64, "use_rslora": True, "target_modules": LINEARS}),
    ("llama", {}, {"target_modules": LINEARS, "use_dora": True}),
    (
        "llama",
        {},
        {
            "target_modules": LINEARS,
            "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 11, "1.self_attn.v_proj": 2},
            "alpha_pattern": {"model.layers.0.self_attn.q_proj": 9, "down_proj": 1.5},
        },
    ),
    ("llama", {"attention_bias": True, "mlp_bias": True}, {"target_modules": LINEARS, "lora_bias": True}),
    ("llama", {"attention_bias": True}, {"target_modules": ["q_proj"], "bias": "all"}),
    ("llama", {"attention_bias": True}, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    ("llama", {"tie_word_embeddings": False}, {"target_modules": ["q_proj", "lm_head"]}),
    ("llama", TIED, {"target_modules": ["q_proj", "lm_head"]}),
    ("llama", TIED, {"target_modules": ["q_proj", "embed_tokens"]}),
    ("llama", TIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("llama", TIED, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    ("llama", {"tie_word_embeddings": False}, {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]}),
    ("llama", TIED, {"target_modules": ["q_proj"], "trainable_token_indices": [0, 5, 306]}),
    ("llama", TIED, {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [0, 5, 306]}),
    (
        "llama",
        {"tie_word_embeddings": False},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7, 3]}},
    ),
    ("qwen2", {}, {"target_modules": LINEARS, "layers_to_transform": [1]}),
    ("gemma2", {}, {"target_modules": LINEARS}),
    ("phi3", {}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    ("gpt2", {}, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    ("gpt2", {}, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    ("deepseek_v3", {}, {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}),
    ("mixtral", {}, EXPERTS),
    (
        "qwen3_moe",
        {},
        {**EXPERTS, "rank_pattern": {"gate_up_proj": 2}, "alpha_pattern": {"down_proj": 9}},
    ),
    ("gpt_oss", {}, EXPERTS),
    ("deepseek_v3", {}, {"target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"]}),
    ("qwen3_next", {}, {"target_modules": ["q_proj", "in_proj_qkvz", "out_proj"]}),
    ("falcon_h1", {}, {"target_modules": ["in_proj", "q_proj", "gate_proj"]}),
]


@pytest.mark.parametrize(("family", "overrides", "lora"), CASES, ids=[f"{f}-{list(o)}-{list(c)}" for f, o, c in CASES])
def test_a_merged_model_is_what_peft_runs(
    tmp_path: Path, family: str, overrides: dict[str, Any], lora: dict[str, Any]
) -> None:
    config = tiny_config(family, **overrides)
    model = tiny_model(config)
    adapted = trained(model, tmp_path, **lora)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, config["vocab_size"], (1, 23)))
    tokens[0, :3] = torch.tensor([5, 306, 7])
    expected = logits(adapted, tokens)
    assert (expected - logits(model, tokens)).abs().max() > 100 * tolerances.DENSE_LOGITS
    merged = MergedCheckpoint(MemoryCheckpoint.of(model, config), [Adapter(tmp_path)])
    tolerance = tolerances.MERGED_HYBRID_LOGITS if family in HYBRIDS else tolerances.DENSE_LOGITS
    assert (logits(as_model(merged), tokens) - expected).abs().max() < tolerance
    build_graph(merged)  # the builder finds all that it needs, and uses all that there is


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_of_saved_checkpoints(tmp_path: Path, family: str) -> None:
    """transformers saves the matrices of each expert by themselves, most of them under other names."""
    config = tiny_config(family)
    model = tiny_model(config)
    saved(model.to(torch.bfloat16), tmp_path / "base")
    adapted = trained(model.float(), tmp_path / "adapter", **EXPERTS | {"target_modules": ["o_proj"]})
    saved(adapted.merge_and_unload(), tmp_path / "merged")
    merged = open_merged(open_checkpoint(str(tmp_path / "base")), [str(tmp_path / "adapter")])
    expected = open_checkpoint(str(tmp_path / "merged"))
    assert merged.tensors.keys() == expected.tensors.keys()
    for name in merged.tensors:
        assert torch.allclose(merged.read(name).float(), expected.read(name), rtol=0, atol=1e-6), name
    build_graph(merged)


def test_two_weighted_adapters(tmp_path: Path) -> None:
    config = tiny_config("llama")
    model = tiny_model(config)
    for number in range(2):
        trained(model, tmp_path / f"{number}", seed=number, r=3 + number, target_modules=LINEARS)
    reference = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "0", adapter_name="0")
    reference.load_adapter(tmp_path / "1", adapter_name="1")
    reference.add_weighted_adapter(["0", "1"], [0.5, -1.25], "both", combination_type="cat")
    reference.set_adapter("both")
    tokens = torch.arange(19)[None]
    merged = open_merged(MemoryCheckpoint.of(model, config), [f"{tmp_path / '0'}:0.5", f"{tmp_path / '1'}:-1.25"])
    assert isinstance(merged, MergedCheckpoint) and merged.name == "tiny-0-1"
    assert (logits(as_model(merged), tokens) - logits(reference, tokens)).abs().max() < tolerances.DENSE_LOGITS


def test_an_adapter_of_zeros_changes_nothing(tmp_path: Path) -> None:
    config = tiny_config("llama")
    base = MemoryCheckpoint.of(tiny_model(config), config)
    get_peft_model(tiny_model(config), LoraConfig(target_modules=LINEARS)).save_pretrained(tmp_path)
    merged = open_merged(base, [str(tmp_path)])
    graphs = [content(build_graph(one)) for one in (base, merged)]
    assert graphs[0] == graphs[1]


def edited(folder: Path, config: Mapping[str, Any] = {}, tensors: Mapping[str, torch.Tensor | None] = {}) -> Path:
    """The folder of an adapter, with other values in its files; None takes a tensor out."""
    values = json.loads((folder / CONFIG).read_text()) | dict(config)
    (folder / CONFIG).write_text(json.dumps(values))
    stored = load_file(folder / WEIGHTS) | dict(tensors)
    save_file({name: value for name, value in stored.items() if value is not None}, folder / WEIGHTS)
    return folder


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
NAN = torch.full((7, 48), float("nan"))


@pytest.mark.parametrize(
    ("config", "tensors", "error", "text"),
    [
        ({"peft_type": "IA3"}, {}, UnsupportedModelError, "peft_type = 'IA3'"),
        ({"peft_type": None}, {}, EngineError, "peft_type is missing"),
        ({"r": 0}, {}, EngineError, "r is 0"),
        ({"r": 8}, {}, EngineError, r"\[7, 48\].*rank 8"),
        ({"r": 10**30}, {}, UnsupportedModelError, "r = 10"),
        ({"lora_alpha": float("nan")}, {}, EngineError, "lora_alpha is nan"),
        ({"new_choice": 1}, {}, UnsupportedModelError, "new_choice = 1"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, UnsupportedModelError, "pissa_niter_4"),
        ({"init_lora_weights": "mine"}, {}, UnsupportedModelError, "'mine'"),
        ({"alora_invocation_tokens": [1]}, {}, UnsupportedModelError, "cannot be merged.*alora_invocation_tokens"),
        ({"alora_invocation_tokens": "x"}, {}, EngineError, "alora_invocation_tokens"),
        ({"target_parameters": ["q_proj.weight"]}, {}, UnsupportedModelError, "target_parameters has 'q_proj.weight'"),
        ({"bias": "some"}, {}, EngineError, "bias is 'some'"),
        ({"use_dora": True}, {}, EngineError, "use_dora is True"),
        ({"rank_pattern": {"(a+)+b": 7}}, {}, UnsupportedModelError, r"could take long"),
        ({"rank_pattern": {"a*a*b": 7}}, {}, UnsupportedModelError, r"could take long"),
        ({"rank_pattern": {"(": 7}}, {}, EngineError, "no regular expression"),
        ({"rank_pattern": {"q_proj": 0.5}}, {}, EngineError, "rank 0.5"),
        ({"alpha_pattern": {f"x{i}": 1 for i in range(10_000)}}, {}, UnsupportedModelError, "10000 entries"),
        ({}, {Q_A: NAN}, EngineError, "not finite"),
        ({}, {Q_A: None}, EngineError, "one of its two factors"),
        ({}, {Q_A: torch.zeros(7, 49)}, EngineError, r"\[7, 49\].*\[48, 48\]"),
        ({}, {Q_A: torch.zeros(7, 48, 1)}, UnsupportedModelError, "not of linear layers"),
        ({}, {Q_A: torch.zeros(7, 48, dtype=torch.int8)}, UnsupportedModelError, "int8"),
        ({}, {"base_model.model.x.lora_C.weight": NAN}, UnsupportedModelError, "lora_C.weight"),
        ({}, {"x.lora_A.weight": NAN}, UnsupportedModelError, "x.lora_A.weight"),
        ({}, {"base_model.model.model.layers.9.mlp.x.weight": NAN}, UnsupportedModelError, "does not have"),
        ({}, {"base_model.model.model.norm.weight": torch.ones(49)}, EngineError, r"\[49\].*\[48\]"),
        ({}, {"base_model.model.model.norm.lora_A.weight": NAN}, EngineError, "one of its two factors"),
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_adapters_that_are_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], error: type[EngineError], text: str
) -> None:
    values = tiny_config("llama")
    model = tiny_model(values)
    trained(model, tmp_path, target_modules=["q_proj"])
    edited(tmp_path, config, tensors)
    with pytest.raises(error, match=text):
        build_graph(merged := open_merged(MemoryCheckpoint.of(model, values), [str(tmp_path)]))
        merged.read("model.layers.0.self_attn.q_proj.weight")


def test_what_cannot_be_combined_or_weighted(tmp_path: Path) -> None:
    values = tiny_config("llama")
    model = tiny_model(values)
    base = MemoryCheckpoint.of(model, values)
    trained(model, tmp_path / "dora", target_modules=["q_proj"], use_dora=True)
    trained(model, tmp_path / "plain", target_modules=["q_proj"])
    with pytest.raises(UsageError, match="cannot have a weight"):
        open_merged(base, [f"{tmp_path / 'dora'}:0.5"])
    with pytest.raises(UsageError, match="dora and plain cannot be combined"):
        open_merged(base, [str(tmp_path / "dora"), str(tmp_path / "plain")])
    with pytest.raises(UsageError, match="finite"):
        open_merged(base, [f"{tmp_path / 'plain'}:nan"])
    with pytest.raises(UsageError, match="no such folder"):
        open_merged(base, [str(tmp_path / "nothing")])
    with pytest.raises(UsageError, match=f"holds no {CONFIG}"):
        open_merged(base, [str(tmp_path)])
    (tmp_path / "plain" / WEIGHTS).rename(tmp_path / "plain" / "adapter_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickle"):
        open_merged(base, [str(tmp_path / "plain")])
    quantized = {**values, "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(UnsupportedModelError, match=r"quantized already \(gptq\)"):
        open_merged(MemoryCheckpoint(quantized, base.stored), [str(tmp_path / "dora")])


def test_the_command_merges_and_rebuilds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same bytes, and an engine that records its adapters."""
    monkeypatch.chdir(tmp_path)
    folder = tiny_checkpoint(tmp_path, "llama")
    model = tiny_model(tiny_config("llama"))
    trained(model, tmp_path / "poet", target_modules=LINEARS)
    for name in ("a", "b"):
        made = run_engine("build", str(folder), "--merge", "poet:0.5", "--quant", "int8-wo", "-o", f"{name}.engine")
        assert made.exit_code == 0, made.output
    assert Path("a.engine").read_bytes() == Path("b.engine").read_bytes()
    shown = json.loads(run_engine("inspect", "a.engine", "--json").output)
    assert shown["recipe"]["merge"] == {"model": "tiny-llama", "adapters": [{"name": "poet", "weight": "0.5"}]}
    assert shown["name"] == "tiny-llama-poet" and "adapter-0/adapter_config.json" in shown["sources"]
    again = run_engine("rebuild", "a.engine", "--merge", "poet", "--no-evidence")
    assert again.exit_code == 0, again.output
    assert run_engine("rebuild", "a.engine", "--no-evidence").exit_code == 2
    edited(tmp_path / "poet", {"lora_alpha": 6})
    changed = run_engine("rebuild", "a.engine", "--merge", "poet", "--no-evidence")
    assert changed.exit_code == 2 and "adapter-0/adapter_config.json has changed" in changed.output
