"""The gate of an adapter: compares an engine that has it with the engine's source, into which it is merged in fp32."""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.adapter_file import AdapterFile
from enginewright.builder.gate.config import GateConfig, limits_of
from enginewright.builder.gate.distance import Positions, by_position, compare, distance
from enginewright.builder.gate.gate import STEP_ELEMENTS, TOKENS, batches, check_distance
from enginewright.builder.gate.texts import HeldOutText, held_out
from enginewright.builder.progress import Progress
from enginewright.errors import QualityGateError, UsageError
from enginewright.passes.streaming import stream
from enginewright.quant_methods import QUANT_METHODS
from enginewright.runtime import env
from enginewright.runtime.commands.quality import QUALITY, Measured, QualityReport, TextDistance
from enginewright.runtime.commands.score import forced
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.engine import Engine


def measure_adapter(
    config: GateConfig,
    engine: Engine,
    merged: ir.Model,
    samples: Sequence[Sequence[int]] | None,
    progress: Progress,
    adapter: AdapterFile,
) -> QualityReport:
    """Measures an engine with an adapter; the limits are those of the engine's own gate.

    Args:
        config: options of the gate.
        engine: the engine.
        merged: graph of the model that the engine was built from, with the adapter merged into its weights.
        samples: token ids of texts; None: the held-out texts.
        progress: receiver of progress.
        adapter: the adapter, prepared for the engine.

    Raises:
        UsageError: `full` is wanted, or the engine's formats have no limits and none are given.
        QualityGateError: it is too far from the merged model, or that model's logits are not finite.
    """
    if config.full:
        raise UsageError("--gate full is for engines", "an adapter is compared on texts alone", "Use --gate quick.")
    plan, threads = engine.plan, env.num_threads() or num_cores()
    if samples is None:
        texts = held_out(engine.tokenizer, plan.vocab_size, TOKENS, plan.max_seq_len)
    else:
        texts = [HeldOutText(f"text {number}", ids[: plan.max_seq_len]) for number, ids in enumerate(samples)]
    longest = max(len(text.tokens) for text in texts)
    rows = max(min(STEP_ELEMENTS // plan.vocab_size, longest), 1)
    limits = RuntimeConfig(
        longest,
        1,
        max_num_batched_tokens=rows,
        max_logit_rows=rows,
        threads=threads,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=max(adapter.max_rank, 1),
    )
    executor, found = CpuExecutor(engine, limits), dict[int, Positions]()
    defaults = _limits_of(config, engine)
    progress.phase(f"quality gate ({config.name})", sum(len(text.tokens) for text in texts))
    for batch in batches(len(texts)):
        tokens = [texts[index].tokens for index in batch]
        source, produced = stream(merged, tokens, threads=threads), forced(executor, tokens, adapter=adapter)
        found |= dict(zip(batch, compare(source, produced, tokens, threads, progress.advance), strict=True))
        compared = [found[index] for index in sorted(found)]
        checks = check_distance(config, compared, defaults, {})
        if len(found) > 1 and all(check.sure for check in checks):
            break
    measured = Measured(
        isa=executor.isa,
        checks=checks,
        whole=distance(compared),
        texts=tuple(TextDistance(texts[index].name, distance([found[index]])) for index in sorted(found)),
        ranges=by_position(compared),
        layers=(),
        all_positions=sum(len(text.tokens) for text in texts),
    )
    report = QualityReport(config.name, measured)
    if measured.failed:
        raise QualityGateError(
            f"the adapter {adapter.name} on the engine {engine.manifest.name} is too far from the model with it",
            "; ".join(check.description for check in measured.failed),
            "No adapter was written. Try --dtype bf16, an engine of another method, or other limits with --gate.",
        )
    return report


def _limits_of(config: GateConfig, engine: Engine) -> dict[str, float]:
    """Combines the limits of the engine's formats."""
    formats = {str(engine.manifest.recipe.get("quant"))}
    if QUALITY in engine.file.sections:
        report = QualityReport.from_json(engine.file.read_section(QUALITY))
        if report.measured is not None and report.measured.layers:
            formats = {layer.method for layer in report.measured.layers}
    if not formats <= QUANT_METHODS.keys():
        if config.limits:
            return {}
        what = f"the engine's format {', '.join(sorted(formats - QUANT_METHODS.keys()))} has no limits"
        raise UsageError(what, fix="Name some, such as --gate kl=0.05.")
    kv_dtypes = [plane.dtype for cache in engine.plan.paged_caches for plane in cache.planes]
    return limits_of(formats, kv_dtypes)
