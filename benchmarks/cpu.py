"""This engine and its peers on a CPU: the same models, tokens and threads, in interleaved rounds of one run.

    python benchmarks/cpu.py                 everything, hours; benchmarks/README.md says what, and how to read it
    python benchmarks/cpu.py --quick         a little of everything, to see that it works
    python benchmarks/cpu.py --models llama-1b --classes 4-bit --points decode-0x1 decode-4096x1
    python benchmarks/cpu.py --render        write table and plot again, from the existing results

Results are written after every part, as OUTPUT.json, .md and .svg. With --add, the parts that this run
measures replace those of the existing results, and the rest stays.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peers.worker import NotMeasured
from protocol import models, points
from protocol.engines import (
    AVX2,
    BF16_KV,
    BUILDS,
    CLASSES,
    NATIVE,
    PEERS,
    EngineUnderTest,
    PeerEnvironment,
    engines_under_test,
)
from protocol.idle_guard import IdleGuard
from protocol.models import Model
from protocol.points import Point
from protocol.quality import held_out, judge
from protocol.results import Results
from protocol.rounds import Measurement, prepare
from protocol.start import first_tokens

from enginewright import _cpu
from enginewright.runtime.device.machine import free_memory, num_cores
from enginewright_bench.machine_facts import machine_facts
from enginewright_bench.roofline import measure_dots

OUTPUT = Path("benchmarks/results/cpu")
PARTS = ("build", "start", "speed", "quality")
START_ROUNDS = 3
MEMORY_SHARE = 0.85  # of what is free, that all engines of a class together may take
BYTES = {"BF16": 2.0, "8-bit": 1.1, "4-bit": 0.7}  # of a weight, to estimate that
OVERHEAD = 1.5  # memory of an engine without its KV cache, as a multiple of its weights


def main() -> None:
    arguments = parse()
    results = Results(arguments.output, add=arguments.add or arguments.render, hidden=arguments.envs)
    if arguments.render:
        results.render()
        return
    pin(arguments.cores, arguments.threads)
    idle_guard = IdleGuard(noisy=arguments.noisy, wait_s=arguments.wait)
    environment = PeerEnvironment(arguments.envs, arguments.pythons, arguments.threads, arguments.ik_llama)
    arguments.envs.mkdir(parents=True, exist_ok=True)
    taking_part = engines_under_test(arguments.peers, arguments.builds, every_setting=not arguments.one_setting)
    wanted = [one for one in taking_part if one.kind in arguments.classes and one.isa in arguments.isas]
    results.about(settings_of(arguments), machine())
    try:
        for name in arguments.models:
            model = models.model(name, environment.models, arguments.smollm2)
            for part in arguments.parts:
                PART[part](model, wanted, environment, idle_guard, arguments, results)
    except NotMeasured as reason:
        raise SystemExit(f"stopped: {reason}") from None
    failed = [one.name for one in BUILDS if one.name in arguments.builds and results.failed(f"engine {one.name}")]
    if failed:
        raise SystemExit(f"not measured, though it is ours: {', '.join(failed)}")


def build_part(
    model: Model,
    wanted: Sequence[EngineUnderTest],
    environment: PeerEnvironment,
    idle_guard: IdleGuard,
    arguments: Any,
    results: Results,
) -> None:
    rows = []
    for one in BUILDS:
        if not any(entry.name == f"engine {one.name}" for entry in wanted) or not model.timed:
            continue
        idle_guard.wait()
        row: dict[str, Any] = {"name": one.name, "checkpoint_bytes": model.checkpoint_bytes}
        try:
            made = asdict(environment.build(one, model))
            row |= {name: value for name, value in made.items() if name != "path"}
        except NotMeasured as reason:
            row["not_measured"] = str(reason)
        rows.append(row)
    if rows:
        results.put("build", model.name, rows)


def start_part(
    model: Model,
    wanted: Sequence[EngineUnderTest],
    environment: PeerEnvironment,
    idle_guard: IdleGuard,
    arguments: Any,
    results: Results,
) -> None:
    if model.timed:
        entries = prepare(firsts(wanted), model, replace(environment, sequences=1, kv_tokens=1024))
        results.put("start", model.name, first_tokens(entries, min(arguments.rounds, START_ROUNDS), idle_guard))


def quality_part(
    model: Model,
    wanted: Sequence[EngineUnderTest],
    environment: PeerEnvironment,
    idle_guard: IdleGuard,
    arguments: Any,
    results: Results,
) -> None:
    if model.judged:
        texts = held_out(model, 2 if arguments.quick else None)
        longest = max(map(len, texts))
        entries = prepare(
            firsts(wanted), model, replace(environment, sequences=1, positions=longest + 64, kv_tokens=4096)
        )
        results.put("quality", model.name, judge(entries, model, texts))


def speed_part(
    model: Model,
    wanted: Sequence[EngineUnderTest],
    environment: PeerEnvironment,
    idle_guard: IdleGuard,
    arguments: Any,
    results: Results,
) -> None:
    if not model.timed:
        return
    for kind, isa, members in groups(wanted):
        group = f"{model.name}, {kind}" + ("" if isa == NATIVE else f", {isa.upper()}")
        chosen, too_much = fitting(arguments.points, model, kind, len(members), arguments.rounds)
        for point, reason in too_much.items():
            results.put("speed", group, {"not_measured": reason}, point)
        if not chosen:
            continue
        sized = replace(
            environment,
            sequences=max(point.prompts for point in chosen),
            positions=max(point.positions(2 * arguments.rounds) for point in chosen),
            kv_tokens=max(point.prompts * point.positions(2 * arguments.rounds) for point in chosen),
        )
        entries = prepare(members, model, sized)
        try:
            for point in chosen:
                for entry in entries:
                    entry.start()
                print(f"measuring {group}: {point.name}", file=sys.stderr, flush=True)
                measurement = Measurement(entries, model, point, arguments.rounds, arguments.threads, idle_guard)
                results.put("speed", group, {"class": kind, "isa": isa} | measurement.run(), point.name)
        finally:
            for entry in entries:
                entry.close()


PART = {"build": build_part, "start": start_part, "speed": speed_part, "quality": quality_part}


def firsts(wanted: Sequence[EngineUnderTest]) -> list[EngineUnderTest]:
    """Everybody once, on the machine's own instructions."""
    return [one for one in wanted if one.setting == "" and one.isa == NATIVE]


def groups(wanted: Sequence[EngineUnderTest]) -> Iterator[tuple[str, str, list[EngineUnderTest]]]:
    """Who is measured together: one class, one kind of instructions."""
    for isa in (NATIVE, AVX2):
        for kind in CLASSES:
            members = [one for one in wanted if one.kind == kind and one.isa == isa]
            if members:
                yield kind, isa, members


def fitting(
    wanted: Sequence[Point], model: Model, kind: str, engines: int, rounds: int
) -> tuple[list[Point], dict[str, str]]:
    """The points that the memory has room for with all engines at once, and why not the others."""
    weights = (model.stored_weights + model.head_weights) * BYTES[kind] * OVERHEAD
    free, chosen, too_much = free_memory() * MEMORY_SHARE, [], {}
    for point in wanted:
        kv = point.prompts * point.positions(2 * rounds) * model.kv_values * BF16_KV
        need = engines * (weights + kv)
        if need <= free:
            chosen.append(point)
        else:
            each = f"{kv / 1e9:.1f} GB of KV each"
            too_much[point.name] = f"{engines} engines with {each} would take {need / 1e9:.0f} GB of {free / 1e9:.0f}"
    return chosen, too_much


def pin(cores: list[int] | None, threads: int) -> None:
    """This process, and so all that it starts, onto the given processors, or one of each of the first cores."""
    if cores is None:
        first: dict[str, int] = {}
        for cpu in sorted(os.sched_getaffinity(0)):
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            first.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
        cores = list(first.values())[:threads]
    os.sched_setaffinity(0, cores)
    if len(os.sched_getaffinity(0)) != threads:
        raise SystemExit(f"{threads} threads need as many processors; there are {sorted(os.sched_getaffinity(0))}")


def machine() -> dict[str, Any]:
    """Facts about the machine. dots: operations/s of each instruction set, on registers alone."""
    isas, processors = _cpu.isa_names(), sorted(os.sched_getaffinity(0))
    dots = {isa: {name: asdict(rate) for name, rate in measure_dots(isa, len(processors)).items()} for isa in isas}
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts = machine_facts("torch", "transformers")
    return {**facts, "processors": processors, "memory_bytes": memory_bytes, "isas": isas, "dots": dots}


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of this run, without folders."""
    names = (
        "rounds",
        "threads",
        "noisy",
        "quick",
        "one_setting",
        "models",
        "classes",
        "isas",
        "peers",
        "builds",
        "parts",
    )
    found = {name: getattr(arguments, name) for name in names}
    return found | {"points": [point.name for point in arguments.points]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    builds = [one.name for one in BUILDS]
    parser.add_argument("--models", nargs="+", choices=tuple(models.KINDS), default=list(models.KINDS))
    parser.add_argument("--classes", nargs="+", choices=tuple(CLASSES), default=list(CLASSES))
    parser.add_argument("--isas", nargs="+", choices=(NATIVE, AVX2), default=[NATIVE, AVX2])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--builds", nargs="*", choices=builds, default=builds, help="of ours")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--points", nargs="+", metavar="POINT", help="prefill-512, decode-4096x8, in-flight-32x128x64")
    parser.add_argument("--rounds", type=int, help="that count  [5; 2 with --quick]")
    parser.add_argument("--quick", action="store_true", help="few points, rounds and texts, one setting of each peer")
    parser.add_argument("--one-setting", action="store_true", help="each peer at its first setting, not its whole grid")
    parser.add_argument("--threads", type=int, default=min(2, num_cores()))
    parser.add_argument("--cores", type=int, nargs="+", help="processors to run on  [one of each of the first cores]")
    parser.add_argument("--noisy", action="store_true", help="measure though other work runs; results are marked so")
    parser.add_argument("--wait", type=float, default=300, help="seconds for other work to end")
    parser.add_argument("--smollm2", type=Path, default=models.SMOLLM2, help="its .gguf file, or a folder")
    parser.add_argument("--envs", type=Path, default=work_folder(), help="environments, models, logs  [%(default)s]")
    parser.add_argument(
        "--python",
        dest="pythons",
        metavar="NAME=PATH",
        type=named_path,
        action="append",
        default=[],
        help="the interpreter of an environment that is there: llama.cpp, llama.cpp-avx2, openvino, vllm, transformers",
    )
    parser.add_argument("--ik-llama", type=Path, help="llama-batched-bench of a built ik_llama.cpp")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="without its suffix  [%(default)s]")
    parser.add_argument("--add", action="store_true", help="to the results that are there")
    parser.add_argument("--render", action="store_true", help="measure nothing, write table and plot again")
    arguments = parser.parse_args()
    names = arguments.points or (points.QUICK if arguments.quick else points.FULL)
    arguments.points = [points.point(name, quick=arguments.quick) for name in names]
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    arguments.one_setting = arguments.one_setting or arguments.quick
    arguments.pythons = dict(arguments.pythons)
    return arguments


def named_path(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} should be NAME=PATH of an interpreter")
    return name, Path(path)


def work_folder() -> Path:
    """Outside the repository: gigabytes that another clone can use."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enginewright/peers"


if __name__ == "__main__":
    main()
