"""Models with pictures: their text model is built, and what else they hold is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.models import build_graph, check_config
from enginewright.errors import UnsupportedModelError
from tests import tolerances
from tests.checkpoint.test_models import STEPS, graph_logits
from tests.helpers.graphs import content
from tests.helpers.tiny import MemoryCheckpoint, saved, tiny_config

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
VISION_OF_GEMMA_4: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
VISION_OF_QWEN: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 40,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
PARTS = {"gemma4": ("vision_tower", "embed_vision")}  # that are left out
OF_TEXTS: dict[str, dict[str, Any]] = {"gemma3": {"final_logit_softcapping": None}, "gemma4": {"pad_token_id": 0}}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4, "image_token_index": 5},
}
CASES = [("gemma4", "gemma4_text"), ("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("mistral3", "ministral3")]


def whole_config(wrapper: str, text_type: str) -> dict[str, Any]:
    text = tiny_config(text_type, **OF_TEXTS.get(wrapper, {}))
    vision = {"gemma4": VISION_OF_GEMMA_4, "qwen3_5": VISION_OF_QWEN, "qwen3_5_moe": VISION_OF_QWEN}
    picture = "id" if wrapper in vision else "index"
    whole = {"model_type": wrapper, "text_config": text, "vision_config": vision.get(wrapper, VISION)}
    return {**whole, f"image_token_{picture}": 5}


def whole_model(wrapper: str, text_type: str) -> PreTrainedModel:
    """The complete model of transformers, with random weights."""
    values = whole_config(wrapper, text_type)
    settings = json.loads(json.dumps({**values, **OTHERS.get(wrapper, {})}))
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(settings.pop("model_type"), **settings), attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "embed" in name or parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * scale).to(torch.bfloat16))
    for name, buffer in model.named_buffers():
        if name.endswith("embed_scale"):
            buffer.copy_(buffer.to(torch.bfloat16))
    return model  # type: ignore[no-any-return]


def whole_checkpoint(wrapper: str, text_type: str) -> tuple[MemoryCheckpoint, np.ndarray, np.ndarray]:
    """The checkpoint of `whole_model`; and of some tokens, its logits."""
    model, vocab_size = whole_model(wrapper, text_type), whole_config(wrapper, text_type)["text_config"]["vocab_size"]
    tokens = np.random.default_rng(0).integers(6, vocab_size, (1, sum(STEPS)))
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    tied = model.config.tie_word_embeddings
    stored = {
        name: value.to(torch.bfloat16)
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    return MemoryCheckpoint(json.loads(model.config.to_json_string()), stored), tokens, logits


@pytest.mark.parametrize(
    ("wrapper", "text_type"), [*CASES, ("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text")]
)
def test_what_transformers_saves_of_the_whole_is_the_same_model(wrapper: str, text_type: str, tmp_path: Path) -> None:
    model = whole_model(wrapper, text_type).to(torch.bfloat16)
    in_memory = MemoryCheckpoint.of(model, json.loads(model.config.to_json_string()))
    again = AutoModelForImageTextToText.from_pretrained(saved(model, tmp_path / "first"))
    for folder in (tmp_path / "first", saved(again, tmp_path / "again")):
        graph = build_graph(open_checkpoint(str(folder)))
        assert content(graph) == content(build_graph(in_memory))


def as_published(name: str) -> str:
    """The order of names in the hub's checkpoints."""
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    return "language_model." + name if name.startswith("lm_head") else name.removeprefix("model.")


@pytest.mark.parametrize(("wrapper", "text_type"), CASES)
def test_the_text_model_is_transformers(wrapper: str, text_type: str) -> None:
    checkpoint, tokens, expected = whole_checkpoint(wrapper, text_type)
    assert any("vision_tower" in name for name in checkpoint.stored)
    published = {as_published(name): value for name, value in checkpoint.stored.items()}
    for stored in (checkpoint.stored, published):
        graph = build_graph(MemoryCheckpoint(checkpoint.config, stored))
        assert np.abs(graph_logits(graph, tokens) - expected).max() < tolerances.DENSE_LOGITS
        notes = json.loads(graph.metadata_props["enginewright.notes"])
        parts = PARTS.get(wrapper, ("vision_tower", "multi_modal_projector"))
        assert notes == {
            f"{part} is left out, since only texts can be read": sum(part in name for name in checkpoint.stored)
            for part in parts
        }


def test_other_parts_and_keys_are_refused() -> None:
    config = whole_config("gemma3", "gemma3_text")
    check_config(config)
    with pytest.raises(UnsupportedModelError, match="audio_config"):
        check_config({**config, "audio_config": {}})
    with pytest.raises(UnsupportedModelError, match="n_routed_experts = 8"):
        check_config({**config, "text_config": {**config["text_config"], "n_routed_experts": 8}})
    with pytest.raises(UnsupportedModelError, match="models of type 'qwen9'"):
        check_config({**config, "text_config": {**config["text_config"], "model_type": "qwen9"}})
    checkpoint, _, _ = whole_checkpoint("gemma3", "gemma3_text")
    checkpoint.stored = {**checkpoint.stored, "audio_tower.weight": torch.zeros(1)}
    with pytest.raises(UnsupportedModelError, match=r"audio_tower\.weight"):
        build_graph(checkpoint)


def test_published_configs_of_the_whole() -> None:
    """Gemma 3 4B's text_config leaves out what is transformers' default."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    top = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
    }
    check_config({**top, "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}})
