"""Models with a text model and other parts, such as a vision tower: the text model is built, the rest left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from enginewright.builder.checkpoint.base import Checkpoint, TensorInfo
from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_keys import Harmless

_OTHERS = "It is about pictures or sounds, which are left out."


@dataclass(frozen=True)
class Wrapper:
    """The position of a text model in another one."""

    about: str  # description in one line, for users
    text_type: str  # the text model's type, if its config has none
    defaults: Mapping[str, Any]  # values of transformers for keys that the text model's config lacks
    harmless: tuple[str, ...]  # keys of the whole config that are about the other parts
    # Prefixes of the other parts' tensors, with `model.` before them, or without.
    left_out: tuple[str, ...] = ("vision_tower", "multi_modal_projector")


_OF_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_OF_QWEN = ("image_token_id", "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id")

# `model_type` of the whole → position of the text model.
WRAPPERS = {
    "gemma3": Wrapper(
        "Gemma 3 with pictures: its text model, gemma3_text.",
        "gemma3_text",
        {**_OF_GEMMA, "vocab_size": 262_208, "num_hidden_layers": 26},
        ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "vision_config"),
    ),
    "gemma4": Wrapper(
        "Gemma 4 with pictures and sounds: its text model, gemma4_text.",
        "gemma4_text",
        {**_OF_GEMMA, "vocab_size": 262_144, "num_hidden_layers": 30},
        (
            *("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
            *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id"),
            *("vision_config", "vision_soft_tokens_per_image"),
        ),
        ("vision_tower", "embed_vision", "audio_tower", "embed_audio"),
    ),
    "mistral3": Wrapper(
        "Mistral Small 3.1 and 4, and Ministral 3, with pictures: their text model, mistral, mistral4 or ministral3.",
        "mistral",
        {"num_key_value_heads": 8},
        (
            "image_token_index",
            "multimodal_projector_bias",
            "projector_hidden_act",
            "spatial_merge_size",
            "vision_config",
            "vision_feature_layer",
        ),
    ),
    "qwen3_5": Wrapper(
        "Qwen3.5 with pictures: its text model, qwen3_5_text.", "qwen3_5_text", {}, _OF_QWEN, ("visual",)
    ),
    "qwen3_5_moe": Wrapper(
        "Qwen3.5 with experts and pictures: its text model, qwen3_5_moe_text.",
        "qwen3_5_moe_text",
        {},
        _OF_QWEN,
        ("visual",),
    ),
}
# Prefix of names in the whole → in the text model alone. transformers has had both orders.
RENAMED = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the text model: the whole one, if the model has no other parts.

    Raises:
        UnsupportedModelError: the whole config has an unknown key.
    """
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return config
    whole = ConfigReader(config)
    whole.read(str, "model_type")
    text = {"model_type": wrapper.text_type, **wrapper.defaults, **whole.read(dict, "text_config")}
    # those of the whole config take precedence
    for kind, key in ((dict, "quantization_config"), (bool, "tie_word_embeddings")):
        if (value := whole.read(kind, key, default=None)) is not None:
            text[key] = value
    whole.refuse_unread(dict.fromkeys(wrapper.harmless, Harmless(_OTHERS)))
    return text


class TextModelTensors:
    """The text model of a checkpoint with other parts, as a source of tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        left_out = WRAPPERS[str(checkpoint.config["model_type"])].left_out
        parts = {name: name.removeprefix("model.").partition(".")[0] for name in checkpoint.tensors}
        self._sources = {_text_name(name): name for name, part in parts.items() if part not in left_out}
        self.tensors: Mapping[str, TensorInfo] = {
            name: checkpoint.tensors[source] for name, source in self._sources.items()
        }
        self.notes: dict[str, int] = {}
        for part in left_out:
            if count := list(parts.values()).count(part):
                self.notes[f"{part} is left out, since only texts can be read"] = count

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor by its name in the text model."""
        return self._checkpoint.read(self._sources[name])


def _text_name(name: str) -> str:
    for beginning, instead in RENAMED.items():
        if name.startswith(beginning):
            return instead + name.removeprefix(beginning)
    return name
