"""Engines for several GPUs that compute one model together: their plans, and answers that have the bits of one."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from enginewright.builder import assembly, build, rebuild
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.cuda import compile_each
from enginewright.builder.cuda.sections import to_compile
from enginewright.builder.draft import FirstLayers
from enginewright.builder.progress import Silent
from enginewright.cli import main
from enginewright.code import CompiledKernel, write_code
from enginewright.errors import UsageError
from enginewright.plan import BufferOperand, KernelCall, PagedCache, Plan, WeightOperand
from enginewright.plugins import architectures
from enginewright.plugins.kernel import Specialization
from enginewright.plugins.target import Target
from enginewright.rank_plan import ALL_GATHER
from enginewright.runtime.commands.quality import QualityReport
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.device import devices
from enginewright.runtime.device.cuda import ranked
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.device.cuda.ranks import rank_weight_bytes
from enginewright.runtime.device.ranks.shares import shares_of
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.targets import PTX
from tests.cuda.test_engine import Deltas
from tests.emulator.device import EmulatedDevice
from tests.emulator.ranks import RanksOnDevices
from tests.helpers.engines import folder_of_engines
from tests.helpers.graphs import random_tokens
from tests.helpers.tiny import ALL_EXPERTS, MemoryCheckpoint, tiny_checkpoint
from tests.ranks.test_bits import CUT

LENGTHS = (1, 2, 33, 61)
LIMITS = RuntimeConfig(max_model_len=128, max_num_seqs=3, max_num_batched_tokens=70, max_logit_rows=70)


# One of each kind of exchange: of columns with zeros after them and without, of rows of experts, of latent vectors, and
# of what recurrences give; tests/long has the others.
SOME = ("norms of all heads", "experts", "latent attention", "states")
# A model whose sums have another order if a part decides about it: products with two splits of K, which many features
# would not have, and a norm of one head, which is that of a row.
SPLIT: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 576,
    "intermediate_size": 640,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 80,
}
FEW_MULTIPROCESSORS = 4
NO_CODE = {"code/sm_80": write_code({"none@1": (CompiledKernel("none"), b"none")})}


def checkpoint_of(name: str) -> MemoryCheckpoint:
    family, changes, _ = CUT.get(name, ("qwen3", SPLIT, 0) if name == "split" else (name, {}, 0))
    return MemoryCheckpoint.tiny(family, **{**ALL_EXPERTS.get(family, {}), **changes})


@cache
def built(
    name: str, size: int, method: str = "bf16", kv: str = "bf16", batch_invariant: bool = True
) -> tuple[Path, Mapping[str, Specialization]]:
    """An engine for `size` GPUs (without cubins: nothing here runs them), and their code."""
    kernels: dict[str, Specialization] = {}
    lower = assembly.lower

    def watched(model: Any, target: Target, *rest: Any) -> Any:
        lowered = lower(model, target, *rest)
        kernels.update(lowered.kernels)
        return lowered

    path = folder_of_engines() / f"{name}-{size}-{method}-{kv}-{batch_invariant}.engine"
    config = BuildConfig(
        quant=quant_config(method),
        kv_cache_dtype=kv,
        targets=("cuda:sm_80",),
        batch_invariant=batch_invariant,
        tensor_parallel_size=size,
        gate=None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "lower", watched)
        patch.setattr(build, "code_sections", lambda kernels, targets: NO_CODE)
        build_engine(checkpoint_of(name), config, path)
    return path, kernels


def check(name: str, size: int, *, lengths: Sequence[int] = LENGTHS, **built_as: Any) -> None:
    """Checks that the logits of `size` GPUs have the bits of one, and that none reads all weights."""
    path, kernels = built(name, size, **built_as)
    random = np.random.default_rng(1)
    with Engine.open(path, "cuda") as engine:
        texts = [random.integers(0, engine.plan.vocab_size, length).tolist() for length in lengths]
        expected = score(CudaExecutor(engine, EmulatedDevice(kernels), LIMITS), texts)
        ranks = RanksOnDevices(engine, kernels, LIMITS, size)
        for length, one, several in zip(lengths, expected, score(ranks, texts), strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_array_equal(one, several, err_msg=f"{length} tokens")
        shares = [rank_weight_bytes(engine.for_rank(rank, size)) / engine.weight_bytes for rank in range(size)]
    assert ranks.group.done > 0 and ranks.group.moved_bytes > 0
    if name in CUT and size == 2 and "method" not in built_as:
        assert max(shares) <= CUT[name][2] + 0.02  # experts are cut by blocks of 16 rows, of which tiny ones have few


@pytest.mark.parametrize("name", SOME)
def test_ranks_compute_the_bits_of_one(name: str) -> None:
    check(name, 2)


def test_parts_are_computed_as_the_whole_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a norm of one head by the kernel for several, though its result seldom differs where it is rounded."""
    few = replace(architectures.ARCHITECTURES["sm_80"], multiprocessors=FEW_MULTIPROCESSORS)
    monkeypatch.setitem(architectures.ARCHITECTURES, "sm_80", few)
    check("split", 2, lengths=(5, 70))
    with Engine.open(built("split", 2)[0], "cuda") as engine:
        calls = [call for rank in range(2) for call in engine.for_rank(rank, 2).plan.calls]
    of_heads = [call for call in calls if call.kernel == "rms_norm@1" and _width(call, "out") < SPLIT["hidden_size"]]
    assert SPLIT["head_dim"] in {_width(call, "out") for call in of_heads}
    assert all(launch.kernel.startswith("rms_norm_runs-") for call in of_heads for launch in call.launches)


def _width(call: KernelCall, role: str) -> int:
    operand = call.operands[role]
    assert isinstance(operand, BufferOperand)
    return operand.columns


def told(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    executor_of: Callable[[Engine, RuntimeConfig], CudaExecutor],
    plan_of: Callable[[Engine], Engine],
    blocks: int,
) -> tuple[list[list[SampledToken]], int]:
    """Outputs of greedy and sampled requests with `blocks` blocks in the KV cache, and the number of preemptions."""
    monkeypatch.setattr(core, "open_executor", executor_of)
    asked = [
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(seed=1, max_tokens=8, frequency_penalty=1.0),
        SamplingParams(seed=2, max_tokens=8, top_p=0.9),
    ]
    with Engine.open(path, "cuda") as engine:
        group = plan_of(engine).plan.caches[0]
        assert isinstance(group, PagedCache)
        running = core.EngineCore(engine, replace(LIMITS, max_model_len=96, kv_cache_memory=blocks * group.block_bytes))
        readers = [Deltas() for _ in asked]
        for length, params, reader in zip((27, 30, 29), asked, readers, strict=True):
            prompt = random_tokens(length, seed=length).tolist()
            running.add(running.request(prompt, replace(params, logprobs=2, ignore_eos=True), reader.put))
        while running.has_work:
            for request, delta in running.step():
                request.sink(delta)
        return [
            [one for delta in reader.whole for one in delta.tokens] for reader in readers
        ], running.stats().num_preemptions


def test_answers_of_two_gpus_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding replays graphs on both, and a sequence is preempted on both at once, and computed again."""
    path, kernels = built("norms of all heads", 2)
    devices: list[EmulatedDevice] = []

    def two(engine: Engine, config: RuntimeConfig) -> CudaExecutor:
        ranks = RanksOnDevices(engine, kernels, config, 2)
        ranks.warm_up()
        devices.extend(ranks.group.devices)
        return ranks

    def one(engine: Engine, config: RuntimeConfig) -> CudaExecutor:
        return CudaExecutor(engine, EmulatedDevice(kernels), config)

    alone, none = told(monkeypatch, path, one, lambda engine: engine, 20)
    assert none == 0 and [len(tokens) for tokens in alone] == [8, 8, 8]
    together, some = told(monkeypatch, path, two, lambda engine: engine.for_rank(0, 2), 5)
    assert together == alone and some > 0
    assert all(device.replays > 3 for device in devices) and len(devices) == 2


def test_plans_of_ranks() -> None:
    """Each has launches for all it does, its own part of the cache, and the exchanges of the others, in their order."""
    path, _ = built("experts", 2)
    with Engine.open(path, "cuda") as engine:
        assert engine.rank_sizes == (2,)
        plans = [engine.for_rank(rank, 2).plan for rank in range(2)]
        heads = [plan.paged_caches[0].planes[0].heads for plan in plans]
        assert heads == [1, 2] and engine.plan.paged_caches[0].planes[0].heads == 3
        exchanges = [
            [(call.operands["x"], call.attributes) for call in plan.calls if call.kernel == ALL_GATHER]
            for plan in plans
        ]
        assert exchanges[0] == exchanges[1] and exchanges[0]
        assert all(call.launches for plan in plans for call in plan.calls)
        assert not any(call.kernel == ALL_GATHER for call in engine.plan.calls)


def test_ranks_that_an_engine_was_not_built_for() -> None:
    path, _ = built("experts", 2)
    with Engine.open(path, "cuda") as engine, pytest.raises(UsageError) as caught:
        engine.for_rank(0, 4)
    assert str(caught.value).splitlines() == [
        f"{path} cannot be divided among 4 GPUs: it was built for 1 or 2: kernels for GPUs are compiled for the part "
        "of each",
        "Build it again with --tensor-parallel-size 4, or leave the option out.",
    ]


def compile_plans(name: str, targets: Sequence[str], *, batch_invariant: bool = True) -> int:
    """Compiles the kernels that only plans of ranks have. Returns their number."""
    config = BuildConfig(
        targets=tuple(f"cuda:{sm}" for sm in targets),
        batch_invariant=batch_invariant,
        tensor_parallel_size=2,
        gate=None,
    )
    made = assembly.assemble(checkpoint_of(name), config, Silent())
    whole = {launch.kernel for launch in made.plans["cuda"].launches()}
    wanted = [
        (sm, to_compile(kernel))
        for kernel_name, kernel in made.kernels.items()
        for sm in kernel.architectures or targets
        if kernel_name not in whole
    ]
    compiled = compile_each(wanted)
    assert compiled.keys() == set(wanted) and all(one.cubin for one in compiled.values())
    assert not any(one.local_bytes for (_, kernel), one in compiled.items() if kernel.source == "exchange.cuh")
    return len(compiled)


def test_kernels_of_ranks_are_compiled() -> None:
    """tests/long has all blocks and architectures."""
    assert compile_plans("one KV head", (PTX,)) > 30


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"tensor_parallel_size": 4}, "cannot be divided among 4 GPUs"),
        ({"enable_lora": True}, "--tensor-parallel-size on GPUs does not work with adapters"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is for CPUs"),
        ({"nnodes": 2, "master_addr": "127.0.0.1", "secret_file": "SECRET"}, "--nnodes is for CPUs"),
        ({}, "--tensor-parallel-size 2 needs GPUs 1 to 2: this process sees 1\n"),
    ],
)
def test_what_several_gpus_cannot_do(limits: Mapping[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is started."""
    monkeypatch.setattr(ranked, "num_gpus", lambda: 1)
    config = RuntimeConfig(**{"device": "cuda:1", "tensor_parallel_size": 2, **limits})
    with Engine.open(built("experts", 2)[0], "cuda") as engine, pytest.raises(UsageError) as caught:
        devices.open_executor(engine, config)
    assert why in str(caught.value)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_inspect_says_for_how_many_gpus_an_engine_is() -> None:
    path, _ = built("experts", 2)
    assert "  GPUs       1 or 2, by --tensor-parallel-size\n" in run("inspect", path)
    summary = json.loads(run("inspect", path, "--json", "-tp", 2))
    assert summary["gpus"] == [1, 2] and summary["recipe"]["tensor_parallel_size"] == 2
    kept = [share["kv_bytes_per_token"] for share in summary["ranks"]]
    with Engine.open(path, "cuda") as engine:
        assert kept == [engine.plan.kv_bytes_per_token() * heads // 3 for heads in (1, 2)]
        assert all(share["weight_bytes"] < 0.7 * engine.weight_bytes for share in summary["ranks"])
    assert all(share["received_bytes_per_token"] > 0 for share in summary["ranks"])
    refused = CliRunner().invoke(main, ["inspect", str(path), "-tp", "3"])
    assert refused.exit_code == 2 and "it was built for 1 or 2" in refused.stderr


def test_build_and_its_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, path = tiny_checkpoint(tmp_path, "llama"), tmp_path / "two.engine"
    wanted = ("build", checkpoint, "--target", "cuda:sm_80", "-tp", 2, "--gate", "off", "--output", path)
    forecast = json.loads(run(*wanted, "--dry-run", "--json"))
    assert len(forecast["ranks"]) == 2 and forecast["recipe"]["tensor_parallel_size"] == 2
    monkeypatch.setattr(build, "code_sections", lambda kernels, targets: NO_CODE)
    run(*wanted)
    with Engine.open(path, "cuda") as engine:
        assert engine.rank_sizes == (2,)
        shares = shares_of([engine.for_rank(rank, 2).plan for rank in range(2)], lambda name: engine.weight(name)[1])
    assert [asdict(share) for share in shares] == forecast["ranks"]
    refused = CliRunner().invoke(main, ["build", str(checkpoint), "-tp", "2", "--output", str(tmp_path / "x.engine")])
    assert refused.exit_code == 2 and "on CPUs an engine is cut when it is loaded" in refused.stderr


def test_a_draft_of_whole_layers_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has parts of the layers, and for the draft the same layers once more."""
    monkeypatch.setattr(build, "code_sections", lambda kernels, targets: NO_CODE)
    config = BuildConfig(targets=("cuda:sm_80",), batch_invariant=True, tensor_parallel_size=2, gate=None)
    build_engine(checkpoint_of("experts"), config, tmp_path / "skip.engine", draft=FirstLayers(1))
    with Engine.open(tmp_path / "skip.engine", "cuda") as engine, Engine.open(built("experts", 2)[0], "cuda") as alone:
        own, draft = rank_weight_bytes(alone.for_rank(0, 2)), engine.for_role("skip")
        cut = {one.name for one in _weights(engine.for_rank(0, 2).plan) if one.rows or one.matrices}
        more = sum(engine.weight(name)[1].nbytes for name in cut & set(draft.plan.weight_names()))
        assert rank_weight_bytes(engine.for_rank(0, 2)) == own + more > own


def _weights(plan: Plan) -> list[WeightOperand]:
    operands = (operand for call in plan.calls for operand in call.operands.values())
    return [operand for operand in operands if isinstance(operand, WeightOperand)]


def test_an_engine_of_ranks_is_built_again_from_its_recipe() -> None:
    with Engine.open(built("experts", 2)[0], "cuda") as engine:
        config = rebuild._config(Path("x"), engine.manifest, QualityReport("off"), checkpoint_of("experts"))
    assert config.tensor_parallel_size == 2
