"""The gate: measures a built engine beside the model that it was built from, and says whether it may be written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from enginewright.builder.gate.config import FP8_KV, GateConfig, limits_of
from enginewright.builder.gate.distance import by_position, compare, distance
from enginewright.builder.gate.full import full_values, measure_full
from enginewright.builder.gate.layers import FileWeights, layer_errors
from enginewright.builder.gate.texts import held_out
from enginewright.passes.quant import QuantConfig
from enginewright.passes.streaming import stream
from enginewright.runtime import env
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.machine import num_cores
from enginewright.runtime.quality import Check, Measured, QualityReport, TextDistance, rounded

TOKENS = 4096  # of held-out text
LAYER_TOKENS = 512  # of which every layer's error is measured
STEP_ELEMENTS = 1 << 25  # of the engine's logits in a step
FINITE = "share of positions with finite logits"


@dataclass(frozen=True)
class Subject:
    """What is judged.

    engine: the finished file, under a temporary name. source: the graph as imported. dense: the graph before it was
    quantized (`keep` of run_pipeline). sections: names of the graph's weights → names of the plan's.
    """

    engine: Path
    source: ir.Model
    dense: ir.Model
    sections: Mapping[str, str]
    quant: QuantConfig


def measure(config: GateConfig, subject: Subject) -> QualityReport:
    """The same report by whatever number of threads.

    Raises:
        QualityGateError: the source's own logits are not finite.
        UnsupportedModelError: the tokenizer does not belong to the model.
    """
    threads = env.num_threads() or num_cores()
    with Engine.open(subject.engine) as engine:
        plan = engine.plan
        texts = held_out(engine.tokenizer, plan.vocab_size, TOKENS, plan.max_seq_len)
        tokens = [text.tokens for text in texts]
        longest = max(map(len, tokens))
        rows = max(min(STEP_ELEMENTS // plan.vocab_size, longest), 1)
        limits = RuntimeConfig(longest, 1, max_num_batched_tokens=rows, max_logit_rows=rows, threads=threads)
        executor = CpuExecutor(engine, limits)
        found = compare(stream(subject.source, tokens, threads=threads), executor, tokens, threads)
        whole = distance(found)
        weights = FileWeights(engine, subject.sections)
        short = held_out(engine.tokenizer, plan.vocab_size, LAYER_TOKENS, plan.max_seq_len)
        layers = layer_errors(subject.dense, subject.quant, weights, [text.tokens for text in short], threads)
        full = measure_full(subject.source, engine, threads) if config.full else None
    formats = [layer.method for layer in layers]
    formats += [FP8_KV for group in plan.kv_groups if group.dtype == "e4m3"]
    values: dict[str, float | None] = {"kl": whole.kl, "top1": whole.top1, "layer": layers[0].error}
    if whole.source_perplexity is not None:
        ratio = None if whole.perplexity is None else whole.perplexity / whole.source_perplexity
        values["ppl"] = rounded(ratio, 4)
    if full is not None:
        values |= full_values(full)
    finite = Check("finite", FINITE, rounded(1 - whole.broken / whole.positions, 4), 1.0, least=True)
    measured = Measured(
        isa=executor.isa,
        checks=(*config.checks(values, limits_of(formats)), finite),
        whole=whole,
        texts=tuple(TextDistance(text.name, distance([one])) for text, one in zip(texts, found, strict=True)),
        ranges=by_position(found),
        layers=layers,
        full=full,
    )
    return QualityReport(config.name, measured)
