"""Tiles of matrix products: those that engines have (plugins/gemm/gemm_tiles.py), and each alternative choice.

It runs only if the command names it. Its findings are copied into TILES by hand.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import geometric_mean, median

import torch

from benchmarks.gpu import gemm
from benchmarks.gpu.bench import Bench, GpuBench, Replay, interleaved, ratio
from benchmarks.gpu.calls import OpCall
from benchmarks.gpu.report import Report
from enginewright.builder.cuda import Instance
from enginewright.errors import EngineError
from enginewright.plugins.gemm.gemm_tiles import Tiles

CHOICES: dict[str, tuple[float, ...]] = {
    "feature_warps": (1, 2, 4),
    "turns": (1, 2),
    "waves": (1, 2, 3, 4),
    "in_flight_bytes": (24 << 10, 36 << 10, 48 << 10, 72 << 10),
    "large_stages": (3, 4, 6),
    "large_units": (1, 2),
    "fewest_blocks": (0.5, 1.0, 2.0),
}
PRESENT = "present"
FEW = 64  # tokens, which gemm_small has, or some of them
ROUNDS = 5


def variants(tiles: Tiles) -> Iterator[tuple[str, Tiles]]:
    yield PRESENT, tiles
    for name, values in CHOICES.items():
        for value in values:
            if value != getattr(tiles, name):
                yield f"{name}={value}", replace(tiles, **{name: value})


def calls_of(format: gemm.WeightFormat, shape: gemm.Shape, sm: str) -> dict[str, OpCall]:
    """By variant; none whose stages do not fit, nor one that launches nothing else than the present tiles."""
    found = {name: format.call(shape, sm, tiles) for name, tiles in variants(format.tiles)}
    present = found[PRESENT].launches
    return {name: call for name, call in found.items() if name == PRESENT or call.launches != present}


def compiled(bench: Bench, report: Report, shape: gemm.Shape, calls: dict[str, OpCall]) -> dict[str, OpCall]:
    """Those that compile: not all numbers go together."""
    kernels = {name: gemm.kernels_of(shape, call) for name, call in calls.items()}
    try:
        bench.compile(kernel for some in kernels.values() for kernel in some)
        return calls
    except EngineError:
        return {name: call for name, call in calls.items() if compiles(bench, report, kernels[name])}


def compiles(bench: Bench, report: Report, kernels: Sequence[Instance]) -> bool:
    try:
        bench.compile(kernels)
    except EngineError as problem:
        report.skip(f"tiles/{kernels[0].expression}", str(problem).splitlines()[-1])
        return False
    return True


def measure(
    bench: Bench, report: Report, format: gemm.WeightFormat, shape: gemm.Shape, weights: gemm.Weights
) -> dict[int, dict[str, float]]:
    """By tokens and variant: how many times as fast it is as the present tiles."""
    calls, packed = compiled(bench, report, shape, calls_of(format, shape, bench.sm)), weights.packed(format)
    ratios: dict[int, dict[str, float]] = {}
    for tokens in (tokens for tokens in gemm.TOKENS if tokens <= shape.max_tokens):
        contestants, outs = dict[str, Replay](), dict[str, torch.Tensor]()
        others = {name: call for name, call in calls.items() if differ(call, calls[PRESENT], tokens)}
        if not others:
            continue
        operands = gemm.activations(calls[PRESENT], shape.max_tokens, bench.at)
        for name, call in {PRESENT: calls[PRESENT], **others}.items():
            works, shared = gemm.works(bench, call, packed, operands, tokens)
            works[0]()
            bench.device.synchronize()
            outs[name] = shared["out"][:tokens, : call.matrices["out"].columns].float()
            contestants[name] = bench.ours(works)
        amax, seconds = float(outs[PRESENT].abs().max()), interleaved(bench, contestants, ROUNDS)
        wrong = [name for name, out in outs.items() if not float((out - outs[PRESENT]).abs().max()) < gemm.SAME * amax]
        found = {name: ratio(seconds[PRESENT], seconds[name]) for name in others}
        best = max(found, key=found.__getitem__)
        values: dict[str, float | str] = {"seconds": median(seconds[PRESENT]), "best": best, "by": found[best]}
        report.add(
            f"tiles/{format.name}/{shape.name}/{tokens}",
            **values,
            **({"error": f"{', '.join(wrong)}: not what the present tiles give"} if wrong else {}),
        )
        ratios[tokens] = found
    return ratios


def differ(one: OpCall, other: OpCall, tokens: int) -> bool:
    """Returns True if the two calls have different launches for this number of tokens."""
    sizes = gemm.sizes_of(tokens)
    first, second = ([launch for launch in call.launches if launch.runs(sizes)] for call in (one, other))
    return first != second


def summary(report: Report, format: gemm.WeightFormat, ratios: Sequence[dict[int, dict[str, float]]]) -> None:
    """Over all shapes: of each variant, the geometric mean; 1 where it changes nothing."""
    for kind, wanted in (("few tokens", lambda tokens: tokens <= FEW), ("many tokens", lambda tokens: tokens > FEW)):
        found = [by_name for one in ratios for tokens, by_name in one.items() if wanted(tokens)]
        names = dict.fromkeys(name for by_name in found for name in by_name)
        means = {name: geometric_mean(by_name.get(name, 1.0) for by_name in found) for name in names}
        if means:
            report.add(f"tiles/{format.name}/{kind}", **dict(sorted(means.items(), key=lambda one: -one[1])))


def run(report: Report) -> None:
    bench = GpuBench()
    formats = (*gemm.FORMATS, *gemm.HOPPER) if bench.sm == "sm_90a" else gemm.FORMATS
    ratios: dict[str, list[dict[int, dict[str, float]]]] = {format.name: [] for format in formats}
    for shape in gemm.SHAPES:
        weights = gemm.Weights(bench, shape)
        for format in formats:
            try:
                ratios[format.name].append(measure(bench, report, format, shape, weights))
            except EngineError as problem:
                report.add(f"tiles/{format.name}/{shape.name}", error=str(problem)[:300])
        del weights
        torch.cuda.empty_cache()
    for format in formats:
        summary(report, format, ratios[format.name])
