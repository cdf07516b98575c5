"""Weights restored in numpy from an engine's `adapter_sites`, by the words of docs/engine-file.md."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from enginewright.adapter_sites import Site

Array = npt.NDArray[Any]


def row_sources(site: Site, vectors: Mapping[str, bytes]) -> list[tuple[str, int]]:
    """(layer, its row) of each row of a site, in a layer of experts those of all of them.

    Args:
        vectors: name of a section → its bytes.
    """
    rows = [(run.module, run.first + row) for run in site.runs for row in range(run.count)]
    if site.row_order is not None:
        rows = [rows[n] for n in np.frombuffer(vectors[site.row_order], "<i4")]
    if not site.experts:
        return rows
    return [(matrix_name(module, expert), row) for expert in range(site.experts) for module, row in rows]


def matrix_name(module: str, expert: int) -> str:
    """Name of an expert's layer; `name[expert]` if all of them are one parameter."""
    return module.replace("{}", str(expert)) if "{}" in module else f"{module}[{expert}]"


def stored_matrix(tensors: Mapping[str, torch.Tensor], name: str, is_transposed: bool = False) -> torch.Tensor:
    """The weight of a layer, as stored, or one of a parameter's matrices, [out, in].

    Args:
        is_transposed: whether parameters with matrices of experts are [experts, in, out].
    """
    parameter, _, expert = name.removesuffix("]").partition("[")
    if not expert:
        return tensors[f"{name}.weight"]
    matrix = tensors[parameter if parameter in tensors else f"{parameter}.weight"][int(expert)]
    return matrix.T if is_transposed else matrix


def mapped(site: Site, vectors: Mapping[str, bytes], stored: Callable[[str], Array]) -> Array:
    """The numbers of a site's weight, FLOAT [N, K], before they are quantized.

    Args:
        vectors: name of a section → its bytes.
        stored: name of a layer → its weight, FLOAT [out, in]; or of a matrix as `matrix_name` has it.
    """
    sources = row_sources(site, vectors)
    layers = {module: stored(module) for module in dict.fromkeys(module for module, _ in sources)}
    weight = np.stack([layers[module][row] for module, row in sources])
    if site.transposed:
        by_head = weight.reshape(site.heads, site.columns, site.rows)
        weight = by_head.transpose(0, 2, 1).reshape(-1, site.columns)
    if site.column_order is not None:
        weight = weight[:, np.frombuffer(vectors[site.column_order], "<i4")]
    if site.row_factors is not None:
        weight = weight * np.frombuffer(vectors[site.row_factors], "<f4")[:, None]
    if site.column_factors is not None:
        factors = np.frombuffer(vectors[site.column_factors], "<f4").reshape(-1, site.columns)
        weight = weight * factors.repeat(len(weight) // len(factors), axis=0)
    return weight


def mapped_bias(site: Site, vectors: Mapping[str, bytes], stored: Callable[[str], Array]) -> Array:
    """The numbers of a site's bias, FLOAT [N].

    Args:
        vectors: name of a section → its bytes.
        stored: name of a layer → its bias, FLOAT [out].
    """
    sources = row_sources(site, vectors)
    layers = {module: stored(module) for module in dict.fromkeys(module for module, _ in sources)}
    bias = np.stack([layers[module][row] for module, row in sources])
    return bias if site.bias_factors is None else bias * np.frombuffer(vectors[site.bias_factors], "<f4")
