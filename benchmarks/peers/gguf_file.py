"""A checkpoint as a GGUF file for llama.cpp: BF16, without a vocabulary, since benchmarks speak in token ids."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

Config = dict[str, Any]


def write_gguf(checkpoint: Path, target: Path) -> None:
    """Names and layouts as llama.cpp's converter has them: matrices BF16, all else F32.

    Args:
        checkpoint: a folder with config.json and model.safetensors, of a model_type of ARCHITECTURES.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(f"{checkpoint} is a {config['model_type']}; this writes {', '.join(ARCHITECTURES)}")
    architecture, add_fields, convert = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    _add_common_fields(writer, config)
    add_fields(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for hf_name, tensor in _tensors(checkpoint, config):
        name = names.get_name(hf_name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"GGUF has no name for {hf_name} of {checkpoint}")
        tensor = convert(hf_name, tensor, config)
        if tensor.ndim == 1 or "conv1d" in hf_name or ".mlp.gate." in hf_name:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            data = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_common_fields(writer: gguf.GGUFWriter, config: Config) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], "rope_type": "default"}
    if rope["rope_type"] != "default":
        raise ValueError(f"rope {rope['rope_type']} is not written")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")


def _tensors(checkpoint: Path, config: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the file, the matrices of all experts of a layer as one: [experts, N, K]."""
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        experts: dict[str, list[str]] = defaultdict(list)
        for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
            if re.search(r"\.experts\.[0-9]+\.", name):
                experts[re.sub(r"\.experts\.[0-9]+\.", ".experts.", name)].append(name)
            elif not (name == "lm_head.weight" and config["tie_word_embeddings"]):
                yield name, tensors.get_tensor(name)
        for name, parts in experts.items():
            order = [re.sub(r"\.experts\.", f".experts.{expert}.", name, count=1) for expert in range(len(parts))]
            yield name, torch.stack([tensors.get_tensor(part) for part in order])


def _no_fields(writer: gguf.GGUFWriter, config: Config) -> None:
    """Adds no fields to those of every family."""


def _as_it_is(hf_name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return tensor


def _interleaved(hf_name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """Reorders the rows of each head of Q and K from two halves to pairs of one row of each half."""
    heads = {".q_proj.": config["num_attention_heads"], ".k_proj.": config["num_key_value_heads"]}
    for part, count in heads.items():
        if part in hf_name:
            rows, columns = tensor.shape
            return tensor.reshape(count, 2, rows // count // 2, columns).transpose(1, 2).reshape(rows, columns)
    return tensor


def _add_experts(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_recurrence(writer: gguf.GGUFWriter, config: Config) -> None:
    if config["linear_num_value_heads"] != config["linear_num_key_heads"]:
        raise ValueError("heads of values that share one of keys are in another order in GGUF, which is not written")
    writer.add_rope_dimension_sections([*config["rope_parameters"].get("mrope_section", _sections(config)), 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


def _sections(config: Config) -> list[int]:
    """Pairs that a text model rotates by time, height and width, which are one number for text: any parts will do."""
    pairs = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]) // 2
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def _of_hybrid(hf_name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    if hf_name.endswith("A_log"):
        return -tensor.float().exp()
    if "conv1d" in hf_name:
        return tensor.squeeze(1)
    if hf_name.endswith("norm.weight") and "linear_attn" not in hf_name:
        return tensor + 1
    return tensor


# model_type → architecture, what writes its own fields, and what brings a tensor to its layout.
ARCHITECTURES: dict[
    str,
    tuple[
        gguf.MODEL_ARCH,
        Callable[[gguf.GGUFWriter, Config], None],
        Callable[[str, torch.Tensor, Config], torch.Tensor],
    ],
] = {
    "llama": (gguf.MODEL_ARCH.LLAMA, _no_fields, _interleaved),
    "qwen3_moe": (gguf.MODEL_ARCH.QWEN3MOE, _add_experts, _as_it_is),
    "qwen3_5_text": (gguf.MODEL_ARCH.QWEN35, _add_recurrence, _of_hybrid),
}
