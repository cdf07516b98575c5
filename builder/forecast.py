"""`engine build --dry-run`: predicts the result and the costs of a build; nothing is written, no weight is read."""

import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from enginewright.builder.assembly import (
    Assembly,
    BuildConfig,
    assemble,
    check_quant,
)
from enginewright.builder.calibration import samples_without_data
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
from enginewright.manifest import rank_plan_section
from enginewright.output_file import require_writable
from enginewright.passes.quant import W8A8
from enginewright.passes.quant.auto import Mix
from enginewright.passes.quant.choose import Choose
from enginewright.passes.quant.method import Calibration
from enginewright.plan import Plan
from enginewright.rank_layout import ONE_RANK, RankLayout
from enginewright.runtime.device.cpu.weight_parts import WeightForm
from enginewright.runtime.device.machine import free_memory
from enginewright.runtime.device.ranks.shares import check_gpu_ranks, rank_shares, shares_of
from enginewright.runtime.step.dims import StepCounter
from enginewright.targets import CPU, CUDA

EVIDENCE_SECTIONS = 2  # goldens and quality report
# Python with torch and onnx takes 200 MB, the graph and pieces of weights the rest.
BASE_BYTES = 300_000_000
# copies of the activations that calibration or the gate needs at once, in bytes of the plan's precision; they use FLOAT
COPIES = 4


@dataclass(frozen=True)
class Forecast:
    """The predicted result and costs of a build."""

    output: Path  # the engine file
    name: str  # name of the model
    model_type: str  # `model_type` of its config.json
    recipe: dict[str, Any]  # choices, as the manifest would have them
    kernels: dict[str, dict[str, int]]  # target → kernel → number of calls
    rewrites: dict[str, int]  # pass → number of rewrites
    refusals: dict[str, list[str]]  # pass → reasons why it leaves parts as they are, in sentences
    calibration: dict[str, Any] | None  # known facts about the samples; None if none are needed
    notes: list[str]  # sentences as in a BuildReport
    file_bytes: int  # bytes of the engine file, without measured sections (goldens, a report: some kilobytes)
    weight_bytes: dict[str, int]  # dtype → bytes
    kv_bytes_per_token: int  # bytes of a token in all KV caches
    max_seq_len: int  # positions of the longest sequence
    disk_bytes: int  # maximum of bytes on the disk at any time of the build
    free_disk_bytes: int  # free bytes on the engine file's disk
    memory_bytes: int  # estimate, without pages of files
    free_memory_bytes: int  # free bytes of this machine
    ranks: list[dict[str, Any]]  # part of each process that computes the model (RankShare); none for one process

    def to_dict(self) -> dict[str, Any]:
        """Converts the forecast to JSON's types."""
        return vars(self) | {"output": str(self.output), "targets": list(self.kernels)}


def forecast(
    checkpoint: Checkpoint,
    config: BuildConfig,
    output: Path,
    progress: Progress,
    draft: Draft | None = None,
    layout: RankLayout = ONE_RANK,
) -> Forecast:
    """Predicts the result of `build_engine` with the same arguments.

    Args:
        checkpoint: the checkpoint.
        config: options of the build.
        output: the engine file.
        progress: receiver of progress.
        draft: the draft, or None.
        layout: arrangement of the processes that are to compute the model together.

    Raises:
        EngineError: as `build_engine`: the model is not supported, or the options do not fit it.
    """
    if config.dump_graphs is not None:
        raise UsageError("--dry-run writes nothing", "and --dump-graphs does", "Leave one of them out.")
    require_writable(output, regular=True)
    check_quant(checkpoint, config)
    if config.report is not None:
        raise UsageError("--dry-run writes nothing", "and --report does", "Leave one of them out.")
    samples = samples_without_data(checkpoint, config)
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
        # The engine that writes calibration texts is removed before the build; codes are removed after it.
        disk_bytes=max(file_bytes + _temporary_bytes(assembly), _file_bytes(writer) if writer else 0),
        free_disk_bytes=shutil.disk_usage(output.absolute().parent).free,
        memory_bytes=_memory_bytes(assembly, samples["tokens"] if samples else 0),
        free_memory_bytes=free_memory(),
        ranks=_shares(assembly, layout) if layout.size > 1 else [],
    )


def _shares(assembly: Assembly, layout: RankLayout) -> list[dict[str, Any]]:
    """Parts of the processes that compute the model together, on CPUs if the engine has code for them."""

    def form(name: str) -> WeightForm:
        return assembly.weights[name].form

    if CPU in assembly.plans:
        shares = rank_shares(assembly.plans[CPU], form, layout)
    else:
        check_gpu_ranks(layout)
        sections = (rank_plan_section(CUDA, rank, layout.tensor) for rank in range(layout.tensor))
        shares = shares_of([Plan.from_json(assembly.files[section]) for section in sections], form)
    return [asdict(share) for share in shares]


def _file_bytes(assembly: Assembly) -> int:
    sections = [weight.form.nbytes for weight in assembly.weights.values()] + [*map(len, assembly.files.values())]
    return header_bytes(len(sections) + EVIDENCE_SECTIONS) + sum(map(padded, sections))


def _temporary_bytes(assembly: Assembly) -> int:
    """Computes the bytes of codes that are chosen beforehand and wait on disk, with an eighth more for scales."""
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
    """Computes the bytes of the largest GGUF tensor, which is dequantized as a whole; others are mapped."""
    if not isinstance(checkpoint, GgufCheckpoint):
        return 0
    return max(4 * prod(info.shape) for info in checkpoint.tensors.values())
