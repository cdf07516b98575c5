"""Declares everything that the builder knows about the GGUF files of one model family."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from enginewright.builder.checkpoint.gguf import names
from enginewright.builder.checkpoint.gguf.header import GgufTensor
from enginewright.builder.checkpoint.gguf.keys import Keys
from enginewright.builder.checkpoint.gguf.recipes import Recipe
from enginewright.errors import EngineError

Field = Callable[["Source"], Any]  # reads the value of one key of config.json
GgufFields = dict[str, Field]  # key of config.json → the function that reads its value


@dataclass(frozen=True)
class GgufFamily:
    """The GGUF files of one model family: their names and keys, and the forms in which they store tensors."""

    architecture: str  # `general.architecture` of the files
    model_type: str  # `model_type` of the Hugging Face config
    # GGUF stem → Hugging Face stem, within a layer; several stems: for each expert, one after another in one tensor.
    layer: Mapping[str, str | tuple[str, ...]]
    # metadata key that is 0 or missing in all files of the architecture but this family's; "" in most families
    marker: str = ""
    config: GgufFields = field(default_factory=dict)  # the family's own keys, which replace `fields.COMMON`
    lacks: Sequence[str] = ()  # keys of `fields.COMMON` that the family's config.json does not have
    required: Mapping[str, object] = field(default_factory=dict)  # metadata key → the only value that is implemented
    idle: Sequence[str] = ()  # metadata keys that have no effect on results
    check: Callable[["Source"], object] = lambda _: None  # raises if a file has what is not implemented
    has_rope_factors: bool = False  # True if the tensor of rope factors is implemented
    has_paired_rope: bool = False  # True if the rows of Q and K are reordered
    has_shifted_norms: bool = False  # True if norms hold 1 + w, but for those of recipes
    recipes: Sequence[Recipe] = ()  # in the order of preference
    top: Mapping[str, str] = field(default_factory=lambda: names.TOP)  # as `layer`, for tensors outside of layers
    prefix: str = "model.layers"  # prefix of a layer's number
    # Prefix of the multi-token prediction layers after the others, which the builder leaves out; "": there are none.
    mtp_prefix: str = ""


@dataclass(frozen=True)
class Source:
    """The parts of a file that config.json is made from."""

    family: GgufFamily  # the file's family
    keys: Keys  # metadata of the file
    tensors: Mapping[str, GgufTensor]  # GGUF's name → tensor
    rope_factors: torch.Tensor | None  # divisors of rope frequencies ([head_dim / 2]), if the file has them

    def any_ends(self, end: str) -> bool:
        """Checks if a tensor's name has this end."""
        return any(name.endswith(f".{end}") for name in self.tensors)

    @cached_property
    def layers(self) -> int:
        """Number of layers, without those of multi-token prediction."""
        layers = self.keys.size("block_count")
        if layers > len(self.tensors):
            raise EngineError(f"the GGUF file declares {layers} layers", f"in {len(self.tensors)} tensors")
        if not self.family.mtp_prefix:
            return layers
        mtp_layers = self.keys.find(int, "nextn_predict_layers") or 0
        if not 0 <= mtp_layers < layers:
            raise EngineError(f"the GGUF file declares {mtp_layers} of its {layers} layers as multi-token prediction")
        return layers - mtp_layers
