"""Whole engines on the emulated GPU, against their own graph in onnxruntime, and against the CPU's engine."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from msgspec.structs import replace as replaced
from numpy.typing import NDArray
from safetensors.torch import save_file

from enginewright import _cpu
from enginewright.builder import assembly, build
from enginewright.builder.adapters import Adapter
from enginewright.builder.adapters.prepare import prepare
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.gate.layers import FileWeights
from enginewright.builder.gate.simulate import simulate
from enginewright.builder.progress import Silent
from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, EngineError
from enginewright.plan import step_sizes
from enginewright.plugins.kernel import Specialization
from enginewright.plugins.target import CPU_TARGET, CudaTarget, Target
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.cuda.executor import BUCKETS, CudaExecutor, DeviceRows, bucket_of, buckets_for
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import Entries, Fields, SampledToken
from enginewright.runtime.sampling.token_mask import Mask
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from tests import tolerances
from tests.emulator.device import EmulatedDevice, device_for
from tests.emulator.kernels import EmulatedKernels, Kernels
from tests.helpers.engines import folder_of_engines
from tests.helpers.graphs import CASES as GRAPH_CASES
from tests.helpers.graphs import checkpoint_of, random_tokens, relative_error, with_noise
from tests.helpers.ladder import Ladder
from tests.helpers.ragged import RaggedRun
from tests.helpers.sampling_reference import same_draws, with_newest
from tests.helpers.tiny import ALL_EXPERTS, HYBRIDS, LATENT, MemoryCheckpoint, wide_checkpoint

TARGETS = ("cpu", "cuda:sm_80")
Asked = tuple[list[int], SamplingParams]
LIMITS = RuntimeConfig(max_model_len=128, max_num_seqs=3, max_num_batched_tokens=64, max_logit_rows=64)
CASES = [
    ("llama", "bf16", "bf16"),
    ("qwen3_moe", "int4-rtn", "bf16"),
    ("qwen3_5_text", "w8a8", "bf16"),
    ("gpt2", "fp8", "bf16"),
]


WITH_LATENT = (*LATENT, "kimi_linear")  # attention


@cache
def built(
    family: str, quant: str, kv: str = "bf16", batch_invariant: bool = False, **settings: str
) -> tuple[Path, ir.Model, dict[str, Specialization]]:
    """An engine for both targets (without cubins: nothing here runs them), the graph of GPUs, and their code."""
    graphs: dict[str, ir.Model] = {}
    kernels: dict[str, Specialization] = {}
    lower = assembly.lower

    def watched(model: ir.Model, target: Target, *rest: int):  # type: ignore[no-untyped-def]
        graphs[target.name] = model.clone()
        lowered = lower(model, target, *rest)
        kernels.update(lowered.kernels)
        return lowered

    path = folder_of_engines() / f"{'-'.join((family, quant, kv, str(batch_invariant), *settings.values()))}.engine"
    config = BuildConfig(
        quant=quant_config(quant, **settings),
        kv_cache_dtype=kv,
        batch_invariant=batch_invariant,
        targets=TARGETS,
        gate=None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "lower", watched)
        patch.setattr(build, "code_sections", lambda kernels, targets: {})
        build_engine(_checkpoint(family), config, path)
    return path, graphs["cuda"], kernels


def _checkpoint(family: str) -> MemoryCheckpoint:
    if family == "wide":
        return wide_checkpoint()
    if family in GRAPH_CASES:
        return checkpoint_of(family)
    return MemoryCheckpoint.tiny(family, **ALL_EXPERTS.get(family, {}))


def check_engine(family: str, quant: str, kv: str, *, batch_invariant: bool | None = None) -> None:
    """All logits of a text that is read in two steps, and goes on by two single tokens.

    Args:
        batch_invariant: None builds so where other engines have kernels in Triton, which the emulator does not run:
            tests.helpers.triton_engine_run runs those.
    """
    batch_invariant = family in HYBRIDS if batch_invariant is None else batch_invariant
    path, graph, kernels = built(family, quant, kv, batch_invariant)
    tokens = random_tokens(39, seed=1).tolist()
    expected = RaggedRun(graph, num_blocks=8).step({"text": tokens})["text"]
    with EngineFile.open(path) as file:
        limits = replace(LIMITS, max_num_batched_tokens=21)
        (logits,) = score(CudaExecutor(Engine(file, "cuda"), device_for(kernels), limits), [tokens])
        (on_cpu,) = score(CpuExecutor(Engine(file, "cpu"), limits), [tokens])
    activations = {"w8a8": "int8", "fp8": "fp8"}.get(quant, "bf16")
    if activations == "fp8":
        bound = bound_of_fp8(graph, tokens, expected)
    else:
        bound = tolerances.ENGINE_GRAPH[activations if kv == "bf16" else f"{kv} KV"]
    min_bound = tolerances.ENGINE_GRAPH["latent"] if family in WITH_LATENT else 0.0
    assert relative_error(logits, expected) < max(bound, min_bound)
    activations += " latent" if activations == "fp8" and family in WITH_LATENT else ""
    bound = tolerances.HYBRID_GPU_CPU if family in HYBRIDS else tolerances.GPU_CPU[activations]
    assert relative_error(logits, on_cpu) < bound


def bound_of_fp8(graph: ir.Model, tokens: list[int], expected: NDArray[np.float32]) -> float:
    """Bound for FP8 activations: a multiple of the graph's error if attention is off by a rounding to BF16."""
    noisy = RaggedRun(with_noise(graph, 2**-9), num_blocks=8).step({"text": tokens})["text"]
    return tolerances.ENGINE_GRAPH_FP8 * relative_error(noisy, expected)


@pytest.mark.parametrize(("family", "quant", "kv"), CASES)
def test_an_engine_computes_its_graph(family: str, quant: str, kv: str) -> None:
    check_engine(family, quant, kv)


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_the_gate_simulates_fp8_activations(scales: str) -> None:
    """Nearer than bf16 activations are: each of these is off by a sixteenth of itself at most."""
    path, graph, _ = built("llama", "fp8", fp8_scales=scales)
    tokens = random_tokens(39, seed=1).tolist()
    expected = RaggedRun(graph, num_blocks=8).step({"text": tokens})["text"]
    config = BuildConfig(quant=quant_config("fp8", fp8_scales=scales), targets=TARGETS)
    made = assembly.assemble(checkpoint_of("llama"), config, Silent())
    with Engine.open(path, "cuda") as engine:
        weights = FileWeights(engine, made.section_names)
        errors = []
        for target in (CudaTarget(), CPU_TARGET):
            streamed = simulate(made.dense.clone(), config.method, target, weights, [tokens])
            errors.append(relative_error(streamed.logits(0, 0, len(tokens)).numpy(), expected))
    assert errors[0] < bound_of_fp8(graph, tokens, expected) and errors[0] < 0.8 * errors[1], errors


def test_logits_are_batch_invariant_where_kernels_are() -> None:
    """Logits have the same bits alone, together and in other chunks, in steps of up to 64 tokens by equal kernels."""
    path, _, kernels = built("llama", "bf16")
    texts = [random_tokens(count, seed=count).tolist() for count in (1, 9, 33)]
    with EngineFile.open(path) as file:
        engine, device = Engine(file, "cuda"), device_for(kernels)
        runs = [
            score(CudaExecutor(engine, device, replace(LIMITS, max_num_batched_tokens=cut, max_num_seqs=seqs)), texts)
            for cut, seqs in ((64, 1), (64, 3), (13, 2))
        ]
    for other in runs[1:]:
        for one, same in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(one, same)


def test_logits_of_a_batch_invariant_engine() -> None:
    check_batch_invariant_logits("llama", "bf16", (3, 9, 55))


def check_batch_invariant_logits(
    family: str, quant: str, lengths: Sequence[int] = (9, 30, 61), *, others_differ: bool = False
) -> None:
    """Checks batch invariance in steps of any size; without it, kernels for other sizes may give other bits."""
    texts = [random_tokens(count, seed=count).tolist() for count in lengths]

    def scored(batch_invariant: bool, cut: int, seqs: int) -> bytes:
        path, _, kernels = built(family, quant, batch_invariant=batch_invariant)
        limits = replace(LIMITS, max_num_seqs=seqs, max_num_batched_tokens=cut, max_logit_rows=cut)
        with EngineFile.open(path) as file:
            rows = score(CudaExecutor(Engine(file, "cuda"), device_for(kernels), limits), texts)
        return np.concatenate(rows).tobytes()

    alone = scored(True, 100, 1)
    assert scored(True, 100, 3) == alone == scored(True, 37, 2)
    assert not others_differ or scored(False, 100, 1) != scored(False, 100, 3)


def answers(
    monkeypatch: pytest.MonkeyPatch, batches: Sequence[Sequence[Asked]], cut: int, blocks: int
) -> tuple[list[list[SampledToken]], bool]:
    """Outputs of an engine whose KV cache has `blocks` blocks, and if a request of the last batch was preempted."""
    path, _, kernels = built("wide", "int4-rtn", batch_invariant=True)
    told, device = [], device_for(kernels)
    monkeypatch.setattr(core, "open_executor", lambda engine, config: CudaExecutor(engine, device, config))
    with EngineFile.open(path) as file:
        engine = Engine(file, "cuda")
        group = engine.plan.caches[0]
        memory = blocks * group.block_bytes
        limits = replace(LIMITS, max_num_batched_tokens=cut, kv_cache_memory=memory)
        for batch in batches:
            running, readers = core.EngineCore(engine, limits), [Deltas() for _ in batch]
            for (prompt, params), reader in zip(batch, readers, strict=True):
                running.add(running.request(prompt, params, reader.put))
            while running.has_work:
                for request, delta in running.step():
                    request.sink(delta)
            told += [[one for delta in reader.whole for one in delta.tokens] for reader in readers]
        return told, running.stats().num_preemptions > 0


def check_batch_invariant_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks greedy and sampled completions with log-probabilities: alone, together, preempted, in other chunks."""
    asked = [
        (random_tokens(length, seed=length).tolist(), replace(params, logprobs=2, ignore_eos=True))
        for length, params in (
            (95, SamplingParams(temperature=0.0, max_tokens=6)),
            (60, SamplingParams(seed=1, max_tokens=6, frequency_penalty=1.0)),
            (9, SamplingParams(seed=2, max_tokens=6, top_p=0.9)),
        )
    ]
    alone, _ = answers(monkeypatch, [[one] for one in asked], 200, 20)
    assert [len(tokens) for tokens in alone] == [6, 6, 6]
    assert answers(monkeypatch, [asked], 200, 20) == (alone, False)
    assert answers(monkeypatch, [asked], 67, 6) == (alone, True)


def test_greedy_texts_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache cannot hold all texts at once, so that some are preempted; decoding replays graphs."""
    path, _, kernels = built("llama", "bf16")
    prompts = [random_tokens(count, seed=count).tolist() for count in (27, 30, 29, 28)]
    told, device = [], device_for(kernels)
    for family in ("cpu", "cuda"):
        with EngineFile.open(path) as file:
            engine = Engine(file, family)
            block = engine.plan.caches[0].block_bytes
            limits = replace(LIMITS, kv_cache_memory=5 * block, max_model_len=96)
            if family == "cuda":
                monkeypatch.setattr(core, "open_executor", lambda one, config: CudaExecutor(one, device, config))
            running, readers = core.EngineCore(engine, limits), [Deltas() for _ in prompts]
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            for prompt, reader in zip(prompts, readers, strict=True):
                running.add(running.request(prompt, params, reader.put))
            while running.has_work:
                for request, delta in running.step():
                    request.sink(delta)
            told.append([reader.tokens for reader in readers])
            assert running.stats().num_preemptions > 0
    assert told[0] == told[1] and all(len(tokens) == 8 for tokens in told[0])
    assert device.replays > 5 if isinstance(device, EmulatedDevice) else device.name


@cache
def adapter_file() -> Path:
    """An adapter of random numbers for the small llama; tests/cuda/test_adapters.py compares others with PEFT."""
    path, _, _ = built("llama", "bf16")
    stored, chance = checkpoint_of("llama").stored, torch.Generator().manual_seed(1)
    modules = [f"model.layers.{layer}.{name}" for layer in (0, 2) for name in ("self_attn.q_proj", "mlp.down_proj")]
    tensors = {}
    for module in modules:
        rows, columns = stored[f"{module}.weight"].shape
        for part, shape in ("lora_A", (5, columns)), ("lora_B", (rows, 5)):
            tensors[f"base_model.model.{module}.{part}.weight"] = torch.randn(shape, generator=chance) / 3
    folder = folder_of_engines() / "by-hand"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 5, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with Engine.open(path) as engine:
        return prepare(Adapter(folder), engine, folder.with_suffix(".lora")).path


def test_greedy_texts_with_adapters_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with an adapter and without, in one batch, whose decoding replays graphs."""
    path, _, kernels = built("llama", "bf16")
    prompts = [random_tokens(count, seed=count).tolist() for count in (27, 30, 7)]
    told, device, limits = [], device_for(kernels), replace(LIMITS, enable_lora=True)
    for family in ("cpu", "cuda"):
        with EngineFile.open(path) as file:
            if family == "cuda":
                monkeypatch.setattr(core, "open_executor", lambda one, config: CudaExecutor(one, device, config))
            running, readers = core.EngineCore(Engine(file, family), limits), [Deltas() for _ in prompts * 2]
            params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
            adapters = [None, running.open_adapter(adapter_file())] * 3
            for prompt, adapter, reader in zip(prompts * 2, adapters, readers, strict=True):
                running.add(running.request(prompt, params, reader.put, adapter=adapter))
            while running.has_work:
                for request, delta in running.step():
                    request.sink(delta)
            told.append([reader.tokens for reader in readers])
    assert told[0] == told[1] and all(len(tokens) == 5 for tokens in told[0])
    assert all(told[0][index] != told[0][index + 3] for index in range(3)), "the adapter changes each"
    assert device.replays > 3 if isinstance(device, EmulatedDevice) else device.name


@pytest.mark.skipif(Kernels is not EmulatedKernels, reason="it is the emulated GPU's memory that is counted")
def test_a_closed_llm_gives_the_memory_of_its_gpu_back(monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, kernels = built("llama", "bf16")
    device = EmulatedDevice(kernels)
    monkeypatch.setattr(core, "open_executor", lambda engine, config: CudaExecutor(engine, device, config))
    with EngineFile.open(path) as file:
        engine = Engine(file, "cuda")
        with LLM(engine, max_model_len=64, max_num_seqs=2) as llm:
            (answer,) = llm.generate(["a"], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
            assert len(answer.outputs[0].token_ids) == 3 and device._memory
        assert not device._memory


def test_graphs_are_captured_before_they_are_needed() -> None:
    path, _, kernels = built("llama", "bf16")
    with EngineFile.open(path) as file:
        device = device_for(kernels)
        executor = CudaExecutor(Engine(file, "cuda"), device, replace(LIMITS, max_num_seqs=20))
        executor.warm_up()
        assert sorted(executor._graphs) == [(count, False) for count in (1, 2, 4, 8, 16, 20)]
        assert device.launches == 0 if isinstance(device, EmulatedDevice) else device.name


def test_steps_that_decode_take_the_next_larger_graph() -> None:
    assert buckets_for(3) == (1, 2, 3) and buckets_for(16) == (1, 2, 4, 8, 16) and buckets_for(1000) == BUCKETS
    for count, bucket in ((1, 1), (3, 4), (17, 24), (256, 256)):
        assert bucket_of(step_sizes(tokens=count, sequences=count, logit_rows=count), BUCKETS) == bucket
    assert bucket_of(step_sizes(tokens=513, sequences=513, logit_rows=513), BUCKETS) is None  # more than any graph has
    assert bucket_of(step_sizes(tokens=4, sequences=3, logit_rows=3), BUCKETS) is None  # a prompt is read


class Deltas:
    """A record of the deltas of a request's completions."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.whole: list[Delta] = []

    def put(self, item: Delta | EngineError) -> None:
        if isinstance(item, EngineError):
            raise item
        self.whole.append(item)
        self.tokens += [one.token for one in item.tokens]


def downloaded(gpu: CudaExecutor, address: int, count: int) -> NDArray[np.int32]:
    values = np.empty(count, np.int32)
    gpu.device.download(values.view(np.uint8), address)
    gpu.device.synchronize()
    return values


def test_tokens_are_drawn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's tokens are those that the CPU samples from the same logits, which nobody else copies to the host."""
    path, _, kernels = built("llama", "bf16")
    steps = []
    with EngineFile.open(path) as file:
        engine = Engine(file, "cuda")
        gpu = CudaExecutor(engine, device_for(kernels), LIMITS)
        draw = gpu.draw

        def checked(
            logits: DeviceRows, rows: Entries, history: Entries, biases: Entries, allowed: Mask | None
        ) -> list[Fields]:
            mine = list(draw(logits, rows, history, biases, allowed))
            assert read == []
            newest = downloaded(gpu, gpu._of_steps["known"], gpu.memory_plan.limits.tokens)
            newest = newest[downloaded(gpu, gpu._inputs.addresses["logit_rows"], len(rows))]
            rows, history = with_newest(rows, history, newest.tolist())
            same_draws(mine, _cpu.sample(np.asarray(logits), rows, history, biases, allowed))
            read.clear()
            steps.append(len(rows))
            return mine

        def noted(inputs: StepInputs) -> StepOutputs:
            logits = run(inputs).logits
            return StepOutputs(DeviceRows(lambda: read.append(inputs.sizes.logit_rows) or np.asarray(logits)))

        read: list[int] = []
        run = gpu.run
        monkeypatch.setattr(gpu, "run", noted)
        monkeypatch.setattr(CudaExecutor, "draw", property(lambda _: checked))
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
            running.add(running.request(random_tokens(6, seed=4).tolist(), params, reader.put))
        while running.has_work:
            for request, delta in running.step():
                request.sink(delta)
    assert [len(one.tokens) for one in told] == [3, 4, 4] and sum(steps) == 11


def test_running_ahead_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are the same, whatever the next step's sampling needs of a token that is not yet known, or never comes."""
    path, _, kernels = built("llama", "bf16")
    asked = [
        SamplingParams(temperature=0.0, max_tokens=4, repetition_penalty=1.5, ignore_eos=True),
        SamplingParams(seed=1, max_tokens=5, logprobs=2, frequency_penalty=1.0, ignore_eos=True),
        SamplingParams(seed=2, max_tokens=6, min_tokens=2, stop_token_ids=tuple(range(60)), presence_penalty=1.0),
        SamplingParams(seed=3, max_tokens=4, n=2, ignore_eos=True),
        SamplingParams(seed=4, max_tokens=5, n=2, frequency_penalty=0.5, ignore_eos=True),
    ]
    lengths = (23, 6, 13, 5, 9)  # the first takes several steps that draw nothing
    limits, told = replace(LIMITS, max_num_batched_tokens=9), []
    with EngineFile.open(path) as file:
        engine, device = Engine(file, "cuda"), device_for(kernels)
        for ahead in (0, 1):
            gpu = CudaExecutor(engine, device, limits)
            gpu.steps_ahead = ahead
            monkeypatch.setattr(core, "open_executor", lambda engine, config, gpu=gpu: gpu)
            running, readers, under_way = core.EngineCore(engine, limits), [Deltas() for _ in asked], 0
            ladders = [Ladder(engine.plan.vocab_size, start) for start in (50, 100)]  # the last request's
            for length, params, reader in zip(lengths, asked, readers, strict=True):
                prompt, grammars = random_tokens(length, seed=length).tolist(), ladders if reader is readers[-1] else ()
                running.add(running.request(prompt, params, reader.put, grammars=grammars))
            while running.has_work:
                for request, delta in running.step():
                    request.sink(delta)
                under_way = max(under_way, len(running._in_flight))
            assert under_way == ahead
            told.append([sorted(reader.whole, key=lambda delta: delta.index) for reader in readers])
            assert sorted(readers[-1].tokens) == sorted(ladders[0].taken + ladders[1].taken)
    assert told[0] == told[1] and len(readers[-1].tokens) == 10


def test_code_that_does_not_take_up_what_was_drawn_is_refused() -> None:
    path, _, kernels = built("llama", "bf16")
    with EngineFile.open(path) as file:
        engine = Engine(file, "cuda")
        calls = tuple(
            replaced(call, launches=tuple(replaced(one, arguments=one.arguments[2:]) for one in call.launches))
            for call in engine.plan.calls
        )
        engine.plan = replaced(engine.plan, calls=calls)
        with pytest.raises(CorruptEngineError, match="Build it again"):
            CudaExecutor(engine, device_for(kernels), LIMITS)
