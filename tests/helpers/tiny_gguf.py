"""Small GGUF files, written as llama.cpp's converter would: names, keys and layouts by the `gguf` package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# Family → model_type; the family is the architecture in the file but for WRITTEN_AS.
ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "smollm3", "granite", "olmo2", "glm4", "ernie4_5")},
    "gemma3": "gemma3_text",
    "hunyuan-dense": "hunyuan_v1_dense",
    "cohere2": "cohere2",
    "qwen3moe": "qwen3_moe",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "mixtral": "mixtral",
    "olmo3": "olmo3",
}
WRITTEN_AS = {"mixtral": "llama", "olmo3": "olmo2"}  # family → architecture in the file, where that is another
LAYER_NORM_KEYS = {"cohere2": "layer_norm_eps", "starcoder2": "norm_epsilon"}
NO_HEAD_DIM = ("olmo3", "phi3", "starcoder2")
PAIRED = ("mixtral", "llama", "smollm3", "granite")  # rows of q and k lie as pairs
TOKENS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 97))]


def tiny_model(architecture: str, **changes: Any) -> PreTrainedModel:
    """A random model of awkward sizes. Norm weights are such that 1 + w is exact in float32."""
    sizes: dict[str, Any] = {
        "vocab_size": 71,
        "hidden_size": 60 if architecture == "qwen2" else 54,
        "intermediate_size": 61,
        "num_hidden_layers": {"gemma3": 7, "gemma2": 3, "smollm3": 5, "cohere2": 5, "olmo3": 5}.get(architecture, 2),
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 331,
        "pad_token_id": None,
        LAYER_NORM_KEYS.get(architecture, "rms_norm_eps"): 1e-5,
    }
    if architecture not in (
        "qwen2",
        "smollm3",
        "granite",
        "olmo2",
        "cohere2",
        *NO_HEAD_DIM,
    ):  # whose heads are hidden / heads wide
        sizes["head_dim"] = 18
    if architecture in ("olmo2", "cohere2", *NO_HEAD_DIM):
        sizes["hidden_size"] = 60
    if architecture in ("smollm3", "granite"):
        sizes["hidden_size"] = 108
    if architecture == "glm4":
        sizes["partial_rotary_factor"] = 4 / 9
    torch.manual_seed(7)
    config = AutoConfig.for_model(ARCHITECTURES[architecture], **(sizes | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.data = torch.randint(-200, 200, parameter.shape).float() / 256
    model.eval()  # type: ignore[no-untyped-call]
    return model


def state_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def _apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gates and ups of experts, which transformers has in one tensor, as two."""
    parts: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            stem = name.removesuffix("gate_up_proj")
            parts |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        else:
            parts[f"{name}.weight" if ".experts." in name else name] = value
    return parts


class TinyGguf(gguf.GGUFWriter):
    """A writer with everything that a file needs to be opened, but for the tensors."""

    def __init__(self, path: Path, architecture: str, config: PretrainedConfig) -> None:
        super().__init__(path, WRITTEN_AS.get(architecture, architecture))
        self.add_context_length(config.max_position_embeddings)
        self.add_embedding_length(config.hidden_size)
        self.add_block_count(config.num_hidden_layers)
        self.add_feed_forward_length(config.intermediate_size)
        self.add_head_count(config.num_attention_heads)
        self.add_head_count_kv(config.num_key_value_heads)
        if architecture in LAYER_NORM_KEYS:
            self.add_layer_norm_eps(getattr(config, LAYER_NORM_KEYS[architecture]))
        else:
            self.add_layer_norm_rms_eps(config.rms_norm_eps)
        if getattr(config, "head_dim", None):
            self.add_key_length(config.head_dim)
            self.add_value_length(config.head_dim)
        self.architecture = architecture
        self.config = config
        self._add_own(config)

    def _add_own(self, config: PretrainedConfig) -> None:
        """Adds the keys that the converter writes for this architecture alone."""
        match self.architecture:
            case "qwen3moe":
                self.add_expert_count(config.num_experts)
                self.add_expert_used_count(config.num_experts_per_tok)
                self.add_expert_feed_forward_length(config.moe_intermediate_size)
            case "mixtral":
                self.add_expert_count(config.num_local_experts)
                self.add_expert_used_count(config.num_experts_per_tok)
            case "olmo3":
                self.add_sliding_window(config.sliding_window)
                self.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
            case "phi3":
                self.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
                self.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
                self.add_sliding_window(config.sliding_window or 0)
            case "gemma2":
                self.add_sliding_window(config.sliding_window)
                self.add_attn_logit_softcapping(config.attn_logit_softcapping)
                self.add_final_logit_softcapping(config.final_logit_softcapping)
            case "granite":
                self.add_attention_scale(config.attention_multiplier)
                self.add_embedding_scale(config.embedding_multiplier)
                self.add_residual_scale(config.residual_multiplier)
                self.add_logit_scale(config.logits_scaling)
            case "glm4":
                self.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
            case "cohere2":
                self.add_sliding_window(config.sliding_window)
                self.add_logit_scale(config.logit_scale)
                self.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    def add_spelled_vocabulary(
        self, tokens: Sequence[str] = TOKENS, types: Sequence[int] | None = None, scores: Sequence[float] | None = None
    ) -> None:
        add_vocabulary(self, tokens, types, scores)

    def add_merged_vocabulary(self, pre: str, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
        """GPT-2's kind, all of it normal tokens."""
        self.add_tokenizer_model("gpt2")
        self.add_tokenizer_pre(pre)
        self.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
        self.add_token_types([1] * len(vocabulary))
        self.add_token_merges([" ".join(merge) for merge in merges])

    def add_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The model's tensors, changed as the converter changes them."""
        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch)
        names = gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)
        for hf_name, tensor in _apart(state).items():
            name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            assert name is not None
            values = tensor.numpy()
            if self.architecture.startswith("gemma") and "norm" in hf_name:
                values = values + np.float32(1)
            if self.architecture in PAIRED and "q_proj" in hf_name:
                values = interleave(values, self.config.num_attention_heads)
            if self.architecture in PAIRED and "k_proj" in hf_name:
                values = interleave(values, self.config.num_key_value_heads)
            self.add_tensor(name, np.ascontiguousarray(values))

    def finish(self) -> Path:
        return finish(self)


def finish(writer: gguf.GGUFWriter) -> Path:
    """Writes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert isinstance(writer.path, Path)
    return writer.path


def add_vocabulary(
    writer: gguf.GGUFWriter,
    tokens: Sequence[str] = TOKENS,
    types: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
) -> None:
    """SentencePiece's kind: `<unk>`, `<s>`, `</s>` unless said otherwise, then normal tokens."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types or [2, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_scores(scores or [-float(id) for id in range(len(tokens))])


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs of one row of each."""
    head_dim = len(values) // heads
    half = head_dim // 2
    order = [head * head_dim + half * part + pair for head in range(heads) for pair in range(half) for part in (0, 1)]
    return values[order]


def write_model(path: Path, architecture: str, model: PreTrainedModel) -> TinyGguf:
    """A file with the model's tensors and a vocabulary; `finish` is still to be called."""
    writer = TinyGguf(path, architecture, model.config)
    writer.add_spelled_vocabulary()
    writer.add_state(state_of(model))
    return writer
