"""Tiny random models of awkward sizes: as tensors in memory, and as a checkpoint in a folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM

from enginewright.builder.checkpoint.base import TensorInfo, TokenizerFiles
from enginewright.builder.pooling import Pooling

# Which transformers has, and not among models of texts alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

MIXTURES = (
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "glm4_moe",
    "minimax_m2",
    "ernie4_5_moe",
    "deepseek_v3",
    "glm4_moe_lite",
    "mistral4",
    "granitemoe",
    "granitemoeshared",
)
LATENT = ("deepseek_v3", "glm4_moe_lite", "mistral4")  # of mixtures, whose attention has kernels of its own
# Of mixtures: that every expert is chosen, so that engines, which round what routers read, choose as transformers does.
ALL_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_experts_per_tok": 7},
    "mixtral": {"num_experts_per_tok": 5},
    "gpt_oss": {"num_experts_per_tok": 5},
    "glm4_moe": {"num_experts_per_tok": 12, "n_group": 1, "topk_group": 1},
    "minimax_m2": {"num_experts_per_tok": 7},
    "ernie4_5_moe": {"moe_k": 7},
    "deepseek_v3": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    "mistral4": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "granitemoe": {"num_experts_per_tok": 5},
    "granitemoeshared": {"num_experts_per_tok": 5},
    "granitemoehybrid": {"num_experts_per_tok": 5},
    "kimi_linear": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "lfm2_moe": {"num_experts_per_tok": 5},
    "nemotron_h": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "qwen3_5_moe_text": {"num_experts_per_tok": 5},
    "qwen3_next": {"num_experts_per_tok": 5},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 5, "moe_intermediate_size": 21},
}
# What covers the kernels: others are put together of the same.
OF_KERNELS = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")
# One family of each kind of dense block: rotated or learned positions, norms of each kind, joined projections, blocks
# side by side, windows, layers that share a KV cache, experts, latent attention.
OF_EACH_BLOCK = ("llama", "gpt2", "phi3", "cohere2", "gemma4_text", "gpt_oss", "deepseek_v3")
HYBRIDS = (
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
)  # with layers that carry a state
OF_EACH_STATE = ("falcon_h1", "kimi_linear", "lfm2", "nemotron_h", "qwen3_5_text")  # one of each kind of them
ENCODERS = ("bert", "modernbert")  # that write no text
UNPUBLISHED = (
    "falcon_h1",
    "gemma4_text",
    "granitemoeshared",
    "kimi_linear",
    "lfm2",
    "mistral4",
    "modernbert",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "seed_oss",
)  # families whose published config.json is not in tests/golden/published_configs.json
BEGIN, END, TURN = "<|begin|>", "<|end|>", "<|turn|>"  # ids 0, 1, 2
VOCAB_SIZE = 307  # a prime, above the 256 bytes that a byte-level vocabulary starts from

# A family's own keys of tiny_config, in addition to the common ones: awkward sizes, and features of this family alone.
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 48, "intermediate_size": 74, "num_attention_heads": 6, "num_key_value_heads": 3},
    "modernbert": {
        "hidden_size": 60,
        "intermediate_size": 37,
        "num_attention_heads": 6,
        "local_attention": 14,
        "global_attn_every_n_layers": 3,
    },
    "bert": {"hidden_size": 60, "intermediate_size": 37, "num_attention_heads": 6},
    "qwen2": {"hidden_size": 50, "intermediate_size": 111, "num_attention_heads": 5, "num_key_value_heads": 1},
    "qwen3": {
        "hidden_size": 48,
        "intermediate_size": 37,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
    },
    "qwen3_moe": {
        "hidden_size": 48,
        "intermediate_size": 37,
        "moe_intermediate_size": 21,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
    },
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "hidden_size": 48,
        "intermediate_size": 21,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "sliding_window": 7,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "hidden_size": 48,
        "intermediate_size": 37,
        "moe_intermediate_size": 21,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "minimax_m2": {
        "hidden_size": 48,
        "intermediate_size": 21,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "rotary_dim": 10,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
    },
    "ernie4_5_moe": {
        "rms_norm_eps": 1e-5,
        "hidden_size": 40,
        "intermediate_size": 37,
        "moe_intermediate_size": 21,
        "moe_num_experts": 7,
        "moe_num_shared_experts": 2,
        "moe_k": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gemma3_text": {
        "hidden_size": 72,
        "intermediate_size": 111,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "query_pre_attn_scalar": 17,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 9.0,
    },
    "qwen3_5_text": {
        "hidden_size": 40,
        "intermediate_size": 37,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 18,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "deepseek_v3": {
        "hidden_size": 48,
        "intermediate_size": 74,
        "moe_intermediate_size": 22,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 40,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 10,
        "v_head_dim": 16,
    },
    "glm4_moe_lite": {
        "rms_norm_eps": 1e-4,
        "hidden_size": 48,
        "intermediate_size": 74,
        "moe_intermediate_size": 22,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 14,
        "v_head_dim": 16,
    },
    "mistral4": {
        "hidden_size": 48,
        "intermediate_size": 74,
        "moe_intermediate_size": 22,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 40,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "rope_parameters": {
            "type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 512,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "kimi_linear": {
        "rms_norm_eps": 1e-5,
        "hidden_size": 40,
        "intermediate_size": 37,
        "moe_intermediate_size": 21,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 10,
        "v_head_dim": 16,
        "linear_head_dim": 22,
        "linear_num_heads": 3,
        "linear_conv_kernel_dim": 4,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 3,
        "topk_group": 2,
    },
    "qwen3_next": {
        "hidden_size": 40,
        "intermediate_size": 37,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 18,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "moe_intermediate_size": 21,
        "shared_expert_intermediate_size": 33,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
    "qwen3_5_moe_text": {
        "hidden_size": 40,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 18,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "moe_intermediate_size": 21,
        "shared_expert_intermediate_size": 33,
        "num_experts": 5,
        "num_experts_per_tok": 3,
    },
    "granitemoehybrid": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 21,
        "shared_intermediate_size": 37,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 11,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.5,
    },
    "falcon_h1": {
        "hidden_size": 42,
        "intermediate_size": 37,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "mamba_d_ssm": 54,
        "mamba_n_heads": 3,
        "mamba_d_state": 11,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "key_multiplier": 0.6,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.8,
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.3, 0.7],
        "mlp_multipliers": [0.9, 0.6],
    },
    "nemotron_h": {
        "hidden_size": 36,
        "intermediate_size": 51,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 14,
        "mamba_num_heads": 6,
        "mamba_head_dim": 18,
        "n_groups": 2,
        "ssm_state_size": 11,
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "ME*M-",
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 21,
        "moe_shared_expert_intermediate_size": 33,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "lfm2": {
        "hidden_size": 42,
        "intermediate_size": 74,
        "block_multiple_of": 13,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "lfm2_moe": {
        "hidden_size": 42,
        "intermediate_size": 74,
        "moe_intermediate_size": 21,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.7,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "mistral": {
        "hidden_size": 80,
        "intermediate_size": 74,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 80,
        "sliding_window": 7,
    },
    "phi3": {
        "hidden_size": 60,
        "intermediate_size": 37,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.0, 7.5]},
        "sliding_window": 150,
    },
    "seed_oss": {"hidden_size": 50, "intermediate_size": 37, "num_attention_heads": 5, "num_key_value_heads": 1},
    "smollm3": {
        "hidden_size": 48,
        "intermediate_size": 74,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "no_rope_layers": [1, 0, 1],
    },
    "olmo2": {"hidden_size": 48, "intermediate_size": 37, "num_attention_heads": 6, "num_key_value_heads": 2},
    "olmo3": {
        "hidden_size": 72,
        "intermediate_size": 37,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "granite": {
        "hidden_size": 50,
        "intermediate_size": 74,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.5,
    },
    "granitemoe": {
        "hidden_size": 50,
        "intermediate_size": 21,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.5,
    },
    "granitemoeshared": {
        "hidden_size": 50,
        "intermediate_size": 21,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.5,
        "shared_intermediate_size": 37,
    },
    "gemma2": {
        "hidden_size": 72,
        "intermediate_size": 111,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 256,
        "query_pre_attn_scalar": 17,
        "sliding_window": 7,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma4_text": {
        "hidden_size": 40,
        "intermediate_size": 37,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "global_head_dim": 36,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 7,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 10,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 9.0,
    },
    "ministral3": {
        "hidden_size": 48,
        "intermediate_size": 74,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4": {
        "hidden_size": 48,
        "intermediate_size": 37,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
    },
    "ernie4_5": {
        "hidden_size": 48,
        "intermediate_size": 37,
        "num_attention_heads": 7,
        "num_key_value_heads": 7,
        "head_dim": 10,
        "use_bias": True,
    },
    "hunyuan_v1_dense": {
        "hidden_size": 48,
        "intermediate_size": 37,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "starcoder2": {
        "hidden_size": 60,
        "intermediate_size": 111,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "sliding_window": 7,
    },
    "gpt2": {"n_embd": 60, "n_layer": 3, "n_head": 5, "n_positions": 512},
    "cohere2": {
        "hidden_size": 60,
        "intermediate_size": 37,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "logit_scale": 0.7,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
FAMILIES = tuple(family for family in _SIZES if family not in (*HYBRIDS, *ENCODERS))

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_TEXT = """The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.
An engine is built from a checkpoint, and the engine answers. The model is small, and its answers are noise.
user: Hello, who are you? assistant: I am a tiny model. Größe, naïve, 東京, 🙂."""


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """Content of config.json for a tiny model of a family (one of FAMILIES)."""
    common = {} if family == "gpt2" else {"num_hidden_layers": 3, "max_position_embeddings": 512}
    return {
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        **common,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        **_SIZES[family],
        **overrides,
    }


def tiny_model(config: Mapping[str, Any], seed: int = 0, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """transformers' model of a config, of its class `kind`, in fp32, with random weights that are exact in bfloat16.

    Norms and biases are random too, and projections are large enough that a fault anywhere shows in the logits.
    """
    settings = {key: value for key, value in config.items() if key != "model_type"}
    model: PreTrainedModel = kind.from_config(
        AutoConfig.for_model(config["model_type"], **json.loads(json.dumps(settings))),
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower() or ".ln_" in name:
                # Of some families, weights are stored less 1.
                less_1 = config["model_type"].startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))
                values = 0.2 * values + (0.0 if less_1 and "linear_attn" not in name else 1.0)
                if config["model_type"] == "gemma4_text" and "q_norm" in name:
                    values = 0.2 * values  # scores have no other scale
            elif name.endswith(".bias") or "embed" in name or ".wte" in name or ".wpe" in name:
                values = 0.3 * values
            else:
                values = values * parameter.shape[-1] ** -0.5
            if "experts." in name and parameter.dim() > 1:
                # Experts are alike, so that a token that goes to another one, since two scores are nearly the same and
                # an engine rounds activations, changes little, and a wrong expert everywhere still shows.
                values = values[:1] + 0.2 * values
            parameter.copy_(values.to(torch.bfloat16))
        for name, buffer in model.named_buffers():
            if "correction" in name or name.endswith("expert_bias"):
                buffer.copy_((0.2 * torch.randn(buffer.shape, generator=generator)).to(torch.bfloat16))
            elif name.endswith("layer_scalar"):
                buffer.copy_((0.4 + torch.rand(buffer.shape, generator=generator)).to(torch.bfloat16))
        use_long_factors(model)
    return model  # type: ignore[no-any-return]


def use_long_factors(model: PreTrainedModel) -> None:
    """LongRoPE's frequencies are those of long sequences for all of them, as an engine has it."""
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if getattr(rotary, "rope_type", None) == "longrope":
        longest = model.config.max_position_embeddings
        rotary.original_inv_freq.copy_(ROPE_INIT_FUNCTIONS["longrope"](model.config, seq_len=longest)[0])


@dataclass
class MemoryCheckpoint:
    """A Checkpoint without files. reads: the names of the tensors that were read, in order."""

    config: Mapping[str, Any]
    stored: Mapping[str, torch.Tensor]
    name: str = "tiny"
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    pooling: Pooling | None = None
    origin: str | None = None
    reads: list[str] = field(default_factory=list)

    @staticmethod
    def of(model: PreTrainedModel, config: Mapping[str, Any]) -> "MemoryCheckpoint":
        """The tensors that transformers would save, in bfloat16."""
        tied = model.config.tie_word_embeddings
        stored = {
            name: value.to(torch.bfloat16)
            for name, value in model.state_dict().items()
            if not (tied and name == "lm_head.weight")
        }
        return MemoryCheckpoint(config, stored)

    @staticmethod
    def tiny(family: str, **overrides: Any) -> "MemoryCheckpoint":
        """The checkpoint of a tiny model. overrides: entries of its `tiny_config`."""
        config = tiny_config(family, **overrides)
        return MemoryCheckpoint.of(tiny_model(config), config)

    @property
    def tokenizer(self) -> TokenizerFiles:
        return TokenizerFiles(_tokenizer_json().encode(), _tokenizer_config(), _CHAT_TEMPLATE)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(value.dtype, tuple(value.shape)) for name, value in self.stored.items()}

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self.stored[name]

    def source_hashes(self) -> Mapping[str, str]:
        return {}


def wide_checkpoint() -> MemoryCheckpoint:
    """A model that is wide enough for two splits of K, and for sums in another order to round to another bfloat16."""
    return MemoryCheckpoint.tiny(
        "llama",
        num_hidden_layers=2,
        hidden_size=160,
        intermediate_size=600,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


def tiny_checkpoint(tmp_path: Path, family: str, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """A checkpoint folder, as a hub would have it. Further arguments replace entries of `tiny_config`."""
    model = tiny_model(tiny_config(family, **overrides), kind=kind_of(family))
    return saved(model.to(torch.bfloat16), tmp_path / f"tiny-{family}", max_shard_size)


def kind_of(family: str) -> Any:
    """transformers' class of a family's models."""
    return AutoModel if family in ENCODERS else AutoModelForCausalLM


def saved(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    """The folder of a model as transformers saves it, with a tokenizer."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    generation = {"bos_token_id": 0, "eos_token_id": [1, 2], "do_sample": True, "temperature": 0.8, "top_k": 20}
    _write_json(folder / "generation_config.json", generation)
    return folder


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "add_bos_token": True,
        "model_max_length": 512,
        "chat_template": _CHAT_TEMPLATE,
    }


@cache
def _tokenizer_json() -> str:
    """A byte-level BPE, as Llama 3's and Qwen's: it starts a text with BEGIN, and knows every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[BEGIN, END, TURN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 0)]
    )
    return tokenizer.to_str(pretty=True)
