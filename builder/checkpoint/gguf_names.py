"""What the tensors of a GGUF file are called in the Hugging Face model, and how its converter changed them.

Source: llama.cpp's convert_hf_to_gguf.py. It renames every tensor; for `llama` it also reorders the rows of Q
and K, so that the two dimensions which rope rotates together lie side by side; for Gemma it stores 1 + w for
the weight of every norm, as w + 1 in float32.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from enginewright.builder.checkpoint.gguf_header import GgufHeader, GgufTensor
from enginewright.errors import EngineError, UnsupportedModelError

# Tensors that are not weights of the Hugging Face model: ROPE_FACTORS is read into the config.
ROPE_FACTORS = "rope_freqs.weight"

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
GATE_IN_UP = {**PROJECTIONS, "ffn_up": "mlp.gate_up_proj"}  # one tensor of both
ATTENTION = {stem: name for stem, name in PROJECTIONS.items() if stem.startswith("attn")}
# One tensor of all experts, [experts, rows, columns]; its name has the expert's number where the braces are.
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
# StarCoder 2 calls the MLP's matrices c_fc and c_proj.
NO_GATE = ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """What one `general.architecture` stands for."""

    model_type: str  # of the Hugging Face config
    layer: Mapping[str, str]  # GGUF stem → Hugging Face stem, within a layer
    paired_rope: bool = False  # the rows of Q and K are reordered
    shifted_norms: bool = False  # norms hold 1 + w


ARCHITECTURES = {
    "llama": Architecture("llama", PROJECTIONS | TWO_NORMS, paired_rope=True),
    "qwen2": Architecture("qwen2", PROJECTIONS | TWO_NORMS),
    "qwen3": Architecture("qwen3", PROJECTIONS | TWO_NORMS | HEAD_NORMS),
    "qwen3moe": Architecture("qwen3_moe", ATTENTION | EXPERTS | TWO_NORMS | HEAD_NORMS),
    "gemma2": Architecture("gemma2", PROJECTIONS | FOUR_NORMS, shifted_norms=True),
    "gemma3": Architecture("gemma3_text", PROJECTIONS | FOUR_NORMS | HEAD_NORMS, shifted_norms=True),
    "smollm3": Architecture("smollm3", PROJECTIONS | TWO_NORMS, paired_rope=True),
    "granite": Architecture("granite", PROJECTIONS | TWO_NORMS, paired_rope=True),
    "olmo2": Architecture("olmo2", PROJECTIONS | NORMS_BEHIND | HEAD_NORMS),
    "glm4": Architecture("glm4", GATE_IN_UP | GLM4_NORMS),
    "ernie4_5": Architecture("ernie4_5", PROJECTIONS | TWO_NORMS),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", PROJECTIONS | TWO_NORMS | HUNYUAN_NORMS),
    "cohere2": Architecture("cohere2", PROJECTIONS | {"attn_norm": "input_layernorm"}),
    "phi3": Architecture("phi3", FUSED | TWO_NORMS),
    "starcoder2": Architecture("starcoder2", NO_GATE | TWO_NORMS),
}
# (architecture, key) → what the architecture stands for in a file with the key, where that is not 0.
VARIANTS = {
    ("llama", "expert_count"): Architecture("mixtral", ATTENTION | MIXTRAL_EXPERTS | TWO_NORMS, paired_rope=True),
    ("olmo2", "attention.sliding_window"): replace(ARCHITECTURES["olmo2"], model_type="olmo3"),
}


@dataclass(frozen=True)
class RestoredTensor:
    """A tensor in the file, and what brings its values back to the Hugging Face model's."""

    tensor: GgufTensor
    restore: Callable[[torch.Tensor], torch.Tensor]  # from the file's values to the model's


def find_architecture(header: GgufHeader) -> Architecture:
    """Raises:
    UnsupportedModelError: it is not one of ARCHITECTURES.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of architecture {name!r} are not read",
            f"known are {', '.join(ARCHITECTURES)}",
            "Build from the model's safetensors checkpoint instead.",
        )
    for (base, key), variant in VARIANTS.items():
        if name == base and header.metadata.get(f"{base}.{key}"):
            return variant
    return ARCHITECTURES[name]


def map_tensors(header: GgufHeader, architecture: Architecture, heads: int, kv_heads: int) -> dict[str, RestoredTensor]:
    """Hugging Face name -> where its values come from.

    Args:
        heads: number of query heads, and kv_heads: of key and value heads; the order of Q's and K's rows
            depends on them.

    Raises:
        UnsupportedModelError: a tensor has no place in the architecture.
        EngineError: Q or K has rows that the heads do not divide.
    """
    sources: dict[str, RestoredTensor] = {}
    for name, tensor in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        hf_name = _hf_name(name, architecture)
        if hf_name is None:
            raise UnsupportedModelError(
                f"tensor {name} is not known",
                f"architecture {header.metadata['general.architecture']} has no such tensor here",
                "Build from the model's safetensors checkpoint instead.",
            )
        restore = _unchanged
        if architecture.shifted_norms and hf_name.endswith("norm.weight"):
            restore = _without_one
        elif architecture.paired_rope and (part := re.search(r"self_attn\.([qk])_proj\.", hf_name)):
            count = heads if part[1] == "q" else kv_heads
            if tensor.shape[0] % (2 * count):
                raise EngineError(f"tensor {name} has {tensor.shape[0]} rows", f"not an even number for {count} heads")
            restore = partial(_halves_apart, heads=count)
        if "{}" in hf_name:
            sources |= {hf_name.format(i): RestoredTensor(part, restore) for i, part in enumerate(_matrices_of(tensor))}
        else:
            sources[hf_name] = RestoredTensor(tensor, restore)
    return sources


def _matrices_of(tensor: GgufTensor) -> list[GgufTensor]:
    """A tensor [matrices, rows, columns] as so many, which lie one behind the other.

    Raises:
        EngineError: it has another number of dimensions.
    """
    if len(tensor.shape) != 3:
        raise EngineError(f"tensor {tensor.name} has shape {list(tensor.shape)}", "a matrix for each expert is needed")
    count, *shape = tensor.shape
    nbytes = tensor.nbytes // count
    return [
        replace(tensor, shape=tuple(shape), offset_bytes=tensor.offset_bytes + i * nbytes, nbytes=nbytes)
        for i in range(count)
    ]


def _hf_name(name: str, architecture: Architecture) -> str | None:
    match = re.fullmatch(r"(?:blk\.(0|[1-9]\d{0,5})\.)?(\w+)\.(weight|bias)", name, re.ASCII)
    if match is None:
        return None
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{TOP[stem]}.{kind}" if stem in TOP else None
    return f"model.layers.{layer}.{architecture.layer[stem]}.{kind}" if stem in architecture.layer else None


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _without_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor - 1


def _halves_apart(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (0, half, 1, half + 1, …) back to (0, 1, …, half, half + 1, …)."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, …]
    return pairs.transpose(1, 2).reshape(tensor.shape)
