"""Tiny models with heads or layers that draft tokens for them, and the expected draft tokens by transformers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from enginewright.builder.draft import Automatic, Draft
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model

Tensors = Mapping[str, torch.Tensor]

# By family: the config of a one-layer model whose layer is like the one that drafts tokens, and the names of the
# drafting layer's tensors, of which the last is the prefix of the layer's own.
AFTER = tuple(f"model.layers.3.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""))
NEXT_TO = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0.")
MTP: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "qwen3_5_text": ({"layer_types": ["full_attention"]}, NEXT_TO),
    "qwen3_5_moe_text": ({"layer_types": ["full_attention"]}, NEXT_TO),
    "qwen3_next": ({"layer_types": ["full_attention"]}, NEXT_TO),
    "glm4_moe": ({"first_k_dense_replace": 0}, AFTER),
    "glm4_moe_lite": ({"mlp_layer_types": ["sparse"]}, AFTER),
    "deepseek_v3": ({"first_k_dense_replace": 0}, AFTER),
}
SHORT_BY_ONE = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")  # families that store norms less 1


class Drafter(ABC):
    """A model, and heads or a layer that draft tokens for it from its hidden states."""

    role: ClassVar[str]
    checkpoint: MemoryCheckpoint  # the model's

    @abstractmethod
    def draft(self, folder: Path) -> Draft:
        """The draft that an engine is built with. folder: a folder for a checkpoint of the head's own."""

    @abstractmethod
    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """The model's states in the form that the head reads, [tokens, columns of its own states]."""

    @abstractmethod
    def forward(self, tokens: Sequence[int], hidden: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the head on tokens from position `first` + 1 on, with the model's hidden states from `first` on.

        Returns:
            Its logits, [tokens, vocabulary], and its own states, [tokens, columns].
        """

    @torch.inference_mode()
    def shortfalls(self, tokens: Sequence[int], draft_tokens: Sequence[int], first: int = 0) -> list[float]:
        """Measures how far the head's logit of each draft token lies below its largest logit.

        Args:
            tokens: the tokens before the draft tokens.
            draft_tokens: the draft tokens.
            first: the position that the head begins at.

        Returns:
            A difference of logits for each draft token; 0 where it is the head's first choice.
        """
        states, read, found = self.hidden(tokens[:-1])[first:], list(tokens[first + 1 :]), []
        for draft in draft_tokens:
            logits, own = self.forward(read, states, first)
            found.append(float(logits[-1].max() - logits[-1, draft]))
            read.append(draft)
            states = torch.cat([states, own[-1:]])
        return found


@dataclass(frozen=True)
class WithMtp(Drafter):
    """A model, and a multi-token prediction layer of its checkpoint that drafts tokens for it."""

    role: ClassVar[str] = "mtp"

    model: PreTrainedModel
    layer: PreTrainedModel  # of one layer, and a norm
    norms: Tensors  # of embeddings, and of hidden states
    fc: torch.Tensor  # [hidden, 2 · hidden]
    checkpoint: MemoryCheckpoint

    def draft(self, folder: Path) -> Draft:
        return Automatic()

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """The model's states after its last norm."""
        with torch.inference_mode():
            states: torch.Tensor = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    def forward(self, tokens: Sequence[int], hidden: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            embedded = self.model.get_input_embeddings()(torch.tensor(tokens))
            both = [self._norm(embedded, "embedding"), self._norm(hidden, "hidden")]
            x = torch.cat(both, -1) @ self.fc.T
            positions = torch.arange(first, first + len(tokens))[None]
            states = self.layer.model(inputs_embeds=x[None], position_ids=positions).last_hidden_state[0]
            return self.model.lm_head(states), states

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        epsilon = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * self.norms[name]


def with_mtp(family: str, seed: int = 5, **changes: Any) -> WithMtp:
    """A random model of a family with an MTP layer, as its publisher stores it."""
    config = tiny_config(family, **changes)
    model = tiny_model(config)
    like, (embedding_norm, hidden_norm, joined, norm, prefix) = MTP[family]
    layer = tiny_model({**config, "num_hidden_layers": 1, "tie_word_embeddings": False, **like}, seed=seed)
    random, width = torch.Generator().manual_seed(seed), config["hidden_size"]
    less = 1.0 if family in SHORT_BY_ONE else 0.0
    norms = {
        name: (0.2 * torch.randn(width, generator=random) + 1 - less).bfloat16().float()
        for name in ("embedding", "hidden")
    }
    fc = (torch.randn(width, 2 * width, generator=random) * (2 * width) ** -0.5).bfloat16().float()
    stored = {
        f"{embedding_norm}.weight": norms["embedding"],
        f"{hidden_norm}.weight": norms["hidden"],
        f"{joined}.weight": fc,
        f"{norm}.weight": layer.model.norm.weight.data,
    }
    for name, value in layer.state_dict().items():
        if name.startswith("model.layers.0."):
            stored[name.replace("model.layers.0.", prefix)] = value
    stored = {name: value.bfloat16() for name, value in stored.items()}
    checkpoint = MemoryCheckpoint(config, {**MemoryCheckpoint.of(model, config).stored, **stored})
    return WithMtp(model, layer, {name: value + less for name, value in norms.items()}, fc, checkpoint)


def right_mtp() -> WithMtp:
    """A model whose layers add nothing, so that the next token depends on the last one alone, and an MTP layer that
    passes that token on.
    """
    family = "qwen3_5_text"
    head = with_mtp(family, tie_word_embeddings=True)
    checkpoint = head.checkpoint
    embedding_norm, _, joined, norm, _ = MTP[family][1]
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    stored = {name: value * 0 if name.endswith(silent) else value for name, value in checkpoint.stored.items()}
    width = checkpoint.config["hidden_size"]
    one = torch.full((width,), 0.0 if family in SHORT_BY_ONE else 1.0, dtype=torch.bfloat16)
    passed_on = torch.cat([torch.eye(width), torch.zeros(width, width)], 1).bfloat16()
    stored |= {f"{embedding_norm}.weight": one, f"{joined}.weight": passed_on}
    stored[f"{norm}.weight"] = stored["model.norm.weight"]
    return replace(head, checkpoint=replace(checkpoint, stored=stored))
