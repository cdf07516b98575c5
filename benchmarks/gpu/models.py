"""A model of the 1B Llama shape with random weights: tokens/s, waits of a step for the host, time to ready."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from protocol.models import LLAMA_1B

from benchmarks.gpu.bench import GpuBench, ratio
from benchmarks.gpu.report import Report
from benchmarks.gpu.roofline import Roofline, reported
from enginewright import LLM, RequestOutput, SamplingParams
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.runtime.device.cuda import device as cuda_device
from tests.helpers.tiny import MemoryCheckpoint

# Each by what --quant says; and those that are built with --batch-invariant, too, for its price.
QUANTS, INVARIANT = ("bf16", "int4-rtn", "fp8"), ("bf16", "int4-rtn")
BATCHES, PROMPTS = (1, 32), (512, 2048)
DEPTH, STEPS, ROUNDS = 32, 128, 5
LIMITS = {
    "max_model_len": 4096,
    "max_num_seqs": max(BATCHES),
    "max_num_batched_tokens": max(PROMPTS),
    "kv_cache_memory": 8 << 30,
    "enable_prefix_caching": False,
}
READY = """
import sys
from enginewright import LLM
with LLM(sys.argv[1], device="cuda", kv_cache_memory=8 << 30):
    print("ready", flush=True)
"""


def random_checkpoint(sizes: Mapping[str, Any], at: str = "cpu") -> MemoryCheckpoint:
    """A Llama with a tied head. at: device on which torch makes the random weights."""
    hidden, ffn, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    width, kv_width = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    matrices = {
        "self_attn.q_proj": (width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    torch.manual_seed(0)

    def random_weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=at).mul_(columns**-0.5).cpu()

    stored = {"model.embed_tokens.weight": random_weight(sizes["vocab_size"], hidden)}
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        stored |= {f"{prefix}.{name}.weight": random_weight(*shape) for name, shape in matrices.items()}
        stored |= {f"{prefix}.{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    return MemoryCheckpoint({"model_type": "llama", **sizes}, stored | {"model.norm.weight": ones}, "random")


def invariant(name: str) -> str:
    return f"{name} batch-invariant"


def build(quant: str, path: Path, targets: tuple[str, ...], sizes: Mapping[str, Any], at: str, **more: Any) -> float:
    """Seconds. more: of BuildConfig."""
    checkpoint = random_checkpoint(sizes, at)
    start = time.perf_counter()
    build_engine(checkpoint, BuildConfig(quant=quant_config(quant), targets=targets, gate=None, **more), path)
    return time.perf_counter() - start


class WatchedDevice(cuda_device.CudaDevice):
    """Records when each run began and ended; nothing while `marks` is None."""

    latest: "WatchedDevice"

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        self._torch_stream = torch.cuda.ExternalStream(self.stream)
        WatchedDevice.latest = self

    def launcher(
        self, kernel: str, threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> Callable[[cuda_device.Grid], None]:
        run = super().launcher(kernel, threads, shared_bytes, arguments)
        return lambda grid: self._watched(lambda: run(grid))

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        marks, self.marks = self.marks, None
        replay = super().capture(work)
        self.marks = marks
        return lambda: self._watched(replay)

    def _watched(self, run: Callable[[], None]) -> None:
        if self.marks is None:
            return run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._torch_stream)
        run()
        end.record(self._torch_stream)
        self.marks.append((start, end))
        return None

    def busy_and_between(self) -> tuple[float, float]:
        """Seconds in kernels, and between them."""
        assert self.marks
        torch.cuda.synchronize()
        busy = sum(start.elapsed_time(end) for start, end in self.marks)
        ends = [end for _, end in self.marks[:-1]]
        between = sum(end.elapsed_time(start) for end, (start, _) in zip(ends, self.marks[1:], strict=True))
        return busy / 1000, between / 1000


@dataclass(frozen=True)
class Subject:
    """An engine in memory. device: of its executor, where it is a GPU. step_bytes: weights that a step reads."""

    llm: LLM
    step_bytes: int
    kv_bytes_per_token: int
    device: WatchedDevice | None

    @staticmethod
    def open(path: Path, device: str, **limits: Any) -> "Subject":
        llm = LLM(path, device=device, **limits)
        plan, engine = llm.engine.plan, llm.engine
        step_bytes = sum(engine.weight(name)[1].nbytes for name in plan.weight_names())
        watched = WatchedDevice.latest if device == "cuda" else None
        return Subject(llm, step_bytes, plan.kv_bytes_per_token(), watched)

    def answer(self, count: int, prompt: int, tokens: int) -> list[RequestOutput]:
        """So many prompts of a length, each with an answer of `tokens`."""
        random = np.random.default_rng(0)
        prompts = random.integers(3, self.llm.engine.plan.vocab_size, (count, prompt)).tolist()
        return self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))

    def seconds(self, count: int, prompt: int, tokens: int) -> float:
        """Seconds from the first prompt to the last of `tokens` generated tokens."""
        start = time.perf_counter()
        self.answer(count, prompt, tokens)
        return time.perf_counter() - start

    def step_seconds(self, batch: int, steps: int) -> float:
        """Seconds of a step in which each sequence of a batch decodes one token; prompts do not count."""
        metrics = [output.metrics for output in self.answer(batch, DEPTH, steps + 1)]
        return median(one.total_s - one.first_token_s for one in metrics) / steps

    def kernel_seconds(self, batch: int, steps: int) -> tuple[float, float]:
        """A step's time in kernels, and between them; noting it takes some microseconds, which are in the latter."""
        assert self.device is not None
        found = []
        for tokens in (1, steps + 1):
            self.device.marks = []
            self.seconds(batch, DEPTH, tokens)
            found.append(self.device.busy_and_between())
            self.device.marks = None
        (busy, between), (all_busy, all_between) = found
        return (all_busy - busy) / steps, (all_between - between) / steps

    def bytes_of_step(self, batch: int, steps: int) -> float:
        return self.step_bytes + batch * (DEPTH + steps / 2) * self.kv_bytes_per_token


def body_weights(sizes: Mapping[str, Any]) -> int:
    """That every token of a prompt is multiplied by."""
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    attention = 2 * (sizes["num_attention_heads"] + sizes["num_key_value_heads"]) * head * hidden
    return int(sizes["num_hidden_layers"] * (attention + 3 * hidden * sizes["intermediate_size"]))


def measure(
    report: Report,
    roofline: Roofline,
    subjects: Mapping[str, Subject],
    sizes: Mapping[str, Any],
    *,
    steps: int,
    rounds: int,
) -> None:
    decoding = {name: subject for name, subject in subjects.items() if name not in map(invariant, QUANTS)}
    for batch in BATCHES:
        found: dict[str, list[float]] = {name: [] for name in decoding}
        for _ in range(rounds):
            for name, subject in decoding.items():
                found[name].append(subject.step_seconds(batch, steps))
        for name, subject in decoding.items():
            step = median(found[name])
            values = {
                "tokens per s": batch / step,
                "seconds a step": step,
                "of the memory roofline": subject.bytes_of_step(batch, steps) / step / roofline.memory,
            }
            if subject.device is not None:
                busy, between = subject.kernel_seconds(batch, steps)
                values |= {"in kernels": busy, "between kernels": between}
            report.add(f"models/{name}/decode-{batch}", **values)
    for prompt in PROMPTS:
        taken: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, subject in subjects.items():
                taken[name].append(subject.seconds(1, prompt, 1))
        for name in subjects:
            seconds, flops = median(taken[name]), 2 * body_weights(sizes) * prompt
            values = {"tokens per s": prompt / seconds, "of the matmul roofline": flops / seconds / roofline.bf16_flops}
            if invariant(name) in taken:
                values["over batch-invariant"] = ratio(taken[invariant(name)], taken[name])
            report.add(f"models/{name}/prefill-{prompt}", **values)


def ready_seconds(path: Path) -> float:
    """From starting a process to an engine that answers."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", READY, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        seconds = time.perf_counter() - start
    if "ready" not in said:
        raise RuntimeError(f"the process ended with {process.returncode}")
    return seconds


def transformers_rates(report: Report, sizes: Mapping[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16).eval()
    for batch in BATCHES:
        prompts = torch.randint(3, sizes["vocab_size"], (batch, DEPTH), device="cuda")
        taken = []
        for tokens in (1, 1, 33):  # the first is a warm-up
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        report.add(f"models/transformers/decode-{batch}", **{"tokens per s": 32 * batch / (taken[2] - taken[1])})


def run(report: Report) -> None:
    bench = GpuBench()
    roofline = reported(bench, report)
    with tempfile.TemporaryDirectory(prefix="enginewright-gpu-") as folder:
        paths = built(report, Path(folder), ("cpu", f"cuda:{bench.sm}"))
        subjects = opened(report, paths)
        measure(report, roofline, subjects, LLAMA_1B, steps=STEPS, rounds=ROUNDS)
        for subject in subjects.values():
            subject.llm.close()
    try:
        transformers_rates(report, LLAMA_1B)
    except Exception as problem:  # a peer's
        report.skip("models/transformers", f"{type(problem).__name__}: {problem}")


def built(report: Report, folder: Path, targets: tuple[str, ...]) -> dict[str, Path]:
    """The engines that could be built, side by side."""
    paths = {}
    wanted = {name: (name, False) for name in QUANTS} | {invariant(name): (name, True) for name in INVARIANT}
    with ProcessPoolExecutor(len(wanted), get_context("spawn")) as pool:
        building = {}
        for name, (quant, batch_invariant) in wanted.items():
            path = folder / f"{name}.engine"
            building[path] = pool.submit(build, quant, path, targets, LLAMA_1B, "cuda", batch_invariant=batch_invariant)
        for path, work in building.items():
            with report.case(f"models/{path.stem}/build"):
                report.add(f"models/{path.stem}/build", seconds=work.result(), bytes=path.stat().st_size)
                paths[path.stem] = path
    return paths


def opened(report: Report, paths: Mapping[str, Path]) -> dict[str, Subject]:
    """Those that run, warm."""
    cuda_device.CudaDevice = WatchedDevice
    subjects = {}
    for name, path in paths.items():
        with report.case(f"models/{name}/run"):
            if name in QUANTS:
                report.add(f"models/{name}/ready", seconds=min(ready_seconds(path) for _ in range(2)))
            subject = Subject.open(path, "cuda", **LIMITS)
            subject.seconds(max(BATCHES), DEPTH, 8)
            subjects[name] = subject
    return subjects
