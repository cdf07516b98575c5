"""GGUF checkpoints: tensors and config come back as the Hugging Face model had them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from enginewright.builder.checkpoint import Checkpoint, open_checkpoint
from enginewright.builder.checkpoint.gguf import file as gguf_file
from enginewright.builder.models import build_graph
from enginewright.errors import EngineError, UnsupportedModelError, UsageError
from tests.helpers.converted_gguf import CASES as CONVERTED
from tests.helpers.converted_gguf import VARIANTS as CONVERTED_VARIANTS
from tests.helpers.converted_gguf import write_converted
from tests.helpers.graphs import DenseRun
from tests.helpers.tiny import MemoryCheckpoint
from tests.helpers.tiny_gguf import ARCHITECTURES, TOKENS, TinyGguf, finish, state_of, tiny_model, write_model

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


def test_hashes(smollm2_gguf: Path) -> None:
    expected = hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()
    assert open_checkpoint(str(smollm2_gguf)).source_hashes() == {smollm2_gguf.name: expected}


def assert_model(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Checks that tensors are the model's, and that transformers computes the same logits from them by the config."""
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
    """Each expert is read from one tensor of all; the graph agrees with that of transformers' own tensors."""
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


CASES = (*CONVERTED, *CONVERTED_VARIANTS)


@pytest.mark.parametrize("case", CASES[::2])  # tests/long has the others
def test_what_the_converter_changed_is_undone(tmp_path: Path, case: str) -> None:
    """The graph of the file gives what that of the checkpoint does which it was converted from."""
    architecture, converted = CONVERTED_VARIANTS.get(case) or (case, CONVERTED[case])
    writer, source = write_converted(tmp_path / "tiny.gguf", architecture, converted)
    checkpoint = open_checkpoint(str(finish(writer)))
    assert checkpoint.config["model_type"] == (converted.read_as or converted.model_type)
    assert all(checkpoint.read(name).shape == info.shape for name, info in checkpoint.tensors.items())
    tokens = list(range(23))
    logits = [DenseRun(build_graph(one)).step(tokens) for one in (checkpoint, source)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(("case", "left_out"), [("qwen35", "mtp.3."), ("glm4moe", "model.layers.3.")])
def test_layers_that_draft_further_tokens_are_left_out(tmp_path: Path, case: str, left_out: str) -> None:
    for draft_tokens in (1, 4):
        writer, _ = write_converted(tmp_path / "tiny.gguf", case, CONVERTED[case])
        writer.kv_data[0][f"{case}.block_count"].value = 4
        writer.add_nextn_predict_layers(draft_tokens)
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.ones((3, 5), np.float32))
        finish(writer)
        if draft_tokens == 4:
            with pytest.raises(EngineError, match="declares 4 of its 4 layers as multi-token prediction"):
                open_checkpoint(str(tmp_path / "tiny.gguf"))
            continue
        checkpoint = open_checkpoint(str(tmp_path / "tiny.gguf"))
        assert checkpoint.config["num_hidden_layers"] == 3
        assert [name for name in checkpoint.tensors if name.startswith(left_out)] == [f"{left_out}nextn.eh_proj.weight"]
        build_graph(checkpoint)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    writer, _ = write_converted(tmp_path / "tiny.gguf", "gpt-oss", CONVERTED["gpt-oss"])
    values = np.random.default_rng(3).normal(size=(5, 32, 64)).astype(np.float32)
    stored = gguf.quantize(values, gguf.GGMLQuantizationType.MXFP4)
    del writer.tensors[0]["blk.1.ffn_gate_exps.weight"]
    writer.add_tensor("blk.1.ffn_gate_exps.weight", stored, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    checkpoint = open_checkpoint(str(finish(writer)))
    expected = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.MXFP4))
    assert expected.unique().numel() > 16  # with one scale for all there would be 15
    for expert in range(5):
        assert torch.equal(checkpoint.read(f"model.layers.1.mlp.experts.{expert}.gate_proj.weight"), expected[expert])


def test_granite_4_without_states_is_granite(tmp_path: Path) -> None:
    """The converter writes keys of states, and each layer's number of kv heads, even for a model without states."""
    model = tiny_model("granite", **FAMILIES["granite"])
    writer = write_model(tmp_path / "tiny.gguf", "granite", model)
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        writer.add_uint32(f"granite.ssm.{key}", 4)
    writer.add_head_count_kv([2, 2])
    writer.add_expert_shared_feed_forward_length(61)
    assert_model(open_checkpoint(str(writer.finish())), model)


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        ("gpt-oss", "attention.sliding_window", None, r"gpt-oss\.attention\.sliding_window is missing"),
        ("qwen35", "ssm.state_size", None, r"qwen35\.ssm\.state_size is missing"),
        ("qwen35", "ssm.inner_size", 109, r"ssm\.inner_size is 109: not a multiple of ssm\.time_step_rank, 6"),
        ("qwen35", "ssm.group_count", 4, r"blk\.0\.ssm_\w+ has shape \[6\]: it does not fit the file's metadata"),
        ("deepseek2", "attention.kv_lora_rank", None, r"deepseek2\.attention\.kv_lora_rank is missing"),
        ("glm4moe", "expert_gating_func", 1, r"glm4moe\.expert_gating_func = 1 is not implemented"),
        ("lfm2", "shortconv.l_cache", None, r"lfm2\.shortconv\.l_cache is missing"),
        ("lfm2", "attention.head_count_kv", [0, 1], r"lfm2\.attention\.head_count_kv does not fit 3 layers"),
        ("lfm2", "attention.head_count_kv", [1, 0, 3], "attention.head_count_kv is 1 and 3 in different layers"),
        ("lfm2", "attention.head_count_kv", [0, 0, 0], "attention.head_count_kv is 0 in all layers"),
        ("lfm2", "attention.head_count_kv", None, r"lfm2\.attention\.head_count_kv is missing"),
        ("nemotron_h", "ssm.inner_size", 109, r"ssm\.inner_size is 109: not a multiple of ssm\.time_step_rank, 6"),
        ("granitehybrid", "ssm.inner_size", 84, r"granitehybrid\.ssm\.inner_size is 84, which is not a multiple of 40"),
        ("seed_oss", "nextn_predict_layers", 1, r"seed_oss\.nextn_predict_layers = 1 is not implemented"),
        ("gemma4", "attention.key_length_swa", None, r"gemma4\.attention\.key_length_swa is missing"),
        ("gemma4", "attention.value_length_swa", 8, r"gemma4\.attention\.value_length_swa = 8 is not implemented"),
        ("gemma4", "rope.dimension_count_swa", 4, r"gemma4\.rope\.dimension_count_swa = 4 is not implemented"),
        ("gemma4", "rope.freq_base_swa", None, r"gemma4\.rope\.freq_base_swa is missing"),
        (
            "gemma4",
            "feed_forward_length",
            [37, 37, 74, 74, 74],
            r"length is \[37.*: 37 in some layers, twice .* last 2",
        ),
        (
            "gemma4",
            "attention.head_count_kv",
            [3, 2, 1, 3, 2],
            "head_count_kv is 3 and 1 in layers of sliding_attention",
        ),
        ("kimi-linear", "kda.head_dim", None, r"kimi-linear\.kda\.head_dim is missing"),
        ("kimi-linear", "expert_gating_func", 1, r"kimi-linear\.expert_gating_func = 1 is not implemented"),
        ("mistral4", "attention.temperature_length", 65, r"mistral4\.attention\.temperature_length = 65 is not impl"),
        ("mistral4", "expert_gating_func", 2, r"mistral4\.expert_gating_func = 2 is not implemented"),
        ("mistral4", "rope.scaling.type", None, r"rope\.scaling\.type is missing"),
        ("mistral4", "rope.scaling.type", "linear", r"mistral4\.rope\.scaling\.type = 'linear' is not implemented"),
    ],
)
def test_metadata_that_a_family_needs(
    tmp_path: Path, case: str, key: str, value: int | list[int] | str | None, message: str
) -> None:
    writer, _ = write_converted(tmp_path / "tiny.gguf", case, CONVERTED[case])
    writer.kv_data[0].pop(f"{case}.{key}", None)
    if isinstance(value, list):
        writer.add_array(f"{case}.{key}", value)
    elif isinstance(value, str):
        writer.add_string(f"{case}.{key}", value)
    elif value is not None:
        writer.add_uint32(f"{case}.{key}", value)
    with pytest.raises(EngineError, match=message):
        open_checkpoint(str(finish(writer)))


@pytest.mark.parametrize(
    ("case", "tensor", "message"),
    [
        ("deepseek2", "exp_probs_b", "exp_probs_b.bias is missing in all layers: DeepSeek V2's experts"),
        ("deepseek2", "attn_v_b", r"tensor blk\.0\.attn_k_b\.weight is not known"),
        ("falcon-h1", "output.weight", "output.weight is missing: the factors of embeddings and logits"),
        ("ministral3", "rope.scaling.type", "mistral3.rope.scaling.type is missing"),
        ("mistral4", "rope.scaling.type", "rope.scaling.type is missing"),
        ("gemma4", "rope_freqs", r"tensor rope_freqs\.weight is missing"),
        ("gemma4 with values", "blk.1.attn_v", r"blk\.1\.attn_v\.weight is missing: other layers without"),
    ],
)
def test_what_else_a_family_needs(tmp_path: Path, case: str, tensor: str, message: str) -> None:
    """tensor: a part of the names of tensors, or of a key."""
    architecture, converted = CONVERTED_VARIANTS.get(case) or (case, CONVERTED[case])
    writer, _ = write_converted(tmp_path / "tiny.gguf", architecture, converted)
    writer.tensors[0] = {name: info for name, info in writer.tensors[0].items() if tensor not in name}
    for key in [key for key in writer.kv_data[0] if "rope.scaling" in tensor and "rope.scaling" in key]:
        del writer.kv_data[0][key]
    with pytest.raises(EngineError, match=message):
        open_checkpoint(str(finish(writer)))


@pytest.mark.parametrize(
    "factors", [[1.0] * 4 + [1e30] * 13, [1.0] * 4 + [1e29] * 14, [1e30] * 18, [1e30] * 4 + [1.0] * 14]
)
def test_gemma4_without_a_proportional_rope(tmp_path: Path, factors: list[float]) -> None:
    writer, _ = write_converted(tmp_path / "tiny.gguf", "gemma4", CONVERTED["gemma4"])
    del writer.tensors[0]["rope_freqs.weight"]
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    with pytest.raises(UnsupportedModelError, match="not those of a proportional rope: 18 are needed, 1 for each pair"):
        open_checkpoint(str(finish(writer)))


def test_gemma4_with_a_rope_scaling(tmp_path: Path) -> None:
    writer, _ = write_converted(tmp_path / "tiny.gguf", "gemma4", CONVERTED["gemma4"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    with pytest.raises(UnsupportedModelError, match="rope factors together with a rope scaling are not implemented"):
        open_checkpoint(str(finish(writer)))


def test_mistral4_without_its_scale_of_queries_is_as_long_as_it_was_trained_first(tmp_path: Path) -> None:
    """Further on nobody knows how much queries grow."""
    for case, expected in (("mistral4", 64), ("native mistral4", 512)):
        architecture, converted = CONVERTED_VARIANTS.get(case) or (case, CONVERTED[case])
        writer, _ = write_converted(tmp_path / "tiny.gguf", architecture, converted)
        assert open_checkpoint(str(finish(writer))).config["max_position_embeddings"] == expected


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
    """Divisors by transformers' own frequencies: unscaled over scaled."""
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

    refused(
        TinyGguf(path, "falcon", model.config), "architecture 'falcon' are not supported: supported are llama, qwen2"
    )
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
    with pytest.raises(EngineError, match=r"blk\.\d\.attn_k\.weight has shape \[36, 54\]: it does not fit"):
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
