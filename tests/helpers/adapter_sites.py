"""Weights restored in numpy from an engine's `adapter_sites`, by the words of docs/engine-file.md."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.adapter_sites import Site

Array = npt.NDArray[Any]


def row_sources(site: Site, vectors: Mapping[str, bytes]) -> list[tuple[str, int]]:
    """(layer, its row) of each row of a site.

    Args:
        vectors: name of a section → its bytes.
    """
    rows = [(run.module, run.first + row) for run in site.runs for row in range(run.count)]
    return rows if site.row_order is None else [rows[n] for n in np.frombuffer(vectors[site.row_order], "<i4")]


def mapped(site: Site, vectors: Mapping[str, bytes], stored: Callable[[str], Array]) -> Array:
    """The numbers of a site's weight, FLOAT [N, K], before they are quantized.

    Args:
        vectors: name of a section → its bytes.
        stored: name of a layer → its weight, FLOAT [out, in].
    """
    sources = row_sources(site, vectors)
    layers = {module: stored(module) for module in dict.fromkeys(module for module, _ in sources)}
    weight = np.stack([layers[module][row] for module, row in sources])
    if site.column_order is not None:
        weight = weight[:, np.frombuffer(vectors[site.column_order], "<i4")]
    if site.row_factors is not None:
        weight = weight * np.frombuffer(vectors[site.row_factors], "<f4")[:, None]
    if site.column_factors is not None:
        weight = weight * np.frombuffer(vectors[site.column_factors], "<f4")
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
