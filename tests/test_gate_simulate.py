"""What the gate says of targets that are not at hand: simulated arithmetic beside engines that run."""

from pathlib import Path

import numpy as np
import pytest

from enginewright.builder.assembly import assemble
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.gate import GateConfig
from enginewright.builder.gate.layers import FileWeights
from enginewright.builder.gate.simulate import blocks, simulate
from enginewright.builder.progress import Silent
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.goldens import GOLDENS, Goldens
from enginewright.runtime.quality import QUALITY, QualityReport
from enginewright.runtime.score import score
from tests.graphs import checkpoint_of, random_tokens, relative_error

VOCAB = 307


@pytest.mark.parametrize("quant", ["bf16", "int8-wo", "w8a8", "int4-rtn", "mxfp4", "fp8"])
def test_the_simulation_is_what_the_cpu_computes(quant: str, tmp_path: Path) -> None:
    """Told the CPU's precision, it is as near to the engine as attention in bf16 allows; other weights are not."""
    checkpoint, texts = checkpoint_of("qwen3"), [random_tokens(n, seed=n).tolist() for n in (1, 37)]
    config = BuildConfig(quant=quant_config(quant), gate=None)
    build_engine(checkpoint, config, tmp_path / "x.engine")
    assembly = assemble(checkpoint, config, Silent())
    with Engine.open(tmp_path / "x.engine") as engine:
        actual = score(CpuExecutor(engine, RuntimeConfig(max_num_seqs=2)), texts)
        weights = FileWeights(engine, assembly.section_names)
        streamed = simulate(assembly.dense.clone(), config.method, "cpu", weights, texts)
        simulated = [
            np.concatenate([part for n, _, part in blocks(streamed, texts, VOCAB) if n == text]) for text in (0, 1)
        ]
    for one, other in zip(simulated, actual, strict=True):
        assert relative_error(one, other) < 2e-3


@pytest.mark.parametrize("quant", ["int8-wo", "int4-rtn"])
def test_a_build_for_gpus_alone_is_measured(quant: str, tmp_path: Path) -> None:
    """Its goldens are those of an engine for the CPU, within what verify allows, and its report says what it is."""
    built = []
    for targets in (("cpu",), ("cuda:sm_80",), ("cpu", "cuda:sm_80")):
        path = tmp_path / f"{len(targets)}-{targets[0][:3]}.engine"
        config = BuildConfig(quant=quant_config(quant), targets=targets, gate=GateConfig())
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
