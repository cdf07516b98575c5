"""One file for CPUs and GPUs, built without a GPU: what is in it, that it is the same twice, and who refuses it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from enginewright.builder import build
from enginewright.builder.assembly import Assembly, assemble
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.cuda.sections import code_sections
from enginewright.builder.progress import Silent
from enginewright.cli import main
from enginewright.code import read_code
from enginewright.engine_file import EngineFile
from enginewright.errors import NoCodeForMachineError
from enginewright.plan import Plan, StepSizes, step_sizes
from enginewright.plugins.architectures import ARCHITECTURES
from enginewright.plugins.kernel import Specialization
from enginewright.plugins.recurrence.recurrence_triton import PREPARE_WARPS, SCAN_WARPS
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cuda.device import num_gpus
from enginewright.runtime.device.devices import open_engine, open_executor
from enginewright.runtime.engine import Engine
from tests.helpers.tiny import MemoryCheckpoint

TARGETS = ("cpu", "cuda:sm_80", "cuda:sm_90a")


# What makes the tiny llama a model of few shapes, and so of few kernels.
FEW_SHAPES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": None,
    "head_dim": 8,
}


def small() -> MemoryCheckpoint:
    return MemoryCheckpoint.tiny("llama", **FEW_SHAPES)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "all.engine"
    build_engine(small(), BuildConfig(quant=quant_config("bf16"), targets=TARGETS, gate=None), path)
    return path


def some(kernels: Mapping[str, Specialization]) -> dict[str, Specialization]:
    return dict(list(kernels.items())[3::10])


def test_the_same_file_from_an_empty_cache(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth kernel is compiled again, and gives the same bytes."""
    monkeypatch.setattr(build, "code_sections", lambda kernels, targets: code_sections(some(kernels), targets))
    config = BuildConfig(quant=quant_config("bf16"), targets=TARGETS[:2], gate=None)  # `engine` has compiled them
    build_engine(small(), config, tmp_path / "one.engine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    build_engine(small(), config, tmp_path / "again.engine")
    assert any((tmp_path / "empty").rglob("*"))
    assert (tmp_path / "again.engine").read_bytes() == (tmp_path / "one.engine").read_bytes()


def test_it_has_each_weight_once_and_code_for_each_architecture(engine: Path) -> None:
    with EngineFile.open(engine) as file, Engine(file, "cpu") as on_cpu:
        on_gpu = Engine(file, "cuda")
        assert set(on_cpu.plan.weight_names()) == set(on_gpu.plan.weight_names())
        called = {launch.kernel for step in on_gpu.plan.calls for launch in step.launches}
        assert on_gpu.plan.sampling is not None and on_gpu.plan.adapting is not None
        adapting = {launch.kernel for launch in on_gpu.plan.adapting.launches()}
        assert {name.partition("-")[0] for name in adapting} == {"adapter_shrink", "adapter_expand"}
        for capability in ((8, 0), (8, 9), (9, 0)):
            archive = on_gpu.code(capability)
            assert set(archive.launches) == called | {on_gpu.plan.sampling.kernel} | adapting
            assert all(bytes(archive.cubin(name)[:4]) == b"\x7fELF" for name in called)
        with pytest.raises(NoCodeForMachineError, match=r"(?s)10\.0.*sm_80, sm_90a.*cuda:sm_100a"):
            on_gpu.code((10, 0))


def test_inspect_says_what_code_there_is(engine: Path) -> None:
    shown = CliRunner().invoke(main, ["inspect", str(engine), "--json"])
    assert shown.exit_code == 0, shown.output
    code = json.loads(shown.stdout)["code"]
    assert list(code) == ["sm_80", "sm_90a"] and all(one["kernels"] > 20 for one in code.values())


@pytest.mark.skipif(num_gpus() > 0, reason="there is a GPU")
def test_without_a_gpu_it_runs_on_the_cpu_and_nowhere_else(engine: Path) -> None:
    with open_engine(engine) as opened:
        assert opened.target == "cpu"
    refused = CliRunner().invoke(main, ["generate", str(engine), "--prompt", "a", "--device", "cuda"])
    assert refused.exit_code == NoCodeForMachineError.exit_code
    assert "there is no GPU 0 here" in refused.output and "--device cpu" in refused.output
    with open_engine(engine, "cuda") as opened, pytest.raises(NoCodeForMachineError, match="there is no GPU 1 here"):
        open_executor(opened, RuntimeConfig(device="cuda:1"))
    unknown = CliRunner().invoke(main, ["generate", str(engine), "--prompt", "a", "--device", "tpu"])
    assert unknown.exit_code == 2 and "'tpu' is no device" in unknown.output


def test_wgmma_where_it_is_switched_on_is_for_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = ("cuda:sm_80", "cuda:sm_90a", "cuda:ptx")
    checkpoint = MemoryCheckpoint.tiny("llama", head_dim=64)

    def assembled(**options: Any) -> Assembly:
        return assemble(checkpoint, BuildConfig(targets=targets, **options), Silent())

    before = assembled().plans["cuda"]
    assert not any("wgmma" in launch.kernel for launch in before.launches())  # no engine has it until then
    switched_on = replace(ARCHITECTURES["sm_90a"], wgmma_gemm=True, wgmma_prefill=True)
    monkeypatch.setitem(ARCHITECTURES, "sm_90a", switched_on)
    assembly = assembled()
    plan = Plan.from_json(assembly.plans["cuda"].to_json())
    for architecture, large, prefill in (
        ("sm_80", "gemm_large", "paged_prefill"),
        ("ptx", "gemm_large", "paged_prefill"),
        ("sm_90a", "gemm_wgmma", "paged_prefill_wgmma"),
    ):
        for step in plan.for_architecture(architecture).calls:
            if step.kernel.startswith("paged_attention"):
                assert [one.kernel.partition("-")[0] for one in step.launches] == [prefill, "paged_decode"]
            if not step.kernel.startswith("gemm"):
                continue
            for tokens, expected in ((1, "gemm_small"), (64, "gemm_small"), (65, large), (5000, large)):
                sizes = step_sizes(tokens=tokens, sequences=tokens, logit_rows=tokens)
                (one,) = (launch for launch in step.launches if launch.runs(sizes))
                assert one.kernel.startswith(expected)
    names = [
        next(name for name in assembly.kernels if name.startswith(start)) for start in ("gemm_l", "gemm_w", "embed")
    ]
    sections = code_sections({name: assembly.kernels[name] for name in names}, targets[:2])
    held = {section: set(read_code(memoryview(data), section).launches) for section, data in sections.items()}
    assert held == {"code/sm_80": {names[0], names[2]}, "code/sm_90a": {names[1], names[2]}}
    assert not any("wgmma" in name for name in assembled(batch_invariant=True).kernels)
    assert not any("prefill_wgmma" in name for name in assembled(kv_cache_dtype="int8").kernels)


def test_recurrences_go_in_chunks_unless_they_shall_be_batch_invariant() -> None:
    targets = ("cuda:sm_80", "cuda:sm_90a")

    def assembled(family: str, **options: Any) -> Assembly:
        return assemble(MemoryCheckpoint.tiny(family), BuildConfig(targets=targets, **options), Silent())

    def functions(assembly: Assembly, sizes: StepSizes) -> set[tuple[str, ...]]:
        plan = Plan.from_json(assembly.plans["cuda"].to_json())
        calls = [call for call in plan.calls if call.kernel.startswith(("selective_state", "gated_delta"))]
        return {tuple(one.kernel.partition("-")[0] for one in call.launches if one.runs(sizes)) for call in calls}

    prompts, decodes = (step_sizes(tokens=tokens, sequences=2, logit_rows=2) for tokens in (3, 2))
    alone, in_chunks = {("linear_recurrence",)}, {("linear_recurrence", "prepare_chunks", "scan_chunks")}
    assembly = assembled("nemotron_h")
    for chunked in (assembly, assembled("qwen3_next")):
        assert functions(chunked, prompts) == in_chunks and functions(chunked, decodes) == alone
    assert functions(assembled("nemotron_h", batch_invariant=True), prompts) == alone
    assert functions(assembled("kimi_linear"), prompts) == alone  # each row of a state has a decay of its own
    some = {name: kernel for name, kernel in assembly.kernels.items() if "linear_rec" in name or kernel.triton}
    archives = {
        name: read_code(memoryview(data), name).launches for name, data in code_sections(some, targets[1:]).items()
    }
    warps = {name: sorted(one.num_warps for one in launches.values()) for name, launches in archives.items()}
    assert warps == {"code/sm_90a": [0, SCAN_WARPS, PREPARE_WARPS]}
    assert not any(one.scratch_bytes for launches in archives.values() for one in launches.values())


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_each_architecture_has_the_kernels_of_its_launches(batch_invariant: bool) -> None:
    names = ("sm_80", "sm_90a", "sm_120")
    config = BuildConfig(targets=tuple(f"cuda:{name}" for name in names), batch_invariant=batch_invariant)
    assembly = assemble(MemoryCheckpoint.tiny("llama"), config, Silent())
    whole = assembly.plans["cuda"]
    assert any(launch.architectures for launch in whole.launches())  # tiles grow at another number of tokens
    for name in names:
        plan = whole.for_architecture(name)
        for launch in plan.launches():
            assert name in (assembly.kernels[launch.kernel].architectures or names)
        for call in plan.calls:
            for tokens in (1, 8, 64, 65, 1000, 5000, 20000) if call.kernel.startswith("gemm") else ():
                sizes = step_sizes(tokens=tokens, sequences=tokens, logit_rows=tokens)
                assert sum(launch.runs(sizes) for launch in call.launches) == 1
