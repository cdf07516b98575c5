"""EAGLE-3 heads for tiny models, in the two layouts in which they are published, and their expected draft tokens:
written from the paper (https://arxiv.org/abs/2503.01840) and the layouts alone.
"""

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

EPSILON, THETA = 1e-5, 500.0
# Of tiny heads: the family of the model, and what is not as in `with_eagle`.
EAGLE: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_hidden_layers": 7, "known": 101},
    "llama-own-embedding": {"hidden": 40, "layers": (1, 2, 3), "speculators": True, "norm_before_fc": True},
    "llama-normed": {"layers": (1, 3), "speculators": True, "norm_before_residual": True, "norm_output": True},
    "qwen3_5_text": {"layers": (2, 3), "known": 211, "attention_bias": True},
}


@dataclass(frozen=True)
class WithEagle(Drafter):
    """A model, and an EAGLE head of another checkpoint that drafts tokens for it."""

    model: PreTrainedModel
    checkpoint: MemoryCheckpoint
    config: Mapping[str, Any]  # of the head, with all keys in one object
    tensors: Tensors  # of the head, in the layout of SpecForge
    layers: Sequence[int]  # numbers of the model's layers, from 1, whose outputs the head reads
    speculators: bool  # whether the head is stored in the layout of vLLM's speculators
    says_layers: bool  # whether the stored config names these layers

    role: ClassVar[str] = "eagle"

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """The model's hidden states after each of `layers`, [tokens, layers · hidden]."""
        shown: dict[int, torch.Tensor] = {}

        def keep(count: int, output: Any) -> None:
            shown[count] = (output[0] if isinstance(output, tuple) else output).reshape(len(tokens), -1)

        hooks = [
            layer.register_forward_hook(lambda _, inputs, output, count=count: keep(count, output))
            for count, layer in enumerate(self.model.model.layers, start=1)
        ]
        with torch.inference_mode():
            self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.cat([shown[count] for count in self.layers], -1)

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        states = self.states(tokens)
        return (self._norm(states, "input_norm") if self.config["norm_before_fc"] else states) @ self._weight("fc").T

    def forward(self, tokens: Sequence[int], hidden: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.tensors.get("embed_tokens.weight", self.model.get_input_embeddings().weight.detach())
        embedded = self._norm(table[torch.tensor(tokens)], "midlayer.input_layernorm")
        normed = self._norm(hidden, "midlayer.hidden_norm")
        x = self._attention(torch.cat([embedded, normed], -1), first)
        x = x + (normed if self.config["norm_before_residual"] else hidden)
        h = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = (h @ self._weight(f"midlayer.mlp.{part}_proj").T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ self._weight("midlayer.mlp.down_proj").T
        last = self._norm(x, "norm")
        own = last @ self._weight("lm_head").T
        logits = torch.full((len(tokens), VOCAB_SIZE), -1e30)
        logits[:, self._tokens()] = own
        return logits, last if self.config["norm_output"] else x

    def _tokens(self) -> torch.Tensor:
        """The token of each column of the head's logits."""
        columns = torch.arange(self.config["draft_vocab_size"])
        return columns + self.tensors["d2t"] if "d2t" in self.tensors else columns

    def _attention(self, x: torch.Tensor, first: int) -> torch.Tensor:
        heads, kv_heads, dim = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        angles = torch.arange(first, first + len(x))[:, None] * THETA ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))  # [tokens, 1, dim]

        def project(part: str, count: int) -> torch.Tensor:
            name = f"midlayer.self_attn.{part}_proj"
            return (x @ self._weight(name).T + self.tensors.get(f"{name}.bias", 0)).view(len(x), count, dim)

        def rotated(y: torch.Tensor) -> torch.Tensor:
            left, right = y.chunk(2, -1)
            return y * cos + torch.cat([-right, left], -1) * sin

        q, k, v = rotated(project("q", heads)), rotated(project("k", kv_heads)), project("v", kv_heads)
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * dim**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        y = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        name = "midlayer.self_attn.o_proj"
        return y @ self._weight(name).T + self.tensors.get(f"{name}.bias", 0)

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self._weight(name)

    def store(self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]) -> Path:
        """The head's folder. config, tensors: what is there in the place of its own; without those that are None."""
        own = {name: value.bfloat16() if value.is_floating_point() else value for name, value in self.tensors.items()}
        stored = {name: value for name, value in {**own, **tensors}.items() if value is not None}
        if self.speculators:
            stored = {name.replace("midlayer.", "layers.0."): value for name, value in stored.items()}
        folder.mkdir()
        whole = {**self._stored_config(), **config}
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in whole.items() if value is not None})
        )
        save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
        return folder

    def draft(self, folder: Path) -> HeadFolder:
        head = find_head(self.store(folder, {}, {}))
        assert head is not None
        return head

    def _stored_config(self) -> dict[str, Any]:
        of_head = ("draft_vocab_size", "target_hidden_size", "norm_before_fc", "norm_before_residual", "norm_output")
        own = {key: self.config[key] for key in of_head if key in self.config}
        layer = {key: value for key, value in self.config.items() if key not in of_head}
        if self.speculators:
            return {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "speculators_config": {"algorithm": "eagle3", "proposal_methods": []},
                "eagle_aux_hidden_state_layer_ids": list(self.layers) if self.says_layers else None,
                "transformer_layer_config": layer,
                **own,
            }
        numbered = [layer - 1 for layer in self.layers]
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": numbered} if self.says_layers else None,
            **layer,
            **{key: value for key, value in own.items() if not key.startswith("norm_")},
        }


def with_eagle(
    case: str,
    *,
    seed: int = 7,
    num_hidden_layers: int = 3,
    hidden: int | None = None,
    known: int = VOCAB_SIZE,
    layers: Sequence[int] = (),
    speculators: bool = False,
    norm_before_fc: bool = False,
    norm_before_residual: bool = False,
    norm_output: bool = False,
    attention_bias: bool = False,
) -> WithEagle:
    """A random model and a random head for it.

    Args:
        case: begins with the model's family.
        hidden: columns of the head, which has an embedding of its own then; None are those of the model.
        known: tokens that the head knows.
        layers: as WithEagle has them; () are those that vLLM takes, which the config does not have.
    """
    changed = {"tie_word_embeddings": True, "num_hidden_layers": num_hidden_layers}
    target = tiny_config(case.partition("-")[0], **changed)
    model, random, given = tiny_model(target), torch.Generator().manual_seed(seed), target["hidden_size"]
    width, heads, kv_heads, dim, inner = hidden or given, 6, 3, 10, 37

    def linear(rows: int, columns: int) -> torch.Tensor:
        return _rounded(torch.randn(rows, columns, generator=random) * columns**-0.5)

    def vector(columns: int, mean: float = 1.0) -> torch.Tensor:
        return _rounded(0.2 * torch.randn(columns, generator=random) + mean)

    says_layers = bool(layers)
    layers = layers or (2, num_hidden_layers // 2, num_hidden_layers - 3)
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    tensors = {
        "fc.weight": linear(width, len(layers) * given),
        "norm.weight": vector(width),
        "lm_head.weight": linear(known, width),
        **{f"midlayer.{name}.weight": vector(width) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": vector(width),
        f"{attention}.q_proj.weight": linear(heads * dim, 2 * width),
        f"{attention}.k_proj.weight": linear(kv_heads * dim, 2 * width),
        f"{attention}.v_proj.weight": linear(kv_heads * dim, 2 * width),
        f"{attention}.o_proj.weight": linear(width, heads * dim),
        f"{mlp}.gate_proj.weight": linear(inner, width),
        f"{mlp}.up_proj.weight": linear(inner, width),
        f"{mlp}.down_proj.weight": linear(width, inner),
    }
    if hidden is not None:
        tensors["embed_tokens.weight"] = _rounded(0.3 * torch.randn(VOCAB_SIZE, width, generator=random))
    if norm_before_fc:
        tensors["input_norm.weight"] = vector(len(layers) * given)
    if attention_bias:
        tensors |= {f"{attention}.{part}_proj.bias": vector(heads * dim, 0.0) for part in "q"}
        tensors |= {f"{attention}.{part}_proj.bias": vector(kv_heads * dim, 0.0) for part in "kv"}
        tensors |= {f"{attention}.o_proj.bias": vector(width, 0.0)}
    if known < VOCAB_SIZE:
        tokens = torch.randperm(VOCAB_SIZE, generator=random)[:known].sort().values
        tensors["d2t"] = tokens - torch.arange(known)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, tokens, True)
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "target_hidden_size": given,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": known,
        "attention_bias": attention_bias,
        "norm_before_fc": norm_before_fc,
        "norm_before_residual": norm_before_residual,
        "norm_output": norm_output,
    }
    checkpoint = MemoryCheckpoint.of(model, target)
    return WithEagle(model, checkpoint, config, tensors, layers, speculators, says_layers)


def right_eagle() -> WithEagle:
    """A model whose layers add nothing, so that the next token depends on the last one alone, and a head that chooses
    the same token, with its columns in another order.

    Each of its tokens attends to itself alone: queries and keys are biases that say nothing of tokens, and match best
    where they are rotated by the same angle. What it finds there is the token's embedding.
    """
    head = with_eagle("llama", layers=(2,), speculators=True, norm_before_residual=True, attention_bias=True)
    silent = ("o_proj.weight", "down_proj.weight")
    stored = {name: value * 0 if name.endswith(silent) else value for name, value in head.checkpoint.stored.items()}
    width, dim = head.config["hidden_size"], 8  # 6 heads of 8 columns
    assert width == head.config["num_attention_heads"] * dim
    attention, order = "midlayer.self_attn", torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    zero, one, eye = torch.zeros(width, 2 * width), torch.ones(width), torch.eye(width)
    tensors = {
        **head.tensors,
        "lm_head.weight": stored["model.embed_tokens.weight"].float()[order],
        "norm.weight": stored["model.norm.weight"].float(),
        "d2t": order - torch.arange(VOCAB_SIZE),
        "midlayer.input_layernorm.weight": one,
        "midlayer.hidden_norm.weight": 0 * one,  # the residual is nothing
        "midlayer.mlp.down_proj.weight": 0 * head.tensors["midlayer.mlp.down_proj.weight"],
        f"{attention}.v_proj.weight": torch.cat([eye, 0 * eye], 1),
        f"{attention}.v_proj.bias": 0 * one,
        f"{attention}.o_proj.weight": eye,
        f"{attention}.o_proj.bias": 0 * one,
        **{f"{attention}.{part}_proj.weight": zero for part in "qk"},
        **{f"{attention}.{part}_proj.bias": 100 * one for part in "qk"},
    }
    config = {**head.config, "head_dim": dim, "num_key_value_heads": head.config["num_attention_heads"]}
    return replace(head, checkpoint=replace(head.checkpoint, stored=stored), config=config, tensors=tensors)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()
