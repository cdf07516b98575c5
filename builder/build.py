"""Checkpoint → graph → plan → file: the builder's one road, end to end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from enginewright import __version__
from enginewright.builder.ahead import ahead, begin
from enginewright.builder.checkpoint import Checkpoint
from enginewright.builder.lower import Lowered, Weight, lower, pack_rows
from enginewright.builder.models import build_graph
from enginewright.builder.progress import Progress, Silent
from enginewright.engine_file import EngineWriter
from enginewright.errors import UsageError
from enginewright.manifest import WEIGHTS, About, Limits
from enginewright.passes.pipeline import run_pipeline
from enginewright.passes.quant import Bf16, QuantConfig, quant_config
from enginewright.passes.weights import open_rows
from enginewright.plan import Plan
from enginewright.runtime.engine import Engine
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.goldens import GOLDENS, record, replay_config

KV_DTYPES = {"bf16": "bf16", "int8": "i8"}  # as --kv-cache-dtype has it → as the plan has it


@dataclass(frozen=True)
class BuildConfig:
    """What a build is asked for.

    kv_cache_dtype: what the KV cache holds, one of KV_DTYPES. max_seq_len: positions of the longest sequence; None
    takes the model's own. max_batch_size: sequences in a step, recorded as the runtime's default and nothing more.
    dump_graphs: folder for one ONNX file a pass.
    """

    quant: QuantConfig = field(default_factory=Bf16)
    targets: tuple[str, ...] = ("cpu",)
    kv_cache_dtype: str = "bf16"
    max_seq_len: int | None = None
    max_batch_size: int = 32
    dump_graphs: Path | None = None


@dataclass(frozen=True)
class BuildReport:
    """What was built. rewrites: pass → number of rewrites. weight_bytes: weights as stored."""

    path: Path
    size_bytes: int
    content_hash: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_seq_len: int
    rewrites: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def build_engine(
    checkpoint: Checkpoint, config: BuildConfig, output: Path, progress: Progress | None = None
) -> BuildReport:
    """Build `output` from a checkpoint. It appears whole under its name, or not at all.

    Raises:
        UnsupportedModelError: the model, or something in it, is not implemented.
        UsageError: the options do not fit the model.
        EngineError: the checkpoint is damaged, or the disk is.
    """
    with _one_thread():
        return _build(checkpoint, config, output, progress or Silent())


@contextmanager
def _one_thread() -> Iterator[None]:
    """One order of operations whatever the machine; packing is copying, which more threads would not speed up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _build(checkpoint: Checkpoint, config: BuildConfig, output: Path, progress: Progress) -> BuildReport:
    sources = begin(checkpoint.source_hashes)
    progress.phase("import the model")
    model = build_graph(checkpoint)
    max_seq_len = _max_seq_len(config, int(model.metadata_props["enginewright.max_seq_len"]))
    progress.phase("run the passes")
    ragged, results = run_pipeline(model, config.quant, config.dump_graphs, KV_DTYPES[config.kv_cache_dtype])
    progress.phase("lower to a plan")
    lowered = {target: lower(ragged, target, max_seq_len) for target in config.targets}

    weights = _merged(lowered)
    weight_bytes = sum(weight.form.nbytes for weight in weights.values())
    files = _files(checkpoint, {target: entry.plan for target, entry in lowered.items()})
    with EngineWriter(output, len(weights) + len(files) + 1, weight_bytes + sum(map(len, files.values()))) as writer:
        for name, data in files.items():
            writer.add(name, data)
        progress.phase("pack the weights", weight_bytes)
        for name, weight in weights.items():
            writer.add(f"{WEIGHTS}{name}", _packed(weight, progress), **asdict(weight.form))
        about = About(
            builder_version=__version__,
            name=checkpoint.name,
            model_type=str(checkpoint.config["model_type"]),
            targets=config.targets,
            recipe={
                "quant": config.quant.name,
                **asdict(config.quant),
                "kv_cache_dtype": config.kv_cache_dtype,
                "max_seq_len": max_seq_len,
                "max_batch_size": config.max_batch_size,
            },
            sources=dict(sources.result()),
            limits=Limits(max_seq_len=max_seq_len, max_batch_size=config.max_batch_size),
        )
        writer.write_header(about)
        progress.phase("run it once")
        writer.add(GOLDENS, _goldens(writer.temporary_path), evidence=True)
        progress.phase("write it to disk")
        manifest = writer.commit(about)
    plan = next(iter(lowered.values())).plan
    return BuildReport(
        path=output,
        size_bytes=output.stat().st_size,
        content_hash=manifest.content_hash,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token(),
        max_seq_len=max_seq_len,
        rewrites={name: result.rewrites for name, result in results.items()},
    )


def _max_seq_len(config: BuildConfig, model_limit: int) -> int:
    if config.max_seq_len is not None and config.max_seq_len > model_limit:
        raise UsageError(
            f"--max-seq-len {config.max_seq_len} is more than the model was made for",
            f"its config says {model_limit} positions",
            f"Use --max-seq-len {model_limit} or less.",
        )
    return config.max_seq_len or model_limit


def _merged(lowered: Mapping[str, Lowered]) -> dict[str, Weight]:
    """The weights of all targets; one that several read alike is stored once."""
    return {name: weight for entry in lowered.values() for name, weight in entry.weights.items()}


def _files(checkpoint: Checkpoint, plans: Mapping[str, Plan]) -> dict[str, bytes]:
    """Sections that are not weights: plans, tokenizer, templates, defaults."""
    tokenizer = checkpoint.tokenizer
    files = {f"plan/{target}": plan.to_json() for target, plan in plans.items()}
    files["tokenizer.json"] = tokenizer.tokenizer_json
    files["tokenizer_config.json"] = msgspec.json.encode(dict(tokenizer.config), order="sorted")
    files["generation_config.json"] = msgspec.json.encode(dict(checkpoint.generation_config), order="sorted")
    if tokenizer.chat_template is not None:
        files["chat_template"] = tokenizer.chat_template.encode()
    return files


def _packed(weight: Weight, progress: Progress) -> Iterator[memoryview]:
    """Reads, converts and packs one weight; what is derived lazily (fused, quantized) happens here."""
    for piece in ahead(pack_rows(open_rows(weight.value), weight.form)):
        progress.advance(piece.nbytes)
        yield piece


def _goldens(path: Path) -> bytes:
    """What the finished engine computes on this machine."""
    with Engine.open(path) as engine:
        executor = CpuExecutor(engine, replay_config())
        return record(executor, engine.plan.vocab_size).to_json()


__all__ = ["BuildConfig", "BuildReport", "build_engine", "quant_config"]
