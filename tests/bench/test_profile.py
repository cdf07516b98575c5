"""`engine bench profile`: kernels add up to the step, and what they say of their work is true; no time is asserted."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright import _cpu
from enginewright.manifest import WEIGHTS
from enginewright.plan import WeightOperand
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright_bench import profile, roofline
from enginewright_bench.profile import (
    KernelProfile,
    Point,
    ProfileConfig,
    profile_config,
    run_profile,
    step_plan,
)
from enginewright_bench.report import describe_profile
from enginewright_bench.roofline import read_buffer
from tests.helpers.command import run_engine
from tests.helpers.engines import built
from tests.helpers.scheduler_watch import sequence_of
from tests.helpers.tiny import tiny_checkpoint

FEW = ProfileConfig(prefill=(33,), batch=(1, 3), depth=(0, 70), rounds=2)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "SECONDS", 0.002)
    monkeypatch.setattr(profile, "ROUND_SECONDS", 0.002)
    monkeypatch.setattr(profile, "read_buffer", lambda: read_buffer(1 << 16))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Engines by family and quantization: a tied and an untied table, and windows."""
    folder = tmp_path_factory.mktemp("profile")
    return {
        "llama bf16": built(tiny_checkpoint(folder, "llama", tie_word_embeddings=False), "bf16"),
        "gemma int8-wo": built(tiny_checkpoint(folder, "gemma3_text"), "int8-wo", "int8"),
    }


NAMES = ("llama bf16", "gemma int8-wo")  # the second with KV in int8


def executor_of(engine: Engine, isa: str = "portable", **limits: Any) -> CpuExecutor:
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 33, "max_model_len": 120, "threads": 2} | limits
    return CpuExecutor(engine, RuntimeConfig(isa=isa, kv_cache_memory=4 << 20, **limits))


def work_of(executor: CpuExecutor, point: Point) -> Any:
    return executor.profile(step_plan(executor, point).inputs)[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_decode_touches_the_weights_of_the_file_once(engines: Mapping[str, Path], name: str) -> None:
    with Engine.open(engines[name]) as engine:
        executor = executor_of(engine)
        for batch in (1, 3):
            work = work_of(executor, Point(batch, 1, 40))
            touched, expected = {}, 0
            for step in engine.plan.calls:
                forms = {
                    role: engine.weight(operand.name)[1]
                    for role, operand in step.operands.items()
                    if isinstance(operand, WeightOperand)
                }
                if "table" in forms:  # a row a token: all lines of its block, and its scale
                    table = forms.pop("table")
                    assert table.shape is not None
                    expected += batch * table.nbytes // -(-table.shape[0] // 16)
                    expected += batch * 4 * (forms.pop("table_scale", None) is not None)
                touched |= {
                    operand.name: engine.weight(operand.name)[1].nbytes
                    for role, operand in step.operands.items()
                    if isinstance(operand, WeightOperand) and role in forms
                }
            assert int(work["weight_bytes"].sum()) == expected + sum(touched.values())
            tables = {name for name in engine.file.sections if "embed" in name} if "llama" in name else set()
            assert sum(touched.values()) == engine.weight_bytes - sum(engine.file.sections[t].nbytes for t in tables)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("isa", _cpu.isa_names())
def test_operations_of_gemms_are_those_of_the_product(engines: Mapping[str, Path], name: str, isa: str) -> None:
    with Engine.open(engines[name]) as engine:
        executor = executor_of(engine, isa)
        for point in (Point(1, 33, 0), Point(2, 1, 5)):
            work = work_of(executor, point)
            gemms = 0
            for step, did in zip(engine.plan.calls, work, strict=True):
                if not step.kernel.startswith("gemm"):
                    continue
                operand = step.operands["weight"]
                assert isinstance(operand, WeightOperand)
                shape = engine.weight(operand.name)[1].shape
                assert shape is not None
                chosen = gemms > 4 * 2  # after the last attention, only rows whose logits are wanted
                rows = point.sequences if chosen else point.sequences * point.tokens
                expected = {"int8_ops": 0, "bf16_ops": 0, "fp32_ops": 0, "kv_bytes": 0}
                by_fma = isa in ("avx512-vnni", "avx2-vnni", "avx2")
                expected["fp32_ops" if by_fma else "bf16_ops"] = 2 * rows * shape[0] * shape[1]
                assert {key: int(did[key]) for key in expected} == expected
                gemms += 1
            assert gemms == 4 * 3 + 1  # qkv, out, gate and up, down; the head


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("point", [Point(1, 33, 0), Point(3, 1, 69), Point(2, 5, 30), Point(1, 1, 0)], ids=str)
def test_attention_counts_what_queries_see(engines: Mapping[str, Path], name: str, point: Point) -> None:
    with Engine.open(engines[name]) as engine:
        work = work_of(executor_of(engine), point)
        written = 0
        for step, did in zip(engine.plan.calls, work, strict=True):
            attributes = step.attributes
            if step.kernel.startswith("rope_kv_write"):
                written += int(did["kv_bytes"])
            if not step.kernel.startswith("paged_attention"):
                continue
            heads, kv_heads, head_dim = (int(attributes[key]) for key in ("heads", "kv_heads", "head_dim"))
            end = point.depth + point.tokens
            query, key = np.arange(point.depth, end)[:, None], np.arange(end)[None]
            seen = (key <= query) & (key > query - (int(attributes["window"]) or end))
            int8, padded = name == "gemma int8-wo", -(-head_dim // 32) * 32
            ops = 4 * point.sequences * heads * head_dim * int(seen.sum())
            assert (int(did["int8_ops"]), int(did["bf16_ops"])) == ((ops, 0) if int8 else (0, ops))
            kv_row = 2 * kv_heads * (padded + 4 if int8 else padded * 2)
            assert int(did["kv_bytes"]) == point.sequences * int(seen.any(axis=0).sum()) * kv_row
            assert int(did["activation_bytes"]) == point.sequences * point.tokens * 2 * heads * head_dim * 2
            assert did["weight_bytes"] == 0
        assert written == point.sequences * point.tokens * engine.plan.kv_bytes_per_token()


def test_profiling_computes_what_a_run_computes(engines: Mapping[str, Path]) -> None:
    with Engine.open(engines["llama bf16"]) as engine:
        executor = executor_of(engine, _cpu.isa_names()[0])
        plan = step_plan(executor, Point(3, 7, 0))
        expected = np.array(executor.run(plan.inputs).logits)
        executor.run(step_plan(executor, Point(1, 1, 90)).inputs)
        nanoseconds, work = executor.profile(plan.inputs)
        assert (
            np.array_equal(executor.run(plan.inputs).logits, expected)
            and np.isfinite(expected).all()
            and expected.any()
        )
        assert nanoseconds.shape == work.shape == (len(engine.plan.calls),) and (nanoseconds >= 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [1, 31, 70])
def test_decodes_are_those_of_the_scheduler(engines: Mapping[str, Path], name: str, depth: int) -> None:
    with Engine.open(engines[name]) as engine:
        executor = executor_of(engine, max_num_batched_tokens=3 * depth)
        scheduler = Scheduler(engine.plan.caches, executor.memory_plan.limits, executor.memory_plan.num_blocks)
        for index in range(3):
            scheduler.add(sequence_of([index, *range(1, depth)], length=100))
        prompts = scheduler.schedule()
        assert prompts is not None and prompts.inputs.sizes.tokens == 3 * depth
        scheduler.commit(prompts, [[SampledToken(5)]] * 3)
        decode = scheduler.schedule()
        ours = step_plan(executor, Point(3, 1, depth))
        assert decode is not None and (decode.inputs.sizes, decode.num_decodes) == (ours.inputs.sizes, ours.num_decodes)
        assert decode.inputs.arrays.keys() == ours.inputs.arrays.keys()
        for key in ("positions", "kv_len", "query_start", "logit_rows"):
            assert np.array_equal(decode.inputs.arrays[key], ours.inputs.arrays[key])
        for key in ours.inputs.arrays.keys() - {"tokens"}:
            assert decode.inputs.arrays[key].shape == ours.inputs.arrays[key].shape
            if key.startswith("slots"):
                assert len(set(ours.inputs.arrays[key].tolist())) == 3, "no two sequences write to one place"


@pytest.mark.parametrize("name", NAMES)
def test_kernels_add_up_to_the_step(engines: Mapping[str, Path], name: str) -> None:
    report = run_profile(engines[name], FEW, threads=2)
    assert [step.point for step in report.steps] == FEW.points and len(FEW.points) == 5
    with Engine.open(engines[name]) as engine:
        kernels = [step.kernel for step in engine.plan.calls]
    for step in report.steps:
        assert [kernel.kernel for kernel in step.kernels] == kernels
        whole = KernelProfile.sum(step.kernels)
        grouped = KernelProfile.sum(step.groups)
        assert (grouped.calls, grouped.weight_bytes, grouped.kv_bytes) == (
            len(kernels),
            whole.weight_bytes,
            whole.kv_bytes,
        )
        assert grouped.ops == whole.ops and grouped.seconds == pytest.approx(whole.seconds)
        assert whole.seconds <= step.step_s, "kernels take no longer than the call that runs them"
        assert step.share_of_roofline == pytest.approx(whole.roofline_s / step.step_s)
        assert len(step.shares) == FEW.rounds and list(step.shares) == sorted(step.shares)
        assert step.share_of_roofline in step.shares


def test_most_of_a_step_is_kernels(engines: Mapping[str, Path]) -> None:
    """The rest is checks of the inputs and the waking of threads; at least one of many steps has little of it."""
    with Engine.open(engines["llama bf16"]) as engine:
        executor = executor_of(engine, threads=1)
        plan = step_plan(executor, Point(1, 33, 0))
        steps = [profile._measure(executor, Point(1, 33, 0), plan, KNOWN) for _ in range(20)]
    assert max(sum(kernel.seconds for kernel in step.kernels) / step.step_s for step in steps) > 0.5


KNOWN = roofline.Roofline("portable", 1, {"fp32": roofline.Rate("x", 1e9), "bf16": roofline.Rate("y", 4e9)}, 1, 1e9)


def test_the_roofline_of_a_kernel(engines: Mapping[str, Path]) -> None:
    with Engine.open(engines["llama bf16"]) as engine:
        executor = executor_of(engine)
        plan = step_plan(executor, Point(1, 33, 0))
        measured = profile._measure(executor, Point(1, 33, 0), plan, KNOWN)
    for kernel in measured.kernels:
        reading = (kernel.weight_bytes + kernel.kv_bytes) / 1e9
        computing = kernel.ops["bf16"] / 4e9 + kernel.ops["fp32"] / 1e9
        assert kernel.roofline_s == pytest.approx(max(reading, computing))
        assert kernel.share_of_roofline == pytest.approx(kernel.roofline_s / kernel.seconds)


@pytest.mark.parametrize(
    ("options", "points"),
    [
        (((), (), ()), [Point(1, 512, 0), Point(1, 1, 512)]),
        (((7, 9), (), ()), [Point(1, 7, 0), Point(1, 9, 0)]),
        (((), (8,), ()), [Point(8, 1, 512)]),
        (((), (), (0, 5)), [Point(1, 1, 0), Point(1, 1, 5)]),
        (((7,), (2, 8), (5,)), [Point(1, 7, 0), Point(2, 1, 5), Point(8, 1, 5)]),
    ],
)
def test_options_name_the_points(options: tuple[Any, Any, Any], points: list[Point]) -> None:
    assert profile_config(*options, rounds=1).points == points


def test_a_table_on_stderr_or_one_json_object_on_stdout(engines: Mapping[str, Path]) -> None:
    engine = engines["gemma int8-wo"]
    options = (engine, "--prefill", 40, "--batch", 2, "--depth", 0, "--rounds", 1, "--threads", 1)
    text = run_engine("bench", "--profile", *options)
    assert text.exit_code == 0 and text.stdout == "", text.output
    lines = text.stderr.splitlines()
    assert lines[0].startswith("tiny-gemma3_text (") and f"; {_cpu.isa_names()[0]}, 1 thread" in lines[1]
    assert any(line.startswith("prefill of 40 tokens: ") for line in lines)
    assert any(line.startswith("decode of 2 sequences at depth 0: ") for line in lines)
    rows = [line for line in lines if line.startswith("paged_attention@1")]
    assert len(rows) == 4 and sum("6/3 x 10 of 7" in row for row in rows) == 2, "by window, in two steps"
    assert sum(line.startswith("outside of kernels") for line in lines) == 2
    assert [line.split()[-1] for line in lines if line.startswith("step ")] == ["100.0%"] * 2

    found = json.loads(run_engine("bench", "profile", *options, "--json").stdout)
    assert found["engine"]["isa"] == _cpu.isa_names()[0] and found["engine"]["recipe"]["quant"] == "int8-wo"
    assert str(engine.parent) not in json.dumps(found)
    prefill, decode = found["steps"]
    assert (prefill["tokens"], decode["sequences"], decode["depth"]) == (40, 2, 0)
    assert sum(kernel["share_of_step"] for kernel in prefill["kernels"]) <= 1
    assert sum(group["calls"] for group in decode["groups"]) == len(decode["kernels"])
    assert {"weight_bytes", "activation_bytes", "kv_bytes", "ops", "share_of_roofline"} <= prefill["groups"][0].keys()


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        (("--prefill", 513), "a sequence of 513 positions is longer than the engine was built for"),
        (("--depth", 512), "its limit is 512"),
        (("--rounds", 0), "--rounds is 0"),
        (("--depth", "-1"), "whole number"),
    ],
)
def test_what_cannot_be_profiled_is_said(engines: Mapping[str, Path], options: tuple[Any, ...], piece: str) -> None:
    result = run_engine("bench", "profile", engines["llama bf16"], *options)
    assert result.exit_code == 2 and piece in result.stderr and "Traceback" not in result.stderr


def test_the_roofline_reads_weights_and_of_a_step_its_kv(engines: Mapping[str, Path]) -> None:
    report = run_profile(engines["llama bf16"], replace(FEW, rounds=1), threads=1)
    with Engine.open(engines["llama bf16"]) as engine:
        nbytes = sum(form.nbytes for name, form in engine.file.sections.items() if name.startswith(WEIGHTS))
        for step in report.steps:
            point, kv_bytes = step.point, 0
            for group in engine.plan.caches:
                blocks = point.sequences * -(-(point.depth + point.tokens) // group.block_size)
                kv_bytes += blocks * group.block_bytes
            assert step.roofline.read_bytes == nbytes + kv_bytes
    assert [each.read_bytes for each in report.rooflines] == [nbytes]
    assert [each.read_bytes for each in report.fresh_rooflines] == [1 << 16]
    assert report.fresh_rooflines[0].dots == report.rooflines[0].dots
    assert "the weights in place" in describe_profile(report)
