"""A model of the 8B Llama shape in FP8, KV cache too: offline throughput compared with its roofline, and time to ready.

Weights are random, and the head is tied to the embedding.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from protocol.models import LLAMA_1B

from benchmarks.gpu.bench import GpuBench
from benchmarks.gpu.models import Subject, body_weights, build, ready_seconds
from benchmarks.gpu.report import Report
from benchmarks.gpu.roofline import Roofline, reported

LLAMA_8B = LLAMA_1B | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
}
FP8_OVER_BF16 = 2  # of the tensor cores' speed
STEP_TOKENS = 8192


@dataclass(frozen=True)
class Work:
    """Number of requests at once, and tokens of each prompt and answer."""

    requests: int
    prompt: int
    answer: int

    @property
    def length(self) -> int:
        return self.prompt + self.answer

    def roofline_seconds(
        self, roofline: Roofline, sizes: Mapping[str, Any], step_bytes: int, kv_bytes_per_token: int
    ) -> float:
        """Seconds of the products of prompts, and for each later step the longer of its products and its reads."""
        body, flops = body_weights(sizes), FP8_OVER_BF16 * roofline.bf16_flops
        multiplying = 2 * self.requests * (body + sizes["vocab_size"] * sizes["hidden_size"]) / flops
        whole = 2 * self.requests * self.prompt * body / flops
        for depth in range(self.prompt + 1, self.length):
            reading = (step_bytes + self.requests * depth * kv_bytes_per_token) / roofline.memory
            whole += max(multiplying, reading)
        return whole


IN_FLIGHT = Work(requests=256, prompt=128, answer=2048)


def measure(report: Report, roofline: Roofline, path: Path, device: str, sizes: Mapping[str, Any], work: Work) -> None:
    subject = Subject.open(
        path,
        device,
        max_model_len=work.length,
        max_num_seqs=work.requests,
        max_num_batched_tokens=min(STEP_TOKENS, work.requests * work.prompt),
        enable_prefix_caching=False,
    )
    with subject.llm:
        subject.seconds(work.requests, work.prompt, 2)
        seconds = subject.seconds(work.requests, work.prompt, work.answer)
    best = work.roofline_seconds(roofline, sizes, subject.step_bytes, subject.kv_bytes_per_token)
    report.add(
        f"large/fp8/{work.requests}x{work.prompt}x{work.answer}",
        **{"tokens per s": work.requests * work.answer / seconds, "of the roofline": best / seconds},
    )


def run(report: Report) -> None:
    bench = GpuBench()
    roofline = reported(bench, report)
    with tempfile.TemporaryDirectory(prefix="enginewright-gpu-") as folder:
        path = Path(folder, "fp8.engine")
        seconds = build("fp8", path, (f"cuda:{bench.sm}",), LLAMA_8B, "cuda", kv_cache_dtype="fp8")
        torch.cuda.empty_cache()
        report.add("large/fp8/build", seconds=seconds, bytes=path.stat().st_size)
        report.add("large/fp8/ready", seconds=min(ready_seconds(path) for _ in range(2)))
        measure(report, roofline, path, "cuda", LLAMA_8B, IN_FLIGHT)
