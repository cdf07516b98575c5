"""Medusa heads for tiny models, in the published layout and in vLLM's, and their expected draft tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from enginewright.builder.checkpoint.head import HeadFolder, find_head
from tests.helpers.heads import Drafter, Tensors
from tests.helpers.tiny import VOCAB_SIZE, MemoryCheckpoint, tiny_config, tiny_model

# Of tiny heads: the family of the model, and what is not as in `with_medusa`.
MEDUSA: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama-vllm": {"heads": 2, "layers": 2, "vllm": True},
    "qwen3_5_text": {"heads": 5, "prefix": "medusa_head."},
    "qwen3": {"heads": 1},
}


@dataclass(frozen=True)
class WithMedusa(Drafter):
    """A model, and Medusa heads of another checkpoint that draft tokens for it."""

    role: ClassVar[str] = "medusa"

    model: PreTrainedModel
    checkpoint: MemoryCheckpoint
    tensors: Tensors  # of the heads, as they are published
    heads: int
    layers: int  # of each head
    vllm: bool  # whether they are stored as vLLM does, which is without biases
    prefix: str  # of all names

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """The model's states after its last norm."""
        with torch.inference_mode():
            states: torch.Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    def logits(self, states: torch.Tensor, head: int) -> torch.Tensor:
        """A head's logits for states of the model, [tokens, vocabulary]."""
        x = states
        for layer in range(self.layers):
            h = x @ self.tensors[f"{head}.{layer}.linear.weight"].T + self.tensors.get(f"{head}.{layer}.linear.bias", 0)
            x = x + torch.nn.functional.silu(h)
        return x @ self.tensors[f"{head}.{self.layers}.weight"].T

    def forward(self, tokens: Sequence[int], hidden: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("heads give no states")

    @torch.inference_mode()
    def shortfalls(self, tokens: Sequence[int], draft_tokens: Sequence[int], first: int = 0) -> list[float]:
        state = self.hidden(tokens[:-1])[-1]
        said = [self.logits(state, head) for head in range(len(draft_tokens))]
        return [float(logits.max() - logits[draft]) for logits, draft in zip(said, draft_tokens, strict=True)]

    def store(self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]) -> Path:
        """The heads' folder. config, tensors: what is there in the place of its own; without those that are None."""
        own = {self._stored_name(name): value.bfloat16() for name, value in self.tensors.items()}
        stored = {name: value for name, value in {**own, **tensors}.items() if value is not None}
        folder.mkdir()
        published = {"medusa_num_heads": self.heads, "medusa_num_layers": self.layers, "base_model_name_or_path": "x/y"}
        of_vllm = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.checkpoint.config["hidden_size"],
            "vocab_size": VOCAB_SIZE,
            "truncated_vocab_size": VOCAB_SIZE,
            "num_heads": self.heads,
            "num_hidden_layers": self.layers,
            "max_paths": 64,
            "topk": 10,
        }
        whole = {**(of_vllm if self.vllm else published), **config}
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in whole.items() if value is not None})
        )
        save_file(stored, folder / "medusa_lm_head.safetensors")
        return folder

    def draft(self, folder: Path) -> HeadFolder:
        head = find_head(self.store(folder, {}, {}))
        assert head is not None
        return head

    def _stored_name(self, name: str) -> str:
        if not self.vllm:
            return f"{self.prefix}{name}"
        head, layer, *_ = name.split(".")
        return f"lm_heads.{head}.weight" if int(layer) == self.layers else f"blocks.{head}.layers.{layer}.weight"


def with_medusa(
    case: str, *, seed: int = 9, heads: int = 3, layers: int = 1, vllm: bool = False, prefix: str = "", **changes: Any
) -> WithMedusa:
    """A random model and random heads for it.

    Args:
        case: begins with the model's family.
    """
    target = tiny_config(case.partition("-")[0], **{"tie_word_embeddings": True, **changes})
    model, width = tiny_model(target), target["hidden_size"]
    random = torch.Generator().manual_seed(seed)
    tensors = dict[str, torch.Tensor]()
    for head in range(heads):
        for layer in range(layers):
            weight = torch.randn(width, width, generator=random) * width**-0.5
            tensors[f"{head}.{layer}.linear.weight"] = weight.bfloat16().float()
            if not vllm:
                tensors[f"{head}.{layer}.linear.bias"] = torch.randn(width, generator=random).bfloat16().float()
        logits = torch.randn(VOCAB_SIZE, width, generator=random) * width**-0.5
        tensors[f"{head}.{layers}.weight"] = logits.bfloat16().float()
    return WithMedusa(model, MemoryCheckpoint.of(model, target), tensors, heads, layers, vllm, prefix)


def right_medusa() -> WithMedusa:
    """A model whose next token is the same after every token, and heads that choose it too."""
    head = with_medusa("llama", heads=4, tie_word_embeddings=False)
    silent = ("o_proj.weight", "down_proj.weight")
    stored = {name: value * 0 if name.endswith(silent) else value for name, value in head.checkpoint.stored.items()}
    stored["model.embed_tokens.weight"] = stored["model.embed_tokens.weight"][:1].repeat(VOCAB_SIZE, 1)
    tensors = {name: value * 0 for name, value in head.tensors.items()}
    tensors |= {f"{number}.1.weight": stored["lm_head.weight"].float() for number in range(head.heads)}
    return replace(head, checkpoint=replace(head.checkpoint, stored=stored), tensors=tensors)
