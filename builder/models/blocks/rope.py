"""Rotary position embeddings: the inverse frequencies, from a config old or new.

Older configs have `rope_theta` and `rope_scaling`; newer ones have it all in `rope_parameters`. The arithmetic is
in fp32 and in transformers' order, so that frequencies are the same bits as there.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.plugins.plugin import dims_of, width_of
from enginewright.plugins.rope_table import ROPE_TABLE

HARMLESS = ("finetuned",)  # a remark of old yarn configs


@dataclass(frozen=True)
class RopeTable:
    """The angles of a step's positions, for all layers with the same rope."""

    cos: ir.Value  # [1, T, head_dim / 2]
    sin: ir.Value  # [1, T, head_dim / 2]

    def rotate(self, graph: GraphWriter, x: ir.Value, head_dim: int) -> ir.Value:
        """Rotates each head of x, [1, T, heads · head_dim], its first half against its second half."""
        inputs, heads = [x, self.cos, self.sin], width_of(x) // head_dim
        return graph.op("RotaryEmbedding", inputs, f"{x.name}.rotated", dims_of(x), num_heads=heads)


@dataclass(frozen=True, eq=False)
class Rope:
    """Which angles positions have."""

    inv_freq: npt.NDArray[np.float32]  # radians a position, [head_dim / 2]
    scale: float = 1.0  # of cosines and sines

    def write(self, graph: GraphWriter, name: str = "rope") -> RopeTable:
        inv_freq = graph.constant(f"{name}.inv_freq", self.inv_freq)
        cos, sin = graph.plugin(ROPE_TABLE, [graph.positions, inv_freq], name, scale=self.scale).outputs
        cos.name, sin.name = f"{name}.cos", f"{name}.sin"
        return RopeTable(cos, sin)


def read_rope(config: ConfigReader, head_dim: int, default_theta: float = 10_000.0) -> Rope:
    """The one rope of a model whose layers all have the same."""
    theta = config.read_positive("rope_theta", default=default_theta)
    _refuse_partial(config)
    max_positions = config.read_size("max_position_embeddings")
    return rope_from(config.section("rope_scaling", "rope_parameters"), theta, head_dim, max_positions)


def rope_from(parameters: ConfigReader | None, theta: float, head_dim: int, max_positions: int) -> Rope:
    """The rope that `parameters` describe.

    Args:
        theta: the base where they have none.
        max_positions: that the model was trained for, where they name no others.

    Raises:
        UnsupportedModelError: the type of rope, or one of its parameters, is not implemented.
    """
    parameters = ConfigReader({}, "rope_parameters") if parameters is None else parameters
    theta = parameters.read_positive("rope_theta", default=theta)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = theta**exponents  # over 2π; [head_dim / 2]
    kind, scale = parameters.read(str, "rope_type", "type", default="default"), 1.0
    match kind:
        case "default":
            inv_freq = 1.0 / wavelengths
        case "linear":
            inv_freq = (1.0 / wavelengths) / parameters.read_positive("factor")
        case "llama3":
            inv_freq = _llama3(parameters, 1.0 / wavelengths, max_positions)
        case "yarn":
            inv_freq, scale = _yarn(parameters, wavelengths, theta, max_positions)
        case _:
            raise parameters.unsupported(
                f"rope_type = {kind!r}", "Implemented rope types are default, linear, llama3, yarn."
            )
    _refuse_partial(parameters)
    parameters.refuse_any_unread(HARMLESS)
    return Rope(inv_freq.numpy(), scale)


def _refuse_partial(parameters: ConfigReader) -> None:
    if (part := parameters.read_positive("partial_rotary_factor", default=1.0)) != 1.0:
        raise parameters.unsupported(f"partial_rotary_factor = {part}")


def _original_positions(parameters: ConfigReader, max_positions: int) -> int:
    return parameters.read_size("original_max_position_embeddings", default=max_positions)


def _llama3(parameters: ConfigReader, inv_freq: torch.Tensor, max_positions: int) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones are kept, in between is interpolated."""
    factor = parameters.read_positive("factor")
    low, high = parameters.read_positive("low_freq_factor"), parameters.read_positive("high_freq_factor")
    if low >= high:
        raise parameters.error(f"low_freq_factor is {low}, not below high_freq_factor, {high}")
    positions = _original_positions(parameters, max_positions)
    wavelengths = 2 * math.pi / inv_freq
    share_kept = (positions / wavelengths - low) / (high - low)
    between = (1 - share_kept) * inv_freq / factor + share_kept * inv_freq
    stretched = torch.where(wavelengths > positions / low, inv_freq / factor, between)
    return torch.where(wavelengths < positions / high, inv_freq, stretched)


def _yarn(
    parameters: ConfigReader, wavelengths: torch.Tensor, theta: float, max_positions: int
) -> tuple[torch.Tensor, float]:
    """YaRN, https://arxiv.org/abs/2309.00071: the inverse frequencies, and the scale ("attention factor")."""
    head_dim = 2 * len(wavelengths)
    positions = _original_positions(parameters, max_positions)
    factor = parameters.read_positive("factor", default=max_positions / positions)
    if theta <= 1:
        raise parameters.error(f"rope_theta is {theta}: yarn needs one above 1")
    first = _turning(parameters.read_positive("beta_fast", default=32.0), positions, theta, head_dim)
    last = _turning(parameters.read_positive("beta_slow", default=1.0), positions, theta, head_dim)
    if parameters.read(bool, "truncate", default=True):
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, float(head_dim - 1))
    last = first + 0.001 if first == last else last
    # 0 where a frequency is kept, 1 where it is divided by the factor, a ramp between.
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
    kept = 1 - ramp
    inv_freq = (1.0 / (factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept

    scale = parameters.read(float, "attention_factor", default=None)
    mscale = parameters.read(float, "mscale", default=0.0)
    mscale_all_dim = parameters.read(float, "mscale_all_dim", default=0.0)
    if scale is None:
        both = mscale and mscale_all_dim
        scale = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim) if both else _magnitude(factor, 1.0)
    return inv_freq, scale


def _turning(rotations: float, positions: int, theta: float, head_dim: int) -> float:
    """The (fractional) index of the frequency that turns `rotations` times within the original positions."""
    return head_dim * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
