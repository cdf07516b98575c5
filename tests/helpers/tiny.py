"""Tiny random models of awkward sizes: as tensors in memory, and as a checkpoint in a folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from enginewright.builder.checkpoint.base import TensorInfo, TokenizerFiles

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
BEGIN, END, TURN = "<|begin|>", "<|end|>", "<|turn|>"  # ids 0, 1, 2
VOCAB_SIZE = 307  # a prime, above the 256 bytes that a byte-level vocabulary starts from

_SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 48, "intermediate_size": 74, "num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen2": {"hidden_size": 50, "intermediate_size": 111, "num_attention_heads": 5, "num_key_value_heads": 1},
    "qwen3": {
        "hidden_size": 48,
        "intermediate_size": 37,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
    },
    "gemma3_text": {
        "hidden_size": 72,
        "intermediate_size": 111,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "query_pre_attn_scalar": 17,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 9.0,
    },
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_TEXT = """The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.
An engine is built from a checkpoint, and the engine answers. The model is small, and its answers are noise.
user: Hello, who are you? assistant: I am a tiny model. Größe, naïve, 東京, 🙂."""


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """What config.json of a tiny model of a family (one of FAMILIES) holds."""
    return {
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        **_SIZES[family],
        **overrides,
    }


def tiny_model(config: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """transformers' model of a config, in fp32, with random weights that are exact in bfloat16.

    Norms and biases are random too, and projections are large enough that a fault anywhere shows in the logits.
    """
    settings = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **json.loads(json.dumps(settings))), attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                values = 0.2 * values + (0.0 if config["model_type"].startswith("gemma") else 1.0)
            elif name.endswith(".bias") or "embed" in name:
                values = 0.3 * values
            else:
                values = values * parameter.shape[-1] ** -0.5
            parameter.copy_(values.to(torch.bfloat16))
    return model  # type: ignore[no-any-return]


@dataclass
class MemoryCheckpoint:
    """A Checkpoint without files. reads: the names of the tensors that were read, in order."""

    config: Mapping[str, Any]
    stored: Mapping[str, torch.Tensor]
    name: str = "tiny"
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    @staticmethod
    def of(model: PreTrainedModel, config: Mapping[str, Any]) -> "MemoryCheckpoint":
        """The tensors that transformers would save, in bfloat16."""
        tied = model.config.tie_word_embeddings
        stored = {
            name: value.to(torch.bfloat16)
            for name, value in model.state_dict().items()
            if not (tied and name == "lm_head.weight")
        }
        return MemoryCheckpoint(config, stored)

    @property
    def tokenizer(self) -> TokenizerFiles:
        return TokenizerFiles(_tokenizer_json().encode(), _tokenizer_config(), _CHAT_TEMPLATE)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(value.dtype, tuple(value.shape)) for name, value in self.stored.items()}

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self.stored[name]

    def source_hashes(self) -> Mapping[str, str]:
        return {}


def wide_checkpoint() -> MemoryCheckpoint:
    """So wide that sums in another order become another bfloat16 somewhere, and two splits of K."""
    config = tiny_config(
        "llama",
        num_hidden_layers=2,
        hidden_size=160,
        intermediate_size=600,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return MemoryCheckpoint.of(tiny_model(config), config)


def tiny_checkpoint(tmp_path: Path, family: str, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """A checkpoint folder, as a hub would have it. Further arguments replace entries of `tiny_config`."""
    folder = tmp_path / f"tiny-{family}"
    model = tiny_model(tiny_config(family, **overrides))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    generation = {"bos_token_id": 0, "eos_token_id": [1, 2], "do_sample": True, "temperature": 0.8, "top_k": 20}
    _write_json(folder / "generation_config.json", generation)
    return folder


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "add_bos_token": True,
        "model_max_length": 512,
        "chat_template": _CHAT_TEMPLATE,
    }


@cache
def _tokenizer_json() -> str:
    """A byte-level BPE, as Llama 3's and Qwen's: it starts a text with BEGIN, and knows every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[BEGIN, END, TURN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 0)]
    )
    return tokenizer.to_str(pretty=True)
