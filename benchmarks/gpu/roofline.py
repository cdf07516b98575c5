"""Rooflines: rates of the memory and the tensor cores of this GPU, measured in the same run as the compared figures."""

from dataclasses import dataclass

import torch

from benchmarks.gpu.bench import Bench, GpuBench, Replay, interleaved
from benchmarks.gpu.calls import OpCall
from benchmarks.gpu.report import Report
from enginewright.plan import Extent, Launch, Linear, step_sizes
from enginewright.plugins.kernel import ONE, expression

LINES = 4096  # of 16 bytes, in a row that read_rows counts
THREADS, BLOCKS = 256, 8  # of a block; a multiprocessor
BYTES = 4 << 30
SIZE = 8192  # of the matrices that are multiplied


@dataclass(frozen=True)
class Roofline:
    """Medians. copy_bytes_per_s counts what is read and what is written."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    bf16_flops: float

    @property
    def memory(self) -> float:
        """Bytes per second of a streaming read, the limit of every kernel."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)


def read_call(lines: int = LINES) -> OpCall:
    """Reads [tokens, lines · 16 bytes]."""
    extent = Extent(Linear(1 << 20), per_multiprocessor=BLOCKS)
    kernel = expression("read_rows", "ReadRows", lines=lines)
    return OpCall({}, (Launch(kernel, ("x", "out"), (extent, ONE, ONE), THREADS),), {"read_rows": "roofline.cuh"})


def read_work(bench: Bench, x: torch.Tensor, lines: int = LINES) -> Replay:
    """x: UINT8, whole rows."""
    call, sizes = read_call(lines), step_sizes(tokens=x.numel() // (16 * lines), sequences=1, logit_rows=1)
    bench.compile(call.instances(sizes))
    out = torch.empty(bench.device.multiprocessors * BLOCKS * THREADS, dtype=torch.int32, device=bench.at)
    return bench.ours([call.bind(bench.device, {"x": x, "out": out}, sizes)])


def measure(bench: Bench, nbytes: int = BYTES, size: int = SIZE) -> Roofline:
    x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=bench.at)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=bench.at) for _ in range(2))
    y, c = torch.empty_like(x), torch.empty_like(a)
    contestants = {
        "read": read_work(bench, x),
        "copy": bench.torch([lambda: y.copy_(x)]),
        "matmul": bench.torch([lambda: torch.mm(a, b.T, out=c)] * 4),
    }
    seconds = {name: sorted(found)[len(found) // 2] for name, found in interleaved(bench, contestants).items()}
    return Roofline(nbytes / seconds["read"], 2 * nbytes / seconds["copy"], 2 * size**3 / seconds["matmul"])


def reported(bench: Bench, report: Report) -> Roofline:
    roofline = measure(bench)
    report.add("roofline", **vars(roofline))
    return roofline


def run(report: Report) -> None:
    reported(GpuBench(), report)
