"""Tiny models of families whose tensors llama.cpp's converter changes, written as its conversion/*.py writes them.

What is here undoes nothing and shares no code with builder/checkpoint/: a mistake would have to be made twice.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PretrainedConfig

from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model
from tests.helpers.tiny_gguf import add_vocabulary, interleave

Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """The converter's rules for a family."""

    model_type: str
    write_keys: Callable[[gguf.GGUFWriter, PretrainedConfig], None]
    modify: Callable[[str, torch.Tensor, PretrainedConfig], Tensors]  # modify_tensors of the converter
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of tiny_config
    read_as: str = ""  # the family that computes the same; "": itself


def write_converted(path: Path, architecture: str, case: Case) -> tuple[gguf.GGUFWriter, MemoryCheckpoint]:
    """A file that is still to be finished, and the checkpoint that it was converted from."""
    model = tiny_model(tiny := tiny_config(case.model_type, **case.overrides))
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = _survives_exp(parameter.numel()).view_as(parameter)
    checkpoint = MemoryCheckpoint.of(model, tiny)
    model.config.allow_global_per_layer_attribute_access = True  # of Gemma 4, which has some of them for each layer
    config, arch = model.config, next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    writer = gguf.GGUFWriter(path, architecture)
    _write_base_keys(writer, config)
    case.write_keys(writer, config)
    add_vocabulary(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, stored in checkpoint.stored.items():
        for own, tensor in case.modify(hf_name, stored.float(), config):
            # Some families' converters write names of the file themselves.
            name = own if own.startswith("blk.") else names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert name is not None, own
            writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    return writer, checkpoint


def _survives_exp(count: int) -> torch.Tensor:
    """Values of A_log that are the same after exp and log, so that logits can be compared bit by bit."""
    values = torch.linspace(-1.5, 2.0, 4001).bfloat16().float().unique()
    kept = values[values.exp().log() == values]
    return kept[:: len(kept) // count][:count].clone()


def _write_base_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """TextModel.set_gguf_parameters, of conversion/base.py."""

    def write(add: Callable[[Any], None], *keys: str) -> None:
        value = next((value for key in keys if (value := getattr(config, key, None)) is not None), None)
        if value is not None:
            add(value)

    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    write(writer.add_context_length, "max_position_embeddings")
    write(writer.add_embedding_length, "hidden_size")
    write(writer.add_feed_forward_length, "intermediate_size")
    write(writer.add_head_count_kv, "num_key_value_heads")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    write(writer.add_layer_norm_rms_eps, "rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    write(writer.add_layer_norm_eps, "layer_norm_eps", "layer_norm_epsilon")
    write(writer.add_expert_count, "num_local_experts", "num_experts", "n_routed_experts")
    write(writer.add_expert_used_count, "num_experts_per_tok")
    write(writer.add_expert_group_count, "n_group")
    write(writer.add_expert_group_used_count, "topk_group")
    write(writer.add_key_length, "head_dim")
    write(writer.add_value_length, "head_dim")


def _experts(name: str, tensor: torch.Tensor, gate: str = "gate_proj", up: str = "up_proj") -> Tensors:
    """Gates and ups of experts, which transformers has in one tensor, as checkpoints and the converter have them."""
    if name.endswith(".gate_up_proj"):
        for part, half in zip((gate, up), tensor.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}.weight"), half
    elif name.endswith(("experts.down_proj", "experts.up_proj")):
        yield f"{name}.weight", tensor
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("correction_bias", "correction.bias"), tensor
    else:
        yield name, tensor


def _unchanged(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    yield name, tensor


# GptOssModel, conversion/gpt_oss.py


def _gpt_oss_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _gpt_oss(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif "down_proj" in name:
        is_bias = name.endswith("_bias")
        yield name.replace("_bias", ".bias") if is_bias else f"{name}.weight", tensor if is_bias else tensor.mT
    elif "gate_up_proj" in name:
        is_bias = name.endswith("_bias")
        rows = tensor if is_bias else tensor.mT
        kind = "bias" if is_bias else "weight"
        for first, part in enumerate(("gate_proj", "up_proj")):
            yield f"{name.removesuffix('_bias').replace('gate_up_proj', part)}.{kind}", rows[:, first::2]
    else:
        yield name, tensor


# Qwen3NextModel and _LinearAttentionVReorderBase, conversion/qwen.py


def _delta_net_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(2)
    writer.add_rope_dimension_count(int(config.head_dim * 0.25))
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _qwen35_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    _delta_net_keys(writer, config)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _qwen3_next(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if name.endswith(".A_log"):
        yield name, -tensor.exp()
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), tensor
    elif "conv1d" in name:
        yield name, tensor.squeeze(1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, tensor + 1
    elif "in_proj_qkvz" in name:
        # Of each key head q, k, v and z; all q, all k and all v, and all z, go to two tensors.
        shared = config.linear_num_value_heads // config.linear_num_key_heads
        widths = [config.linear_key_head_dim] * 2 + [shared * config.linear_value_head_dim] * 2
        heads = tensor.view(config.linear_num_key_heads, sum(widths), -1).split(widths, dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in heads)
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat([q, k, v])
        yield name.replace("in_proj_qkvz", "in_proj_z"), z
    else:
        yield from _experts(name, tensor)


def _tiled(tensor: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Rows of value heads, of which several share a key head: the first of each key head, then the second, …"""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = [group * (heads // groups) + place for place in range(heads // groups) for group in range(groups)]
    return tensor.view(heads, -1, *tensor.shape[1:])[order].flatten(0, 1)


def _qwen35(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if ".in_proj_qkv." in name or ".conv1d." in name:
        tensor = torch.cat([tensor[:keys], _tiled(tensor[keys:], config)])
    elif any(part in name for part in (".in_proj_z.", ".in_proj_b.", ".in_proj_a.", ".A_log", ".dt_bias")):
        tensor = _tiled(tensor, config)
    elif "linear_attn.out_proj" in name:
        tensor = _tiled(tensor.t(), config).t()
    yield from _qwen3_next(name, tensor, config)


def _older_qwen3_next(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if "in_proj_qkvz" in name:
        yield name, tensor
    else:
        yield from _qwen3_next(name, tensor, config)


def _qwen35_fused(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """_qwen35 with gates and ups of experts in one tensor, which is an option of the converter."""
    if name.endswith(".gate_up_proj"):
        yield f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", tensor
    else:
        yield from _qwen35(name, tensor, config)


# DeepseekV2Model, conversion/deepseek.py


def _deepseek_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(1)
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _deepseek(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if name.endswith("kv_b_proj.weight"):
        heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), v
    else:
        yield from _experts(name, tensor)


def _older_deepseek_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Keys of files from before kv_b was split, with the number and sizes of heads in training."""
    _deepseek_keys(writer, config)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim)
    for key in ("key_length_mla", "value_length_mla"):
        del writer.kv_data[0][f"deepseek2.attention.{key}"]


def _older_deepseek(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if name.endswith("e_score_correction_bias"):
        yield f"blk.{name.split('.')[2]}.exp_probs_b", tensor
    else:
        yield from _experts(name, tensor)


def _mistral4_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Keys of a checkpoint in transformers' form, whose config has neither a gating function nor a scale of queries."""
    _deepseek_keys(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    del writer.kv_data[0][f"{writer.arch}.expert_gating_func"]


def _native_mistral4_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """MistralMoeModel, conversion/mistral.py: of Mistral's own form of a checkpoint."""
    _mistral4_keys(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    writer.add_attn_temperature_length(config.rope_parameters["original_max_position_embeddings"])


def _mistral4(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    yield from _deepseek(f"{name}.weight" if ".experts." in name else name, tensor, config)


# KimiLinearModel, conversion/kimi_linear.py


def _kimi_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _kimi(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """transformers has decays in a module of their own, and the taps of q, k and v in one tensor."""
    name = name.replace("forget_gate.", "")
    if name.endswith("conv1d.weight"):
        for part, taps in zip("qkv", tensor.chunk(3), strict=True):
            yield name.replace("conv1d", f"{part}_conv1d"), taps.reshape(1, -1, 1, taps.shape[-1])
    elif name.endswith("A_log"):
        yield name, -tensor.exp().reshape(1, 1, -1, 1)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    else:
        yield from _deepseek(name, tensor, config)


# Glm4MoeModel, conversion/glm.py


def _glm4_moe_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def _only_experts(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    yield from _experts(name, tensor)


# LlamaModel and Mistral3Model, conversion/llama.py and mistral3.py


def _paired(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if f".{part}." in name:
            tensor = torch.from_numpy(interleave(tensor.numpy(), heads))
    yield name, tensor


def _mistral_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)


def _ministral3_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    _mistral_keys(writer, config)
    writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


# LFM2Model and LFM2MoeModel, conversion/lfm2.py


def _lfm2_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config.layer_types])
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        multiple, width = config.block_multiple_of, int(2 * config.intermediate_size / 3)
        writer.add_feed_forward_length(multiple * ((width + multiple - 1) // multiple))


def _lfm2(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if "conv.conv" in name:
        yield name, tensor.squeeze(1)
    elif name.endswith("expert_bias"):
        yield f"{name}.bias", tensor
    elif ".experts." in name:
        for own, part in _experts(name, tensor, "w1", "w3"):
            yield own.removeprefix("model.").replace("down_proj", "w2"), part
    else:
        yield name, tensor


# Mamba2Model, GraniteHybridModel and NemotronHModel, conversion/mamba.py, granite.py and nemotron.py


def _mamba2(name: str, tensor: torch.Tensor, groups: int) -> Tensors:
    if name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), tensor
    elif name.endswith("conv1d.weight"):
        yield name, tensor.squeeze()
    elif name.endswith(".A_log"):
        yield name, -tensor.unsqueeze(-1).exp()
    elif name.endswith(".D"):
        yield name, tensor.unsqueeze(-1)
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        yield name, tensor.view(groups, -1)
    else:
        yield name, tensor


def _ssm_keys(writer: gguf.GGUFWriter, taps: int, state: int, groups: int, heads: int, dim: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * dim)
    writer.add_ssm_time_step_rank(heads)


def _mamba2_keys(writer: gguf.GGUFWriter, config: PretrainedConfig, dim: int) -> None:
    groups, heads = config.mamba_n_groups, config.mamba_n_heads
    _ssm_keys(writer, config.mamba_d_conv, config.mamba_d_state, groups, heads, dim)


def _granite_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    if shared := getattr(config, "shared_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(shared)


def _granite(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if "shared_mlp" in name:
        stem = "ffn_{}_shexp" if config.num_local_experts else "ffn_{}"
        layer = f"blk.{name.split('.')[2]}"
        gate_up = zip(("gate", "up"), tensor.chunk(2), strict=True) if "input_linear" in name else ()
        for part, rows in gate_up or (("down", tensor),):
            yield f"{layer}.{stem.format(part)}.weight", rows
    elif ".router." in name:
        yield name.replace("router.", "router.layer."), tensor
    elif ".experts." in name:
        for own, part in _experts(name, tensor):
            kind = own.split(".")[-2].removesuffix("_proj")
            yield f"blk.{name.split('.')[2]}.ffn_{kind}_exps.weight", part
    else:
        yield from _paired(name, tensor, config)


def _granite_hybrid_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    _granite_keys(writer, config)
    _mamba2_keys(writer, config, config.mamba_d_head)
    heads = config.num_key_value_heads
    writer.add_head_count_kv(
        [heads if "attention" in kind and "linear" not in kind else 0 for kind in config.layer_types]
    )
    writer.add_rope_scaling_finetuned(False)
    writer.add_context_length(2**20)


def _granite_hybrid(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if ".mamba." in name:
        yield from _mamba2(name, tensor, config.mamba_n_groups)
    else:
        yield from _granite(name, tensor, config)


def _nemotron_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    kinds = config.layer_types
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    _ssm_keys(
        writer,
        config.conv_kernel,
        config.ssm_state_size,
        config.n_groups,
        config.mamba_num_heads,
        config.mamba_head_dim,
    )
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_rope_scaling_finetuned(False)
    writer.add_context_length(2**20)
    if "moe" not in kinds:
        writer.add_feed_forward_length([config.intermediate_size if kind == "mlp" else 0 for kind in kinds])
        for key in ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"):
            writer.kv_data[0].pop(f"nemotron_h.{key}", None)  # published configs without experts have no such keys
        return
    writer.add_feed_forward_length([config.moe_intermediate_size if kind == "moe" else 0 for kind in kinds])
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.moe_latent_size is not None:
        writer.add_moe_latent_size(config.moe_latent_size)


def _nemotron(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    name = name.replace("model.", "backbone.", 1)
    if ".experts." in name:
        yield f"{name.replace('backbone.', 'model.').replace('.mixer.', '.mlp.')}.weight", tensor
        return
    for own, part in _mamba2(name, tensor, config.n_groups):
        for other, paired in _paired(own, part, config):
            yield from _experts(other, paired)


# FalconH1Model, conversion/falcon_h1.py


def _falcon_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    _mamba2_keys(writer, config, config.mamba_d_ssm // config.mamba_n_heads)
    writer.add_vocab_size(config.vocab_size)


def _falcon(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    factors = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "in_proj": config.ssm_in_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    factor = next((factor for part, factor in factors.items() if part in name.split(".")), 1.0)
    for own, part in _mamba2(name, tensor, config.mamba_n_groups):
        scaled = part * factor
        if own.endswith("in_proj.weight"):
            keys = config.mamba_n_groups * config.mamba_d_state
            rows = scaled.split([config.mamba_d_ssm, config.mamba_d_ssm, keys, keys, config.mamba_n_heads])
            scaled = torch.cat([each * own for each, own in zip(rows, config.ssm_multipliers, strict=True)])
        yield own, scaled


# MiniMaxM2Model and Ernie4_5MoeModel, conversion/minimax.py and ernie.py


def _minimax_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(10)


def _minimax(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    for own, part in _experts(name.replace(".mlp.", ".block_sparse_moe."), tensor, "w1", "w3"):
        yield own.replace("down_proj", "w2"), part


def _ernie_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)


def _ernie(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    yield from _experts(name.replace("gate.moe_statics", "moe_statics"), tensor)


# Gemma4Model, conversion/gemma.py


def _gemma4_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    tiny = _GEMMA4_HEADS
    writer.add_sliding_window(config.sliding_window)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    local = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window_pattern(local)
    writer.add_key_length(tiny["global_head_dim"])
    writer.add_value_length(tiny["global_head_dim"])
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    if config.moe_intermediate_size is not None:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_used_count(config.top_k_experts)
    if config.use_double_wide_mlp:
        width, own = config.intermediate_size, config.num_hidden_layers - config.num_kv_shared_layers
        writer.add_feed_forward_length([width if layer < own else 2 * width for layer in range(len(local))])
    if config.attention_k_eq_v:
        heads = (tiny["num_global_key_value_heads"], config.num_key_value_heads)
        writer.add_head_count_kv([heads[is_local] for is_local in local])
    writer.add_rope_dimension_count(tiny["global_head_dim"])
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    rotated = int(tiny["global_head_dim"] * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * rotated + [1e30] * (tiny["global_head_dim"] // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _gemma4(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    layer = name.split(".")[2]
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    elif name.endswith("layer_scalar") or ".experts." in name:
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def _gemma4_apart(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """_gemma4 with gates and ups of experts in two tensors, as quantizers of checkpoints leave them."""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", half
    else:
        yield from _gemma4(name, tensor, config)


# GPT2Model, conversion/gpt2.py


def _gpt2_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    writer.add_feed_forward_length(4 * config.n_embd)
    for key in ("attention.layer_norm_rms_epsilon", "attention.head_count_kv"):
        writer.kv_data[0].pop(f"gpt2.{key}", None)


def _gpt2(name: str, tensor: torch.Tensor, config: PretrainedConfig) -> Tensors:
    is_across = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    yield name, tensor.t() if is_across else tensor


def _no_keys(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    pass


# What transformers 5.23 keeps in other keys of the config than those that it is made from.
_GEMMA4_HEADS = {"global_head_dim": 36, "num_global_key_value_heads": 2}
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 21,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "num_kv_shared_layers": 0,
}
# Powers of two, whose products are exact.
_FALCON_FACTORS = {
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.5,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.5,
    "key_multiplier": 0.25,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 0.5],
    "mlp_multipliers": [0.5, 2.0],
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "rope_theta": 1e4,
}
CASES: Mapping[str, Case] = {
    "gpt-oss": Case("gpt_oss", _gpt_oss_keys, _gpt_oss),
    "qwen35": Case("qwen3_5_text", _qwen35_keys, _qwen35),
    "qwen35moe": Case("qwen3_5_moe_text", _qwen35_keys, _qwen35),
    "qwen3next": Case("qwen3_next", _delta_net_keys, _qwen3_next, {"mlp_only_layers": []}),
    "deepseek2": Case("deepseek_v3", _deepseek_keys, _deepseek, {"rope_parameters": _YARN}),
    "mistral4": Case("mistral4", _mistral4_keys, _mistral4),
    "kimi-linear": Case("kimi_linear", _kimi_keys, _kimi),
    "glm4moe": Case("glm4_moe", _glm4_moe_keys, _only_experts),
    "lfm2": Case("lfm2", _lfm2_keys, _lfm2),
    "lfm2moe": Case("lfm2_moe", _lfm2_keys, _lfm2, {"routed_scaling_factor": 1.0}),
    "nemotron_h": Case("nemotron_h", _nemotron_keys, _nemotron, {"hybrid_override_pattern": "M-*M-"}),
    "nemotron_h_moe": Case("nemotron_h", _nemotron_keys, _nemotron, {"hybrid_override_pattern": "ME*ME"}),
    "granitehybrid": Case("granitemoehybrid", _granite_hybrid_keys, _granite_hybrid),
    "falcon-h1": Case("falcon_h1", _falcon_keys, _falcon, _FALCON_FACTORS),
    "minimax-m2": Case("minimax_m2", _minimax_keys, _minimax),
    "ernie4_5-moe": Case("ernie4_5_moe", _ernie_keys, _ernie),
    "seed_oss": Case("seed_oss", _no_keys, _unchanged),
    "gpt2": Case("gpt2", _gpt2_keys, _gpt2),
    "gemma4": Case("gemma4_text", _gemma4_keys, _gemma4, _GEMMA4_HEADS),
}
# Further kinds of the same architectures: what they are called → the architecture, and the case.
VARIANTS: Mapping[str, tuple[str, Case]] = {
    "mistral": ("mistral3", Case("mistral", _mistral_keys, _paired, {"sliding_window": None})),
    "ministral3": ("mistral3", Case("ministral3", _ministral3_keys, _paired)),
    "granitemoe": ("granitemoe", Case("granitemoe", _granite_keys, _granite)),
    "granitemoeshared": ("granitemoe", Case("granitemoeshared", _granite_keys, _granite)),
    "glm4_moe_lite": (
        "deepseek2",
        Case(
            "glm4_moe_lite",
            _deepseek_keys,
            _deepseek,
            {"mlp_layer_types": ["dense", "sparse", "sparse"]},
            read_as="deepseek_v3",
        ),
    ),
    "older deepseek2": (
        "deepseek2",
        Case("deepseek_v3", _older_deepseek_keys, _older_deepseek, {"rope_parameters": _YARN}),
    ),
    "native mistral4": ("deepseek2", Case("mistral4", _native_mistral4_keys, _deepseek)),
    "older qwen3next": ("qwen3next", Case("qwen3_next", _delta_net_keys, _older_qwen3_next, {"mlp_only_layers": []})),
    "fused qwen35moe": ("qwen35moe", Case("qwen3_5_moe_text", _qwen35_keys, _qwen35_fused)),
    "nemotron_h_moe with latent columns": (
        "nemotron_h_moe",
        Case("nemotron_h", _nemotron_keys, _nemotron, {"hybrid_override_pattern": "ME*ME", "moe_latent_size": 26}),
    ),
    "gemma4 with values": (
        "gemma4",
        Case(
            "gemma4_text",
            _gemma4_keys,
            _gemma4,
            {**_GEMMA4_HEADS, "attention_k_eq_v": False, "num_kv_shared_layers": 0},
        ),
    ),
    "gemma4 with experts": (
        "gemma4",
        Case("gemma4_text", _gemma4_keys, _gemma4, {**_GEMMA4_HEADS, **_GEMMA4_EXPERTS}),
    ),
    "gemma4 with gates and ups apart": (
        "gemma4",
        Case("gemma4_text", _gemma4_keys, _gemma4_apart, {**_GEMMA4_HEADS, **_GEMMA4_EXPERTS}),
    ),
    "granitehybrid without experts": (
        "granitehybrid",
        Case("granitemoehybrid", _granite_hybrid_keys, _granite_hybrid, {"num_local_experts": 0}),
    ),
}
