"""config.json from the metadata of a GGUF file.

Source: the keys that llama.cpp's convert_hf_to_gguf.py writes, and what its loaders take where one is absent.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from enginewright.builder.checkpoint.gguf_header import GgufHeader
from enginewright.builder.checkpoint.gguf_names import Architecture
from enginewright.errors import EngineError, UnsupportedModelError

T = TypeVar("T", int, float, bool, str)

# Keys without an effect on what is computed.
IDLE_KEYS = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
GEMMA3_PATTERN = 6  # every sixth layer is global
GEMMA3_LOCAL_BASE = 10_000.0
GEMMA3_27B_LAYERS = 62
GEMMA2_27B_LAYERS = 46
LLAMA3_CONTEXT_TOKENS = 8192
LLAMA3_LOW, LLAMA3_HIGH = 1.0, 4.0  # factors on frequencies: the same in every llama3 scaling that was published
LLAMA3_RELATIVE_ERROR = 1e-5  # between float32 factors computed in another order


class Keys:
    """The metadata under `<architecture>.`, read by type. What nobody asked for is refused by `finish`."""

    def __init__(self, header: GgufHeader) -> None:
        self._architecture = str(header.metadata["general.architecture"])
        prefix = self._architecture + "."
        self._values = {key[len(prefix) :]: value for key, value in header.metadata.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def find(self, kind: type[T], key: str) -> T | None:
        self._read.add(key)
        value = self._values.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise UnsupportedModelError(
                f"metadata {self._architecture}.{key} is a {type(value).__name__}", f"a {kind.__name__} is read"
            )
        return value

    def get(self, kind: type[T], key: str, default: T | None = None) -> T:
        value = self.find(kind, key)
        if value is None:
            value = default
        if value is None:
            raise EngineError(f"metadata {self._architecture}.{key} is missing", fix="Convert the model anew.")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(int, key, default)
        if not 0 < value < 1 << 31:
            raise EngineError(f"metadata {self._architecture}.{key} is {value}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(float, key, default)
        if not 0 < value < math.inf:
            raise EngineError(f"metadata {self._architecture}.{key} is {value}")
        return value

    def refuse(self, key: str, *harmless: object) -> None:
        """Raises:
        UnsupportedModelError: the key is there with another than a harmless value.
        """
        self._read.add(key)
        value = self._values.get(key)
        if value is not None and value not in harmless:
            raise UnsupportedModelError(f"metadata {self._architecture}.{key} = {value!r} is not implemented")

    def layers(self, key: str, count: int) -> list[bool] | int | None:
        """A flag for each of `count` layers, or a period."""
        self._read.add(key)
        value = self._values.get(key)
        if isinstance(value, list) and len(value) >= count:
            return [bool(flag) for flag in value[:count]]
        if value is None or (type(value) is int and value > 0):
            return value
        raise EngineError(f"metadata {self._architecture}.{key} does not fit {count} layers")

    def finish(self) -> None:
        for key in sorted(self._values.keys() - self._read - IDLE_KEYS):
            self.refuse(key)


def synthesize(header: GgufHeader, architecture: Architecture, rope_factors: torch.Tensor | None) -> dict[str, Any]:
    """config.json, with the keys of transformers.

    Args:
        rope_factors: what each rope frequency is divided by ([head_dim / 2]), where the file has it.

    Raises:
        UnsupportedModelError: the metadata asks for something that is not implemented here.
        EngineError: a needed key is missing or makes no sense.
    """
    keys = Keys(header)
    hidden, heads = keys.size("embedding_length"), keys.size("attention.head_count")
    rotated = keys.find(int, "rope.dimension_count")
    head_dim = keys.size("attention.key_length", rotated if architecture.paired_rope and rotated else hidden // heads)
    keys.refuse("attention.value_length", head_dim)
    part = 1.0
    if architecture.model_type == "glm4" and rotated:
        part = rotated / head_dim
    else:
        keys.refuse("rope.dimension_count", head_dim)
    keys.refuse("attention.causal", True)
    if architecture.model_type not in ("qwen3_moe", "mixtral"):
        keys.refuse("expert_count", 0)
        keys.refuse("expert_used_count", 0)
    names = header.tensors.keys()
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise EngineError("tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": "output.weight" not in names,
    }
    match architecture.model_type:
        case "cohere2":
            config["layer_norm_eps"] = keys.positive("attention.layer_norm_epsilon")
        case "starcoder2":
            config["norm_epsilon"] = keys.positive("attention.layer_norm_epsilon")
        case _:
            config["rms_norm_eps"] = keys.positive("attention.layer_norm_rms_epsilon")
    if config["num_hidden_layers"] > len(names):
        raise EngineError(
            f"the GGUF file is said to have {config['num_hidden_layers']} layers", f"in {len(names)} tensors"
        )
    scaling = _rope_scaling(keys, config["max_position_embeddings"])
    if not architecture.model_type.startswith("gemma"):
        config |= {"hidden_act": "silu", "rope_theta": keys.positive("rope.freq_base", 10_000.0)}
    if rope_factors is not None:
        if architecture.model_type != "llama":
            raise UnsupportedModelError("rope factors are implemented for architecture llama alone")
        if scaling is not None:
            raise UnsupportedModelError("rope factors beside a rope scaling are not implemented")
        scaling = _llama3_scaling(rope_factors, config["rope_theta"], head_dim)
    config["rope_scaling"] = scaling
    has_biases = {part: any(name.endswith(f"{part}.bias") for name in names) for part in ("attn_q", "ffn_up")}
    match architecture.model_type:
        case "llama" | "granite" | "smollm3":
            config |= {"attention_bias": has_biases["attn_q"], "mlp_bias": has_biases["ffn_up"]}
        case "qwen3" | "qwen3_moe" | "olmo2" | "olmo3" | "glm4" | "hunyuan_v1_dense" | "cohere2":
            config["attention_bias"] = has_biases["attn_q"]
        case "ernie4_5" | "starcoder2":
            config["use_bias"] = has_biases["attn_q"]
    match architecture.model_type:
        case "qwen2" | "qwen3":
            config["use_sliding_window"] = False
        case "gemma2":
            config |= _gemma2(keys, config)
        case "gemma3_text":
            config |= _gemma3(keys, config)
        case "granite":
            config |= {
                "attention_multiplier": keys.positive("attention.scale", head_dim**-0.5),
                "embedding_multiplier": keys.positive("embedding_scale", 1.0),
                "residual_multiplier": keys.positive("residual_scale", 1.0),
                "logits_scaling": keys.positive("logit_scale", 1.0),
            }
        case "qwen3_moe":
            config |= {
                "use_sliding_window": False,
                "num_experts": keys.size("expert_count"),
                "num_experts_per_tok": keys.size("expert_used_count"),
                "moe_intermediate_size": keys.size("expert_feed_forward_length"),
                "norm_topk_prob": True,  # llama.cpp normalizes whatever the model says
            }
        case "mixtral":
            config |= {
                "num_local_experts": keys.size("expert_count"),
                "num_experts_per_tok": keys.size("expert_used_count"),
            }
        case "olmo3":
            window = keys.size("attention.sliding_window")
            config |= {"sliding_window": window, "layer_types": _layer_types(keys, config["num_hidden_layers"], 4)}
        case "phi3":
            # The file has 0 where no layer has a window.
            config["sliding_window"] = keys.find(int, "attention.sliding_window") or None
        case "starcoder2":
            config["hidden_act"] = "gelu_pytorch_tanh"  # the file does not have its windows, nor has llama.cpp
        case "glm4":
            config["partial_rotary_factor"] = part
        case "cohere2":
            window = keys.size("attention.sliding_window")
            config |= {"logit_scale": keys.positive("logit_scale"), "sliding_window": window}
            config["layer_types"] = _layer_types(keys, config["num_hidden_layers"], 4)
            if hidden != heads * head_dim:
                raise UnsupportedModelError(
                    "heads of another width than hidden / heads are not implemented for cohere2"
                )
    keys.finish()
    return config


def _rope_scaling(keys: Keys, context_tokens: int) -> dict[str, Any] | None:
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
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original or context_tokens
        for key, name in (("attn_factor", "attention_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            if (value := keys.find(float, f"rope.scaling.yarn_{key}")) is not None:
                scaling[name] = value
    return scaling


def _layer_types(keys: Keys, count: int, period: int) -> list[str]:
    """Of each layer: one of `period` sees everything, where the file does not say which do."""
    pattern = keys.layers("attention.sliding_window_pattern", count) or period
    local = [(layer + 1) % pattern != 0 for layer in range(count)] if isinstance(pattern, int) else pattern
    return ["sliding_attention" if flag else "full_attention" for flag in local]


def _gemma2(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    own = _gemma(keys, config, GEMMA2_27B_LAYERS)
    window = keys.size("attention.sliding_window", 4096)
    return own | {
        "rope_theta": keys.positive("rope.freq_base", 10_000.0),
        "layer_types": _layer_types(keys, config["num_hidden_layers"], 2),
        "sliding_window": window,
    }


def _gemma3(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    count, window = config["num_hidden_layers"], keys.find(int, "attention.sliding_window") or 0
    types = _layer_types(keys, count, GEMMA3_PATTERN)
    own = _gemma(keys, config, GEMMA3_27B_LAYERS) | {
        "rope_theta": keys.positive("rope.freq_base", 10_000.0),
        "rope_local_base_freq": keys.positive("rope.freq_base_swa", GEMMA3_LOCAL_BASE),
        "layer_types": types if window else ["full_attention"] * count,
    }
    return own | ({"sliding_window": window} if window else {})


def _gemma(keys: Keys, config: dict[str, Any], layers_of_27b: int) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": keys.find(float, "final_logit_softcapping"),
        "attn_logit_softcapping": keys.find(float, "attn_logit_softcapping"),
        # Not in the file. The 27B model scales by its hidden size over its heads, every other by head_dim.
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if config["num_hidden_layers"] == layers_of_27b
        else config["head_dim"],
    }


def _llama3_scaling(factors: torch.Tensor, base: float, head_dim: int) -> dict[str, Any] | None:
    """The rope_scaling that gives these factors; None where they change nothing.

    The file has the factors alone. That a scaling gives all of them, and to float32's precision, is the proof
    that it is the right one.
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
    """What Llama 3.1 divides each rope frequency by: long waves by `factor`, short ones by 1, between them a mix."""
    factors = []
    for pair in range(head_dim // 2):
        turns = context_tokens / (2 * math.pi * base ** (2 * pair / head_dim))  # within the original context
        mix = (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
        factors.append(1.0 if turns > LLAMA3_HIGH else factor if turns < LLAMA3_LOW else 1 / ((1 - mix) / factor + mix))
    return factors
