"""Checkpoint → graph → plan → file: the whole build."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from enginewright.builder.adapters import merge_recipe
from enginewright.builder.ahead import begin
from enginewright.builder.assembly import (
    Assembly,
    BuildConfig,
    assemble,
    check_quant,
    chosen_quant,
    default_output,
    with_possible_kv,
)
from enginewright.builder.calibration import RECOVERY, calibrate
from enginewright.builder.checkpoint import Checkpoint
from enginewright.builder.checkpoint.head import HeadFolder
from enginewright.builder.cuda.compile import check_compilers
from enginewright.builder.cuda.sections import code_sections, to_compile
from enginewright.builder.draft import Draft, FirstLayers, add_draft, check_draft, source_of
from enginewright.builder.gate import (
    Subject,
    check_report_path,
    measure,
    measure_vectors,
    refusal,
    write_report,
)
from enginewright.builder.gate.layers import FileWeights
from enginewright.builder.gate.simulate import simulate
from enginewright.builder.progress import Progress, Silent
from enginewright.errors import UsageError
from enginewright.manifest import About
from enginewright.output_file import require_writable, same_file
from enginewright.passes.quant import quant_config
from enginewright.passes.quant.method import Calibration
from enginewright.plugins.target import targets_of
from enginewright.runtime import env
from enginewright.runtime.commands.goldens import GOLDENS, last_logits_of, record, replay_config
from enginewright.runtime.commands.provenance import write_provenance
from enginewright.runtime.commands.quality import QUALITY, QualityReport
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.engine import Engine


@dataclass(frozen=True)
class BuildReport:
    """The result of a build."""

    path: Path  # the engine file
    size_bytes: int  # its size
    content_hash: str  # SHA-256 of its content, without evidence
    weight_bytes: int  # bytes of weights, as stored
    kv_bytes_per_token: int  # bytes of a token in all KV caches
    max_seq_len: int  # positions of the longest sequence
    gives: str  # main output: `logits`, from which tokens are sampled, or one of plan.RESULTS for each text
    rewrites: dict[str, int]  # pass → number of rewrites
    calibration: Mapping[str, Any] | None  # facts about the texts; None if the method needs none
    notes: Sequence[str]  # facts about quantized weights of the checkpoint and its chat template that users should know
    quality: QualityReport  # result of the quality gate

    def to_dict(self) -> dict[str, Any]:
        """Converts the report to JSON's types."""
        return asdict(self) | {"path": str(self.path), "quality": self.quality.to_dict()}


def build_engine(
    checkpoint: Checkpoint,
    config: BuildConfig,
    output: Path,
    progress: Progress | None = None,
    draft: Draft | None = None,
) -> BuildReport:
    """Builds `output` from a checkpoint. It appears complete under its name, or not at all.

    Args:
        checkpoint: the checkpoint.
        config: options of the build.
        output: the engine file.
        progress: receiver of progress; None is nobody.
        draft: a smaller model of the same tokenizer, which the engine holds in the role `draft`, built by
            `config.for_draft`; or a head that was trained for the model, in a role of its kind; or first layers of the
            model itself, in the role `skip`; or the best that the checkpoint offers. The gate does not measure it.

    Raises:
        UnsupportedModelError: the model, or something in it, is not implemented.
        UsageError: the options do not fit the model.
        EngineError: the checkpoint is damaged, or the disk is.
        QualityGateError: the engine is too far from its source.
    """
    with _one_thread():
        return _build(checkpoint, draft, config, output, progress or Silent())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Fixes the order of operations on any machine; packing copies memory, and gains nothing from threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _build(
    checkpoint: Checkpoint, draft: Draft | None, config: BuildConfig, output: Path, progress: Progress
) -> BuildReport:
    _check_outputs(config, output)
    env.source_date()  # an invalid date is refused before the work
    check_quant(checkpoint, config)
    check_draft(checkpoint, draft, config)
    if config.method.calibrated or config.recover:
        progress.phase("check the plan")
        _check_plan(checkpoint, draft, config, output)
    samples = calibrate(checkpoint, config, output, progress)
    sources = begin(checkpoint.source_hashes)
    role, other = source_of(draft) or ("", None)
    draft_sources = begin(other.source_hashes) if other is not None else None
    threads, folder = env.num_threads() or num_cores(), output.absolute().parent
    calibration = None
    if samples:
        texts = samples.texts[::RECOVERY] if config.recover else samples.texts
        calibration = Calibration(texts, threads, folder, samples.texts if config.recover else ())
    assembly = assemble(checkpoint, config, progress, calibration)
    if draft is not None:
        assembly = add_draft(assembly, draft, progress, calibration)
    check_compilers(map(to_compile, assembly.kernels.values()))
    if assembly.kernels:
        progress.phase("compile GPU kernels")
        code = code_sections(assembly.kernels, config.targets)
        assembly = replace(assembly, files={**assembly.files, **code})
    with assembly.writer(output, evidence_sections=2) as writer:
        progress.phase("pack the weights", assembly.weight_bytes)
        assembly.write(writer, progress)
        hashes = dict(sources.result())
        if draft_sources is not None:
            hashes |= {f"{role}/{file}": value for file, value in draft_sources.result().items()}
        about = assembly.about(hashes, **merge_recipe(checkpoint), **(samples.recipe() if samples else {}))
        writer.write_header(about)
        progress.phase("run it once")
        goldens = _goldens(assembly, writer.temporary_path)
        quality = _gate(assembly, writer.temporary_path, about, progress)
        writer.add(GOLDENS, goldens, evidence=True)
        writer.add(QUALITY, quality.to_json(), evidence=True)
        progress.phase("write it to disk")
        manifest = writer.commit(about)
    if config.provenance is not None:
        origins = {name: one.origin for name, one in (("", checkpoint), (f"{role}/", other)) if one is not None}
        write_provenance(output, config.provenance, origins, config.builder_id)
    return BuildReport(
        path=output,
        size_bytes=output.stat().st_size,
        content_hash=manifest.content_hash,
        weight_bytes=assembly.weight_bytes,
        kv_bytes_per_token=assembly.kv_bytes_per_token,
        max_seq_len=assembly.max_seq_len,
        gives=next(iter(assembly.plans.values())).result_name,
        rewrites={name: result.rewrites for name, result in assembly.results.items()},
        calibration=samples.to_dict() if samples else None,
        notes=assembly.notes,
        quality=quality,
    )


def _check_outputs(config: BuildConfig, output: Path) -> None:
    """Refuses outputs that could not be written, before a build that takes minutes."""
    require_writable(output, regular=True)
    others = [config.provenance] if config.provenance is not None else []
    if config.report is not None:
        others += check_report_path(config.report, config.gate)
    for number, path in enumerate(others):
        require_writable(path)
        if any(same_file(path, other) for other in (output, *others[:number])):
            raise UsageError(f"{path} cannot be written", "another output of this build has the same name")
    if config.dump_graphs is not None:
        try:
            config.dump_graphs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror or str(error)
            raise UsageError(f"the folder {config.dump_graphs} cannot be made", why) from error


def _check_plan(checkpoint: Checkpoint, draft: Draft | None, config: BuildConfig, output: Path) -> None:
    """Refuses, before calibration takes minutes, whatever does not depend on it.

    A plan of the same sizes may be impossible, may have kernels that no compiler here can compile, or may have no space
    on the disk.
    """
    planned = assemble(checkpoint, replace(config, dump_graphs=None), Silent())
    if isinstance(draft, FirstLayers | HeadFolder):
        planned = add_draft(planned, draft, Silent())
    check_compilers(map(to_compile, planned.kernels.values()))
    with planned.writer(output, evidence_sections=2):
        pass


def _goldens(assembly: Assembly, path: Path) -> bytes:
    """Records results of the finished engine on this machine; without a plan for its CPU, simulated ones."""
    target = targets_of(assembly.config.targets)[0]
    with Engine.open(path, target.name) as engine:
        config = replay_config(engine.plan.max_seq_len)
        if target.runs_in_builds:
            return record(last_logits_of(CpuExecutor(engine, config)), engine.plan).to_json()
        weights = FileWeights(engine, assembly.section_names)

        def last_logits(prompt: Sequence[int]) -> NDArray[np.float32]:
            dense, end = assembly.dense.clone(), len(prompt)
            method, kv_dtype = assembly.config.method, engine.plan.kv_dtype()
            streamed = simulate(dense, method, target, weights, [prompt], kv_dtype=kv_dtype)
            logits: NDArray[np.float32] = streamed.logits(0, end - 1, end)[0].numpy()
            return logits

        return record(last_logits, engine.plan).to_json()


def _gate(assembly: Assembly, path: Path, about: About, progress: Progress) -> QualityReport:
    """Measures how far the finished engine is from its source.

    Raises:
        QualityGateError: it is too far.
    """
    config = assembly.config
    if config.gate is None:
        return QualityReport("off")
    targets = targets_of(config.targets)
    subject = Subject(path, assembly.imported, assembly.dense, assembly.section_names, config.method, targets)
    generates = all(plan.generates for plan in assembly.plans.values())
    report = (measure if generates else measure_vectors)(config.gate, subject, progress)
    if config.report is not None:
        write_report(report, about, config.report)
    for target, measured in zip(targets, (report.measured, *report.also), strict=True):
        if measured is not None and measured.failed:
            raise refusal(measured, target, config.method, config.kv_cache_dtype)
    return report


__all__ = [
    "BuildConfig",
    "BuildReport",
    "build_engine",
    "chosen_quant",
    "default_output",
    "quant_config",
    "with_possible_kv",
]
