"""Any number of ranks computes the bits of one: every block, number format, cache and instruction set."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright import _cpu
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.dtypes import KV_CACHES
from enginewright.rank_layout import RankLayout
from enginewright.rank_plan import ALL_GATHER
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.ranks.shares import rank_shares
from enginewright.runtime.engine import Engine
from enginewright.stage_plan import SEND
from tests.helpers.ranks import RanksInThreads, RanksOverSockets
from tests.helpers.tiny import ALL_EXPERTS, MemoryCheckpoint

LENGTHS = (1, 2, 33, 61, 290)  # longer than windows, a KV block, and a split of attention
WIDE = {"hidden_size": 96, "intermediate_size": 192}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
RECURRENT = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
EXPERTS = {"num_experts": 7, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
# Name → family, what differs from its tiny model, so that blocks of 16 rows divide, and the share of its weights that
# the larger of two ranks reads, at most: embeddings, routers and norms are whole on each.
CUT: Mapping[str, tuple[str, Mapping[str, Any], float]] = {
    "llama": ("llama", {**WIDE, **HEADS, "vocab_size": 512}, 0.62),
    "one KV head": ("llama", {**WIDE, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 32}, 0.62),
    "norms of heads": ("qwen3", {**WIDE, **HEADS}, 0.62),
    "norms of all heads": ("olmo2", {**WIDE, "num_attention_heads": 6, "num_key_value_heads": 2}, 0.65),
    "windows": ("gemma3_text", {**WIDE, **HEADS}, 0.66),
    "sinks and experts": ("gpt_oss", {**HEADS, "hidden_size": 64, "intermediate_size": 32}, 0.65),
    "experts": ("qwen3_moe", {**HEADS, "hidden_size": 64, **EXPERTS}, 0.65),
    "biases": ("gpt2", {"hidden_size": 96, "n_embd": 96, "n_head": 6}, 0.68),
    "gated delta": (
        "qwen3_next",
        {**WIDE, **HEADS, **RECURRENT, **EXPERTS, "shared_expert_intermediate_size": 64},
        0.65,
    ),
    "latent attention": ("deepseek_v3", {**LATENT, "hidden_size": 96, "intermediate_size": 192}, 0.65),
    "short convolutions": (
        "lfm2",
        {"hidden_size": 96, "intermediate_size": 192, "block_multiple_of": 16, "num_attention_heads": 6},
        0.65,
    ),
    "states": (
        "granitemoehybrid",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "mamba_n_heads": 6,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
        },
        0.7,
    ),
}
METHODS = ("int8-wo", "int8-sq", "int4-rtn", "fp8", "mxfp4")


def built(path: Path, family: str, changes: Mapping[str, Any], method: str = "bf16", kv: str = "bf16") -> Path:
    """The engine of a tiny model."""
    checkpoint = MemoryCheckpoint.tiny(family, **{**ALL_EXPERTS.get(family, {}), **changes})
    build_engine(checkpoint, BuildConfig(quant=quant_config(method), kv_cache_dtype=kv, gate=None), path)
    return path


def check(
    path: Path,
    *sizes: int,
    isa: str | None = None,
    threads: int = 1,
    stages: int = 1,
    ranks_of: Callable[[Engine, RuntimeConfig], RanksInThreads] = RanksInThreads,
) -> float:
    """Checks that ranks compute the bits of one process.

    Args:
        path: the engine.
        sizes: numbers of ranks of a stage.
        isa: instruction set.
        threads: threads of each rank.
        stages: number of stages.
        ranks_of: opens the ranks.

    Returns:
        The largest share of the weights' bytes that a rank reads, with the first number of ranks.
    """
    limits = {"isa": isa, "threads": threads, "max_num_batched_tokens": 100, "max_num_seqs": 5, "max_model_len": 320}
    random, shares = np.random.default_rng(1), []
    with Engine.open(path) as engine:
        texts = [random.integers(0, engine.plan.vocab_size, length).tolist() for length in LENGTHS]
        expected = score(CpuExecutor(engine, RuntimeConfig(**limits)), texts)
        for size in sizes:
            ranks = ranks_of(engine, RuntimeConfig(**limits, tensor_parallel_size=size, pipeline_parallel_size=stages))
            for length, one, several in zip(LENGTHS, expected, score(ranks, texts), strict=True):
                assert np.array_equal(one, several), f"{length} tokens, {size} ranks"
            assert any(call.kernel in (ALL_GATHER, SEND) for call in ranks.plan.calls)
            parts = rank_shares(engine.plan, lambda name: engine.weight(name)[1], RankLayout(size, stages))
            shares.append(max(one.weight_bytes for one in parts) / engine.weight_bytes)
            ranks.close()
    return shares[0]


@pytest.mark.parametrize("name", CUT)
def test_ranks_compute_the_bits_of_one(name: str, tmp_path: Path) -> None:
    family, changes, share = CUT[name]
    assert check(built(tmp_path / "tiny.engine", family, changes), 2, 3, 5) <= share


@pytest.mark.parametrize("name", CUT)
def test_stages_compute_the_bits_of_one(name: str, tmp_path: Path) -> None:
    family, changes, _ = CUT[name]
    path = built(tmp_path / "tiny.engine", family, changes)
    assert check(path, 1, stages=2) < 0.9
    check(path, 1, 2, stages=3)


@pytest.mark.parametrize("method", METHODS)
def test_formats_of_weights(method: str, tmp_path: Path) -> None:
    family, changes, _ = CUT["llama"]
    check(built(tmp_path / "tiny.engine", family, changes, method), 2, 4)


@pytest.mark.parametrize("method", ["w8a8", "int4-rtn"])
def test_formats_of_experts(method: str, tmp_path: Path) -> None:
    """Rows of experts are rounded to codes between two products."""
    family, changes, _ = CUT["experts"]
    check(built(tmp_path / "tiny.engine", family, changes, method), 3)


def test_codes_of_a_whole_row(tmp_path: Path) -> None:
    """A row's largest number decides about its codes, so a gate that rounds is not cut by columns."""
    family, changes, _ = CUT["gated delta"]
    check(built(tmp_path / "tiny.engine", family, changes, "w8a8"), 2)


@pytest.mark.parametrize("kv", [name for name in KV_CACHES if name != "bf16"])
def test_formats_of_kv_caches(kv: str, tmp_path: Path) -> None:
    family, changes, _ = CUT["norms of heads"]
    check(built(tmp_path / "tiny.engine", family, changes, kv=kv), 2)


@pytest.mark.parametrize("isa", _cpu.isa_names())
def test_instruction_sets_and_threads(isa: str, tmp_path: Path) -> None:
    family, changes, _ = CUT["gated delta"]
    check(built(tmp_path / "tiny.engine", family, changes, "int4-rtn"), 2, isa=isa, threads=2)


@pytest.mark.parametrize("name", ["llama", "sinks and experts"])
def test_sockets(name: str, tmp_path: Path) -> None:
    family, changes, _ = CUT[name]
    path = built(tmp_path / "tiny.engine", family, changes)
    check(path, 2, 3, ranks_of=RanksOverSockets)
    check(path, 2, stages=2, ranks_of=RanksOverSockets)


def test_more_ranks_than_heads(tmp_path: Path) -> None:
    """Ranks without heads of their own compute those of others; 8 heads of 2 groups are shared by 4 and 8, not by 6."""
    changes = {**WIDE, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    check(built(tmp_path / "tiny.engine", "llama", changes), 4, 6, 8)


@pytest.mark.parametrize("family", ["gemma4_text", "phi3", "falcon_h1"])
def test_awkward_sizes(family: str, tmp_path: Path) -> None:
    """Sizes that no block of 16 rows divides; tests/long has all families."""
    check(built(tmp_path / "tiny.engine", family, {}), 2)
