"""The gate's verdict on targets that are not at hand: simulated arithmetic against engines that run."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.builder import build
from enginewright.builder.assembly import assemble
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.gate import GateConfig
from enginewright.builder.gate.kv import as_stored, attended
from enginewright.builder.gate.layers import FileWeights
from enginewright.builder.gate.page import page
from enginewright.builder.gate.simulate import blocks, simulate
from enginewright.builder.progress import Silent
from enginewright.manifest import About, Limits
from enginewright.passes.streaming import Streamed
from enginewright.plugins.attention.kv_write import STORED
from enginewright.plugins.target import CPU_TARGET, CudaTarget, Target
from enginewright.runtime.commands.goldens import GOLDENS, Goldens
from enginewright.runtime.commands.quality import (
    QUALITY,
    Check,
    Distance,
    LayerError,
    Measured,
    PositionRange,
    QualityReport,
    describe_quality,
)
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.engine import Engine
from tests.cuda.test_engine import built
from tests.emulator.device import device_for
from tests.helpers.graphs import checkpoint_of, random_tokens, relative_error
from tests.helpers.onnx_run import Array
from tests.helpers.paged_kv import KV_CODES, codes_of, rotated, stored

VOCAB = 307


def difference(streamed: Streamed, texts: Sequence[Sequence[int]], actual: Sequence[Array]) -> float:
    """relative_error of the text that is simulated worst."""
    simulated = [
        np.concatenate([part for n, _, part in blocks(streamed, texts, VOCAB) if n == text]) for text in (0, 1)
    ]
    return max(relative_error(one, other) for one, other in zip(simulated, actual, strict=True))


QUANTS = ("bf16", "int8-wo", "w8a8", "int4-rtn", "mxfp4", "fp8")
SOME_QUANTS = ("bf16", "int4-rtn", "fp8")
OF_GPUS = [("int8-wo", "fp8"), ("int4-rtn", "bf16")]


@pytest.mark.parametrize("quant", SOME_QUANTS)
def test_the_simulation_is_what_the_cpu_computes(quant: str, tmp_path: Path) -> None:
    """At the CPU's precision, it is as near to the engine as attention in bf16 allows; with other weights it is not."""
    checkpoint, texts = checkpoint_of("qwen3"), [random_tokens(n, seed=n).tolist() for n in (1, 37)]
    config = BuildConfig(quant=quant_config(quant), gate=None)
    build_engine(checkpoint, config, tmp_path / "x.engine")
    assembly = assemble(checkpoint, config, Silent())
    with Engine.open(tmp_path / "x.engine") as engine:
        actual = score(CpuExecutor(engine, RuntimeConfig(max_num_seqs=2)), texts)
        weights = FileWeights(engine, assembly.section_names)
        streamed = simulate(assembly.dense.clone(), config.method, CPU_TARGET, weights, texts)
    assert difference(streamed, texts, actual) < 2e-3


SOME_KV_CACHES = ["int8"]  # whose queries are rounded on CPUs


@pytest.mark.parametrize("kv", SOME_KV_CACHES)
def test_the_simulation_has_the_kv_cache_of_gpus(kv: str) -> None:
    """The simulation is nearest to the engine on the emulated GPU if it has its KV cache and unrounded queries."""
    path, _, kernels = built("llama", "bf16", kv)
    texts = [random_tokens(n, seed=n).tolist() for n in (1, 37)]
    config = BuildConfig(kv_cache_dtype=kv, gate=None)
    assembly = assemble(checkpoint_of("llama"), config, Silent())
    with Engine.open(path, "cuda") as engine:
        weights = FileWeights(engine, assembly.section_names)
        actual = score(CudaExecutor(engine, device_for(kernels), RuntimeConfig(max_num_seqs=2)), texts)

        def away(target: Target, dtype: str) -> float:
            dense = assembly.dense.clone()
            return difference(simulate(dense, config.method, target, weights, texts, kv_dtype=dtype), texts, actual)

        own = engine.plan.caches[0].planes[0].dtype
        nearest = away(CudaTarget(), own)
        others = [away(CudaTarget(), dtype) for dtype in STORED if dtype != own]
        if own == "i8":
            others.append(away(CPU_TARGET, own))
    assert nearest < 3e-4 and 1.4 * nearest < min(others)


@pytest.mark.parametrize("dtype", KV_CODES)
def test_keys_are_rounded_as_in_a_pool(dtype: str) -> None:
    """Keys agree to the last bit; one head is zeros, one has numbers too small for a scale, one has a NaN."""
    x = torch.randn(997, 3, 29, generator=torch.Generator().manual_seed(0))
    x[1, 1], x[2, 0], x[3, 2, 7] = 0.0, 1e-37, torch.nan
    codes, scale = codes_of(x, dtype)
    expected = codes.float() * scale
    expected[2, 0] = 0.0
    actual = as_stored(x.flatten(1), 3, STORED[dtype])
    torch.testing.assert_close(actual, expected.flatten(1), rtol=0, atol=0, equal_nan=True)


def test_numbers_of_4_bits_are_rounded_as_in_a_pool() -> None:
    """Numbers agree to the last bit; one group is all one number, one is too small, one has a NaN. Queries and keys are
    rotated.
    """
    q, k, v = (torch.randn(37, heads * 80, generator=torch.Generator().manual_seed(heads)) for heads in (6, 3, 2))
    k, v = k[:, :160], v.clone()
    v[1, :32], v[2, 32:64], v[3, 70] = 0.7, 1e-37, torch.nan
    actual = attended(q, k, v, (6, 2), STORED["u4"], STORED["bf16"])
    expected = rotated(q.unflatten(-1, (6, -1))), rotated(k.unflatten(-1, (2, -1))), v.unflatten(-1, (2, -1))
    expected = expected[0].bfloat16().float(), *(stored(x, "u4").float() for x in expected[1:])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other.flatten(1), rtol=0, atol=0, equal_nan=True)
    assert actual[2][3].isnan().nonzero().flatten().tolist() == list(range(64, 80))


@pytest.mark.parametrize(("quant", "kv"), OF_GPUS[:1])
def test_a_build_for_gpus_alone_is_measured(
    quant: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The goldens are those of an engine for the CPU, within verify's tolerance, and the report says "simulated"."""
    monkeypatch.setattr(build, "code_sections", lambda kernels, targets: {})  # nothing here runs them
    built = []
    for targets in (("cpu",), ("cuda:sm_80",), ("cpu", "cuda:sm_80")):
        path = tmp_path / f"{len(targets)}-{targets[0][:3]}.engine"
        config = BuildConfig(quant=quant_config(quant), kv_cache_dtype=kv, targets=targets, gate=GateConfig())
        build_engine(checkpoint_of("qwen3"), config, path)
        with Engine.open(path, targets[0].partition(":")[0]) as engine:
            goldens = Goldens.from_json(engine.file.read_section(GOLDENS))
            built.append((goldens, QualityReport.from_json(engine.file.read_section(QUALITY))))
    (on_cpu, report), (on_gpu, simulated), (_, both) = built
    for golden, other in zip(on_cpu.entries, on_gpu.entries, strict=True):
        expected = dict(golden.top)
        assert golden.prompt == other.prompt
        assert max(abs(expected[token] - value) for token, value in other.top if token in expected) < 0.05
    assert simulated.measured is not None and simulated.measured.isa == "cuda, simulated" and not simulated.failed
    assert both.measured == report.measured and both.also == (simulated.measured,)
    assert [line for line in describe_quality(report) if "simulated" in line] == []
    for one in (simulated, both):
        assert describe_quality(one)[-4] == "on cuda, simulated:"
    assert report.measured is not None and report.measured.whole.kl is not None
    assert simulated.measured.whole.kl == pytest.approx(report.measured.whole.kl, rel=0.05)


def test_a_target_that_fails_is_on_the_page() -> None:
    """A target that fails is on the page, whatever others do."""
    checks = [Check("kl", "", value, 0.5, is_minimum=False) for value in (0.25, 0.75)]
    whole, layer = Distance(1, 0, 0.0, 0.0, 1.0, 1.0, 1.0), LayerError("model.layers.0.mlp.down_proj", "bf16", 1, 0.0)
    measured = [
        Measured(isa, (check,), whole, (), (PositionRange(0, 1, 0.0),), (layer,))
        for isa, check in zip(("avx2", "gpu"), checks, strict=True)
    ]
    report = QualityReport("quick", measured[0], (measured[1],))
    about = About(
        builder_version="0",
        name="x",
        model_type="llama",
        targets=("cpu", "cuda:sm_80"),
        recipe={},
        sources={},
        limits=Limits(max_seq_len=8, max_batch_size=1),
    )
    text = page(report, measured[0], about)
    assert "refused" in text and "Computed with gpu" in text and "0.75" in text
