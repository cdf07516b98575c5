"""Adapters on several ranks: the bits of one process, and what loads and unloads them between steps."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from enginewright.adapter_file import AdapterFile
from enginewright.adapter_plan import GROUP_KERNEL, HEAD_KERNEL, KERNEL, TABLE_KERNEL, with_adapters
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.plan import Plan
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.ranks.member import weight_sizes
from enginewright.runtime.engine import Engine
from enginewright.runtime.scheduler.adapters import AdapterSlots
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.stage_plan import plan_of_stage
from tests.helpers.adapters import prepared, trained, trained_experts
from tests.helpers.ranks import RanksInThreads, RanksOverSockets
from tests.helpers.tiny import MemoryCheckpoint, saved, tiny_config, tiny_model
from tests.ranks.test_bits import CUT, HEADS, WIDE

LENGTHS = (1, 2, 33, 61, 110, 9)
LINEARS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
TOKENS = [(number * 31 + 36) % 200 + 5 for number in range(40)]
HEAD = ["lm_head", "embed_tokens"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TIED = {**WIDE, **HEADS, "vocab_size": 501, "tie_word_embeddings": True}
LATENT = ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DENSE: Sequence[Mapping[str, Any]] = (
    {"target_modules": LINEARS, "r": 3},
    {"target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"], "r": 33},
    {"target_modules": LINEARS, "use_dora": True, "rank_pattern": {"v_proj": 19}},
)
# Name → family, what differs from its tiny model, method of its weights, and the adapters.
CASES: Mapping[str, tuple[str, Mapping[str, Any], str, Sequence[Mapping[str, Any]]]] = {
    "dense": ("llama", CUT["llama"][1], "bf16", DENSE),
    "codes of activations": ("llama", CUT["llama"][1], "int8-sq", DENSE),
    "groups of 4 bits": ("llama", CUT["llama"][1], "int4-rtn", DENSE),
    "one KV head": ("llama", CUT["one KV head"][1], "int8-wo", DENSE),
    "tied head": (
        "llama",
        TIED,
        "bf16",
        [
            {"target_modules": HEAD, "r": 5},
            {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS},
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            {"target_modules": ["lm_head"], "r": 17},
        ],
    ),
    "untied head of codes": (
        "llama",
        {**TIED, "tie_word_embeddings": False},
        "int8-wo",
        [
            {"target_modules": HEAD, "r": 5},
            {"target_modules": ["o_proj"], "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS[:9]}},
            {"target_modules": ["q_proj"], "modules_to_save": HEAD},
        ],
    ),
    "biases": (
        "qwen2",
        {**WIDE, **HEADS},
        "bf16",
        [{"target_modules": LINEARS, "bias": "lora_only"}, {"target_modules": ["k_proj"], "use_dora": True}],
    ),
    "fused layers": (
        "phi3",
        {},
        "fp8",
        [{"target_modules": ["qkv_proj", "gate_up_proj"]}, {"target_modules": ["o_proj"]}],
    ),
    "experts": (
        "qwen3_moe",
        CUT["experts"][1],
        "bf16",
        [
            {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
            {"target_modules": ["v_proj", "o_proj"], "target_parameters": EXPERTS[1:]},
        ],
    ),
    "experts of codes": (
        "qwen3_moe",
        CUT["experts"][1],
        "w8a8",
        [{"target_modules": ["q_proj"], "target_parameters": EXPERTS}],
    ),
    "shared experts": (
        "glm4_moe",
        {},
        "bf16",
        [{"target_modules": ["shared_experts.gate_proj", "shared_experts.down_proj"], "target_parameters": EXPERTS}],
    ),
    "latent attention": (
        "deepseek_v3",
        CUT["latent attention"][1],
        "bf16",
        [{"target_modules": LATENT}, {"target_modules": ["kv_b_proj"], "r": 19}, {"target_modules": ["o_proj"]}],
    ),
    "gated delta": (
        "qwen3_next",
        CUT["gated delta"][1],
        "bf16",
        [
            {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]},
            {"target_modules": ["in_proj_qkvz"], "use_dora": True},
        ],
    ),
    "states": (
        "granitemoehybrid",
        CUT["states"][1],
        "int8-wo",
        [{"target_modules": ["in_proj", "out_proj", "q_proj"]}, {"target_modules": ["o_proj"], "use_dora": True}],
    ),
}


def adapted(folder: Path, name: str) -> tuple[Path, list[Path]]:
    """The engine of a case, and its adapters."""
    family, changes, method, choices = CASES[name]
    config = tiny_config(family, **changes)
    model, engine = tiny_model(config), folder / "tiny.engine"
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(quant=quant_config(method), gate=None), engine)
    files = []
    for number, choice in enumerate(choices):
        trained(model, folder / str(number), seed=number, **choice)
        files.append(prepared(engine, folder / str(number)))
    return engine, files


def logits_of(
    executor: CpuExecutor, texts: Sequence[Sequence[int]], adapters: Sequence[AdapterFile | None], num_slots: int
) -> list[NDArray[np.float32]]:
    """All logits of texts, each with an adapter or without one, which are computed together."""
    sequences = [
        TokenSequence(
            list(text), num_prompt_tokens=len(text), max_tokens=len(text), scores_prompt=True, adapter=adapter
        )
        for text, adapter in zip(texts, adapters, strict=True)
    ]
    scheduler = Scheduler(
        executor.plan.caches,
        executor.memory_plan.limits,
        executor.memory_plan.num_blocks,
        adapters=AdapterSlots(num_slots, executor.load_adapter, executor.unload_adapter),
    )
    for sequence in sequences:
        scheduler.add(sequence)
    rows: dict[int, list[NDArray[np.float32]]] = {id(sequence): [] for sequence in sequences}
    while (plan := scheduler.schedule()) is not None:
        logits, row = np.asarray(executor.run(plan.inputs).logits), 0
        for part in plan.scheduled:
            rows[id(part.sequence)].append(logits[row : row + part.num_logit_rows].copy())
            row += part.num_logit_rows
        scheduler.commit(plan, [])
    return [np.concatenate(rows[id(sequence)]) for sequence in sequences]


def check(
    engine_path: Path,
    files: Sequence[Path],
    *sizes: int,
    num_slots: int = 4,
    threads: int = 1,
    stages: int = 1,
    ranks_of: type[RanksInThreads] = RanksInThreads,
) -> None:
    """Checks that ranks compute the bits of one process, with adapters and without, which differ.

    Args:
        engine_path: the engine.
        files: its adapters.
        sizes: numbers of ranks of a stage.
        num_slots: number of slots.
        threads: threads of each rank.
        stages: number of stages.
        ranks_of: opens the ranks.
    """
    limits: dict[str, Any] = {
        "threads": threads,
        "max_num_batched_tokens": 70,
        "max_num_seqs": 5,
        "max_model_len": 320,
        "enable_lora": True,
        "max_loras": num_slots,
    }
    random = np.random.default_rng(1)
    with ExitStack() as opened:
        engine = opened.enter_context(Engine.open(engine_path))
        adapters = [None, *(opened.enter_context(AdapterFile.open(file)) for file in files)]
        texts, owners = list[list[int]](), list[AdapterFile | None]()
        for index, length in enumerate(LENGTHS):
            text = random.integers(5, 200, length).tolist()
            for adapter in (adapters[index % len(adapters)], adapters[(index + 1) % len(adapters)]):
                texts.append(text)
                owners.append(adapter)
        expected = logits_of(CpuExecutor(engine, RuntimeConfig(**limits)), texts, owners, num_slots)
        for one, other in zip(expected[::2], expected[1::2], strict=True):
            assert not np.array_equal(one, other), "each adapter changes logits"
        for size in sizes:
            ranks = ranks_of(engine, RuntimeConfig(**limits, tensor_parallel_size=size, pipeline_parallel_size=stages))
            for _ in range(2):
                found = logits_of(ranks, texts, owners, num_slots)
                for number, (one, several) in enumerate(zip(expected, found, strict=True)):
                    assert one.tobytes() == several.tobytes(), f"text {number}, {size} ranks"
            ranks.close()


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_the_bits_of_one(name: str, tmp_path: Path) -> None:
    check(*adapted(tmp_path, name), 2, 3)


@pytest.mark.parametrize("name", CASES)
def test_stages_compute_the_bits_of_one(name: str, tmp_path: Path) -> None:
    case = adapted(tmp_path, name)
    check(*case, 1, 2, stages=2)
    check(*case, 1, stages=5)


@pytest.mark.parametrize("name", ["tied head", "experts", "latent attention"])
def test_no_stage_ends_between_a_product_and_what_adapters_add(name: str, tmp_path: Path) -> None:
    """Wherever a plan is cut: a stage has all calls for the adapters of its own layers, in their order."""
    family, changes, method, _ = CASES[name]
    checkpoint, path = MemoryCheckpoint.tiny(family, **changes), tmp_path / "tiny.engine"
    build_engine(checkpoint, BuildConfig(quant=quant_config(method), gate=None), path)
    with Engine.open(path) as engine:
        plan = with_adapters(engine.plan, engine.adapter_sites.sites, 16, 4)
        found = False
        for stages in (2, 3, 5, 8, 13, 21):
            for stage in range(stages):
                found |= check_calls(plan_of_stage(plan, stage, stages, weight_sizes(engine).nbytes))
        assert found == (name != "tied head")


def check_calls(plan: Plan) -> bool:
    """Checks that calls for adapters are next to what they change. Returns True if rows of experts are grouped."""
    grouped = None
    for before, call in pairwise([None, *plan.calls]):
        if "delta" in call.operands and call.kernel.startswith(("gemm_", "head_gemm_")):
            assert before is not None and before.kernel in (KERNEL, HEAD_KERNEL), call.kernel
            assert before.operands["delta"] == call.operands["delta"]
            assert "starts" not in call.operands or grouped == call.operands["starts"]
        if call.kernel == TABLE_KERNEL:
            assert before is not None and before.operands["out"] == call.operands["out"]
        if call.kernel == GROUP_KERNEL:
            grouped = call.operands["starts"]
    return grouped is not None


def test_more_ranks_than_heads_and_fewer_slots_than_adapters(tmp_path: Path) -> None:
    check(*adapted(tmp_path, "tied head"), 5, num_slots=2)


@pytest.mark.parametrize("name", ["experts", "latent attention"])
def test_more_ranks_than_experts_or_heads(name: str, tmp_path: Path) -> None:
    check(*adapted(tmp_path, name), 8)


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_sockets_and_threads(name: str, tmp_path: Path) -> None:
    check(*adapted(tmp_path, name), 2, threads=2, ranks_of=RanksOverSockets)


def test_a_rank_whose_experts_are_not_changed(tmp_path: Path) -> None:
    """The adapter has layers of single experts, and none of expert 0, which is all that rank 0 of 5 has."""
    model = tiny_model(tiny_config("qwen3_moe", **CUT["experts"][1]))
    saved(copy.deepcopy(model).to(torch.bfloat16), tmp_path / "base")
    engine = tmp_path / "tiny.engine"
    build_engine(open_checkpoint(str(tmp_path / "base")), BuildConfig(gate=None), engine)
    trained_experts(model, tmp_path / "adapter")
    check(engine, [prepared(engine, tmp_path / "adapter")], 2, 5)
