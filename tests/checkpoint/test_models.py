"""Every family's dense graph in onnxruntime against transformers, both in fp32 on weights rounded to bfloat16."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.config import ConfigReader
from enginewright.builder.harmless_tensors import HARMLESS_TENSORS
from enginewright.builder.models import build_graph, model_types
from enginewright.builder.models.blocks import Attention, Embedding, GraphWriter, Head, Heads
from enginewright.builder.models.blocks.rope import Rope, read_rope
from enginewright.builder.pooling import Pooling
from enginewright.builder.tensors import AssumedTensors, Tensors
from enginewright.builder.weights import Weights
from enginewright.errors import EngineError
from enginewright.plugins import expand_references
from tests import tolerances
from tests.helpers.graphs import Content, content
from tests.helpers.onnx_run import Oracle
from tests.helpers.tiny import (
    ENCODERS,
    FAMILIES,
    HYBRIDS,
    OF_EACH_BLOCK,
    OF_EACH_STATE,
    MemoryCheckpoint,
    kind_of,
    tiny_checkpoint,
    tiny_config,
    tiny_model,
)

Logits = npt.NDArray[np.float32]
STEPS = (17, 5, 1)  # tokens: a prefill, a chunk that follows it, a decode

LINEAR = {"rope_type": "linear", "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"vocab_size": 131, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 10}),
    ("llama", {"num_key_value_heads": None, "rms_norm_eps": 1e-3}),
    ("llama", {"hidden_size": 50, "num_attention_heads": 5, "num_key_value_heads": 1, "num_hidden_layers": 1}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"rope_theta": 123456.7}),
    ("llama", {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_parameters": {"rope_theta": 777.0, **LINEAR}}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_scaling": YARN}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("llama", {"rope_parameters": {"rope_theta": 10000.0, **YARN, "attention_factor": 1.5, "truncate": False}}),
    ("llama", {"rope_scaling": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 20.0, "beta_slow": 2.0}}),
    ("qwen2", {"head_dim": 14, "num_key_value_heads": 5, "tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 1}),
    (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 10, "num_attention_heads": 5, "rope_theta": 1e6}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    ("qwen3_moe", {"num_experts": 37, "num_experts_per_tok": 37, "attention_bias": True}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 3}),
    ("deepseek_v3", {"rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, "n_shared_experts": 1}),
    ("deepseek_v3", {"rms_norm_eps": 1e-3}),
    ("glm4_moe_lite", {"q_lora_rank": 40, "mlp_layer_types": None, "n_group": 1, "norm_topk_prob": False}),
    ("mistral4", {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1}),
    ("mixtral", {"sliding_window": 5, "num_experts_per_tok": 1}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 3, "num_experts_per_tok": 5}),
    ("glm4_moe", {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "norm_topk_prob": False}),
    ("glm4_moe", {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True, "final_logit_softcapping": None}),
    ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3, "sliding_window": 1}),
    ("gemma3_text", {"layer_types": None, "num_hidden_layers": 7, "sliding_window": 23}),
    ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
    ("gemma3_text", {"layer_types": ["sliding_attention"] * 3}),
    ("gemma3_text", {"attn_logit_softcapping": 1.5}),
    ("gemma3_text", {"rope_local_base_freq": 200.0, "rope_theta": 3000.0, "rope_scaling": LINEAR}),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_theta": 5000.0, **LLAMA3},
            }
        },
    ),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 3, "head_dim": None, "hidden_size": 48}),
    ("phi3", {"rope_scaling": None, "partial_rotary_factor": 1.0, "sliding_window": None, "tie_word_embeddings": True}),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": False}),
    ("smollm3", {"use_sliding_window": False, "sliding_window": 5}),
    (
        "smollm3",
        {
            "use_sliding_window": False,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": None}),
    ("olmo3", {"rope_scaling": None, "layer_types": None, "num_hidden_layers": 5}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 1}),
    ("granitemoeshared", {"shared_intermediate_size": 0}),
    (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": ["full_attention"] * 3},
    ),
    ("gemma4_text", {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
    ("gemma4_text", {"layer_types": ["sliding_attention"] * 5, "num_kv_shared_layers": 0}),
    ("gemma4_text", {"layer_types": None, "num_kv_shared_layers": 0}),
    ("gemma4_text", {"layer_types": ["full_attention"] * 5, "attention_bias": True, "tie_word_embeddings": False}),
    (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 21},
    ),
    ("ministral3", {"tie_word_embeddings": True, "sliding_window": 9}),
    ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.7, "tie_word_embeddings": True}),
    ("ernie4_5", {"use_bias": False, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    ("hunyuan_v1_dense", {"rope_scaling": None, "attention_bias": True, "tie_word_embeddings": True}),
    ("starcoder2", {"use_bias": False, "hidden_act": "gelu", "sliding_window": None, "tie_word_embeddings": False}),
    ("gpt2", {"n_inner": 37, "activation_function": "relu2", "layer_norm_epsilon": 1e-3}),
    (
        "cohere2",
        {"layer_types": None, "sliding_window_pattern": 2, "attention_bias": True, "tie_word_embeddings": False},
    ),
]
# Each family as it is, and a fourth of the configs that differ.
SOME_CASES = [*CASES[: len(FAMILIES)], *CASES[len(FAMILIES) :: 4]]


def case_id(value: object) -> str:
    """A short name of a family, or of the keys that differ."""
    return str(list(value)) if isinstance(value, dict) else str(value)


def reference_logits(model: PreTrainedModel, tokens: npt.NDArray[np.int64]) -> Logits:
    """All logits of one sequence, in one pass without a cache."""
    if model.config.model_type.startswith("gemma"):
        for name, scale in model.named_buffers():
            if name.endswith("embed_scale"):
                scale.copy_(scale.to(torch.bfloat16))  # as it is with bfloat16 weights
    with torch.no_grad():
        return model(torch.from_numpy(tokens), use_cache=False).logits.numpy()  # type: ignore[no-any-return]


def graph_logits(graph: ir.Model, tokens: npt.NDArray[np.int64]) -> Logits:
    """Logits of the dense graph, computed in STEPS; the present of each step is the past of the next."""
    oracle, parts, done = Oracle(graph), [], 0
    past = {
        str(value.name): np.zeros([0 if isinstance(dim, ir.SymbolicDim) else dim for dim in value.shape], np.float32)
        for value in graph.graph.inputs[2:]
        if value.shape is not None
    }
    for count in STEPS:
        positions = np.arange(done, done + count)[None]
        outputs = oracle({"tokens": tokens[:, done : done + count], "positions": positions, **past})
        parts.append(outputs.pop("logits"))
        past = {name.replace("present", "past"): value for name, value in outputs.items()}
        done += count
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize(("family", "overrides"), SOME_CASES, ids=case_id)
def test_logits_are_those_of_transformers(family: str, overrides: dict[str, Any]) -> None:
    config = tiny_config(family, **overrides)
    model = tiny_model(config)
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (1, sum(STEPS)))
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.5
    # The config as it was given, of the older form, and as transformers writes it today.
    for form in (config, json.loads(model.config.to_json_string())):
        difference = np.abs(graph_logits(build_graph(MemoryCheckpoint.of(model, form)), tokens) - expected)
        assert difference.max() < tolerances.DENSE_LOGITS


def test_an_engine_for_short_sequences_has_the_short_factors() -> None:
    """With LongRoPE, an engine whose sequences stay within the original length has transformers' short factors."""
    config = tiny_config("phi3")
    checkpoint = MemoryCheckpoint.of(tiny_model(config), config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**json.loads(json.dumps(config))), attn_implementation="eager"
    ).eval()
    model.load_state_dict({name: value.float() for name, value in checkpoint.stored.items()}, strict=True)
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (1, sum(STEPS)))
    short, long = (graph_logits(build_graph(checkpoint, max_seq_len=length), tokens) for length in (128, 129))
    expected = reference_logits(model, tokens)
    assert np.abs(short - expected).max() < tolerances.DENSE_LOGITS
    assert np.abs(long - expected).max() > 1000 * tolerances.DENSE_LOGITS


@pytest.mark.parametrize(
    "changed", [{"rms_norm_eps": 1e-5}, {"rope_theta": 9900.0}, {"hidden_act": "gelu_pytorch_tanh"}]
)
def test_the_comparison_sees_small_faults(changed: dict[str, Any]) -> None:
    model = tiny_model(tiny_config("llama"))
    tokens = np.random.default_rng(0).integers(0, 307, (1, sum(STEPS)))
    wrong = graph_logits(build_graph(MemoryCheckpoint.of(model, tiny_config("llama", **changed))), tokens)
    assert np.abs(wrong - reference_logits(model, tokens)).max() > 10 * tolerances.DENSE_LOGITS


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, YARN, {**YARN, "beta_fast": 8, "factor": 1.0}])
@pytest.mark.parametrize("head_dim", [6, 64, 128])
def test_frequencies_are_transformers_bits(scaling: dict[str, Any] | None, head_dim: int) -> None:
    values = tiny_config("llama", head_dim=head_dim, rope_theta=10007.0, rope_scaling=scaling)
    settings = {key: value for key, value in values.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", **json.loads(json.dumps(settings)))
    embedding = AutoModelForCausalLM.from_config(config).model.rotary_emb
    reader = ConfigReader(values)
    rope = read_rope(reader, Heads.read(reader).dim)
    np.testing.assert_array_equal(rope.inv_freq, embedding.inv_freq.numpy())
    assert rope.scale == embedding.attention_scaling


GRAPHS: list[tuple[str, dict[str, Any]]] = [*((family, {}) for family in FAMILIES), *CASES[-3:]]
SOME_GRAPHS = [case for case in GRAPHS if case[0] in OF_EACH_BLOCK]


@pytest.mark.parametrize(("family", "overrides"), SOME_GRAPHS)
def test_graphs_are_valid_and_say_their_shapes(family: str, overrides: dict[str, Any]) -> None:
    config = tiny_config(family, **overrides)
    graph = build_graph(MemoryCheckpoint.of(tiny_model(config), config))
    names = [node.name for node in graph.graph]
    assert None not in names
    assert len(set(names)) == len(names)
    standard = ir.to_proto(expand_references(graph))
    onnx.checker.check_model(standard)

    said = {value.name: value for value in standard.graph.value_info}
    del standard.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(standard, check_type=True, strict_mode=True, data_prop=True)
    compared = 0
    for value in inferred.graph.value_info:
        if value.name in said:
            ours, theirs = (_dims(v) for v in (said[value.name], value))
            assert len(ours) == len(theirs), value.name
            assert all(a == b for a, b in zip(ours, theirs, strict=True) if a and b), (value.name, ours, theirs)
            compared += 1
    assert compared > len(names) / 2
    assert _dims(inferred.graph.output[0])[-1] == config["vocab_size"]


def _dims(value: onnx.ValueInfoProto) -> list[int]:
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_kv_groups_follow_the_windows() -> None:
    metadata = build_graph(MemoryCheckpoint.tiny("gemma3_text")).metadata_props
    assert json.loads(metadata["enginewright.kv_groups"]) == [
        {"layers": [0, 2], "kv_heads": 3, "head_dim": 10, "window": 7, "planes": ["key", "value"]},
        {"layers": [1], "kv_heads": 3, "head_dim": 10, "window": 0, "planes": ["key", "value"]},
    ]
    assert metadata["enginewright.max_seq_len"] == "512"


def test_a_block_says_whose_cache_it_is() -> None:
    """Layers without attention leave none; what is unlike another layer's is a group of its own."""
    graph, heads = GraphWriter(Weights(AssumedTensors()), 512), Heads(4, 2, 8)
    table = Rope(np.ones(4, np.float32)).write(graph)
    x = Embedding(vocab=307, hidden=48).write(graph, "model.embed_tokens")
    blocks = {3: Attention(heads), 1: Attention(Heads(6, 3, 8)), 7: Attention(heads, window=5), 8: Attention(heads)}
    for layer, attention in blocks.items():
        x = graph.add(x, attention.write(graph, x, f"model.layers.{layer}.self_attn", layer, table))
    with pytest.raises(AssertionError, match="layer 7 has a cache already"):
        blocks[7].write(graph, x, "model.layers.9.self_attn", 7, table)
    model = graph.finish(Head(vocab=307, tied=False).write(graph, x, "model.embed_tokens"))
    assert json.loads(model.metadata_props["enginewright.kv_groups"]) == [
        {"layers": [3, 8], "kv_heads": 2, "head_dim": 8, "window": 0, "planes": ["key", "value"]},
        {"layers": [1], "kv_heads": 3, "head_dim": 8, "window": 0, "planes": ["key", "value"]},
        {"layers": [7], "kv_heads": 2, "head_dim": 8, "window": 5, "planes": ["key", "value"]},
    ]
    pairs = [f"{kind}.{layer}" for layer in blocks for kind in ("key", "value")]
    assert [value.name for value in model.graph.inputs[2:]] == [f"past_{pair}" for pair in pairs]
    assert [value.name for value in model.graph.outputs[1:]] == [f"present_{pair}" for pair in pairs]


def large_checkpoint(layers: int) -> MemoryCheckpoint:
    """Llama 70B's sizes, on torch's meta device: a tensor that is read fails."""
    config = {
        **tiny_config("llama", num_hidden_layers=layers, vocab_size=128256, max_position_embeddings=131072),
        **{"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
    }
    with torch.device("meta"):
        settings = {key: value for key, value in config.items() if key != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))
    return MemoryCheckpoint.of(model, config)


def test_a_large_graph_is_built_and_nothing_is_read() -> None:
    checkpoint = large_checkpoint(layers=80)
    graph = build_graph(checkpoint)
    assert len(graph.graph) == 80 * 24 + 5
    expand_references(graph)
    assert checkpoint.reads == []


def test_weights_are_rounded_and_counted() -> None:
    stored = {"w": torch.tensor([[1.0, 1.001], [3.14159, -65504.0]]), "norm": torch.tensor([0.00390625, 1.001])}
    checkpoint = MemoryCheckpoint({}, stored)
    weights = Weights(Tensors(checkpoint))
    value, norm = weights.tensor("w", (2, 2)), weights.tensor("norm", (2,), offset=1.0)
    assert weights.tensor("w", (2, 2)) is value
    assert (weights.reads, checkpoint.reads) == (0, [])
    assert value.const_value is not None and norm.const_value is not None
    np.testing.assert_array_equal(value.const_value.numpy(), stored["w"].to(torch.bfloat16).float().numpy())
    np.testing.assert_array_equal(
        norm.const_value.numpy(), np.array([1.00390625, 2.0], np.float32)
    )  # 1 + w is not rounded
    assert (weights.reads, checkpoint.reads) == (2, ["w", "norm"])


def broken(**changes: torch.Tensor | None) -> MemoryCheckpoint:
    """A tiny llama with some tensors replaced, or without them where None."""
    config = tiny_config("llama")
    checkpoint = MemoryCheckpoint.of(tiny_model(config), config)
    stored = {name: value for name, value in {**checkpoint.stored, **changes}.items() if value is not None}
    return MemoryCheckpoint(config, stored)


@pytest.mark.parametrize(
    ("changes", "message", "exit_code"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight", 1),
        ({"lm_head.weight": torch.zeros(307, 47)}, r"lm_head.*\[307, 47\].*\[307, 48\]", 1),
        ({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}, "stored as int8", 3),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, r"1 of .*self_attn\.q_proj\.bias", 3),
        ({f"extra.{i}": torch.zeros(1) for i in range(7)}, r"7 of .*extra\.0, .*extra\.4 and 2 more", 3),
    ],
)
def test_tensors_that_do_not_fit(changes: dict[str, torch.Tensor | None], message: str, exit_code: int) -> None:
    with pytest.raises(EngineError, match=message) as error:
        build_graph(broken(**changes))
    assert error.value.exit_code == exit_code


def test_tensors_that_may_be_left_over() -> None:
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for layer in range(3)}
    checkpoint = broken(**frequencies)
    build_graph(checkpoint)
    assert checkpoint.reads == []


UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "lfm2", "nemotron_h"])  # all call tables otherwise
def test_a_head_of_its_own_is_used_though_the_config_ties_it(family: str) -> None:
    config = tiny_config(family, **UNTIED, **({"tie_embedding": False} if family == "lfm2" else {}))
    checkpoint = MemoryCheckpoint.of(tiny_model(config), config)
    expected, tied = build_graph(checkpoint), {**config, "tie_word_embeddings": True}
    tied.pop("tie_embedding", None)
    contradicted = MemoryCheckpoint(tied, checkpoint.stored)
    graph = build_graph(contradicted)
    head, table = contradicted.reads  # nothing else is read
    assert head == "lm_head.weight" and ("embed" in table or table.endswith("wte.weight"))
    (note,) = json.loads(graph.metadata_props["enginewright.notes"])
    assert note.startswith("lm_head.weight is not the embedding's table")
    assert content(graph) == content(expected)

    repeated = MemoryCheckpoint(tied, {**checkpoint.stored, "lm_head.weight": checkpoint.stored[table].clone()})
    without = {name: value for name, value in checkpoint.stored.items() if name != "lm_head.weight"}
    same = build_graph(repeated)
    assert json.loads(same.metadata_props["enginewright.notes"]) == {}
    assert content(same) == content(build_graph(MemoryCheckpoint(tied, without)))


def test_a_contradicted_tie_is_what_transformers_loads(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", **UNTIED)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(0, values["vocab_size"], (1, sum(STEPS)))
    actual = graph_logits(build_graph(open_checkpoint(str(folder))), tokens)
    assert np.abs(actual - reference_logits(model, tokens)).max() < tolerances.DENSE_LOGITS


def test_a_tied_head_of_another_shape_is_refused() -> None:
    checkpoint = broken(**{"lm_head.weight": torch.zeros(307, 47)})
    checkpoint.config = {**checkpoint.config, "tie_word_embeddings": True}
    with pytest.raises(EngineError, match=r"lm_head.*\[307, 47\].*\[307, 48\]"):
        build_graph(checkpoint)


def test_every_harmless_tensor_has_a_reason() -> None:
    for family in [*FAMILIES, *HYBRIDS, *ENCODERS]:
        weights = Weights(AssumedTensors())
        config = ConfigReader(tiny_config(family), pooling=Pooling("mean"))
        config.read(str, "model_type")
        importlib.import_module(f"enginewright.builder.models.{family}").build(config, weights)
        assert HARMLESS_TENSORS.items() <= weights.harmless.items()
        for end, reason in weights.harmless.items():
            assert reason.startswith("It is ") and reason.endswith("."), end


@pytest.mark.parametrize(
    ("family", "overrides", "warning"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 1.5}, "attn_logit_softcapping = 1.5 is not applied"),
        (
            "gemma4_text",
            {"layer_types": ["sliding_attention"] * 5, "num_kv_shared_layers": 0},
            "layer_types gives the last layer a window",
        ),
    ],
)
def test_a_key_that_transformers_does_not_follow_is_warned_of(
    family: str, overrides: dict[str, Any], warning: str
) -> None:
    config = tiny_config(family, **overrides)
    for values, expected in ((config, [warning]), (tiny_config(family), [])):
        graph = build_graph(MemoryCheckpoint.of(tiny_model(values), values))
        warnings = json.loads(graph.metadata_props["enginewright.warnings"])
        assert all(map(str.startswith, warnings, expected)) and len(warnings) == len(expected), warnings


REFUSED: list[tuple[str, Mapping[str, Any], str, int]] = [
    ("llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type = 'ntk'.*longrope, proportional, yarn", 3),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "short_factor is not a list of 4", 1),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3}}, "long_factor is not a list of 3", 1),
    ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, which rotates 18 of 12", 1),
    ("phi3", {"partial_rotary_factor": 0.25}, "which rotates 3 of 12 columns", 1),
    ("phi3", {"attention_bias": True}, "attention_bias = True .only False", 3),
    ("ernie4_5_moe", {"moe_norm_min": 1e-3}, "moe_norm_min = 0.001 .only 1e-12 or 0.0", 3),
    ("mistral", {"sliding_window": -1}, "sliding_window is -1, not above 0", 1),
    ("mistral", {"sliding_window": 1 << 40}, "sliding_window = 1099511627776", 3),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries, but num_hidden_layers is 3", 1),
    ("starcoder2", {"hidden_act": "tanh"}, "hidden_act = 'tanh'.*gelu_new", 3),
    ("gpt2", {"n_embd": 61}, "n_embd is 61, which is not a multiple of n_head, 5", 1),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True", 3),
    ("granite", {"residual_multiplier": 0.0}, "residual_multiplier is 0.0, not above 0", 1),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm = True", 3),
    ("llama", {"rope_scaling": {**LINEAR, "mrope_section": [2, 1, 1]}}, "mrope_section", 3),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is missing", 1),
    ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor", 1),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5", 3),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary", 3),
    ("llama", {"hidden_act": "relu2"}, "hidden_act = 'relu2'.*silu", 3),
    ("llama", {"sliding_window": 4096}, "sliding_window = 4096", 3),
    ("llama", {"num_experts": 8}, "num_experts = 8", 3),
    ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method = 'bitsandbytes'", 3),
    ("llama", {"num_key_value_heads": 4}, "not a multiple of num_key_value_heads", 1),
    ("llama", {"head_dim": 7}, "head_dim is 7", 1),
    ("qwen2", {"attention_bias": True}, "attention_bias", 3),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "chunked_attention", 3),
    ("qwen2", {"layer_types": ["full_attention"] * 4}, "names 4 layers", 1),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is None", 1),
    ("gemma3_text", {"use_bidirectional_attention": True}, "the checkpoint has no pooling", 3),
    ("gemma3_text", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear'", 3),
    (
        "gemma3_text",
        {"rope_scaling": LINEAR, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "both rope_scaling and rope_parameters",
        3,
    ),
    ("gemma5", {}, "'gemma5' are not implemented.*Did you mean gemma", 3),
    ("qwen4", {}, "the known types are .*, qwen2, qwen3.*Did you mean qwen", 3),
    ("../llama", {}, "are not implemented", 3),
    ("blocks", {}, "are not implemented", 3),
    ("distilbert", {}, "'distilbert' are not implemented", 3),
]


@pytest.mark.parametrize(("model_type", "overrides", "message", "exit_code"), REFUSED)
def test_what_is_not_implemented_is_refused_by_name(
    model_type: str, overrides: Mapping[str, Any], message: str, exit_code: int
) -> None:
    family = model_type if model_type in FAMILIES else "llama"
    checkpoint = MemoryCheckpoint.of(tiny_model(tiny_config(family)), {})
    checkpoint.config = {**tiny_config(family, **overrides), "model_type": model_type}
    with pytest.raises(EngineError, match=f"(?s){message}") as error:
        build_graph(checkpoint)
    assert error.value.exit_code == exit_code
    assert checkpoint.reads == []


IN_FOLDERS = (*OF_EACH_BLOCK, *OF_EACH_STATE, *ENCODERS)


@pytest.mark.parametrize("family", IN_FOLDERS)
def test_a_checkpoint_in_a_folder_is_the_same_model(tmp_path: Path, family: str) -> None:
    """tests/long saves it once more."""
    config = tiny_config(family)
    folder = tiny_checkpoint(tmp_path, family, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    in_memory = MemoryCheckpoint.of(tiny_model(config, kind=kind_of(family)), config)
    assert content_of_folder(folder, family) == content(_pooled(in_memory, family))


def content_of_folder(folder: Path, family: str) -> Content:
    """`content` of a checkpoint's folder."""
    return content(_pooled(open_checkpoint(str(folder)), family))


def _pooled(checkpoint: Any, family: str) -> ir.Model:
    if family in ENCODERS:
        checkpoint.pooling = Pooling("mean")
    return build_graph(checkpoint)


def test_a_real_model_has_a_graph(smollm2_gguf: Path) -> None:
    graph = build_graph(open_checkpoint(str(smollm2_gguf)))
    assert len(graph.graph) == 30 * 24 + 5
    assert json.loads(graph.metadata_props["enginewright.kv_groups"])[0]["head_dim"] == 64


def test_the_type_of_the_model_is_needed() -> None:
    with pytest.raises(EngineError, match="model_type is missing"):
        build_graph(MemoryCheckpoint({}, {}))


def test_every_family_is_tested() -> None:
    assert {family for family, _ in CASES} == set(FAMILIES)
    assert set(model_types()) == {*FAMILIES, *HYBRIDS, *ENCODERS}, "those of other tests, too"
