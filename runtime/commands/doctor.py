"""`engine doctor`: describes this machine, and how an engine would run on it. Nothing is allocated or run."""

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from enginewright import __version__, _cpu
from enginewright.errors import EngineError
from enginewright.runtime import env
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device import machine
from enginewright.runtime.device.cpu.executor import choose_isa
from enginewright.runtime.device.cuda.device import describe_gpus
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.device.memory_plan import KvBlocks, places_of
from enginewright.runtime.engine import Engine
from enginewright.runtime.speculation.methods import plan_models, with_method
from enginewright.targets import CPU

SLOW_ISAS = {
    "portable": "this CPU has no AVX2: kernels in portable C++ are several times slower",
    "avx2": "this CPU has AVX2 without VNNI: products of integers take about twice the time",
}
FEW_FILES = 1024  # file descriptors, below which a server can accept few connections


def examine(path: Path | None, config: RuntimeConfig, root: Path = machine.ROOT) -> dict[str, Any]:
    """Describes the machine and an engine on it.

    Args:
        path: an engine file; None describes only the machine.
        config: limits of the engine.
        root: the root of the file system that describes the machine.

    Returns:
        Facts, with the lists `problems`, the reasons why the engine cannot run here, and `warnings`.
    """
    report: dict[str, Any] = {"enginewright": __version__, "cpu": _cpu_facts(root), "memory": _memory_facts(root)}
    report |= {"gpus": describe_gpus(), "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    problems: list[str] = []
    if path is not None:
        try:
            with open_engine(path, config.device) as engine:
                report["engine"] = _engine_facts(engine, config, report["cpu"])
        except EngineError as error:
            problems.append(str(error))
    return report | {"warnings": list(_warnings(report)), "problems": problems}


def _nodes_line(nodes: Sequence[int]) -> str:
    """Describes memory nodes by their numbers of CPUs."""
    return f"{len(nodes)} memory nodes of {', '.join(map(str, nodes))} CPUs: try --tensor-parallel-size {len(nodes)}"


def _cpu_facts(root: Path) -> dict[str, Any]:
    quotas = list(machine.processor_limits(root))
    return {
        "name": machine.processor_name(root),
        "isas": _cpu.isa_names(),
        "cores": machine.num_cores(root),  # threads by default
        "allowed_cpus": len(os.sched_getaffinity(0)),
        "machine_cpus": os.cpu_count(),
        "control_group_cores": min(quotas, default=None),
        "caches": machine.caches(root),
        "memory_nodes": [len(cpus) for cpus in machine.memory_nodes(root)],
    }


def _memory_facts(root: Path) -> dict[str, Any]:
    total = machine.total_memory(root)
    limits = [
        limit for limit, _, _ in machine.memory_limits(root) if limit < total
    ]  # without a limit, the system reports a larger number
    return {
        "total_bytes": total,
        "free_bytes": machine.free_memory(root),
        "control_group_bytes": min(limits, default=None),
        "transparent_huge_pages": machine.transparent_huge_pages(root),
    }


def _engine_facts(engine: Engine, config: RuntimeConfig, cpu: dict[str, Any]) -> dict[str, Any]:
    """Facts about the engine. Raises EngineError if it cannot run with this config."""
    plan = engine.plan
    on_cpu = engine.target == CPU
    isa = choose_isa(config.isa or env.cpu_isa()) if on_cpu else None
    free = None if on_cpu else describe_gpus()[int(config.device.partition(":")[2] or 0)]["free_bytes"]
    config = with_method(engine, config)
    memory, draft = plan_models(engine, config, free)
    num_full_sequences = [
        count // places_of(group, memory.max_model_len, memory.limits.tokens)
        for count, group in zip(memory.num_blocks, plan.caches, strict=True)
    ]
    blocks = KvBlocks.of(plan.caches, memory.num_blocks)
    return {
        "path": str(engine.file.path),
        "name": engine.manifest.name,
        "device": engine.target,
        "isa": isa,
        "threads": (config.threads or env.num_threads() or cpu["cores"]) if on_cpu else None,
        "kernels": sorted({call.kernel for call in plan.calls}),
        "max_model_len": memory.max_model_len,
        "weight_bytes": engine.weight_bytes,
        "arena_bytes": memory.arena_bytes,
        "kv_cache_bytes": memory.kv_bytes,
        "kv_cache_tokens": None if blocks is None else blocks.tokens,
        "whole_sequences": min(num_full_sequences, default=None),
        "speculate": config.speculate,
        "draft": None if draft is None else {"arena_bytes": draft.arena_bytes, "kv_cache_bytes": draft.kv_bytes},
    }


def _warnings(report: dict[str, Any]) -> Iterator[str]:
    cpu, memory, engine = report["cpu"], report["memory"], report.get("engine")
    isa = cpu["isas"][0] if engine is None else engine["isa"]
    if isa in SLOW_ISAS:
        yield SLOW_ISAS[isa] if isa == cpu["isas"][0] else f"{isa} is chosen, and this CPU has {cpu['isas'][0]}"
    if cpu["control_group_cores"] is not None and cpu["control_group_cores"] < cpu["allowed_cpus"]:
        yield (
            f"the control group gives time for {cpu['control_group_cores']} of {cpu['allowed_cpus']} CPUs: threads may "
            "be stopped within a step; whole CPUs (cpusets) give a steadier speed"
        )
    if memory["transparent_huge_pages"] == "never":
        yield "transparent huge pages are off: large matrices are read more slowly (set them to madvise or always)"
    if report["open_files"] < FEW_FILES:
        yield f"the limit of open files is {report['open_files']}: a server takes few connections (ulimit -n)"
    if engine is None:
        return
    if engine["threads"] is not None and engine["threads"] > cpu["cores"]:
        yield f"{engine['threads']} threads share {cpu['cores']} cores: more threads than cores make each step slower"
    arena_bytes = engine["arena_bytes"] + (engine["draft"]["arena_bytes"] if engine["draft"] else 0)
    if engine["device"] == CPU and engine["weight_bytes"] + arena_bytes > memory["free_bytes"]:
        yield (
            f"the weights take {format_bytes(engine['weight_bytes'])}, and {format_bytes(memory['free_bytes'])} are "
            "free: each step reads a part of them from the disk"
        )
    if report["gpus"] and engine["device"] == CPU:
        yield "there is a GPU, and this engine does not run on it: it has no code for it, or --device is cpu"


def describe(report: dict[str, Any]) -> str:
    """The report for people."""
    cpu, memory = report["cpu"], report["memory"]
    caches = ", ".join(f"{name} {format_bytes(size)}" for name, size in cpu["caches"].items())
    quota, limit = cpu["control_group_cores"], memory["control_group_bytes"]
    lines = [
        ("enginewright", report["enginewright"]),
        ("CPU", cpu["name"] or "not known"),
        ("", f"instruction sets: {', '.join(cpu['isas'])}"),
        (
            "",
            f"{cpu['cores']} cores compute; {cpu['allowed_cpus']} of {cpu['machine_cpus']} CPUs are allowed, "
            f"the control group {'has no limit' if quota is None else f'fills {quota}'}",
        ),
        *([("", f"caches: {caches}")] if caches else ()),
        *([("", _nodes_line(cpu["memory_nodes"]))] if len(cpu["memory_nodes"]) > 1 else ()),
        (
            "memory",
            f"{format_bytes(memory['free_bytes'])} free of {format_bytes(memory['total_bytes'])}, "
            f"the control group {'has no limit' if limit is None else f'allows {format_bytes(limit)}'}",
        ),
        ("", f"transparent huge pages: {memory['transparent_huge_pages'] or 'not known'}"),
        *(
            ("GPU", f"{gpu['name']}, {gpu['architecture']}, {format_bytes(gpu['total_bytes'])}, CUDA {gpu['cuda']}")
            for gpu in report["gpus"]
        ),
        *([] if report["gpus"] else [("GPU", "none, or no driver, or cuda-bindings is not installed")]),
        ("open files", str(report["open_files"])),
    ]
    if engine := report.get("engine"):
        where = engine["device"] if engine["isa"] is None else f"{engine['isa']}, {engine['threads']} threads"
        lines += [
            ("engine", f"{engine['path']}: {engine['name']}"),
            ("", f"runs on {where}, with {', '.join(engine['kernels'])}"),
            (
                "",
                f"{format_bytes(engine['weight_bytes'])} weights, {format_bytes(engine['arena_bytes'])} arena, "
                f"{format_bytes(engine['kv_cache_bytes'])} KV cache",
            ),
        ]
        if engine["kv_cache_tokens"] is not None:
            fit = f"which holds {engine['kv_cache_tokens']:,} tokens, or {engine['whole_sequences']:,} sequences"
            lines.append(("", f"{fit} of {engine['max_model_len']:,} positions"))
        if draft := engine["draft"]:
            arena, cache = format_bytes(draft["arena_bytes"]), format_bytes(draft["kv_cache_bytes"])
            lines.append(("", f"and {arena} arena and {cache} KV cache for the draft model ({engine['speculate']})"))
    lines += [("warning", text) for text in report["warnings"]] + [("problem", text) for text in report["problems"]]
    return "\n".join(f"{name:<13} {text}".rstrip().replace("\n", f"\n{'':<13} ") for name, text in lines)
