"""Restores tensors that llama.cpp's converter stores in another form than the Hugging Face model.

Source: modify_tensors of the families in llama.cpp's conversion/*.py, and of MambaModel and Mamba2Model in mamba.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Config = Mapping[str, Any]  # config.json, as config.py makes it


def unchanged(_config: Config, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself."""
    return tensor


@dataclass(frozen=True)
class Recipe:
    """A tensor of a layer that has another form in the file, or several parts; it applies if all parts exist."""

    name: str  # Hugging Face's name, after the layer's
    parts: tuple[str, ...]  # names in the file, after the layer's
    restore: Callable[..., torch.Tensor] = unchanged  # (config, *parts) → the model's tensor


def row_of_each(_config: Config, tensor: torch.Tensor) -> torch.Tensor:
    """Reshapes a convolution's [channels, width], perhaps with axes of 1, to [channels, 1, width]."""
    return tensor.reshape(-1, 1, tensor.shape[-1])


def _flat(_config: Config, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()


def logarithm(_config: Config, tensor: torch.Tensor) -> torch.Tensor:
    """Restores A_log from -exp(A_log), which the file has, perhaps as [heads, 1]."""
    return (-tensor).log().flatten()


def transposed(_config: Config, tensor: torch.Tensor) -> torch.Tensor:
    """Swaps rows and columns."""
    return tensor.t()


def _stacked(_config: Config, *parts: torch.Tensor) -> torch.Tensor:
    """Stacks rows of gate, then those of up: of one MLP, or of each expert."""
    return torch.cat(parts, dim=-2)


def _whole_kv(_config: Config, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Joins each head's rows of k [heads, latent, nope_dim], then those of v [heads, value_dim, latent]."""
    return torch.cat([k.transpose(1, 2), v], dim=1).flatten(0, 1)


def by_key_head(config: Config, qkv: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Regroups rows of all q, all k, all v and all z by key head."""
    heads, width = config["linear_num_key_heads"], config["linear_num_key_heads"] * config["linear_key_head_dim"]
    parts = (qkv[:width], qkv[width : 2 * width], qkv[2 * width :], z)
    return torch.cat([part.reshape(heads, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)


def _grouped(config: Config, tensor: torch.Tensor) -> torch.Tensor:
    """Regroups rows of value heads from one head of each key head to all heads of a key head together."""
    groups = config["linear_num_key_heads"]
    shared = config["linear_num_value_heads"] // groups
    return tensor.reshape(shared, groups, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def _grouped_after_keys(config: Config, tensor: torch.Tensor) -> torch.Tensor:
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return torch.cat([tensor[:keys], _grouped(config, tensor[keys:])])


def _grouped_columns(config: Config, tensor: torch.Tensor) -> torch.Tensor:
    return _grouped(config, tensor.t()).t()


def _then(second: Callable[..., torch.Tensor], first: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Composes two changes."""

    def both(config: Config, *parts: torch.Tensor) -> torch.Tensor:
        return second(config, first(config, *parts))

    return both


def mamba2(block: str) -> Sequence[Recipe]:
    """Lists the recipes of Mamba-2.

    Args:
        block: name of the block in a layer.
    """
    return (
        Recipe(f"{block}.A_log", ("ssm_a",), logarithm),
        Recipe(f"{block}.D", ("ssm_d",), _flat),
        Recipe(f"{block}.dt_bias", ("ssm_dt.bias",)),
        Recipe(f"{block}.conv1d.weight", ("ssm_conv1d.weight",), row_of_each),
        Recipe(f"{block}.norm.weight", ("ssm_norm.weight",), _flat),
    )


NET = "linear_attn"
DELTA_NET = (
    Recipe(f"{NET}.A_log", ("ssm_a",), _then(_grouped, logarithm)),
    Recipe(f"{NET}.dt_bias", ("ssm_dt.bias",), _grouped),
    Recipe(f"{NET}.conv1d.weight", ("ssm_conv1d.weight",), _then(row_of_each, _grouped_after_keys)),
    Recipe(f"{NET}.norm.weight", ("ssm_norm.weight",)),
    Recipe(f"{NET}.in_proj_qkv.weight", ("attn_qkv.weight",), _grouped_after_keys),
    Recipe(f"{NET}.in_proj_z.weight", ("attn_gate.weight",), _grouped),
    Recipe(f"{NET}.in_proj_b.weight", ("ssm_beta.weight",), _grouped),
    Recipe(f"{NET}.in_proj_a.weight", ("ssm_alpha.weight",), _grouped),
    Recipe(f"{NET}.out_proj.weight", ("ssm_out.weight",), _grouped_columns),
)
SHORT_CONV = (Recipe("conv.conv.weight", ("shortconv.conv.weight",), row_of_each),)
LATENT = (Recipe("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), _whole_kv),)
SHARED_MLP = tuple(
    Recipe(f"shared_mlp.{name}.weight", tuple(f"{part}{end}.weight" for part in parts), restore)
    for end in ("_shexp", "")
    for name, parts, restore in (
        ("input_linear", ("ffn_gate", "ffn_up"), _stacked),
        ("output_linear", ("ffn_down",), unchanged),
    )
)


def correction(name: str) -> Sequence[Recipe]:
    """Lists the recipes of the correction of experts' scores. In older files the tensor's name has no suffix."""
    return tuple(Recipe(name, (part,)) for part in ("exp_probs_b.bias", "exp_probs_b"))


def without_one(_config: Config, tensor: torch.Tensor) -> torch.Tensor:
    """Subtracts 1 from a norm's weight."""
    return tensor - 1


def halves_apart(key: str) -> Callable[..., torch.Tensor]:
    """Makes the function that reorders rows of each head from (0, half, 1, half + 1, …) to (0, 1, 2, …).

    Args:
        key: key of the config with the number of heads.
    """
    return partial(_halves_apart, key)


def _halves_apart(key: str, config: Config, tensor: torch.Tensor) -> torch.Tensor:
    pairs = tensor.reshape(config[key], -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, …]
    return pairs.transpose(1, 2).reshape(tensor.shape)
