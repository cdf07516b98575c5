"""Makes config.json from the metadata of a GGUF file."""

from typing import Any

import torch

from enginewright.builder.checkpoint.gguf.families import FAMILIES
from enginewright.builder.checkpoint.gguf.family import GgufFamily, Source
from enginewright.builder.checkpoint.gguf.fields import COMMON
from enginewright.builder.checkpoint.gguf.header import GgufHeader
from enginewright.builder.checkpoint.gguf.keys import Keys
from enginewright.errors import UnsupportedModelError


def synthesize(header: GgufHeader, family: GgufFamily, rope_factors: torch.Tensor | None) -> dict[str, Any]:
    """Makes config.json, with the keys of transformers.

    Args:
        header: header of the file.
        family: the file's family.
        rope_factors: divisors of rope frequencies ([head_dim / 2]), if the file has them.

    Raises:
        UnsupportedModelError: the metadata needs something that is not implemented here.
        EngineError: a required key is missing or makes no sense.
    """
    if rope_factors is not None and not family.has_rope_factors:
        known = " and ".join(dict.fromkeys(each.architecture for each in FAMILIES if each.has_rope_factors))
        raise UnsupportedModelError(f"rope factors are implemented for architectures {known} only")
    source = Source(family, Keys(header), header.tensors, rope_factors)
    family.check(source)
    fields = COMMON | family.config
    config = {name: read(source) for name, read in fields.items() if name not in family.lacks}
    for key, value in {"attention.causal": True, **family.required}.items():
        source.keys.refuse(key, value)
    source.keys.idle(*family.idle)
    source.keys.finish()
    return {"model_type": family.model_type, **config}
