"""Maps the tensors of a GGUF file to the Hugging Face model's names, and reverses the converter's changes.

Source: llama.cpp's convert_hf_to_gguf.py, now conversion/*.py. It renames every tensor; for `llama` it also reorders
the rows of Q and K, so that the two dimensions which rope rotates together lie side by side; for Gemma and Qwen's
hybrids it stores 1 + w for the weight of every norm, as w + 1 in float32. The rest is in recipes.py.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from enginewright.builder.checkpoint.gguf import recipes
from enginewright.builder.checkpoint.gguf.family import GgufFamily
from enginewright.builder.checkpoint.gguf.header import GgufHeader, GgufTensor
from enginewright.errors import EngineError, UnsupportedModelError

# A tensor that is not a weight of the Hugging Face model: it becomes part of the config.
ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING = "token_embd"


@dataclass(frozen=True)
class RestoredTensor:
    """Tensors of the file, and the function that restores the Hugging Face model's tensor."""

    parts: tuple[GgufTensor, ...]  # tensors of the file
    restore: Callable[..., torch.Tensor]  # values of the parts → the model's tensor
    shape: tuple[int, ...]  # shape of the model's tensor


def map_tensors(header: GgufHeader, family: GgufFamily, config: Mapping[str, Any]) -> dict[str, RestoredTensor]:
    """Maps the Hugging Face names to tensors of the file.

    Args:
        header: header of the file.
        family: the file's family.
        config: config.json; the order of rows depends on its numbers of heads.

    Raises:
        UnsupportedModelError: a tensor has no place in the family.
        EngineError: a tensor's shape does not fit the config.
    """
    sources: dict[str, RestoredTensor] = {}
    for layer, tensors in _by_layer(header).items():
        if layer is not None and family.mtp_prefix and int(layer) >= config["num_hidden_layers"]:
            for name, tensor in tensors.items():
                sources[f"{family.mtp_prefix}.{layer}.{name}"] = _restored((tensor,), recipes.unchanged, config)
            continue
        for recipe in family.recipes if layer is not None else ():
            if tensors.keys() >= set(recipe.parts):
                parts = tuple(tensors.pop(part) for part in recipe.parts)
                sources[f"{family.prefix}.{layer}.{recipe.name}"] = _restored(parts, recipe.restore, config)
        for name, tensor in tensors.items():
            stem, _, kind = name.rpartition(".")
            known = (family.top if layer is None else family.layer).get(stem)
            if known is None or kind not in ("weight", "bias"):
                raise UnsupportedModelError(
                    f"tensor {tensor.name} is not known",
                    f"architecture {family.architecture} has no such tensor here",
                    "Build from the model's safetensors checkpoint instead.",
                )
            stems = (known,) if isinstance(known, str) else known
            names = [f"{stem}.{kind}" if layer is None else f"{family.prefix}.{layer}.{stem}.{kind}" for stem in stems]
            if "{}" in names[0]:
                for number, part in enumerate(_of_experts(tensor, len(names), kind)):
                    expert, index = divmod(number, len(names))
                    sources[names[index].format(expert)] = _restored((part,), recipes.unchanged, config)
            else:
                sources[names[0]] = _restored((tensor,), change_of(family, names[0]), config)
    return sources


def _by_layer(header: GgufHeader) -> dict[str | None, dict[str, GgufTensor]]:
    """Groups tensors by layer: its number → name after it → tensor; None → tensors outside of layers."""
    layers: dict[str | None, dict[str, GgufTensor]] = {}
    for name, tensor in header.tensors.items():
        if name != ROPE_FACTORS:
            layer, own = _split(name)
            layers.setdefault(layer, {})[own] = tensor
    return layers


def _split(name: str) -> tuple[str | None, str]:
    """Splits a tensor's name into its layer's number, None outside of layers, and the rest."""
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(.+)", name, re.ASCII | re.DOTALL)
    return (match[1], match[2]) if match else (None, name)


def linear_weight(family: GgufFamily, name: str) -> str | None:
    """Finds the Hugging Face name of a layer's weight that is one tensor on both sides.

    Args:
        family: the file's family.
        name: the weight's name in the file, such as blk.0.attn_q.weight.

    Returns:
        The name; None if the family has no such tensor, or it is an embedding, or of experts, or made of several.
    """
    layer, own = _split(name)
    stem, _, kind = own.rpartition(".")
    known = (family.top if layer is None else family.layer).get(stem)
    if kind != "weight" or not isinstance(known, str) or "{}" in known or stem == EMBEDDING:
        return None
    return f"{known}.weight" if layer is None else f"{family.prefix}.{layer}.{known}.weight"


def change_of(family: GgufFamily, name: str) -> Callable[..., torch.Tensor]:
    """Returns the function that reverses the converter's change to a tensor, of the config and the tensor.

    Args:
        family: the file's family.
        name: the tensor's Hugging Face name.
    """
    if family.has_shifted_norms and name.endswith("norm.weight"):
        return recipes.without_one
    if family.has_paired_rope and (part := re.search(r"\.([qk])_proj\.", name)):
        return recipes.halves_apart("num_attention_heads" if part[1] == "q" else "num_key_value_heads")
    return recipes.unchanged


def _restored(
    parts: tuple[GgufTensor, ...], restore: Callable[..., torch.Tensor], config: Mapping[str, Any]
) -> RestoredTensor:
    shape = parts[0].shape
    if restore is not recipes.unchanged:
        try:
            shape = restore(config, *(torch.empty(part.shape, device="meta") for part in parts)).shape
        except (RuntimeError, IndexError) as error:
            stored = " and ".join(f"{part.name} has shape {list(part.shape)}" for part in parts)
            raise EngineError(
                f"tensor {stored}", "it does not fit the file's metadata", "Convert the model again."
            ) from error
    return RestoredTensor(parts, partial(restore, config), tuple(shape))


def _of_experts(tensor: GgufTensor, count: int, kind: str) -> list[GgufTensor]:
    """Cuts a tensor [experts, rows, columns] into `count` matrices for each expert, one after another.

    Biases, [experts, rows], are cut into vectors.

    Raises:
        EngineError: it has another number of dimensions, or rows that cannot be divided.
    """
    what = "matrix" if kind == "weight" else "vector"
    if len(tensor.shape) != (3 if kind == "weight" else 2) or tensor.shape[1] % count:
        raise EngineError(f"tensor {tensor.name} has shape {list(tensor.shape)}", f"a {what} for each expert is needed")
    experts, rows, *columns = tensor.shape
    nbytes = tensor.nbytes // (experts * count)
    return [
        replace(tensor, shape=(rows // count, *columns), offset_bytes=tensor.offset_bytes + i * nbytes, nbytes=nbytes)
        for i in range(experts * count)
    ]
