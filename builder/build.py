"""Checkpoint → graph → plan → file: the builder's one road, end to end."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from enginewright.builder.ahead import begin
from enginewright.builder.assembly import (
    BuildConfig,
    assemble,
    check_place,
    check_quant,
    chosen_quant,
    default_output,
)
from enginewright.builder.calibration import calibrate
from enginewright.builder.checkpoint import Checkpoint
from enginewright.builder.progress import Progress, Silent
from enginewright.passes.quant import quant_config
from enginewright.passes.quant.method import Calibration
from enginewright.runtime import env
from enginewright.runtime.engine import Engine
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.goldens import GOLDENS, record, replay_config
from enginewright.runtime.machine import num_cores


@dataclass(frozen=True)
class BuildReport:
    """What was built. weight_bytes: weights as stored. rewrites: pass → number of rewrites. calibration: None if the
    method needs none. notes: what people should know of weights that the checkpoint has quantized.
    """

    path: Path
    size_bytes: int
    content_hash: str
    weight_bytes: int
    kv_bytes_per_token: int
    max_seq_len: int
    rewrites: dict[str, int]
    calibration: Mapping[str, Any] | None
    notes: Sequence[str]

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
    check_place(output)
    check_quant(checkpoint, config)
    sources = begin(checkpoint.source_hashes)
    samples = calibrate(checkpoint, config, output, progress)
    threads, folder = env.num_threads() or num_cores(), output.absolute().parent
    calibration = Calibration(samples.texts, threads, folder) if samples else None
    assembly = assemble(checkpoint, config, progress, calibration)
    with assembly.writer(output, evidence_sections=1) as writer:
        progress.phase("pack the weights", assembly.weight_bytes)
        assembly.write(writer, progress)
        about = assembly.about(sources.result(), **(samples.recipe() if samples else {}))
        writer.write_header(about)
        progress.phase("run it once")
        writer.add(GOLDENS, _goldens(writer.temporary_path), evidence=True)
        progress.phase("write it to disk")
        manifest = writer.commit(about)
    return BuildReport(
        path=output,
        size_bytes=output.stat().st_size,
        content_hash=manifest.content_hash,
        weight_bytes=assembly.weight_bytes,
        kv_bytes_per_token=assembly.kv_bytes_per_token,
        max_seq_len=assembly.max_seq_len,
        rewrites={name: result.rewrites for name, result in assembly.results.items()},
        calibration=samples.to_dict() if samples else None,
        notes=assembly.notes,
    )


def _goldens(path: Path) -> bytes:
    """What the finished engine computes on this machine."""
    with Engine.open(path) as engine:
        executor = CpuExecutor(engine, replay_config(engine.plan.max_seq_len))
        return record(executor, engine.plan.vocab_size).to_json()


__all__ = ["BuildConfig", "BuildReport", "build_engine", "chosen_quant", "default_output", "quant_config"]
