"""Maps the tensors of a GGUF file to the Hugging Face model's names, and reverses the converter's changes.

Source: llama.cpp's convert_hf_to_gguf.py, now conversion/*.py. It renames every tensor; for `llama` it also reorders
the rows of Q and K, so that the two dimensions which rope rotates together lie side by side; for Gemma and Qwen's
hybrids it stores 1 + w for the weight of every norm, as w + 1 in float32. The rest is in gguf_recipes.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from enginewright.builder.checkpoint.gguf import recipes
from enginewright.builder.checkpoint.gguf.header import GgufHeader, GgufTensor
from enginewright.builder.checkpoint.gguf.recipes import Recipe
from enginewright.errors import EngineError, UnsupportedModelError

# Tensors that are not weights of the Hugging Face model: ROPE_FACTORS becomes part of the config.
ROPE_FACTORS = "rope_freqs.weight"

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
GATE_IN_UP = {**PROJECTIONS, "ffn_up": "mlp.gate_up_proj"}  # one tensor for both
ATTENTION = {stem: name for stem, name in PROJECTIONS.items() if stem.startswith("attn")}
MLP = {stem: name for stem, name in PROJECTIONS.items() if stem.startswith("ffn")}
# One tensor of all experts, [experts, rows, columns]; the braces in its name stand for the expert's number.
EXPERTS: dict[str, str | tuple[str, ...]] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
SHARED_EXPERT = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
GATED_EXPERT = SHARED_EXPERT | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
QWEN3_NEXT = {"ssm_ba": "linear_attn.in_proj_ba", "ssm_out": "linear_attn.out_proj"}
SHARED_EXPERTS = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
# StarCoder 2 names the MLP's matrices c_fc and c_proj.
NO_GATE = ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
NORM_AFTER_ATTENTION = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
LATENT_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # written by older converters
    "attn_output": "self_attn.o_proj",
}
KIMI_DELTA = {
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    **{f"ssm_{gate}_{part}": f"self_attn.{gate}_{part}_proj" for gate in "fg" for part in "ab"},
}
KIMI_EXPERTS = MIXTRAL_EXPERTS | {
    stem: name.replace("mlp", "block_sparse_moe") for stem, name in SHARED_EXPERTS.items()
}
SHORT_CONV = {f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "out_proj", "conv")}
LFM2 = SHORT_CONV | {
    **{stem: name.replace("o_proj", "out_proj") for stem, name in ATTENTION.items()},
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
LFM2_EXPERTS = {stem: name.replace("block_sparse_moe", "feed_forward") for stem, name in MIXTRAL_EXPERTS.items()}
LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
MAMBA2 = {"ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_out": "mamba.out_proj"}
NEMOTRON_H = {
    **{stem: name.replace("self_attn", "mixer") for stem, name in ATTENTION.items()},
    **{stem: name.replace("mamba", "mixer") for stem, name in MAMBA2.items()},
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
FALCON_H1 = {
    **ATTENTION,
    **MAMBA2,
    "attn_norm": "input_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
NEMOTRON_H_TOP = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
GEMMA4: dict[str, str | tuple[str, ...]] = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
}
GEMMA4_TOP = TOP | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """The model family of one `general.architecture`."""

    model_type: str  # `model_type` of the Hugging Face config
    # GGUF stem → Hugging Face stem, within a layer; several stems: for each expert, one after another in one tensor.
    layer: Mapping[str, str | tuple[str, ...]]
    paired_rope: bool = False  # True if the rows of Q and K are reordered
    shifted_norms: bool = False  # True if norms hold 1 + w, but for those of recipes
    recipes: Sequence[Recipe] = ()  # in the order of preference
    top: Mapping[str, str] = field(default_factory=lambda: TOP)  # as `layer`, for tensors outside of layers
    prefix: str = "model.layers"  # prefix of a layer's number
    # Prefix of the multi-token prediction layers after the others, which the builder leaves out; "": there are none.
    mtp_prefix: str = ""


ARCHITECTURES = {
    "llama": Architecture("llama", PROJECTIONS | TWO_NORMS, paired_rope=True),
    "qwen2": Architecture("qwen2", PROJECTIONS | TWO_NORMS),
    "qwen3": Architecture("qwen3", PROJECTIONS | TWO_NORMS | HEAD_NORMS),
    "qwen3moe": Architecture("qwen3_moe", ATTENTION | EXPERTS | TWO_NORMS | HEAD_NORMS),
    "gemma2": Architecture("gemma2", PROJECTIONS | FOUR_NORMS, shifted_norms=True),
    "gemma3": Architecture("gemma3_text", PROJECTIONS | FOUR_NORMS | HEAD_NORMS, shifted_norms=True),
    "gemma4": Architecture(
        "gemma4_text", PROJECTIONS | FOUR_NORMS | HEAD_NORMS | GEMMA4, recipes=recipes.GEMMA4, top=GEMMA4_TOP
    ),
    "smollm3": Architecture("smollm3", PROJECTIONS | TWO_NORMS, paired_rope=True),
    "granite": Architecture("granite", PROJECTIONS | TWO_NORMS, paired_rope=True),
    "olmo2": Architecture("olmo2", PROJECTIONS | NORMS_AFTER | HEAD_NORMS),
    "glm4": Architecture("glm4", GATE_IN_UP | GLM4_NORMS),
    "ernie4_5": Architecture("ernie4_5", PROJECTIONS | TWO_NORMS),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", PROJECTIONS | TWO_NORMS | HUNYUAN_NORMS),
    "cohere2": Architecture("cohere2", PROJECTIONS | {"attn_norm": "input_layernorm"}),
    "phi3": Architecture("phi3", FUSED | TWO_NORMS),
    "starcoder2": Architecture("starcoder2", NO_GATE | TWO_NORMS),
    "gpt-oss": Architecture(
        "gpt_oss",
        ATTENTION | EXPERTS | NORM_AFTER_ATTENTION | {"ffn_gate_inp": "mlp.router"},
        recipes=recipes.SINKS,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        PROJECTIONS | NORM_AFTER_ATTENTION | HEAD_NORMS,
        shifted_norms=True,
        recipes=recipes.DELTA_NET,
        mtp_prefix="mtp",
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        ATTENTION | NORM_AFTER_ATTENTION | HEAD_NORMS | EXPERTS | GATED_EXPERT,
        shifted_norms=True,
        recipes=recipes.DELTA_NET,
        mtp_prefix="mtp",
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        ATTENTION | NORM_AFTER_ATTENTION | HEAD_NORMS | EXPERTS | GATED_EXPERT | QWEN3_NEXT,
        shifted_norms=True,
        recipes=recipes.FUSED_DELTA_NET,
        mtp_prefix="mtp",
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        LATENT_ATTENTION | MLP | EXPERTS | SHARED_EXPERTS | TWO_NORMS,
        recipes=(*recipes.LATENT, *recipes.correction("mlp.gate.e_score_correction_bias")),
        mtp_prefix="model.layers",
    ),
    "mistral4": Architecture(
        "mistral4", LATENT_ATTENTION | MLP | EXPERTS | SHARED_EXPERTS | TWO_NORMS, recipes=recipes.LATENT
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        LATENT_ATTENTION | KIMI_DELTA | MLP | KIMI_EXPERTS | TWO_NORMS,
        recipes=(
            *recipes.KIMI_DELTA,
            *recipes.LATENT,
            *recipes.correction("block_sparse_moe.gate.e_score_correction_bias"),
        ),
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        PROJECTIONS | EXPERTS | SHARED_EXPERTS | NORM_AFTER_ATTENTION | HEAD_NORMS,
        recipes=recipes.correction("mlp.gate.e_score_correction_bias"),
        mtp_prefix="model.layers",
    ),
    "mistral3": Architecture("mistral", PROJECTIONS | TWO_NORMS, paired_rope=True),
    "lfm2": Architecture("lfm2", LFM2, recipes=recipes.SHORT_CONV, top=LFM2_TOP),
    "lfm2moe": Architecture(
        "lfm2_moe",
        LFM2 | LFM2_EXPERTS,
        recipes=(*recipes.SHORT_CONV, *recipes.correction("feed_forward.expert_bias")),
        top=LFM2_TOP,
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        NEMOTRON_H,
        paired_rope=True,
        recipes=recipes.mamba2("mixer"),
        top=NEMOTRON_H_TOP,
        mtp_prefix="mtp",
    ),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        NEMOTRON_H,
        paired_rope=True,
        recipes=(*recipes.mamba2("mixer"), *recipes.correction("mixer.gate.e_score_correction_bias")),
        top=NEMOTRON_H_TOP,
        mtp_prefix="mtp",
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        ATTENTION | TWO_NORMS | GRANITE_EXPERTS | MAMBA2,
        paired_rope=True,
        recipes=(*recipes.mamba2("mamba"), *recipes.SHARED_MLP),
    ),
    "granitemoe": Architecture("granitemoe", ATTENTION | TWO_NORMS | GRANITE_EXPERTS, paired_rope=True),
    "falcon-h1": Architecture(
        "falcon_h1",
        FALCON_H1,
        recipes=(*recipes.mamba2("mamba"), Recipe("pre_ff_layernorm.weight", ("ffn_norm",))),
        top=TOP | {"output_norm": "model.final_layernorm"},
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        ATTENTION | MIXTRAL_EXPERTS | TWO_NORMS | HEAD_NORMS,
        recipes=recipes.correction("block_sparse_moe.e_score_correction_bias"),
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        PROJECTIONS | EXPERTS | SHARED_EXPERTS | TWO_NORMS,
        recipes=recipes.correction("mlp.moe_statics.e_score_correction_bias"),
    ),
    "seed_oss": Architecture("seed_oss", PROJECTIONS | NORM_AFTER_ATTENTION),
    "gpt2": Architecture("gpt2", GPT2, recipes=recipes.GPT2, top=GPT2_TOP, prefix="transformer.h"),
}
# (architecture, key) → the family of a file of the architecture in which the key is not 0.
VARIANTS = {
    ("llama", "expert_count"): Architecture("mixtral", ATTENTION | MIXTRAL_EXPERTS | TWO_NORMS, paired_rope=True),
    ("olmo2", "attention.sliding_window"): replace(ARCHITECTURES["olmo2"], model_type="olmo3"),
    ("mistral3", "attention.temperature_scale"): replace(ARCHITECTURES["mistral3"], model_type="ministral3"),
    # Mistral's own form of a checkpoint has this key.
    ("deepseek2", "attention.temperature_scale"): ARCHITECTURES["mistral4"],
    ("granitemoe", "expert_shared_feed_forward_length"): replace(
        ARCHITECTURES["granitemoe"], model_type="granitemoeshared", recipes=recipes.SHARED_MLP
    ),
}


@dataclass(frozen=True)
class RestoredTensor:
    """Tensors of the file, and the function that restores the Hugging Face model's tensor."""

    parts: tuple[GgufTensor, ...]  # tensors of the file
    restore: Callable[..., torch.Tensor]  # values of the parts → the model's tensor
    shape: tuple[int, ...]  # shape of the model's tensor


def find_architecture(header: GgufHeader) -> Architecture:
    """Finds the family of a file.

    Raises:
        UnsupportedModelError: its architecture is not in ARCHITECTURES.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF files of architecture {name!r} are not supported",
            f"supported are {', '.join(ARCHITECTURES)}",
            "Build from the model's safetensors checkpoint instead.",
        )
    for (base, key), variant in VARIANTS.items():
        if name == base and header.metadata.get(f"{base}.{key}"):
            return variant
    return ARCHITECTURES[name]


def map_tensors(header: GgufHeader, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, RestoredTensor]:
    """Maps the Hugging Face names to tensors of the file.

    Args:
        header: header of the file.
        architecture: the file's architecture.
        config: config.json; the order of rows depends on its numbers of heads.

    Raises:
        UnsupportedModelError: a tensor has no place in the architecture.
        EngineError: a tensor's shape does not fit the config.
    """
    sources: dict[str, RestoredTensor] = {}
    for layer, tensors in _by_layer(header).items():
        if layer is not None and architecture.mtp_prefix and int(layer) >= config["num_hidden_layers"]:
            for name, tensor in tensors.items():
                sources[f"{architecture.mtp_prefix}.{layer}.{name}"] = _restored((tensor,), recipes.unchanged, config)
            continue
        for recipe in architecture.recipes if layer is not None else ():
            if tensors.keys() >= set(recipe.parts):
                parts = tuple(tensors.pop(part) for part in recipe.parts)
                sources[f"{architecture.prefix}.{layer}.{recipe.name}"] = _restored(parts, recipe.restore, config)
        for name, tensor in tensors.items():
            stem, _, kind = name.rpartition(".")
            known = (architecture.top if layer is None else architecture.layer).get(stem)
            if known is None or kind not in ("weight", "bias"):
                raise UnsupportedModelError(
                    f"tensor {tensor.name} is not known",
                    f"architecture {header.metadata['general.architecture']} has no such tensor here",
                    "Build from the model's safetensors checkpoint instead.",
                )
            stems = (known,) if isinstance(known, str) else known
            names = [
                f"{stem}.{kind}" if layer is None else f"{architecture.prefix}.{layer}.{stem}.{kind}" for stem in stems
            ]
            if "{}" in names[0]:
                for number, part in enumerate(_of_experts(tensor, len(names), kind)):
                    expert, index = divmod(number, len(names))
                    sources[names[index].format(expert)] = _restored((part,), recipes.unchanged, config)
            else:
                sources[names[0]] = _restored((tensor,), _change(architecture, names[0]), config)
    return sources


def _by_layer(header: GgufHeader) -> dict[str | None, dict[str, GgufTensor]]:
    """Groups tensors by layer: its number → name after it → tensor; None → tensors outside of layers."""
    layers: dict[str | None, dict[str, GgufTensor]] = {}
    for name, tensor in header.tensors.items():
        if name != ROPE_FACTORS:
            match = re.fullmatch(r"blk\.(0|[1-9]\d{0,5})\.(.+)", name, re.ASCII | re.DOTALL)
            layer, own = match.groups() if match else (None, name)
            layers.setdefault(layer, {})[own] = tensor
    return layers


def _change(architecture: Architecture, name: str) -> Callable[..., torch.Tensor]:
    """Returns the function that reverses the converter's change to a tensor."""
    if architecture.shifted_norms and name.endswith("norm.weight"):
        return recipes.without_one
    if architecture.paired_rope and (part := re.search(r"\.([qk])_proj\.", name)):
        return recipes.halves_apart("num_attention_heads" if part[1] == "q" else "num_key_value_heads")
    return recipes.unchanged


def _restored(
    parts: tuple[GgufTensor, ...], restore: Callable[..., torch.Tensor], config: Mapping[str, Any]
) -> RestoredTensor:
    shape = parts[0].shape
    if restore is not recipes.unchanged:
        try:
            shape = restore(config, *(torch.empty(part.shape, device="meta") for part in parts)).shape
        except (RuntimeError, IndexError) as error:
            stored = " and ".join(f"{part.name} has shape {list(part.shape)}" for part in parts)
            raise EngineError(
                f"tensor {stored}", "it does not fit the file's metadata", "Convert the model again."
            ) from error
    return RestoredTensor(parts, partial(restore, config), tuple(shape))


def _of_experts(tensor: GgufTensor, count: int, kind: str) -> list[GgufTensor]:
    """Cuts a tensor [experts, rows, columns] into `count` matrices for each expert, one after another.

    Biases, [experts, rows], are cut into vectors.

    Raises:
        EngineError: it has another number of dimensions, or rows that cannot be divided.
    """
    what = "matrix" if kind == "weight" else "vector"
    if len(tensor.shape) != (3 if kind == "weight" else 2) or tensor.shape[1] % count:
        raise EngineError(f"tensor {tensor.name} has shape {list(tensor.shape)}", f"a {what} for each expert is needed")
    experts, rows, *columns = tensor.shape
    nbytes = tensor.nbytes // (experts * count)
    return [
        replace(tensor, shape=(rows // count, *columns), offset_bytes=tensor.offset_bytes + i * nbytes, nbytes=nbytes)
        for i in range(experts * count)
    ]
