"""Makes rope_scaling out of a GGUF file's rope keys, or of its rope factors."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from enginewright.builder.checkpoint.gguf.keys import Keys
from enginewright.errors import EngineError, UnsupportedModelError

LLAMA3_CONTEXT_TOKENS = 8192  # original context of Llama 3, in tokens
LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0  # factors on frequencies, the same in every published llama3 scaling
LLAMA3_RELATIVE_ERROR = 1e-5  # tolerance between float32 factors that are computed in another order


def scaling(keys: Keys, context_tokens: int) -> dict[str, Any] | None:
    """Makes the rope_scaling that all architectures have; None if there is none.

    Args:
        keys: metadata of the file.
        context_tokens: positions of the longest sequence.
    """
    old_factor = keys.find(float, "rope.scale_linear")
    factor = keys.find(float, "rope.scaling.factor") or old_factor
    kind = keys.get(str, "rope.scaling.type", "linear" if factor not in (None, 0.0, 1.0) else "none")
    original = keys.find(int, "rope.scaling.original_context_length")
    keys.refuse("rope.scaling.yarn_ext_factor", 1.0)
    keys.refuse("rope.scaling.attn_factor", 1.0)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or not factor or not math.isfinite(factor):
        raise UnsupportedModelError(f"rope scaling {kind!r} with factor {factor} is not implemented")
    found: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        found["original_max_position_embeddings"] = original or context_tokens
        for key, name in (("attn_factor", "attention_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            if (value := keys.find(float, f"rope.scaling.yarn_{key}")) is not None:
                found[name] = value
    return found


def llama3_scaling(factors: torch.Tensor, base: float, head_dim: int) -> dict[str, Any] | None:
    """Finds the rope_scaling with these factors; None if they change nothing.

    The file has the factors alone. A scaling that reproduces all of them, to float32's precision, is the right one.

    Args:
        factors: divisors of rope frequencies ([head_dim / 2]).
        base: base of the frequencies.
        head_dim: columns of a head.
    """
    if tuple(factors.shape) != (head_dim // 2,):
        raise EngineError(f"the rope factors have shape {tuple(factors.shape)}", f"{head_dim // 2} are needed")
    if bool((factors == 1).all()):
        return None
    factor = max(1.0, float(factors.max()))
    computed = torch.tensor(_llama3_factors(base, head_dim, factor))
    if not torch.allclose(computed, factors, rtol=LLAMA3_RELATIVE_ERROR, atol=0.0):
        raise UnsupportedModelError(
            "the rope factors are not those of a llama3 scaling",
            fix="Build from the model's safetensors checkpoint instead.",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT_TOKENS,
    }


def _llama3_factors(base: float, head_dim: int, factor: float) -> Sequence[float]:
    """Computes Llama 3.1's divisors of rope frequencies: `factor` for long waves, 1 for short ones, or a mix."""
    factors = []
    for pair in range(head_dim // 2):
        # rotations within the original context
        rotations = LLAMA3_CONTEXT_TOKENS / (2 * math.pi * base ** (2 * pair / head_dim))
        mix = (rotations - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
        if rotations > LLAMA3_HIGH:
            factors.append(1.0)
        elif rotations < LLAMA3_LOW:
            factors.append(factor)
        else:
            factors.append(1 / ((1 - mix) / factor + mix))
    return factors
