"""GGUF checkpoints: tensors and config come back as the Hugging Face model had them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from enginewright.builder.checkpoint import Checkpoint, gguf_file, open_checkpoint
from enginewright.builder.models import build_graph
from enginewright.errors import EngineError, UnsupportedModelError, UsageError
from tests.helpers.graphs import DenseRun
from tests.helpers.tiny import MemoryCheckpoint
from tests.helpers.tiny_gguf import ARCHITECTURES, TOKENS, TinyGguf, state_of, tiny_model, write_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 18},
    "smollm3": {"tie_word_embeddings": False, "attention_bias": True},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.25,
        "tie_word_embeddings": True,
    },
    "olmo2": {},
    "glm4": {},
    "ernie4_5": {"use_bias": False},
    "hunyuan-dense": {"attention_bias": True},
    "cohere2": {"sliding_window": 8, "logit_scale": 0.25},
    "olmo3": {"sliding_window": 8},
    "phi3": {"sliding_window": 8, "original_max_position_embeddings": 331},
    "starcoder2": {},
    "gemma3": {"sliding_window": 8, "final_logit_softcapping": 9.0, "query_pre_attn_scalar": 18},
}


BASES = {"gemma3": 1e6, "smollm3": 2e6, "ernie4_5": 5e5, "olmo3": 5e5}  # transformers' own


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> PreTrainedModel:
    """The real model, as transformers reads it from the same file."""
    return AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent,
        gguf_file=smollm2_gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )


def test_real_model(smollm2_gguf: Path, reference: PreTrainedModel) -> None:
    checkpoint = open_checkpoint(str(smollm2_gguf))
    state = state_of(reference)
    assert checkpoint.tensors.keys() == state.keys()
    for name, tensor in state.items():
        assert checkpoint.tensors[name].dtype == torch.float32
        assert checkpoint.tensors[name].shape == tensor.shape
        assert torch.equal(checkpoint.read(name), tensor), name
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert checkpoint.config["model_type"] == "llama"
    config = {key: value for key, value in checkpoint.config.items() if key != "model_type"}
    read, expected = AutoConfig.for_model("llama", **config).to_dict(), reference.config.to_dict()
    for key in config.keys() & expected.keys() - {"rms_norm_eps"} | {"rope_parameters"}:
        assert read[key] == expected[key], key
    assert np.float32(read["rms_norm_eps"]) == np.float32(expected["rms_norm_eps"])
    assert checkpoint.generation_config == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [2, 0]}


def test_real_tokenizer(smollm2_gguf: Path) -> None:
    template = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name).chat_template
    tokenizer = open_checkpoint(str(smollm2_gguf)).tokenizer
    assert tokenizer.chat_template == template
    assert tokenizer.config["bos_token"] == "<|im_start|>"
    assert tokenizer.config["eos_token"] == "<|im_end|>"
    assert tokenizer.config["add_bos_token"] is False


def test_hashes(smollm2_gguf: Path) -> None:
    expected = hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()
    assert open_checkpoint(str(smollm2_gguf)).source_hashes() == {smollm2_gguf.name: expected}


def assert_model(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """The same tensors, and a config by which transformers computes the same logits from them."""
    state = state_of(model)
    assert checkpoint.tensors.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(checkpoint.read(name), tensor), name
        assert checkpoint.tensors[name].shape == tensor.shape
    config = {key: value for key, value in checkpoint.config.items() if key != "model_type"}
    config["pad_token_id"] = None
    rebuilt = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(checkpoint.config["model_type"], **config)
    )
    rebuilt.load_state_dict({name: checkpoint.read(name) for name in checkpoint.tensors}, strict=False)
    rebuilt.tie_weights()
    tokens = torch.arange(53).remainder(model.config.vocab_size)[None]
    with torch.no_grad():
        assert torch.equal(rebuilt.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(tmp_path: Path, family: str) -> None:
    model = tiny_model(family, **FAMILIES[family])
    writer = write_model(tmp_path / "tiny.gguf", family, model)
    writer.add_rope_freq_base(BASES.get(family, 10_000.0))
    if family == "gemma3":
        writer.add_sliding_window(8)
        writer.add_final_logit_softcapping(9.0)
    checkpoint = open_checkpoint(str(writer.finish()))
    assert checkpoint.config["model_type"] == ARCHITECTURES[family]
    assert checkpoint.config["vocab_size"] == 71
    assert_model(checkpoint, model)
    build_graph(checkpoint)  # the family reads every key of the config


QWEN3_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 22, "norm_topk_prob": True}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 22, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("family", "sizes", "experts", "gate", "up"),
    [
        ("qwen3moe", QWEN3_MOE, "mlp.experts", "gate_proj", "up_proj"),
        ("mixtral", MIXTRAL, "block_sparse_moe.experts", "w1", "w3"),
    ],
)
def test_experts_are_read_one_by_one(
    tmp_path: Path, family: str, sizes: dict[str, Any], experts: str, gate: str, up: str
) -> None:
    """From one tensor of all of them: the graph gives what that of transformers' own tensors does."""
    model = tiny_model(family, **sizes)
    writer = write_model(tmp_path / "tiny.gguf", family, model)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    checkpoint = open_checkpoint(str(writer.finish()))
    assert checkpoint.config["model_type"] == ARCHITECTURES[family]
    fused = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    for expert in range(5):
        stem = f"model.layers.1.{experts}.{expert}"
        assert torch.equal(checkpoint.read(f"{stem}.{gate}.weight"), fused[expert, :22])
        assert torch.equal(checkpoint.read(f"{stem}.{up}.weight"), fused[expert, 22:])
    own = MemoryCheckpoint.of(model, json.loads(model.config.to_json_string()))
    tokens = list(range(23))
    logits = [DenseRun(build_graph(one)).step(tokens) for one in (checkpoint, own)]
    np.testing.assert_array_equal(*logits)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 83,
        "beta_fast": 24.0,
        "rope_theta": 5e5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    },
}


def llama_with_rope(path: Path, rope: dict[str, Any]) -> tuple[TinyGguf, PreTrainedModel]:
    model = tiny_model("llama", rope_parameters=dict(rope), max_position_embeddings=65536, tie_word_embeddings=True)
    writer = write_model(path, "llama", model)
    writer.add_rope_freq_base(rope["rope_theta"])
    return writer, model


@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, rope: str) -> None:
    writer, model = llama_with_rope(tmp_path / "tiny.gguf", ROPES[rope])
    writer.add_rope_scaling_type(gguf.RopeScalingType(rope))
    writer.add_rope_scaling_factor(ROPES[rope]["factor"])
    if rope == "yarn":
        writer.add_rope_scaling_orig_ctx_len(83)
        writer.add_rope_scaling_yarn_beta_fast(24.0)
    checkpoint = open_checkpoint(str(writer.finish()))
    assert checkpoint.config["rope_scaling"] == {key: ROPES[rope][key] for key in ROPES[rope] if key != "rope_theta"}
    assert_model(checkpoint, model)


def llama3_divisors(model: PreTrainedModel) -> np.ndarray:
    """From transformers' own frequencies: unscaled over scaled."""
    plain = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    divisors: torch.Tensor = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    return divisors.numpy()


def test_llama3_rope_from_its_factors(tmp_path: Path) -> None:
    writer, model = llama_with_rope(tmp_path / "tiny.gguf", ROPES["llama3"])
    divisors = llama3_divisors(model)
    assert len(np.unique(divisors)) > 2, "a wave between the long and the short"
    writer.add_tensor("rope_freqs.weight", divisors)
    checkpoint = open_checkpoint(str(writer.finish()))
    assert checkpoint.config["rope_scaling"] == {
        key: ROPES["llama3"][key] for key in ROPES["llama3"] if key != "rope_theta"
    }
    assert_model(checkpoint, model)


def test_rope_factors_of_ones_change_nothing(tmp_path: Path) -> None:
    writer, model = llama_with_rope(tmp_path / "tiny.gguf", {"rope_type": "default", "rope_theta": 5e5})
    writer.add_tensor("rope_freqs.weight", np.ones(9, np.float32))
    assert_model(open_checkpoint(str(writer.finish())), model)


@pytest.mark.parametrize("times", [1.001, 0.0, -1.0, float("nan"), float("inf")])
def test_rope_factors_of_another_kind_are_refused(tmp_path: Path, times: float) -> None:
    writer, model = llama_with_rope(tmp_path / "tiny.gguf", ROPES["llama3"])
    divisors = llama3_divisors(model)
    divisors[4 if times == 1.001 else slice(None)] *= times
    writer.add_tensor("rope_freqs.weight", divisors)
    with pytest.raises(UnsupportedModelError, match="rope factors are not those of a llama3 scaling"):
        open_checkpoint(str(writer.finish()))


def test_rope_factors_of_an_unknown_type_or_shape(tmp_path: Path) -> None:
    for values, message in [(np.ones(9, np.int32), "unknown type I32"), (np.ones(8, np.float32), r"shape \(8,\)")]:
        writer, _ = llama_with_rope(tmp_path / "tiny.gguf", ROPES["llama3"])
        writer.add_tensor("rope_freqs.weight", values)
        with pytest.raises(EngineError, match=message):
            open_checkpoint(str(writer.finish()))


@pytest.mark.parametrize("base", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_base_without_sense(tmp_path: Path, base: float) -> None:
    writer, model = llama_with_rope(tmp_path / "tiny.gguf", ROPES["llama3"])
    writer.kv_data[0]["llama.rope.freq_base"].value = base
    writer.add_tensor("rope_freqs.weight", llama3_divisors(model))
    with pytest.raises(EngineError, match=r"llama\.rope\.freq_base is"):
        open_checkpoint(str(writer.finish()))


def test_more_layers_than_tensors(tmp_path: Path) -> None:
    """Two thousand million layers: refused before there is a list of them."""
    writer = write_model(tmp_path / "tiny.gguf", "gemma3", tiny_model("gemma3"))
    writer.kv_data[0]["gemma3.block_count"].value = (1 << 31) - 1
    with pytest.raises(EngineError, match="2147483647 layers"):
        open_checkpoint(str(writer.finish()))


def test_gemma3_patterns(tmp_path: Path) -> None:
    for pattern, expected in [(None, "LLLLLGL"), (3, "LLGLLGL"), ([1, 0, 0, 1, 1, 1, 0], "LGGLLLG")]:
        writer = write_model(tmp_path / "tiny.gguf", "gemma3", tiny_model("gemma3"))
        writer.add_sliding_window(8)
        if isinstance(pattern, int):
            writer.add_uint32("gemma3.attention.sliding_window_pattern", pattern)
        elif pattern:
            writer.add_array("gemma3.attention.sliding_window_pattern", [bool(flag) for flag in pattern])
        types = open_checkpoint(str(writer.finish())).config["layer_types"]
        assert "".join("L" if kind == "sliding_attention" else "G" for kind in types) == expected


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantized_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(gguf_file, "PIECE_ELEMENTS", 500)  # of rows of 96: pieces of 5 and a tail of 1
    model = tiny_model("qwen3", hidden_size=96, tie_word_embeddings=True)
    state = state_of(model)
    name = "model.embed_tokens.weight"
    quantized = gguf.quantize(state.pop(name).numpy(), gguf.GGMLQuantizationType[kind])
    writer = TinyGguf(tmp_path / "tiny.gguf", "qwen3", model.config)
    writer.add_spelled_vocabulary()
    writer.add_state(state)
    writer.add_tensor("token_embd.weight", quantized, raw_dtype=gguf.GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(str(writer.finish()))
    read = checkpoint.read(name)
    assert read.shape == (71, 96)
    assert torch.equal(read, torch.from_numpy(gguf.dequantize(quantized, gguf.GGMLQuantizationType[kind])))


def refused(writer: TinyGguf, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as error:
        open_checkpoint(str(writer.finish()))
    assert error.value.exit_code == 3


def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = tiny_model("llama")

    def tiny() -> TinyGguf:
        return write_model(path, "llama", model)

    refused(TinyGguf(path, "falcon", model.config), "architecture 'falcon' are not read: known are llama, qwen2")
    writer = tiny()
    writer.add_expert_count(8)
    with pytest.raises(EngineError, match=r"llama\.expert_used_count is missing"):
        open_checkpoint(str(writer.finish()))
    writer = tiny()
    writer.add_float32("llama.new_feature", 1.0)
    refused(writer, r"llama\.new_feature = 1\.0 is not implemented")
    writer = tiny()
    writer.add_rope_dimension_count(4)
    refused(writer, r"llama\.rope\.dimension_count = 4 is not implemented")
    writer = tiny()
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    refused(writer, "rope scaling 'longrope'")
    writer = tiny()
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 3), np.float32))
    refused(writer, r"tensor blk\.0\.ffn_gate_exps\.weight is not known")
    writer = tiny()
    writer.add_tensor("blk.1.attn_q_norm.weight", np.zeros(3, np.float32))
    refused(writer, r"tensor blk\.1\.attn_q_norm\.weight is not known")
    writer = tiny()
    writer.add_tensor("output.bias", np.zeros(3, np.int32))
    refused(writer, r"tensor output\.bias has unknown type I32")
    writer = tiny()
    writer.add_uint16("split.count", 3)
    refused(writer, r"tiny\.gguf is one of 3 files")


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "attention.head_count"])
def test_missing_or_senseless_metadata(tmp_path: Path, key: str) -> None:
    model = tiny_model("llama")
    for value in (None, 0, 1 << 31):
        writer = write_model(tmp_path / "tiny.gguf", "llama", model)
        del writer.kv_data[0][f"llama.{key}"]
        if value is not None:
            writer.add_uint32(f"llama.{key}", value)
        with pytest.raises(EngineError, match=rf"llama\.{key} is"):
            open_checkpoint(str(writer.finish()))


def test_heads_that_do_not_divide_the_rows(tmp_path: Path) -> None:
    writer = write_model(tmp_path / "tiny.gguf", "llama", tiny_model("llama"))
    writer.kv_data[0]["llama.attention.head_count_kv"].value = 5
    with pytest.raises(EngineError, match=r"blk\.\d\.attn_k\.weight has 36 rows"):
        open_checkpoint(str(writer.finish()))


def test_vocabulary_larger_than_the_embedding(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=len(TOKENS) - 1)
    with pytest.raises(EngineError, match="the embedding table has 66 rows"):
        open_checkpoint(str(write_model(tmp_path / "tiny.gguf", "llama", model).finish()))


def test_folder_with_one_gguf_file(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    write_model(tmp_path / "Tiny-1B-Q4_K_M.gguf", "qwen3", model).finish()
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.name == "Tiny-1B"
    assert checkpoint.tensors.keys() == state_of(model).keys()
    write_model(tmp_path / "Tiny-1B.BF16.gguf", "qwen3", model).finish()
    with pytest.raises(UsageError, match="2 GGUF files"):
        open_checkpoint(str(tmp_path))


def test_sampling_defaults(tmp_path: Path) -> None:
    writer = write_model(tmp_path / "tiny.gguf", "qwen3", tiny_model("qwen3"))
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    expected = {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.6, "top_k": 20, "do_sample": True}
    assert open_checkpoint(str(writer.finish())).generation_config == expected
