"""Rotary position embeddings: the inverse frequencies, from a config old or new.

Older configs have `rope_theta` and `rope_scaling`; newer ones have it all in `rope_parameters`. The arithmetic is
in fp32 and in transformers' order, so that frequencies are the same bits as there.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.common.sizes import Sizes

HARMLESS = ("finetuned",)  # a remark of old yarn configs


@dataclass(frozen=True, eq=False)
class Rope:
    """inv_freq: fp32 [head_dim / 2]. scale: what cosines and sines are multiplied by."""

    inv_freq: npt.NDArray[np.float32]
    scale: float = 1.0


def read_rope(config: ConfigReader, sizes: Sizes, default_theta: float = 10_000.0) -> Rope:
    """The one rope of a model whose layers all have the same."""
    theta = config.read_positive("rope_theta", default=default_theta)
    return rope_from(config.section("rope_scaling", "rope_parameters"), theta, sizes)


def rope_from(parameters: ConfigReader | None, theta: float, sizes: Sizes) -> Rope:
    """The rope that `parameters` describe. theta: the base where they have none.

    Raises:
        UnsupportedModelError: the type of rope, or one of its parameters, is not implemented.
    """
    parameters = ConfigReader({}, "rope_parameters") if parameters is None else parameters
    theta = parameters.read_positive("rope_theta", default=theta)
    exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
    wavelengths = theta**exponents  # over 2π; [head_dim / 2]
    kind, scale = parameters.read(str, "rope_type", "type", default="default"), 1.0
    match kind:
        case "default":
            inv_freq = 1.0 / wavelengths
        case "linear":
            inv_freq = (1.0 / wavelengths) / parameters.read_positive("factor")
        case "llama3":
            inv_freq = _llama3(parameters, 1.0 / wavelengths, sizes)
        case "yarn":
            inv_freq, scale = _yarn(parameters, wavelengths, theta, sizes)
        case _:
            raise parameters.unsupported(
                f"rope_type = {kind!r}", "Implemented rope types are default, linear, llama3, yarn."
            )
    if (part := parameters.read_positive("partial_rotary_factor", default=1.0)) != 1.0:
        raise parameters.unsupported(f"partial_rotary_factor = {part}")
    parameters.refuse_any_unread(HARMLESS)
    return Rope(inv_freq.numpy(), scale)


def _original_positions(parameters: ConfigReader, sizes: Sizes) -> int:
    return parameters.read_size("original_max_position_embeddings", default=sizes.max_positions)


def _llama3(parameters: ConfigReader, inv_freq: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones are kept, in between is interpolated."""
    factor = parameters.read_positive("factor")
    low, high = parameters.read_positive("low_freq_factor"), parameters.read_positive("high_freq_factor")
    if low >= high:
        raise parameters.error(f"low_freq_factor is {low}, not below high_freq_factor, {high}")
    positions = _original_positions(parameters, sizes)
    wavelengths = 2 * math.pi / inv_freq
    share_kept = (positions / wavelengths - low) / (high - low)
    between = (1 - share_kept) * inv_freq / factor + share_kept * inv_freq
    stretched = torch.where(wavelengths > positions / low, inv_freq / factor, between)
    return torch.where(wavelengths < positions / high, inv_freq, stretched)


def _yarn(
    parameters: ConfigReader, wavelengths: torch.Tensor, theta: float, sizes: Sizes
) -> tuple[torch.Tensor, float]:
    """YaRN, https://arxiv.org/abs/2309.00071: the inverse frequencies, and the scale ("attention factor")."""
    positions = _original_positions(parameters, sizes)
    factor = parameters.read_positive("factor", default=sizes.max_positions / positions)
    if theta <= 1:
        raise parameters.error(f"rope_theta is {theta}: yarn needs one above 1")
    first = _turning(parameters.read_positive("beta_fast", default=32.0), positions, theta, sizes)
    last = _turning(parameters.read_positive("beta_slow", default=1.0), positions, theta, sizes)
    if parameters.read(bool, "truncate", default=True):
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, float(sizes.head_dim - 1))
    last = first + 0.001 if first == last else last
    # 0 where a frequency is kept, 1 where it is divided by the factor, a ramp between.
    ramp = torch.clamp((torch.arange(sizes.head_dim // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
    kept = 1 - ramp
    inv_freq = (1.0 / (factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept

    scale = parameters.read(float, "attention_factor", default=None)
    mscale = parameters.read(float, "mscale", default=0.0)
    mscale_all_dim = parameters.read(float, "mscale_all_dim", default=0.0)
    if scale is None:
        both = mscale and mscale_all_dim
        scale = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim) if both else _magnitude(factor, 1.0)
    return inv_freq, scale


def _turning(rotations: float, positions: int, theta: float, sizes: Sizes) -> float:
    """The (fractional) index of the frequency that turns `rotations` times within the original positions."""
    return sizes.head_dim * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
