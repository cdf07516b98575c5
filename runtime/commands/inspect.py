"""`engine inspect`: shows the contents of an engine file, and how many sequences of which length fit a memory."""

from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from enginewright.adapter_file import AdapterFile
from enginewright.code import CODE, read_code
from enginewright.engine_file import EngineFile
from enginewright.manifest import WEIGHTS, SectionForm, rank_sizes
from enginewright.rank_layout import ONE_RANK, RankLayout
from enginewright.runtime.commands.quality import QUALITY, QualityReport, describe_quality
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.machine import free_memory
from enginewright.runtime.device.memory_plan import FREE_SHARE, plan_memory, sequence_bytes
from enginewright.runtime.device.ranks.shares import RankShare, check_gpu_ranks, check_ranks, rank_shares, shares_of
from enginewright.runtime.engine import Engine
from enginewright.targets import CPU, CUDA, PTX, architectures, platforms_of

LENGTHS = (512, 2048, 8192, 32768, 131072)


def summarize(path: Path, memory: int | None = None, layout: RankLayout = ONE_RANK) -> dict[str, Any]:
    """Collects everything that `inspect` shows of an engine or an adapter, ready for JSON.

    Args:
        path: the file.
        memory: bytes for weights, arena and KV cache together; None is what `engine run` would use on this machine.
        layout: arrangement of the processes that compute the model together.

    Raises:
        CorruptEngineError: the file is damaged.
        UsageError: the engine does not run on several ranks.
    """
    with EngineFile.open(path, check_sections=False, adapters=True) as file:
        if file.manifest.engine is not None:
            return _summarize_adapter(path)
        target = next(iter(platforms_of(file.manifest.targets)), CPU)
        check_ranks(layout)
    with Engine.open(path, target) as engine:
        manifest, plan = engine.manifest, engine.plan
        config = RuntimeConfig(max_num_seqs=manifest.limits.max_batch_size, kv_cache_memory=1 << 60)
        sizes = plan_memory(plan, config, for_running_only=True)
        total = free_memory() if memory is None else memory
        share = FREE_SHARE if memory is None else 1.0
        kv_cache_bytes = max(int((total - engine.weight_bytes - sizes.arena_bytes) * share), 0)
        lengths = [length for length in LENGTHS if length < plan.max_seq_len] + [plan.max_seq_len]
        fits = {
            length: kv_cache_bytes // sequence_bytes(plan.caches, length, sizes.limits.tokens) for length in lengths
        }
        return {
            "path": str(path),
            "file_bytes": engine.file.file_bytes,
            "name": manifest.name,
            "model_type": manifest.model_type,
            "targets": list(manifest.targets),
            "recipe": manifest.recipe,
            "messages": _messages(engine),
            "content_hash": manifest.content_hash,
            "quality": _quality(engine.file),
            "ranks": [asdict(one) for one in _shares(engine, layout)] if layout.size > 1 else [],
            "gpus": [1, *rank_sizes(engine.file.sections, CUDA)] if CUDA in platforms_of(manifest.targets) else [],
            "format_version": manifest.format_version,
            "builder_version": manifest.builder_version,
            "sources": manifest.sources,
            "vocab_size": plan.vocab_size,
            "max_seq_len": plan.max_seq_len,
            "kernels": sorted({call.kernel for call in plan.calls}),
            "steps": len(plan.calls),
            "code": _code(engine.file),
            "kv_groups": [
                {
                    "layers": len(group.layers),
                    "kv_heads": group.planes[0].heads,
                    "head_dim": group.planes[0].dim,
                    "window": group.window,
                    "dtype": group.planes[0].dtype,
                    "bytes_per_token": group.bytes_per_token,
                }
                for group in plan.paged_caches
            ],
            "roles": {role: _role(engine.for_role(role), config) for role in manifest.roles},
            "speculate": manifest.speculate,
            "recurrent_states": [
                {
                    "layers": len(state.layers),
                    "tensors": {
                        tensor.name: {"shape": tensor.shape, "dtype": tensor.dtype} for tensor in state.tensors
                    },
                    "bytes_per_sequence": state.bytes_per_sequence,
                    "snapshot_tokens": state.snapshot_tokens,
                }
                for state in plan.recurrent_states
            ],
            "memory": {
                "given_bytes": total,
                "weight_bytes": engine.weight_bytes,
                "arena_bytes": sizes.arena_bytes,
                "kv_cache_bytes": kv_cache_bytes,
                "kv_cache_share": share,  # share of what weights and arena leave of given_bytes
                "kv_bytes_per_token": plan.kv_bytes_per_token(),
                "state_bytes_per_sequence": plan.state_bytes_per_sequence(),
                "sequences_by_length": fits,
            },
            "sections": _sections(engine.file),
        }


def _summarize_adapter(path: Path) -> dict[str, Any]:
    with AdapterFile.open(path) as adapter:
        manifest = adapter.file.manifest
        return {
            "path": str(path),
            "file_bytes": adapter.file.file_bytes,
            "name": manifest.name,
            "model_type": manifest.model_type,
            "engine": manifest.engine,
            "recipe": manifest.recipe,
            "content_hash": manifest.content_hash,
            "format_version": manifest.format_version,
            "builder_version": manifest.builder_version,
            "sources": manifest.sources,
            "max_rank": adapter.max_rank,
            "layers": len(adapter.sites),
            "rows": sum(site.replaced.count for site in adapter.sites.values() if site.replaced is not None),
            "memory_bytes": adapter.num_bytes,
            "quality": _quality(adapter.file),
            "sections": _sections(adapter.file),
        }


def _sections(file: EngineFile) -> dict[str, Any]:
    return {
        name: {"bytes": form.nbytes, "dtype": form.dtype, "shape": form.shape, "layout": form.layout}
        for name, form in file.sections.items()
    }


def _shares(engine: Engine, layout: RankLayout) -> list[RankShare]:
    """The part of each rank on the platform that the engine was opened for."""

    def form(name: str) -> SectionForm:
        return engine.weight(name)[1]

    if engine.target == CPU:
        return rank_shares(engine.plan, form, layout)
    check_gpu_ranks(layout)
    return shares_of([engine.for_rank(rank, layout.tensor).plan for rank in range(layout.tensor)], form)


def _code(file: EngineFile) -> dict[str, dict[str, int]]:
    """Number of kernels and bytes of code for each GPU architecture."""
    names = [f"{CODE}{architecture}" for architecture in architectures(file.manifest.targets)]
    archives = {name: read_code(file.section(name), name) for name in names}
    return {
        name.removeprefix(CODE): {"kernels": len(archive.launches), "bytes": file.sections[name].nbytes}
        for name, archive in archives.items()
    }


def _role(engine: Engine, config: RuntimeConfig) -> dict[str, Any]:
    """Sizes of a model that the engine has in addition to its main one."""
    plan = engine.plan
    return {
        "vocab_size": plan.vocab_size,
        "max_seq_len": plan.max_seq_len,
        "steps": len(plan.calls),
        "weight_bytes": engine.plan_weight_bytes(),
        "arena_bytes": plan_memory(plan, config).arena_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token(),
        "state_bytes_per_sequence": plan.state_bytes_per_sequence(),
    }


def _messages(engine: Engine) -> dict[str, str | None]:
    """Format of calls and reasoning, as detected from the chat template."""
    form = engine.tokenizer.message_format
    return {
        "tool_call_parser": None if form.calls is None else form.calls.name,
        "reasoning": None if form.reasoning is None else f"{form.reasoning.open}…{form.reasoning.close}",
    }


def _quality(file: EngineFile) -> dict[str, Any] | None:
    """Quality report of a file; None if it has none."""
    if QUALITY not in file.sections:
        return None
    return QualityReport.from_json(file.read_section(QUALITY)).to_dict()


def describe(summary: dict[str, Any], *, every_section: bool = False) -> str:
    """Formats a summary for people.

    Args:
        summary: the result of `summarize`.
        every_section: whether to list the weights one by one.
    """
    if "engine" in summary:
        return "\n".join((*_adapter_lines(summary), *_section_lines(summary["sections"], every_section)))
    memory, recipe, report = summary["memory"], summary["recipe"], summary["quality"]
    quality = _quality_lines(report)
    lines = [
        f"{summary['path']}: {summary['name']} ({summary['model_type']}), {format_bytes(summary['file_bytes'])}",
        f"  recipe     {_listed(recipe)}",
        f"  targets    {', '.join(summary['targets'])}; built by enginewright {summary['builder_version']}",
        f"  content    sha256:{summary['content_hash']}",
        *(f"  {name:<10} {line}" for name, line in zip_longest(["quality"], quality, fillvalue="")),
        *_message_lines(summary["messages"]),
        f"  plan       {summary['steps']} kernel calls of {', '.join(summary['kernels'])}",
    ]
    for role, entry in summary["roles"].items():
        takes = f"{format_bytes(entry['weight_bytes'])} weights, {format_bytes(entry['arena_bytes'])} arena"
        per_token = f"{format_bytes(entry['kv_bytes_per_token'])} of KV per token"
        lines.append(f"  {role:<10} {entry['steps']} kernel calls, {takes}, {per_token}")
    if summary["speculate"] is not None:
        lines.append(f"  speculate  {summary['speculate']}, where --speculate says nothing else")
    for architecture, code in summary["code"].items():
        just_in_time = ", compiled where it is loaded" if architecture == PTX else ""
        count = f"{code['kernels']} {'kernel' if code['kernels'] == 1 else 'kernels'}"
        lines.append(f"  code       {architecture}: {count}, {format_bytes(code['bytes'])}{just_in_time}")
    if len(summary["gpus"]) > 1:
        lines.append(f"  GPUs       {' or '.join(map(str, summary['gpus']))}, by --tensor-parallel-size")
    for group in summary["kv_groups"]:
        window = f"window {group['window']}" if group["window"] else "all positions"
        heads = f"{group['kv_heads']} heads of {group['head_dim']} as {group['dtype']}"
        per_token = f"{format_bytes(group['bytes_per_token'])} per token"
        lines.append(f"  KV         {group['layers']} layers of {heads}, {window}: {per_token}")
    for state in summary["recurrent_states"]:
        tensors = ", ".join(
            f"{name} {'×'.join(map(str, tensor['shape']))} as {tensor['dtype']}"
            for name, tensor in state["tensors"].items()
        )
        size = f"{format_bytes(state['bytes_per_sequence'])} per sequence, however long"
        lines.append(f"  state      {state['layers']} layers of {tensors}: {size}")
    lines.append(
        f"  memory     {format_bytes(memory['weight_bytes'])} weights, {format_bytes(memory['arena_bytes'])} arena"
    )
    for rank, share in enumerate(summary["ranks"]):
        lines.append(f"  {f'rank {rank}':<11}{RankShare(**share).describe()}")
    given, kv_cache = format_bytes(memory["given_bytes"]), format_bytes(memory["kv_cache_bytes"])
    if memory["kv_cache_share"] < 1:
        lines.append(
            f"{'':13}of the {given} that are free, `engine run` takes {kv_cache} for the KV cache, which holds"
        )
    else:
        option = f"--kv-cache-memory {memory['kv_cache_bytes'] >> 20}m"
        lines.append(f"{'':13}in {given}, {kv_cache} are left for the KV cache (`engine run {option}`), which holds")
    for length, count in memory["sequences_by_length"].items():
        lines.append(f"{count:>16,} sequences of {length:,} positions")
    return "\n".join((*lines, *_section_lines(summary["sections"], every_section)))


def _quality_lines(report: dict[str, Any] | None) -> list[str]:
    return ["not known"] if report is None else describe_quality(QualityReport.from_dict(report))


def _adapter_lines(summary: dict[str, Any]) -> list[str]:
    size, quality = format_bytes(summary["memory_bytes"]), _quality_lines(summary["quality"])
    rows = f", and {summary['rows']} rows of its own" if summary["rows"] else ""
    return [
        f"{summary['path']}: the adapter {summary['name']} ({summary['model_type']}), "
        f"{format_bytes(summary['file_bytes'])}",
        f"  recipe     {_listed(summary['recipe'])}; built by enginewright {summary['builder_version']}",
        f"  engine     sha256:{summary['engine']}",
        f"  content    sha256:{summary['content_hash']}",
        f"  changes    {summary['layers']} layers of the engine, with ranks of up to {summary['max_rank']}{rows}",
        f"  memory     {size} of matrices",
        *(f"  {name:<10} {line}" for name, line in zip_longest(["quality"], quality, fillvalue="")),
    ]


def _section_lines(sections: dict[str, Any], every_section: bool) -> list[str]:
    lines = ["  sections"]
    weights = {name: entry for name, entry in sections.items() if name.startswith(WEIGHTS)}
    shown = sections if every_section else {name: entry for name, entry in sections.items() if name not in weights}
    for name, entry in sorted(shown.items()):
        form = f"{entry['dtype']} {list(entry['shape'])} {entry['layout']}" if entry["dtype"] else ""
        lines.append(f"{entry['bytes']:>16,} bytes  {name}  {form}".rstrip())
    if not every_section:
        total = sum(entry["bytes"] for entry in weights.values())
        lines.append(f"{total:>16,} bytes  {len(weights)} weights (--sections lists them)")
    return lines


def _message_lines(messages: dict[str, str | None]) -> list[str]:
    parser, reasoning = messages["tool_call_parser"], messages["reasoning"]
    if parser is None and reasoning is None:
        return []
    calls = "no known format of calls" if parser is None else f"calls as of --tool-call-parser {parser}"
    return [f"  messages   {calls}{'' if reasoning is None else f', reasoning in {reasoning}'}"]


def _listed(recipe: dict[str, Any]) -> str:
    entries = {key: f"({_listed(value)})" if isinstance(value, dict) else value for key, value in recipe.items()}
    return ", ".join(f"{key} {value}" for key, value in entries.items())
