"""Models with layers that carry a state and others that attend: against transformers, and in the runtime."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig

from enginewright import LLM, SamplingParams
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.models import build_graph, check_config
from enginewright.errors import EngineError, UnsupportedModelError
from enginewright.plan import RecurrentState
from enginewright.runtime.commands.inspect import describe, summarize
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.outputs import RequestOutput
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.checkpoint.test_models import STEPS, case_id, graph_logits, reference_logits
from tests.helpers.engines import folder_of_engines
from tests.helpers.graphs import relative_error
from tests.helpers.llm import tokens_of
from tests.helpers.prompts import random_prompts
from tests.helpers.tiny import ALL_EXPERTS, HYBRIDS, OF_EACH_STATE, MemoryCheckpoint, tiny_config, tiny_model

LONGEST = 1300
LENGTHS = [1, 2, 3, 4, 8, 9, 31, 32, 33, 64, 65, 200]
CUTS = (1, 7, 64)

CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in HYBRIDS),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_heads": 6, "mamba_n_groups": 3, "ssm_multipliers": None}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_d_ssm": None}),
    ("lfm2", {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [0], "tie_embedding": False, "rope_theta": 777.0}),
    ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0, "num_experts_per_tok": 5}),
    ("qwen3_5_text", {"layer_types": None, "num_hidden_layers": 4, "linear_conv_kernel_dim": 2}),
    ("qwen3_5_text", {"linear_num_key_heads": 6, "attention_bias": True, "tie_word_embeddings": True}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "mamba_proj_bias": True, "layer_types": None}),
    ("granitemoehybrid", {"num_local_experts": 0}),
    ("nemotron_h", {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "time_step_min": 0.4, "n_groups": 6}),
    ("nemotron_h", {"hybrid_override_pattern": "ME*EE", "moe_latent_size": 27, "n_group": 1, "topk_group": 1}),
    ("nemotron_h", {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "attention", *["mlp"] * 3]}),
    ("qwen3_5_text", {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "partial_rotary_factor": 0.5,
                                          "mrope_interleaved": True, "mrope_section": [2, 2, 2]}}),
]  # fmt: skip


# Each family as it is, and a third of the configs that differ.
SOME_CASES = [*CASES[: len(HYBRIDS)], *CASES[len(HYBRIDS) :: 3]]


@pytest.mark.parametrize(("family", "overrides"), SOME_CASES, ids=case_id)
def test_logits_are_those_of_transformers(family: str, overrides: dict[str, Any]) -> None:
    config = tiny_config(family, **overrides)
    model = tiny_model(config)
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (1, sum(STEPS)))
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.3
    for form in (config, json.loads(model.config.to_json_string())):
        difference = np.abs(graph_logits(build_graph(MemoryCheckpoint.of(model, form)), tokens) - expected)
        assert difference.max() < tolerances.HYBRID_LOGITS


@cache
def engine_of(family: str, quant: str = "bf16", longest: int = LONGEST) -> Path:
    """The engine of a tiny model with `config_of`'s config."""
    config = config_of(family, longest)
    path = folder_of_engines() / f"{family}-{quant}-{longest}.engine"
    checkpoint = MemoryCheckpoint.of(tiny_model(config), config)
    build_engine(checkpoint, BuildConfig(quant=quant_config(quant), gate=None), path)
    return path


def config_of(family: str, longest: int = LONGEST) -> dict[str, Any]:
    """A model for longer sequences, whose head is not its embedding: a tied tiny model repeats itself.

    Each token goes to all experts: which come second and third is a tie for one in thousands, and roundings decide it.
    """
    others = {"tie_embedding": False} if family.startswith("lfm2") else {}
    others |= ALL_EXPERTS.get(family, {})
    return tiny_config(family, max_position_embeddings=longest, tie_word_embeddings=False, **others)


def texts(lengths: Sequence[int] = LENGTHS, seed: int = 3) -> list[list[int]]:
    return random_prompts(lengths, seed)


def logits_of(family: str, cut: int, together: bool, isa: str | None = None) -> list[npt.NDArray[np.float32]]:
    with Engine.open(engine_of(family)) as engine:
        config = RuntimeConfig(
            isa=isa,
            threads=2 if cut > 12 else 1,  # many small steps of two threads take long where others run
            max_num_batched_tokens=cut,
            max_num_seqs=12 if together else 1,
            max_model_len=256,
        )
        executor = CpuExecutor(engine, config)
        batches = [texts()] if together else [[text] for text in texts()]
        return [row for batch in batches for row in score(executor, batch, last_only=True)]


@pytest.mark.parametrize("family", OF_EACH_STATE)
def test_bits_are_the_same_alone_and_with_others_however_prompts_are_cut(family: str) -> None:
    alone = logits_of(family, 512, together=False)
    for cut in CUTS:
        for length, expected, actual in zip(
            LENGTHS, alone, logits_of(family, max(cut, 12), together=True), strict=True
        ):
            assert np.array_equal(expected, actual), f"{length} tokens, cut at {cut}"
    assert all(map(np.array_equal, alone, logits_of(family, 1, together=False)))


BY_QUANT = [(family, quant) for family in HYBRIDS for quant in tolerances.HYBRID_ENGINE_LOGITS]
SOME_BY_QUANT = [case for n, case in enumerate(BY_QUANT) if n % 4 in (0, 3)]


@pytest.mark.parametrize(("family", "quant"), SOME_BY_QUANT)
def test_engines_are_near_transformers(family: str, quant: str) -> None:
    text = texts([173])[0]
    expected = reference_logits(tiny_model(config_of(family)), np.array([text]))[0]
    with Engine.open(engine_of(family, quant)) as engine:
        limits = RuntimeConfig(threads=1, max_num_batched_tokens=29, max_logit_rows=29, max_model_len=256)
        (actual,) = score(CpuExecutor(engine, limits), [text])
    assert 1e-8 < relative_error(actual, expected) < tolerances.HYBRID_ENGINE_LOGITS[quant]


def generated(
    family: str, prompts: Sequence[list[int]], params: SamplingParams, longest: int = LONGEST, **limits: Any
) -> list[RequestOutput]:
    options = {"max_model_len": LONGEST, "max_num_seqs": 8, "max_num_batched_tokens": 96, "threads": 1}
    with LLM(engine_of(family, longest=longest), **{**options, "kv_cache_memory": 64 << 20, **limits}) as llm:
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("family", OF_EACH_STATE)
def test_generated_tokens_are_those_of_transformers(family: str) -> None:
    prompts = texts([1, 7, 70])
    model = tiny_model(config_of(family))
    for prompt, answer in zip(prompts, tokens_of(generated(family, prompts, GREEDY)), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0].numpy()
        for position, token in enumerate(answer, len(prompt) - 1):
            best, second = np.sort(logits[position])[::-1][:2]
            if best - second > tolerances.HYBRID_CLEAR_MARGIN:
                assert token == logits[position].argmax()


@pytest.mark.parametrize("shift", [0, 100])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_shared_beginning_is_computed_once(family: str, shift: int) -> None:
    """A prefix of 1,000 tokens that 20 requests share is computed once; only what follows is computed for each."""
    beginning, *ends = texts([1000 + shift, *[20] * 20])
    prompts = [beginning + end for end in ends]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=3, ignore_eos=True)
    with_cache = generated(family, prompts, params)
    computed = sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in with_cache)
    assert computed <= 0.2 * sum(map(len, prompts)), "three of them at most compute the whole beginning"
    if shift == 0:
        without = generated(family, prompts, params, enable_prefix_caching=False)
        assert tokens_of(with_cache) == tokens_of(without)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_conversation_goes_on_where_its_prompt_ended(family: str) -> None:
    """The next turn reuses the last one's prompt up to a whole block, because the state after it was kept."""
    (prompt,) = texts([301])
    with LLM(engine_of(family), max_model_len=LONGEST, max_num_seqs=2, threads=1, kv_cache_memory=16 << 20) as llm:
        (first,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
        turn = [*prompt, *first.outputs[0].token_ids, 5, 6, 7]
        (second,) = llm.generate([{"prompt_token_ids": turn}], GREEDY, use_tqdm=False)
        assert second.num_cached_tokens == 288  # of 301
    assert tokens_of([second]) == tokens_of(generated(family, [turn], GREEDY, enable_prefix_caching=False))


@pytest.mark.parametrize("family", OF_EACH_STATE)
def test_preemption_changes_no_token(family: str) -> None:
    prompts = texts([90, 60, 75, 50, 81, 33])
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=60, ignore_eos=True)
    expected = tokens_of(generated(family, prompts, params))
    with Engine.open(engine_of(family)) as engine:
        # Slots for all, and blocks for half of them.
        memory = 12 * engine.plan.state_bytes_per_sequence() + 3 * sequence_bytes(engine.plan.paged_caches, 160, 16)
        limits = {"max_model_len": 160, "max_num_seqs": 6, "max_num_batched_tokens": 16, "threads": 1}
        with LLM(engine, **limits, kv_cache_memory=memory) as llm:
            actual = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            assert llm.stats().num_preemptions > 0
    assert tokens_of(actual) == expected


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_parallel_samples_are_those_of_one_at_a_time(family: str, caching: bool) -> None:
    (prompt,) = texts([77])
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, n=4, ignore_eos=True)
    together = tokens_of(generated(family, [prompt], params, enable_prefix_caching=caching))
    alone = tokens_of(generated(family, [prompt], params, max_num_seqs=1, max_num_batched_tokens=13))
    assert together == alone and len(set(map(tuple, together))) > 1


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_state_takes_as_much_for_a_long_sequence_as_for_a_short_one(family: str) -> None:
    path = engine_of(family)
    with Engine.open(path) as engine:
        (state,) = engine.plan.recurrent_states
        assert isinstance(state, RecurrentState) and state.snapshot_tokens == 512
        sizes = {length: sequence_bytes([state], length, 64) for length in (1, 100, LONGEST)}
        assert set(sizes.values()) == {2 * state.bytes_per_sequence}, "its own slot, and one for a snapshot"
        bytes_by_limit = set()
        for length in (64, LONGEST):
            limits = RuntimeConfig(max_model_len=length, max_num_seqs=4, kv_cache_memory=32 << 20, threads=1)
            executor = CpuExecutor(engine, replace(limits, enable_prefix_caching=False))  # or all memory is used
            bytes_by_limit.add(executor.pools[engine.plan.caches.index(state)].nbytes)
        assert bytes_by_limit == {8 * state.bytes_per_sequence}
    summary = summarize(path, 1 << 30)
    assert summary["memory"]["state_bytes_per_sequence"] == state.bytes_per_sequence
    assert "per sequence, however long" in describe(summary)


def test_a_wrapper_gives_its_text_model() -> None:
    config = tiny_config("qwen3_5_text")
    model = tiny_model(config)
    plain = MemoryCheckpoint.of(model, config)
    stored = {name.replace("model.", "model.language_model.", 1): value for name, value in plain.stored.items()}
    stored |= {"model.visual.patch_embed.weight": torch.zeros(3, 3), "mtp.fc.weight": torch.zeros(2, 2)}
    ids = {f"{name}_token_id": 7 for name in ("image", "video", "vision_start", "vision_end")}
    whole = {"model_type": "qwen3_5", "text_config": config, "vision_config": {"depth": 3}, **ids}
    wrapped = build_graph(MemoryCheckpoint({**whole, "tie_word_embeddings": False}, stored))
    notes = json.loads(wrapped.metadata_props["enginewright.notes"])
    assert len(notes) == 2 and "visual" in " ".join(notes) and "multi-token prediction" in " ".join(notes)
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (1, sum(STEPS)))
    np.testing.assert_array_equal(graph_logits(wrapped, tokens), graph_logits(build_graph(plain), tokens))
    for wrong, why in (
        ({"text_config": None}, "text_config is missing"),
        ({"audio_config": {}}, "audio_config = {}"),
    ):
        with pytest.raises(EngineError, match=why):
            build_graph(MemoryCheckpoint({**whole, **wrong}, stored))


def test_kimi_linear_as_it_is_published() -> None:
    """A published checkpoint is read: its config's own section and names, and convolutions and experts one by one."""
    config = tiny_config("kimi_linear")
    plain = MemoryCheckpoint.of(tiny_model(config), config)
    stored: dict[str, torch.Tensor] = {}
    for name, value in plain.stored.items():
        name = name.replace("forget_gate.", "")
        if name.endswith("conv1d.weight"):
            stored |= {
                name.replace("conv1d", f"{part}_conv1d"): taps for part, taps in zip("qkv", value.chunk(3), strict=True)
            }
        elif ".experts." in name:
            parts = {"w1": value[:, :21], "w3": value[:, 21:]} if "gate_up" in name else {"w2": value}
            block = name.rpartition(".")[0].replace(".mlp.", ".block_sparse_moe.")
            for part, matrices in parts.items():
                stored |= {f"{block}.{expert}.{part}.weight": matrix for expert, matrix in enumerate(matrices)}
        else:
            sparse = any(part in name for part in (".gate.", "shared_experts"))
            stored[name.replace(".mlp.", ".block_sparse_moe.") if sparse else name] = value
    renamed = {
        "max_position_embeddings": "model_max_length",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
    }
    dropped = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    published = {renamed.get(key, key): value for key, value in config.items() if key not in dropped} | {
        "linear_attn_config": {
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": 22,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
        "head_dim": 72,
        "first_k_dense_replace": 1,
        "mla_use_nope": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    }
    tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (1, sum(STEPS)))
    actual = graph_logits(build_graph(MemoryCheckpoint(published, stored)), tokens)
    np.testing.assert_array_equal(actual, graph_logits(build_graph(plain), tokens))


SAVED = [*HYBRIDS, "qwen3_5"]
SOME_SAVED = ["falcon_h1", "lfm2", "nemotron_h", "qwen3_5"]  # with no hundreds of experts; tests/long has the others


@pytest.mark.parametrize("family", SOME_SAVED)
def test_what_transformers_saves_can_be_built(family: str) -> None:
    layers: dict[str, Any] = {"num_hidden_layers": 4} if family.startswith("qwen3") else {}  # of up to 512 experts each
    config = AutoConfig.for_model(
        family, dtype=torch.bfloat16, **({"text_config": layers} if family == "qwen3_5" else layers)
    )
    for written in (config.to_json_string(use_diff=True), config.to_json_string(use_diff=False)):
        check_config(json.loads(written))


@pytest.mark.parametrize(
    ("family", "changed", "why"),
    [
        *(
            (family, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'.*only silu is implemented")
            for family in HYBRIDS
            if family not in ("lfm2", "lfm2_moe", "nemotron_h")
        ),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'.*only silu is implemented"),
        ("granitemoehybrid", {"shared_intermediate_size": 0}, "shared_intermediate_size = 0"),
        ("granitemoehybrid", {"time_step_limit": [0.1, 0.2]}, r"time_step_limit = \[0.1, 0.2\]"),
        ("granitemoehybrid", {"mamba_d_head": 7}, "mamba_n_heads is 4, and mamba_d_head 7"),
        ("granitemoehybrid", {"layer_types": ["mamba", "mlp", "mamba"]}, "layer_types has 'mlp'"),
        ("nemotron_h", {"hybrid_override_pattern": "M-X*-"}, "a layer is 'X'"),
        ("nemotron_h", {"moe_latent_size": 27, "mlp_bias": True}, "mlp_bias = True with moe_latent_size"),
        ("nemotron_h", {"hybrid_override_pattern": "M-*"}, "3 layers are named, but num_hidden_layers is 5"),
        ("nemotron_h", {"hybrid_override_pattern": None}, "neither layers_block_type nor hybrid_override_pattern"),
        ("nemotron_h", {"n_groups": 4}, "not a multiple of n_groups"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'"),
        ("nemotron_h", {"sliding_window": 7}, "no windows"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers has 1 factors, not 2"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias = True"),
        ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias = True"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "layer_types has 'mamba'"),
        ("lfm2", {"layer_types": ["conv"]}, "names 1 layers, but num_hidden_layers is 3"),
        ("lfm2", {"conv_L_cache": 9}, "conv_L_cache = 9"),
        ("lfm2", {"use_pos_enc": False}, "use_pos_enc = False"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope = False"),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2]}},
            "each of 4 layers once",
        ),
        ("kimi_linear", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ("qwen3_5_text", {"linear_num_value_heads": 5}, "not a multiple of linear_num_key_heads"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16'"),
        ("qwen3_5_text", {"zebra": 1}, "zebra = 1"),
    ],
)
def test_what_a_config_asks_for_and_nothing_does_is_refused(family: str, changed: dict[str, Any], why: str) -> None:
    with pytest.raises((UnsupportedModelError, EngineError), match=f"(?s){why}"):
        build_graph(MemoryCheckpoint({**tiny_config(family), **changed}, {}))
