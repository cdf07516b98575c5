"""`engine build`, `engine rebuild`, `engine adapter` and `engine export`, with their progress on the terminal."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from enginewright.adapter_file import FactorDType
from enginewright.builder.adapters import Adapter, MergedCheckpoint, open_merged
from enginewright.builder.adapters.gguf import attention_heads
from enginewright.builder.adapters.prepare import AdapterReport, prepare
from enginewright.builder.build import BuildConfig, BuildReport, build_engine, default_output, with_possible_kv
from enginewright.builder.calibration import read_samples
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.console import ConsoleProgress
from enginewright.builder.draft import open_draft, source_of
from enginewright.builder.export import export_onnx
from enginewright.builder.forecast import Forecast, forecast
from enginewright.builder.gate import GateConfig, measure_adapter
from enginewright.builder.models import build_graph, check_config
from enginewright.builder.rebuild import rebuild, source_model
from enginewright.engine_file import EngineFile
from enginewright.errors import UsageError
from enginewright.output_file import require_writable
from enginewright.rank_layout import ONE_RANK, RankLayout
from enginewright.runtime.device.ranks.shares import check_ranks
from enginewright.runtime.engine import Engine
from enginewright.targets import CPU, CUDA, platforms_of


def build_model(
    model: str,
    config: BuildConfig,
    output: Path | None,
    *,
    adapters: Sequence[str] = (),
    draft: str | None,
    dry_run: bool,
    layout: RankLayout = ONE_RANK,
    requires_kv_dtype: bool,
) -> BuildReport | Forecast:
    """Builds an engine from a checkpoint, and shows the progress on stderr.

    Args:
        model: A folder, a GGUF file, or the name of a model on the Hugging Face hub.
        config: Options of the build.
        output: The engine file to write. None: MODEL-METHOD.engine in the working directory.
        adapters: Folders of adapters to merge into the model, in the form of --merge.
        draft: The source of draft tokens, in the form of --draft. None: no draft tokens.
        dry_run: Computes a forecast of the build; nothing is downloaded or written.
        layout: Arrangement of the processes that are to compute the model together: for the forecast, and for kernels
            for GPUs, which have no stages.
        requires_kv_dtype: Refuses a model that cannot have the KV cache's dtype in `config`. False: such a model gets
            bf16, and the report says so.

    Raises:
        UnsupportedModelError: The model, or something in it, is not implemented.
        UsageError: The options do not fit the model.
        EngineError: The checkpoint cannot be read, or the engine cannot be written.
        QualityGateError: The engine is too far from its source.
    """
    check_ranks(layout)
    is_for_gpus = CUDA in platforms_of(config.targets) and layout.pipeline == 1
    if is_for_gpus:
        config = replace(config, tensor_parallel_size=layout.tensor)
    if layout.size > 1 and not (dry_run or is_for_gpus):
        option = "--tensor-parallel-size" if layout.tensor > 1 else "--pipeline-parallel-size"
        why = "on CPUs an engine is cut when it is loaded, for any number of processes"
        fix = "Leave it out, and give it to engine run."
        raise UsageError(f"{option} is for --dry-run, and the first also for engines for GPUs", why, fix)
    with ConsoleProgress() as progress:
        progress.phase("open the checkpoint")
        checkpoint = open_merged(open_checkpoint(model, only_cached=dry_run, check_config=check_config), adapters)
        opened_draft = open_draft(draft, only_cached=dry_run, check_config=check_config) if draft else None
        if not requires_kv_dtype:
            source = source_of(opened_draft)
            config = with_possible_kv(config, checkpoint.config, *([source[1].config] if source else []))
        path = output or default_output(checkpoint, config)
        if dry_run:
            return forecast(checkpoint, config, path, progress, opened_draft, layout)
        return build_engine(checkpoint, config, path, progress, opened_draft)


def rebuild_engine(engine: Path, **options: Any) -> dict[str, Any]:
    """Builds an engine once more, shows the progress on stderr, and returns the comparison.

    Args:
        engine: The engine file.
        options: Those of `rebuild`.

    Raises:
        UsageError, CorruptEngineError, EngineError: As `rebuild` raises them.
    """
    with ConsoleProgress() as progress:
        return rebuild(engine, progress, **options)


def prepare_adapter(
    adapter: str,
    engine: Path,
    output: Path | None,
    dtype: FactorDType | None = None,
    *,
    model: str | None = None,
    gate: GateConfig | None = None,
    calib_data: str | None = None,
) -> AdapterReport:
    """Prepares an adapter for an engine, and shows the progress on stderr.

    Args:
        adapter: The folder of the adapter, a GGUF file, or a hub id.
        engine: The engine file.
        output: The adapter file to write. None: ADAPTER.lora in the working directory.
        dtype: The dtype of its matrices. None: By the dtypes of the engine's weights.
        model: The checkpoint that the engine was built from, with which the adapter is measured. None: It is not.
        gate: Options of the quality gate. None: It is not measured.
        calib_data: Texts to measure on, in the form of --calib-data. None: The held-out texts.

    Raises:
        UsageError: There is no such adapter or engine, the engine takes none, the model is not the engine's, or the
            file cannot be written there.
        UnsupportedModelError: The adapter has a feature that is not implemented, or changes what it cannot.
        EngineError: A file is damaged, or the adapter does not fit the engine.
        QualityGateError: The engine with the adapter is too far from the model with it.
    """
    with ConsoleProgress() as progress:
        progress.phase("open the adapter")
        with _open_to_prepare(engine) as base:
            opened = Adapter.open(adapter, base=attention_heads(base.plan))
            measure = None
            if model is not None and gate is not None:
                if base.target != CPU:
                    why = f"{engine} has code for GPUs alone, and an adapter is measured on a CPU"
                    fix = "Leave --model out, or build the engine for cpu, too."
                    raise UsageError("--model is not possible", why, fix)
                progress.phase("check the model")
                checkpoint = source_model(engine, base.manifest, model, ())
                samples = None if calib_data is None else read_samples(calib_data, checkpoint).texts
                merged = build_graph(MergedCheckpoint(checkpoint, [opened]), None)
                measure = partial(measure_adapter, gate, base, merged, samples, progress)
            return prepare(opened, base, output or Path(f"{opened.name}.lora"), progress, dtype, measure)


def _open_to_prepare(path: Path) -> Engine:
    """Opens an engine for its weights, whatever it runs on."""
    with EngineFile.open(path, check_sections=False) as file:
        target = platforms_of(file.manifest.targets)[0]
    return Engine.open(path, target)


def export_model(model: str, path: Path, dtype: str) -> None:
    """Writes a checkpoint as an ONNX file in standard operators.

    Args:
        model: A folder, a GGUF file, or the name of a model on the Hugging Face hub.
        path: The ONNX file to write.
        dtype: Format of weights and activations, one of `export.DTYPES`.

    Raises:
        UnsupportedModelError: The model, or something in it, is not implemented.
        UsageError: There is no such model, or the file cannot be written there.
        EngineError: The checkpoint is damaged, or the disk has no space.
    """
    require_writable(path, regular=True)  # before a download that may take minutes
    export_onnx(build_graph(open_checkpoint(model, check_config=check_config)), path, dtype)
