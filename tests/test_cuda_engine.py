"""Whole engines on the emulated GPU: beside their own graph in onnxruntime, and beside the CPU's engine."""

from functools import cache
from pathlib import Path

import onnx_ir as ir
import pytest

from enginewright.builder import assembly
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.engine_file import EngineFile
from enginewright.plugins.kernel import Specialization
from enginewright.runtime.cuda.executor import CudaExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.score import score
from tests import tolerances
from tests.emulated_device import EmulatedDevice
from tests.graphs import checkpoint_of, random_tokens, relative_error
from tests.ragged import RaggedRun

TARGETS = ("cpu", "cuda:sm_80", "cuda:sm_90a")
LIMITS = RuntimeConfig(max_model_len=128, max_num_seqs=3, max_num_batched_tokens=64, max_logit_rows=64)


@cache
def built(family: str, quant: str) -> tuple[Path, ir.Model, dict[str, Specialization]]:
    """An engine for both families of targets, the GPU's graph, and its code."""
    graphs: dict[str, ir.Model] = {}
    kernels: dict[str, Specialization] = {}
    lower = assembly.lower

    def watched(model: ir.Model, target: str, max_seq_len: int):  # type: ignore[no-untyped-def]
        graphs[target] = model.clone()
        lowered = lower(model, target, max_seq_len)
        kernels.update(lowered.kernels)
        return lowered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "lower", watched)
        path = Path(_folder()) / f"{family}-{quant}.engine"
        build_engine(checkpoint_of(family), BuildConfig(quant=quant_config(quant), targets=TARGETS, gate=None), path)
    return path, graphs["cuda"], kernels


@cache
def _folder() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="enginewright-tests-")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("quant", ["bf16"])
def test_an_engine_computes_its_graph(family: str, quant: str) -> None:
    path, graph, kernels = built(family, quant)
    tokens = random_tokens(70, seed=1).tolist()
    expected = RaggedRun(graph, num_blocks=8).step({"text": tokens})["text"]
    with EngineFile.open(path) as file:
        gpu = CudaExecutor(Engine(file, "cuda"), EmulatedDevice(kernels), LIMITS)
        (logits,) = score(gpu, [tokens])
        (on_cpu,) = score(CpuExecutor(Engine(file, "cpu"), LIMITS), [tokens])
    assert relative_error(logits, expected) < tolerances.ENGINE_GRAPH["bf16"]
    assert relative_error(logits, on_cpu) < 1e-3
