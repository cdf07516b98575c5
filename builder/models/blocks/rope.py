"""Rotary position embeddings: inverse frequencies from old and new configs.

Older configs have `rope_theta` and `rope_scaling`; newer ones have everything in `rope_parameters`. The arithmetic is
in fp32 and in transformers' order, so that frequencies are the same bits as there.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from enginewright.builder.config import ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter
from enginewright.plugins.attention.rope_table import ROPE_TABLE
from enginewright.plugins.plugin import dims_of, width_of

HARMLESS = ("finetuned",)  # a remark of old yarn configs
SECTIONS = ("mrope_interleaved", "mrope_section")  # angles of time, rows and columns, which are equal in a text


@dataclass(frozen=True)
class RopeTable:
    """Angles of a step's positions, for all layers with the same rope."""

    cos: ir.Value  # cosines, [1, T, rotated / 2]
    sin: ir.Value  # sines, [1, T, rotated / 2]
    interleaved: bool = False  # True if the two columns of a pair are neighbours in checkpoints

    @property
    def rotated(self) -> int:
        """Number of a head's columns that are rotated: its first ones."""
        return 2 * width_of(self.cos)

    def rotate(self, graph: GraphWriter, x: ir.Value, head_dim: int) -> ir.Value:
        """Rotates each head of x, [1, T, heads · head_dim]: the first half of its columns against the second."""
        inputs, heads = [x, self.cos, self.sin], width_of(x) // head_dim
        partial = {} if self.rotated == head_dim else {"rotary_embedding_dim": self.rotated}
        return graph.op("RotaryEmbedding", inputs, f"{x.name}.rotated", dims_of(x), num_heads=heads, **partial)

    def order(self, heads: int, head_dim: int) -> list[int]:
        """Lists the columns of `heads` heads in the order that moves pairs of an interleaved rope half a head apart.

        Scores do not change by it, as queries and keys have the same order.
        """
        if not self.interleaved:
            return [*range(heads * head_dim)]
        pairs = [*range(0, self.rotated, 2), *range(1, self.rotated, 2), *range(self.rotated, head_dim)]
        return [head * head_dim + column for head in range(heads) for column in pairs]


@dataclass(frozen=True, eq=False)
class Rope:
    """Inverse frequencies of a rope, and its settings."""

    inv_freq: npt.NDArray[np.float32]  # radians per position, [rotated / 2]
    scale: float = 1.0  # scale of cosines and sines
    interleaved: bool = False  # as in RopeTable

    def write(self, graph: GraphWriter, name: str = "rope") -> RopeTable:
        """Writes the table of angles."""
        inv_freq = graph.constant(f"{name}.inv_freq", self.inv_freq)
        cos, sin = graph.plugin(ROPE_TABLE, [graph.positions, inv_freq], name, scale=self.scale).outputs
        cos.name, sin.name = f"{name}.cos", f"{name}.sin"
        return RopeTable(cos, sin, self.interleaved)


def read_rope(
    config: ConfigReader,
    head_dim: int,
    default_theta: float = 10_000.0,
    part: float | None = None,
    interleaved: bool = False,
    original_positions: int | None = None,
    sectioned: bool = False,
) -> Rope:
    """Reads the rope of a model with one rope for all layers.

    Args:
        config: config of the model.
        head_dim: columns of a head.
        default_theta: base if the config has none.
        part: rotated share of a head if the config has none; None: the model rotates whole heads.
        interleaved: as in RopeTable.
        original_positions: original context if the rope's parameters have none.
        sectioned: True if the model may have sections of time, rows and columns, which are equal in a text.
    """
    theta = config.read_positive("rope_theta", default=default_theta)
    part = _read_part(config, part)
    max_positions = config.read_size("max_position_embeddings")
    parameters = config.section("rope_scaling", "rope_parameters")
    rope = rope_from(parameters, theta, head_dim, max_positions, part, original_positions, sectioned)
    return replace(rope, interleaved=interleaved)


def read_local_and_global(
    config: ConfigReader, local_theta: float, global_theta: float, head_dim: int, max_positions: int
) -> tuple[Rope, Rope]:
    """Reads the ropes of layers with a window, and of the others. Old configs only scale the latter, by `rope_scaling`.

    Args:
        config: config of the model.
        local_theta: default base of layers with a window.
        global_theta: default base of the others.
        head_dim: columns of a head.
        max_positions: positions of the longest sequence.
    """
    parameters = config.section("rope_parameters") or ConfigReader({})
    local = rope_from(parameters.section("sliding_attention"), local_theta, head_dim, max_positions)
    scaling, newer = config.section("rope_scaling"), parameters.section("full_attention")
    if scaling is not None and newer is not None:
        raise config.unsupported("both rope_scaling and rope_parameters are given", "Leave one of them.")
    parameters.refuse_any_unread()
    return local, rope_from(scaling or newer, global_theta, head_dim, max_positions)


def latent_score_scale(parameters: ConfigReader | None) -> float:
    """Computes the factor of latent attention's scores under a rope that stretches contexts.

    It is squared, since the config's is meant for queries and for keys.

    Args:
        parameters: parameters of the rope; None: there are none.
    """
    if parameters is None or parameters.read(str, "rope_type", "type", default="default") == "default":
        return 1.0
    mscale = parameters.read(float, "mscale_all_dim", default=0.0)
    return _magnitude(parameters.read_positive("factor"), mscale) ** 2 if mscale else 1.0


def rope_from(
    parameters: ConfigReader | None,
    theta: float,
    head_dim: int,
    max_positions: int,
    part: float | None = None,
    original_positions: int | None = None,
    sectioned: bool = False,
) -> Rope:
    """Makes the rope that `parameters` describe.

    Args:
        parameters: parameters of the rope; None: there are none.
        theta: base if they have none.
        head_dim: columns of a head.
        max_positions: positions of the longest sequence.
        part: as in read_rope.
        original_positions: as in read_rope.
        sectioned: as in read_rope.

    Raises:
        UnsupportedModelError: the type of rope, or one of its parameters, is not implemented.
    """
    parameters = ConfigReader({}, "rope_parameters") if parameters is None else parameters
    theta = parameters.read_positive("rope_theta", default=theta)
    kind, scale = parameters.read(str, "rope_type", "type", default="default"), 1.0
    if kind == "proportional":
        return _proportional(parameters, theta, head_dim)
    part = _read_part(parameters, part) or 1.0
    rotated = int(head_dim * part)
    if part > 1 or rotated < 2 or rotated % 2:
        raise parameters.error(f"partial_rotary_factor is {part}, which rotates {rotated} of {head_dim} columns")
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    wavelengths = theta**exponents  # over 2π; [rotated / 2]
    original = parameters.read_size("original_max_position_embeddings", default=original_positions or max_positions)
    match kind:
        case "default":
            inv_freq = 1.0 / wavelengths
        case "dynamic":
            # The base does not change up to max_positions, the longest sequence. Hunyuan's `alpha` raises it.
            parameters.read_positive("factor", default=1.0)
            if alpha := parameters.read(float, "alpha", default=0.0):
                for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
                    parameters.read(float, key, default=0.0)
                wavelengths = (theta * alpha ** (rotated / (rotated - 2))) ** exponents
            inv_freq = 1.0 / wavelengths
        case "linear":
            inv_freq = (1.0 / wavelengths) / parameters.read_positive("factor")
        case "llama3":
            inv_freq = _llama3(parameters, 1.0 / wavelengths, original)
        case "longrope" | "su":
            inv_freq, scale = _longrope(parameters, wavelengths, original, max_positions)
        case "yarn":
            inv_freq, scale = _yarn(parameters, wavelengths, theta, original, max_positions)
        case _:
            raise parameters.unsupported(
                f"rope_type = {kind!r}",
                "Implemented rope types are default, dynamic, linear, llama3, longrope, proportional, yarn.",
            )
    parameters.refuse_any_unread((*HARMLESS, *SECTIONS) if sectioned else HARMLESS)
    return Rope(inv_freq.numpy(), scale)


def _read_part(parameters: ConfigReader, default: float | None) -> float | None:
    part = parameters.read_positive("partial_rotary_factor", default=default or 1.0)
    if default is None and part != 1.0:
        raise parameters.unsupported(f"partial_rotary_factor = {part}", "The family rotates whole heads.")
    return None if default is None else part


def _proportional(parameters: ConfigReader, theta: float, head_dim: int) -> Rope:
    """Makes Gemma 4's rope: the first pairs of a head are rotated, and the others are not."""
    part = parameters.read_positive("partial_rotary_factor", default=1.0)
    factor = parameters.read_positive("factor", default=1.0)
    rotated = int(part * head_dim // 2)  # pairs
    if not 0 < rotated <= head_dim // 2:
        raise parameters.error(f"partial_rotary_factor is {part}, which rotates {rotated} of {head_dim // 2} pairs")
    parameters.refuse_any_unread(HARMLESS)
    inv_freq = torch.zeros(head_dim // 2)
    inv_freq[:rotated] = 1.0 / (theta ** (torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / head_dim))
    return Rope((inv_freq / factor).numpy())


def _llama3(parameters: ConfigReader, inv_freq: torch.Tensor, positions: int) -> torch.Tensor:
    """Stretches long wavelengths by the factor, keeps short ones, and interpolates in between (Llama 3.1)."""
    factor = parameters.read_positive("factor")
    low, high = parameters.read_positive("low_freq_factor"), parameters.read_positive("high_freq_factor")
    if low >= high:
        raise parameters.error(f"low_freq_factor is {low}, not below high_freq_factor, {high}")
    wavelengths = 2 * math.pi / inv_freq
    share_kept = (positions / wavelengths - low) / (high - low)
    between = (1 - share_kept) * inv_freq / factor + share_kept * inv_freq
    stretched = torch.where(wavelengths > positions / low, inv_freq / factor, between)
    return torch.where(wavelengths < positions / high, inv_freq, stretched)


def _longrope(
    parameters: ConfigReader, wavelengths: torch.Tensor, original: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Computes LongRoPE's inverse frequencies and scale ("attention factor"). https://arxiv.org/abs/2402.13753

    There are factors for sequences up to the original length, and for longer ones. The choice cannot depend on a
    sequence, whose keys would have to be rotated again when it grows: an engine has the factors of its longest one.
    """
    factor = parameters.read_positive("factor", default=max_positions / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scale = parameters.read_positive("attention_factor", default=scale)
    is_long = min(max_positions, parameters.max_seq_len or max_positions) > original
    lists = {key: parameters.read_list(float, key) for key in ("short_factor", "long_factor")}
    for key, factors in lists.items():
        if factors is None or len(factors) != len(wavelengths) or min(factors) <= 0:
            raise parameters.error(f"{key} is not a list of {len(wavelengths)} numbers above 0")
    factors = lists["long_factor" if is_long else "short_factor"]
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths), scale


def _yarn(
    parameters: ConfigReader, wavelengths: torch.Tensor, theta: float, positions: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Computes YaRN's inverse frequencies and scale ("attention factor"). https://arxiv.org/abs/2309.00071"""
    head_dim = 2 * len(wavelengths)
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
    """Returns the (fractional) index of the frequency with `rotations` rotations within the original positions."""
    return head_dim * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
