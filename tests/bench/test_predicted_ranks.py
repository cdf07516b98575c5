"""The prediction for many machines: its parts add up, and docs/devices.md has what it gives. No time is measured."""

import json
import re
import sys
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
from predicted_ranks import (
    CONTEXT,
    H200,
    LLAMA_70B,
    NETWORK,
    NVLINK,
    PROMPT,
    SEQUENCES,
    SHARED,
    SOCKET,
    Layout,
    ShapesOnly,
    Work,
    expert_share,
    main,
    models_of_docs,
    rows_of,
    work_of,
)

from enginewright.builder.assembly import Assembly, assemble
from enginewright.builder.build import BuildConfig, quant_config
from enginewright.builder.progress import Silent
from enginewright.plan import WeightOperand
from tests.helpers.tiny import MemoryCheckpoint, tiny_config

DOCS = Path(__file__).parents[2] / "docs/devices.md"
# Rows of experts, of a shared part, and none: with heads that are divided unevenly, and caches of all kinds.
FAMILIES = ["llama", "qwen3_moe", "deepseek_v3", "qwen3_5_moe_text"]


def assembly_of(config: dict[str, Any], quant: str = "int8-wo") -> Assembly:
    return assemble(ShapesOnly.of("tiny", config), BuildConfig(quant=quant_config(quant), gate=None), Silent())


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_checkpoint(family: str) -> None:
    config = tiny_config(family)
    expected = {name: info.shape for name, info in MemoryCheckpoint.tiny(family).tensors.items()}
    assert {name: info.shape for name, info in ShapesOnly.of("tiny", config).tensors.items()} == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_what_ranks_read_adds_up(family: str) -> None:
    config = tiny_config(family)
    assembly = assembly_of(config)
    (whole,) = work_of(assembly, config, 1).ranks
    (plan,) = assembly.plans.values()
    table = sum(
        assembly.weights[operand.name].form.nbytes
        for call in plan.calls
        if call.kernel.startswith("embed_")
        for operand in call.operands.values()
        if isinstance(operand, WeightOperand)
    )
    tied = config.get("tie_word_embeddings", False)
    assert whole.share.weight_bytes == whole.dense_bytes + whole.expert_bytes + (0 if tied else table)
    assert whole.share.exchanges == 0 and (whole.expert_bytes > 0) == (family != "llama")
    for size in (2, 3):
        ranks = work_of(assembly, config, size).ranks
        assert len(ranks) == size and ranks[0].share.exchanges > 0
        experts = sum(rank.expert_bytes for rank in ranks)  # two ranks may read a block of rows that has two experts
        assert whole.expert_bytes <= experts <= (1 + 0.035 * (size - 1)) * whole.expert_bytes, (
            "each expert is on one rank"
        )
        assert whole.dense_bytes <= sum(rank.dense_bytes for rank in ranks) < size * whole.dense_bytes
        assert sum(rank.ops_of_token for rank in ranks) >= whole.ops_of_token > max(rank.ops_of_token for rank in ranks)


def test_the_share_of_experts_that_are_read() -> None:
    assert expert_share(8, 2, 1, 1) == 2 / 8 and expert_share(8, 8, 1, 4) == 1.0
    assert expert_share(6, 2, 100, 3) == 1.0 and expert_share(4, 1, 1, 4) == 1.0
    every = list(combinations(range(8), 2))  # all choices of a token, for two ranks of four experts
    mean = sum(max(sum(one < 4 for one in pair), sum(one >= 4 for one in pair)) for pair in every) / len(every) / 4
    assert expert_share(8, 2, 1, 2) == pytest.approx(mean, abs=0.05)


@pytest.fixture(scope="module")
def work() -> Work:
    config = tiny_config("llama")
    return work_of(assembly_of(config), config, 4)


def test_the_time_of_a_step_is_the_sum_of_its_parts(work: Work) -> None:
    network = Layout(SOCKET, 1, 4, 2, NETWORK, NETWORK)
    read = max(
        rank.dense_bytes + CONTEXT * rank.share.kv_bytes_per_token + 2 * rank.share.state_bytes_per_sequence
        for rank in work.ranks
    )
    share = work.ranks[0].share
    # Of three others, two are on the other machine; two ranks share the network.
    received = max(one.share.received_bytes_per_token + one.share.received_bytes_per_logits for one in work.ranks)
    exchange = share.exchanges * (20e-6 + 2 * 3e-6) + received * 2 * 2 / 3 / 3.125e9
    assert network.compute_s(work, 1, 1) == pytest.approx(read / (0.8 * 460.8e9))
    assert network.exchange_s(work, 1, 1) == pytest.approx(exchange)
    assert network.latency_s(work, 1, 1) == pytest.approx(read / (0.8 * 460.8e9) + exchange)
    assert network.tokens_per_s(work, 1) == pytest.approx(1 / network.latency_s(work, 1, 1))
    ops = max(rank.ops_of_token + PROMPT // 2 * rank.ops_of_position for rank in work.ranks)
    assert network.compute_s(work, 10**6 * PROMPT, 10**6) == pytest.approx(10**6 * PROMPT * ops / SOCKET.ops_rate)


def test_a_pipeline_has_the_latency_of_all_stages_and_the_rate_of_one(work: Work) -> None:
    one, stages = Layout(SOCKET, 1, 4, 1, SHARED, NETWORK), Layout(SOCKET, 8, 4, 1, SHARED, NETWORK)
    hop = 20e-6 + 5 * work.hidden_bytes / 3.125e9
    assert stages.hop_s(work, 5) == pytest.approx(hop) and one.hop_s(work, 5) == 0
    assert stages.latency_s(work, 5, 5) == pytest.approx(one.latency_s(work, 5, 5) + 8 * hop)
    large = Layout(SOCKET, 8, 4, 1, SHARED, NVLINK)  # 8 micro-batches of 4 sequences; hops are no limit
    stage = max(one.latency_s(work, 4, 4) / 8, large.hop_s(work, 4))
    assert large.tokens_per_s(work, SEQUENCES) == pytest.approx(4 / stage)
    assert stages.tokens_per_s(work, 1) == pytest.approx(1 / stages.latency_s(work, 1, 1))


def test_the_table_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("qwen3_moe")))
    monkeypatch.setattr(
        sys, "argv", ["predicted_ranks.py", "--config", str(path), "--machines", "1", "2", "--quant", "fp8"]
    )
    main()
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head == "Predicted, not measured, for fp8:"
    rows = [re.split(r" *\| *", line)[1:-1] for line in lines]
    assert len({len(row) for row in rows}) == 1 and len(rows) == 2 + 2 * 3 + 2
    assert [row[2] for row in rows[5:]] == [
        "tensor 4", "pipeline 2 × tensor 2", "pipeline 4 × tensor 1", "tensor 8", "pipeline 8 × tensor 1",
    ]  # fmt: skip
    assert all(float(row[4]) > 0 and float(row[5]) > 0 for row in rows[2:])


def test_the_docs_have_what_the_script_gives() -> None:
    docs = DOCS.read_text()
    for row in rows_of("Llama-3.3-70B", LLAMA_70B, "int4-rtn", [2]):
        assert row in docs
    assert all(f"| {name} | 8 × H200 | tensor 8 |" in docs for name in models_of_docs())
    assert (f"{SOCKET.read_rate / 1e9:.0f} GB/s" in docs) and (f"{H200.read_rate / 1e12:.2f} TB/s" in docs)


@pytest.mark.parametrize(
    ("name", "billions"), [("Llama-3.3-70B", 70.6), ("Qwen3.5-397B-A17B", 396), ("DeepSeek-V3", 671)]
)
def test_configs_have_as_many_weights_as_their_models(name: str, billions: float) -> None:
    """The model cards' numbers, without heads that predict several tokens and without what reads pictures."""
    shapes = [info.shape for info in ShapesOnly.of(name, models_of_docs()[name]).tensors.values()]
    assert sum(map(prod, shapes)) == pytest.approx(billions * 1e9, rel=0.005)
