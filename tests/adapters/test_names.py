"""Adapters of models whose modules have other names in checkpoints, since transformers renames what it loads."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModel, PreTrainedModel

from enginewright.builder.adapters import Adapter, MergedCheckpoint, open_merged
from enginewright.builder.adapters.names import BaseNames
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.models import build_graph
from enginewright.builder.pooling import Pooling
from enginewright.errors import EngineError, UnsupportedModelError
from tests import tolerances
from tests.adapters.test_merge import as_model
from tests.adapters.test_served import TOKENS, check_answers
from tests.checkpoint.test_wrappers import as_published, whole_model
from tests.helpers.adapters import logits, prepared, trained
from tests.helpers.tiny import ALL_EXPERTS, MemoryCheckpoint, saved, tiny_config, tiny_model

OF_GPT2: list[dict[str, Any]] = [
    {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True},
    {
        "target_modules": ["c_attn", "c_proj"],
        "fan_in_fan_out": True,
        "rank_pattern": {"transformer.h.0.attn.c_attn": 3, "transformer.h.1.mlp.c_proj": 11},
        "alpha_pattern": {"transformer.h.0.attn.c_attn": 9.0},
    },
    {"target_modules": ["c_attn"], "fan_in_fan_out": True, "trainable_token_indices": {"transformer.wte": TOKENS}},
    {"target_modules": ["wte", "lm_head"]},
    {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"},
]


def renamed(checkpoint: MemoryCheckpoint, name: Callable[[str], str]) -> MemoryCheckpoint:
    """A checkpoint whose tensors have other names."""
    stored = {name(old): value for old, value in checkpoint.stored.items()}
    return MemoryCheckpoint(checkpoint.config, stored, pooling=checkpoint.pooling)


def published(name: str) -> str:
    """The name in GPT-2's checkpoint on the hub."""
    return name.removeprefix("transformer.")


def ids_of(lora: Any) -> str:
    return "-".join(map(str, lora)) if isinstance(lora, dict) else str(lora)


@pytest.mark.parametrize("lora", OF_GPT2, ids=ids_of)
def test_gpt2_as_it_is_published(lora: dict[str, Any], tmp_path: Path) -> None:
    """PEFT's model of the checkpoint on the hub has modules that begin with `transformer.`, and its tensors do not."""
    model, engine = tiny_model(config := tiny_config("gpt2")), tmp_path / "tiny.engine"
    checkpoint = renamed(MemoryCheckpoint.of(model, config), published)
    assert not any(name.startswith("transformer.") for name in checkpoint.stored)
    adapted = trained(model, tmp_path / "adapter", **lora)
    build_engine(checkpoint, BuildConfig(gate=None), engine)
    if lora.get("bias") == "all":
        with pytest.raises(UnsupportedModelError, match=r"h\.0\.ln_1"):  # a norm has one, too
            prepared(engine, tmp_path / "adapter")
    else:
        check_answers(engine, model, adapted, tmp_path, "bf16")
    merged = MergedCheckpoint(checkpoint, [Adapter(tmp_path / "adapter")])
    build_graph(merged)
    whole = MergedCheckpoint(MemoryCheckpoint.of(model, config), [Adapter(tmp_path / "adapter")])
    assert {published(name) for name in whole.tensors} == merged.tensors.keys()
    for name in whole.tensors:
        assert torch.equal(whole.read(name), merged.read(published(name))), name
    if "lm_head" not in lora["target_modules"]:
        tokens = torch.arange(5, 28)[None]
        assert (logits(as_model(whole), tokens) - logits(adapted, tokens)).abs().max() < tolerances.DENSE_LOGITS


@pytest.mark.parametrize("modules", [["wte"], ["lm_head"]])
@pytest.mark.parametrize("is_published", [False, True])
def test_a_tied_head_of_gpt2(modules: list[str], is_published: bool, tmp_path: Path) -> None:
    """PEFT changes the embedding or the head alone, so the merged model has both."""
    model = tiny_model(config := tiny_config("gpt2"))
    adapted = trained(model, tmp_path, target_modules=modules)
    checkpoint = MemoryCheckpoint.of(model, config)
    merged = MergedCheckpoint(renamed(checkpoint, published) if is_published else checkpoint, [Adapter(tmp_path)])
    assert "lm_head.weight" in merged.tensors
    build_graph(merged)
    tokens, reference = torch.arange(5, 28)[None], tiny_model({**config, "tie_word_embeddings": False})
    stored = {name: merged.read(name).float() for name in merged.tensors}
    names = {name: f"transformer.{name}" if is_published and "lm_head" not in name else name for name in stored}
    reference.load_state_dict({names[name]: value for name, value in stored.items()})
    assert (logits(reference, tokens) - logits(adapted, tokens)).abs().max() < tolerances.DENSE_LOGITS


def test_gpt2_with_the_prefix(tmp_path: Path) -> None:
    """The form that transformers saves."""
    model, engine = tiny_model(config := tiny_config("gpt2")), tmp_path / "tiny.engine"
    adapted = trained(model, tmp_path / "adapter", **OF_GPT2[0])
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(gate=None), engine)
    check_answers(engine, model, adapted, tmp_path, "bf16")


@pytest.mark.parametrize(
    ("family", "modules", "tolerance"),
    [
        ("nemotron_h", ["in_proj", "out_proj", "q_proj", "o_proj", "shared_experts.up_proj"], "bf16"),
        # Its recurrence makes more of what rounding changes: without an adapter 0.09.
        ("kimi_linear", ["f_a_proj", "f_b_proj", "o_proj", "shared_experts.gate_proj", "mlp.down_proj"], "int8-wo"),
    ],
)
def test_families_that_are_saved_with_other_names(
    family: str, modules: list[str], tolerance: str, tmp_path: Path
) -> None:
    model, engine = tiny_model(tiny_config(family, **ALL_EXPERTS.get(family, {}))), tmp_path / "tiny.engine"
    saved(copy.deepcopy(model).to(torch.bfloat16), tmp_path / "base")
    adapted = trained(model, tmp_path / "adapter", target_modules=modules)
    base = open_checkpoint(str(tmp_path / "base"))
    build_engine(base, BuildConfig(gate=None), engine)
    check_answers(engine, model, adapted, tmp_path, tolerance)
    check_merged(base, adapted, tmp_path)


def check_merged(base: Any, adapted: PeftModel, folder: Path) -> None:
    """Compares merged tensors with those that transformers saves of PEFT's merged model."""
    saved(adapted.merge_and_unload(), folder / "merged")  # type: ignore[operator]
    expected, merged = open_checkpoint(str(folder / "merged")), open_merged(base, [str(folder / "adapter")])
    assert merged.tensors.keys() == expected.tensors.keys()
    for name in merged.tensors:
        assert torch.allclose(merged.read(name).float(), expected.read(name).float(), rtol=0, atol=1e-6), name
    build_graph(merged)


@pytest.mark.parametrize("form", ["as saved", "as published"])
@pytest.mark.parametrize("trained_as", ["whole", "text model"])
def test_the_text_model_of_one_with_pictures(form: str, trained_as: str, tmp_path: Path) -> None:
    """PEFT's names depend on what was loaded: the whole model, or its text model alone."""
    whole, engine = whole_model("gemma3", "gemma3_text").float(), tmp_path / "tiny.engine"
    checkpoint = MemoryCheckpoint.of(whole, whole.config.to_dict())
    if form == "as published":
        checkpoint = renamed(checkpoint, as_published)
    model: PreTrainedModel = whole
    if trained_as == "text model":
        model = tiny_model(tiny_config("gemma3_text", final_logit_softcapping=None))
        model.model.load_state_dict(whole.model.language_model.state_dict())
        model.tie_weights()
    modules = [f".*layers.{layer}.*(q_proj|down_proj)" for layer in range(3)]
    adapted = trained(model, tmp_path / "adapter", target_modules="|".join(modules), exclude_modules=".*vision_tower.*")
    names = list(Adapter(tmp_path / "adapter").updates)
    assert all(name.startswith("model.language_model." if trained_as == "whole" else "model.layers.") for name in names)
    build_engine(checkpoint, BuildConfig(gate=None), engine)
    check_answers(engine, model, adapted, tmp_path, "bf16")
    merged = MergedCheckpoint(checkpoint, [Adapter(tmp_path / "adapter")])
    for name, value in adapted.merge_and_unload().state_dict().items():
        own = name if trained_as == "whole" else name.replace("model.", "model.language_model.", 1)
        own = as_published(own) if form == "as published" else own
        if own in merged.tensors:
            assert torch.allclose(merged.read(own).float(), value, rtol=0, atol=1e-6), name
    changed = {name for name in merged.tensors if merged.tensors[name].dtype == torch.float32}
    assert len(changed) == len(names)
    build_graph(merged)


@pytest.mark.parametrize("is_stored_without", [False, True])
@pytest.mark.parametrize("is_trained_without", [False, True])
def test_embedding_models(is_stored_without: bool, is_trained_without: bool, tmp_path: Path) -> None:
    """transformers' model of one has no head, and PEFT's adapters of it no `model.`."""
    model = tiny_model(config := tiny_config("qwen3"))
    stored = {name: value for name, value in MemoryCheckpoint.of(model, config).stored.items() if "lm_head" not in name}
    checkpoint = MemoryCheckpoint(config, stored, pooling=Pooling("last"))
    if is_stored_without:
        checkpoint = renamed(checkpoint, lambda name: name.removeprefix("model."))
    of_peft: Any = model
    if is_trained_without:
        of_peft = AutoModel.from_config(model.config).eval()
        of_peft.load_state_dict(model.model.state_dict())
    adapted = trained(of_peft, tmp_path, target_modules=["q_proj", "down_proj"])
    merged = MergedCheckpoint(checkpoint, [Adapter(tmp_path)])
    expected = adapted.merge_and_unload().state_dict()
    for name in merged.tensors:
        own = name.removeprefix("model.") if is_trained_without else f"model.{name.removeprefix('model.')}"
        assert torch.allclose(merged.read(name).float(), expected[own], rtol=0, atol=1e-6), name
    build_graph(merged)


def test_a_model_with_a_head_takes_no_adapter_of_one_without(tmp_path: Path) -> None:
    """PEFT would leave its tensors out, with a warning."""
    model = tiny_model(config := tiny_config("llama"))
    trained(AutoModel.from_config(model.config), tmp_path / "adapter", target_modules=["q_proj"])
    checkpoint, engine = MemoryCheckpoint.of(model, config), tmp_path / "tiny.engine"
    with pytest.raises(
        UnsupportedModelError, match=r"changes layers\.0\.self_attn\.q_proj\.weight, which the checkpoint"
    ):
        MergedCheckpoint(checkpoint, [Adapter(tmp_path / "adapter")])
    build_engine(checkpoint, BuildConfig(gate=None), engine)
    with pytest.raises(UnsupportedModelError, match=r"changes layers\.0\.self_attn\.q_proj, which it cannot"):
        prepared(engine, tmp_path / "adapter")


def test_names() -> None:
    base = BaseNames(["h.0.attn.c_attn.weight", "wte.weight", "lm_head.weight"])
    assert base.find("transformer.h.0.attn.c_attn") == "h.0.attn.c_attn"
    assert base.find("transformer.wte") == "wte"
    assert base.find("h.0.attn.c_attn") == "h.0.attn.c_attn"
    assert base.find("transformer.h.1.attn.c_attn") == "transformer.h.1.attn.c_attn"
    assert base.find("lm_head") == "lm_head"
    own_first = BaseNames(["model.layers.0.q.weight", "backbone.layers.0.q.weight", "layers.0.q.weight"])
    assert own_first.find("model.layers.0.q") == "model.layers.0.q"
    experts = BaseNames(["model.layers.0.block_sparse_moe.experts.0.w1.weight"])
    assert experts.find("model.layers.0.mlp.experts") == "model.layers.0.block_sparse_moe.experts"
    assert BaseNames(["model.layers.0.q.weight"]).find("layers.0.q") == "layers.0.q"
    assert BaseNames(["model.layers.0.q.weight"], is_without_head=True).find("layers.0.q") == "model.layers.0.q"


def test_two_modules_that_are_one_of_the_base(tmp_path: Path) -> None:
    trained(tiny_model(tiny_config("gpt2")), tmp_path, target_modules=["c_attn"], fan_in_fan_out=True)
    adapter = Adapter(tmp_path)
    adapter.updates = {**adapter.updates, "h.0.attn.c_attn": adapter.updates["transformer.h.0.attn.c_attn"]}
    with pytest.raises(EngineError, match=r"another of its modules are h\.0\.attn\.c_attn"):
        adapter.named_as(BaseNames(["h.0.attn.c_attn.weight"]))
