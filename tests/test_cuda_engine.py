"""Whole engines on the emulated GPU: beside their own graph in onnxruntime, and beside the CPU's engine."""

from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from enginewright import _cpu
from enginewright.builder import assembly
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.engine_file import EngineFile
from enginewright.errors import EngineError
from enginewright.plugins.kernel import Specialization
from enginewright.runtime import core
from enginewright.runtime.cuda.executor import CudaExecutor, DeviceLogits
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.outputs import Delta
from enginewright.runtime.sampling import Entries, Fields, SamplingParams
from enginewright.runtime.score import score
from tests import tolerances
from tests.emulated_device import EmulatedDevice
from tests.graphs import checkpoint_of, random_tokens, relative_error
from tests.ragged import RaggedRun
from tests.sampling_reference import same_draws

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


class Deltas:
    """What a request's answers are told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, delta: Delta) -> None:
        self.tokens += [one.token for one in delta.tokens]

    def fail(self, error: EngineError) -> None:
        raise error


def test_tokens_are_drawn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step those that the CPU draws from the same logits, which nobody else copies from the device."""
    path, _, kernels = built("llama", "bf16")
    steps = []
    with EngineFile.open(path) as file:
        engine = Engine(file, "cuda")
        gpu = CudaExecutor(engine, EmulatedDevice(kernels), LIMITS)
        draw = gpu.draw

        def checked(logits: DeviceLogits, rows: Entries, history: Entries, biases: Entries) -> list[Fields]:
            mine = draw(logits, rows, history, biases)
            assert read == []
            same_draws(mine, _cpu.sample(np.asarray(logits), rows, history, biases))
            read.clear()
            steps.append(len(rows))
            return mine

        read: list[int] = []
        whole = gpu._read
        monkeypatch.setattr(gpu, "_read", lambda count: read.append(count) or whole(count))
        monkeypatch.setattr(gpu, "_draw", checked)
        monkeypatch.setattr(core, "open_executor", lambda engine, config: gpu)
        running = core.EngineCore(engine, LIMITS)
        told = [Deltas() for _ in range(3)]
        for reader, params in zip(
            told,
            [
                SamplingParams(temperature=0.0, max_tokens=3),
                SamplingParams(seed=1, top_p=0.9, logprobs=3, max_tokens=4),
                SamplingParams(seed=2, top_k=20, repetition_penalty=1.3, logit_bias={5: 4.0}, max_tokens=4),
            ],
            strict=True,
        ):
            running.add(running.request(random_tokens(6, seed=4).tolist(), params, reader))
        while running.has_work:
            for request, delta in running.step():
                request.reader.put(delta)
    assert [len(one.tokens) for one in told] == [3, 4, 4] and sum(steps) == 11
