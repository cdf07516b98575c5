"""`engine build --dry-run`: what a build would make, and what it would take; nothing is written, no weight is read."""

import shutil
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from enginewright.builder.assembly import (
    Assembly,
    BuildConfig,
    assemble,
    check_quant,
)
from enginewright.builder.calibration import foresee_samples
from enginewright.builder.checkpoint import Checkpoint
from enginewright.builder.checkpoint.gguf.file import GgufCheckpoint
from enginewright.builder.cuda.compile import check_compilers
from enginewright.builder.cuda.sections import to_compile
from enginewright.builder.draft import Draft, add_draft, check_draft
from enginewright.builder.gate.gate import STEP_ELEMENTS, TOKENS
from enginewright.builder.lower.pack import TORCH_DTYPES
from enginewright.builder.progress import Progress, Silent
from enginewright.engine_file import header_bytes
from enginewright.engine_header import padded
from enginewright.errors import UsageError
from enginewright.output_file import require_writable
from enginewright.passes.quant import W8A8
from enginewright.passes.quant.auto import Mix
from enginewright.passes.quant.choose import Choose
from enginewright.passes.quant.method import Calibration
from enginewright.runtime.device.machine import free_memory
from enginewright.runtime.step.dims import StepCounter

EVIDENCE_SECTIONS = 2  # goldens, quality report
# Python with torch and onnx takes 200 MB, the graph and pieces of weights the rest.
BASE_BYTES = 300_000_000
COPIES = 4  # of activations in the plan's precision, that calibration or the gate has at once: they are FLOAT there


@dataclass(frozen=True)
class Forecast:
    """What a build would make, and what it would take."""

    output: Path  # the engine file
    name: str
    model_type: str
    recipe: dict[str, Any]  # as the manifest would have it
    kernels: dict[str, dict[str, int]]  # by target, how often each kernel is called
    rewrites: dict[str, int]  # by pass, how many it makes
    refusals: dict[str, list[str]]  # by pass, what it leaves as it is and why, in sentences
    calibration: dict[str, Any] | None  # what is known of the samples; None where none are needed
    notes: list[str]  # as in a BuildReport
    file_bytes: int  # without what a build measures (goldens, a report: some kilobytes)
    weight_bytes: dict[str, int]  # by dtype
    kv_bytes_per_token: int
    max_seq_len: int  # positions
    disk_bytes: int  # the most that is taken at any time of the build
    free_disk_bytes: int  # where the engine file would be
    memory_bytes: int  # an estimate, without pages of files
    free_memory_bytes: int  # of this machine

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"output": str(self.output), "targets": list(self.kernels)}


def forecast(
    checkpoint: Checkpoint, config: BuildConfig, output: Path, progress: Progress, draft: Draft | None = None
) -> Forecast:
    """What `build_engine` would do with the same arguments.

    Raises:
        What it would raise: the model is not supported, or the options do not fit it.
    """
    if config.dump_graphs is not None:
        raise UsageError("--dry-run writes nothing", "and --dump-graphs does", "Leave one of them out.")
    require_writable(output, regular=True)
    check_quant(checkpoint, config)
    if config.report is not None:
        raise UsageError("--dry-run writes nothing", "and --report does", "Leave one of them out.")
    samples = foresee_samples(checkpoint, config)
    assembly = assemble(checkpoint, config, progress)
    check_draft(checkpoint, draft, config)
    if draft is not None:
        assembly = add_draft(assembly, draft, Silent())
    check_compilers(map(to_compile, assembly.kernels.values()))
    writer = assemble(checkpoint, BuildConfig(quant=W8A8()), Silent()) if samples and not config.calib_data else None
    file_bytes = _file_bytes(assembly)
    weight_bytes: Counter[str] = Counter()
    for weight in assembly.weights.values():
        weight_bytes[weight.form.dtype] += weight.form.nbytes
    return Forecast(
        output=output,
        name=checkpoint.name,
        model_type=str(checkpoint.config["model_type"]),
        recipe=assembly.about(sources={}).recipe,
        kernels={target: dict(Counter(call.kernel for call in plan.calls)) for target, plan in assembly.plans.items()},
        rewrites={name: result.rewrites for name, result in assembly.results.items()},
        refusals={name: list(result.refusals) for name, result in assembly.results.items() if result.refusals},
        calibration=samples,
        notes=list(assembly.notes),
        file_bytes=file_bytes,
        weight_bytes=dict(weight_bytes),
        kv_bytes_per_token=assembly.kv_bytes_per_token,
        max_seq_len=assembly.max_seq_len,
        # What writes texts to calibrate with is gone before the engine is begun; codes go when it is written.
        disk_bytes=max(file_bytes + _temporary_bytes(assembly), _file_bytes(writer) if writer else 0),
        free_disk_bytes=shutil.disk_usage(output.absolute().parent).free,
        memory_bytes=_memory_bytes(assembly, samples["tokens"] if samples else 0),
        free_memory_bytes=free_memory(),
    )


def _file_bytes(assembly: Assembly) -> int:
    sections = [weight.form.nbytes for weight in assembly.weights.values()] + [*map(len, assembly.files.values())]
    return header_bytes(len(sections) + EVIDENCE_SECTIONS) + sum(map(padded, sections))


def _temporary_bytes(assembly: Assembly) -> int:
    """Of a method that chooses codes beforehand: those wait on disk, with an eighth more for scales."""
    if not any(isinstance(each, Choose | Mix) for each in assembly.config.method.prepare(Calibration())):
        return 0
    forms = [weight.form for weight in assembly.weights.values() if weight.form.layout.startswith("r16")]
    codes = [prod(form.shape) * TORCH_DTYPES[form.dtype].itemsize for form in forms if "columns" not in form.layout]
    return 9 * sum(codes) // 8


def _memory_bytes(assembly: Assembly, calibration_tokens: int) -> int:
    largest = max(4 * prod(weight.form.shape) for weight in assembly.weights.values())
    total = BASE_BYTES + _buffer_bytes(assembly.checkpoint)
    gate = assembly.config.gate is not None
    tokens = max(calibration_tokens, TOKENS if gate else 0)
    if tokens:
        plan = next(iter(assembly.plans.values()))
        _, activations = plan.arena_offsets(StepCounter(plan.dims, plan.caches).sizes(tokens, 1, 1, longest=1))
        total += COPIES * activations + largest
    return total + (4 * STEP_ELEMENTS if gate else 0)


def _buffer_bytes(checkpoint: Checkpoint) -> int:
    """Tensors of a GGUF file are dequantized whole, one at a time; others are read where they are mapped."""
    if not isinstance(checkpoint, GgufCheckpoint):
        return 0
    return max(4 * prod(info.shape) for info in checkpoint.tensors.values())
