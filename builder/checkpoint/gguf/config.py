"""Makes config.json from the metadata of a GGUF file.

Source: the keys that llama.cpp's convert_hf_to_gguf.py writes, and the defaults of its loaders.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from enginewright.builder.checkpoint.gguf.families import (
    FAMILIES,
    LIKE_LLAMA,
    Family,
    Source,
    granite_factors,
    one_of,
)
from enginewright.builder.checkpoint.gguf.gemma import gemma2, gemma3, gemma4
from enginewright.builder.checkpoint.gguf.header import GgufHeader
from enginewright.builder.checkpoint.gguf.keys import Keys, layer_types, rope_scaling
from enginewright.builder.checkpoint.gguf.names import Architecture
from enginewright.errors import EngineError, UnsupportedModelError

LLAMA3_CONTEXT_TOKENS = 8192  # original context of Llama 3, in tokens
LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0  # factors on frequencies, the same in every published llama3 scaling
LLAMA3_RELATIVE_ERROR = 1e-5  # tolerance between float32 factors that are computed in another order


def synthesize(header: GgufHeader, architecture: Architecture, rope_factors: torch.Tensor | None) -> dict[str, Any]:
    """Makes config.json, with the keys of transformers.

    Args:
        header: header of the file.
        architecture: the file's architecture.
        rope_factors: divisors of rope frequencies ([head_dim / 2]), if the file has them.

    Raises:
        UnsupportedModelError: the metadata needs something that is not implemented here.
        EngineError: a required key is missing or makes no sense.
    """
    keys, model_type = Keys(header), architecture.model_type
    family = FAMILIES.get(model_type, LIKE_LLAMA)
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    keys.refuse("attention.causal", True)
    names = header.tensors.keys()
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise EngineError("tensor token_embd.weight is missing")
    layers = keys.size("block_count")
    if layers > len(names):
        raise EngineError(f"the GGUF file declares {layers} layers", f"in {len(names)} tensors")
    if architecture.mtp_prefix:
        mtp_layers = keys.find(int, "nextn_predict_layers") or 0
        if not 0 <= mtp_layers < layers:
            raise EngineError(f"the GGUF file declares {mtp_layers} of its {layers} layers as multi-token prediction")
        layers -= mtp_layers
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": "output.weight" not in names,
        family.epsilon[1]: keys.positive(family.epsilon[0]),
    }
    if "intermediate_size" not in family.absent:
        config["intermediate_size"] = keys.size("feed_forward_length")
    if "num_key_value_heads" not in family.absent:
        config["num_key_value_heads"] = one_of(keys, "attention.head_count_kv", layers, heads)
    head_dim, part = _head_dim(keys, architecture, family, hidden // heads)
    if "head_dim" not in family.absent:
        config["head_dim"] = head_dim
    scaling = rope_scaling(keys, config["max_position_embeddings"])
    if not model_type.startswith("gemma"):
        config |= {"hidden_act": "silu", "rope_theta": keys.positive("rope.freq_base", 10_000.0)}
    if rope_factors is not None:
        if model_type not in ("llama", "gemma4_text"):
            raise UnsupportedModelError("rope factors are implemented for architectures llama and gemma4 only")
        if scaling is not None:
            raise UnsupportedModelError("rope factors together with a rope scaling are not implemented")
        if model_type == "llama":
            scaling = _llama3_scaling(rope_factors, config["rope_theta"], head_dim)
    config["rope_scaling"] = scaling
    has_biases = {part: any(name.endswith(f"{part}.bias") for name in names) for part in ("attn_q", "ffn_up")}
    match model_type:
        case "llama" | "granite" | "smollm3":
            config |= {"attention_bias": has_biases["attn_q"], "mlp_bias": has_biases["ffn_up"]}
        case "qwen3" | "qwen3_moe" | "olmo2" | "olmo3" | "glm4" | "hunyuan_v1_dense" | "cohere2":
            config["attention_bias"] = has_biases["attn_q"]
        case "ernie4_5" | "starcoder2":
            config["use_bias"] = has_biases["attn_q"]
    source = Source(keys, config, names, rope_factors)
    config |= family.read(source)
    match model_type:
        case "qwen2" | "qwen3":
            config["use_sliding_window"] = False
        case "gemma2":
            config |= gemma2(source)
        case "gemma3_text":
            config |= gemma3(source)
        case "gemma4_text":
            config |= gemma4(source)
        case "granite":
            config |= granite_factors(source)
            # For Granite 4 without states, the converter writes keys of states, and repeats the MLP's.
            keys.idle(*(f"ssm.{key}" for key in ("conv_kernel", "group_count", "inner_size", "state_size")))
            keys.idle("ssm.time_step_rank", "expert_shared_feed_forward_length")
        case "qwen3_moe":
            config |= {
                "use_sliding_window": False,
                "num_experts": keys.size("expert_count"),
                "num_experts_per_tok": keys.size("expert_used_count"),
                "moe_intermediate_size": keys.size("expert_feed_forward_length"),
                "norm_topk_prob": True,  # llama.cpp always normalizes
            }
        case "mixtral":
            config |= {
                "num_local_experts": keys.size("expert_count"),
                "num_experts_per_tok": keys.size("expert_used_count"),
            }
        case "olmo3":
            window = keys.size("attention.sliding_window")
            config |= {"sliding_window": window, "layer_types": layer_types(keys, config["num_hidden_layers"], 4)}
        case "phi3":
            # The file has 0 if no layer has a window.
            config["sliding_window"] = keys.find(int, "attention.sliding_window") or None
        case "starcoder2":
            config["hidden_act"] = "gelu_pytorch_tanh"  # neither the file nor llama.cpp has its windows
        case "glm4" | "glm4_moe" | "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            config["partial_rotary_factor"] = part
        case "cohere2":
            window = keys.size("attention.sliding_window")
            config |= {"logit_scale": keys.positive("logit_scale"), "sliding_window": window}
            config["layer_types"] = layer_types(keys, config["num_hidden_layers"], 4)
            if hidden != heads * head_dim:
                raise UnsupportedModelError(
                    "heads of another width than hidden / heads are not implemented for cohere2"
                )
    keys.finish()
    return {key: value for key, value in config.items() if key not in family.dropped}


def _head_dim(keys: Keys, architecture: Architecture, family: Family, default: int) -> tuple[int, float]:
    """Returns the width of a head, and the share of it that rope rotates."""
    rotated = keys.find(int, "rope.dimension_count")
    if "head_dim" in family.absent:
        return default, 1.0
    dim = keys.size("attention.key_length", rotated if architecture.paired_rope and rotated else default)
    keys.refuse("attention.value_length", dim)
    if not family.partial_rope:
        keys.refuse("rope.dimension_count", dim)
    return dim, rotated / dim if rotated else 1.0


def _llama3_scaling(factors: torch.Tensor, base: float, head_dim: int) -> dict[str, Any] | None:
    """Finds the rope_scaling with these factors; None if they change nothing.

    The file has the factors alone. A scaling that reproduces all of them, to float32's precision, is the right one.
    """
    if tuple(factors.shape) != (head_dim // 2,):
        raise EngineError(f"the rope factors have shape {tuple(factors.shape)}", f"{head_dim // 2} are needed")
    if bool((factors == 1).all()):
        return None
    factor = max(1.0, float(factors.max()))
    computed = torch.tensor(llama3_factors(base, head_dim, factor, LLAMA3_CONTEXT_TOKENS))
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


def llama3_factors(base: float, head_dim: int, factor: float, context_tokens: int) -> Sequence[float]:
    """Computes Llama 3.1's divisors of rope frequencies: `factor` for long waves, 1 for short ones, mixed in between.

    Args:
        base: base of the frequencies.
        head_dim: columns of a head.
        factor: divisor of long waves.
        context_tokens: original context.
    """
    factors = []
    for pair in range(head_dim // 2):
        rotations = context_tokens / (2 * math.pi * base ** (2 * pair / head_dim))  # within the original context
        mix = (rotations - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
        if rotations > LLAMA3_HIGH:
            factors.append(1.0)
        elif rotations < LLAMA3_LOW:
            factors.append(factor)
        else:
            factors.append(1 / ((1 - mix) / factor + mix))
    return factors
