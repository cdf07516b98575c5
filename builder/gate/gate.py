"""The gate: measures a built engine beside the model that it was built from, and says whether it may be written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from enginewright.builder.gate.config import FP8_KV, GateConfig, limits_of
from enginewright.builder.gate.distance import by_position, compare, distance
from enginewright.builder.gate.full import full_values, measure_full
from enginewright.builder.gate.layers import FileWeights, layer_errors
from enginewright.builder.gate.simulate import blocks, simulate
from enginewright.builder.gate.texts import Text, held_out
from enginewright.passes.quant import QuantConfig
from enginewright.passes.streaming import Streamed, stream
from enginewright.runtime import env
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from enginewright.runtime.executor import CpuExecutor
from enginewright.runtime.machine import num_cores
from enginewright.runtime.quality import SIMULATED, Check, Measured, QualityReport, TextDistance, rounded
from enginewright.runtime.score import forced
from enginewright.targets import CPU

TOKENS = 4096  # of held-out text
LAYER_TOKENS = 512  # of which every layer's error is measured
STEP_ELEMENTS = 1 << 25  # of the engine's logits in a step
FINITE = "share of positions with finite logits"


@dataclass(frozen=True)
class Subject:
    """What is judged.

    engine: the finished file, under a temporary name. source: the graph as imported. dense: the graph before it was
    quantized (`keep` of run_pipeline). sections: names of the graph's weights → names of the plan's. families: of the
    targets that it was built for.
    """

    engine: Path
    source: ir.Model
    dense: ir.Model
    sections: Mapping[str, str]
    quant: QuantConfig
    families: Sequence[str] = (CPU,)


def measure(config: GateConfig, subject: Subject) -> QualityReport:
    """The same report by whatever number of threads.

    Raises:
        QualityGateError: the source's own logits are not finite.
        UnsupportedModelError: the tokenizer does not belong to the model.
    """
    threads = env.num_threads() or num_cores()
    with Engine.open(subject.engine, subject.families[0]) as engine:
        texts = held_out(engine.tokenizer, engine.plan.vocab_size, TOKENS, engine.plan.max_seq_len)
        source = stream(subject.source, [text.tokens for text in texts], threads=threads)
        measured = [_measure(config, subject, family, engine, source, texts, threads) for family in subject.families]
    return QualityReport(config.name, measured[0], tuple(measured[1:]))


def _measure(
    config: GateConfig,
    subject: Subject,
    family: str,
    engine: Engine,
    source: Streamed,
    texts: Sequence[Text],
    threads: int,
) -> Measured:
    """On the CPU, the engine itself; for other families, what they would compute."""
    plan, tokens = engine.plan, [text.tokens for text in texts]
    weights = FileWeights(engine, subject.sections)
    full = None
    if family == CPU:
        longest = max(map(len, tokens))
        rows = max(min(STEP_ELEMENTS // plan.vocab_size, longest), 1)
        limits = RuntimeConfig(longest, 1, max_num_batched_tokens=rows, max_logit_rows=rows, threads=threads)
        executor = CpuExecutor(engine, limits)
        produced, ran_on = forced(executor, tokens), executor.isa
        full = measure_full(subject.source, engine, threads) if config.full else None
    else:
        kv_dtype = plan.kv_groups[0].dtype
        simulated = simulate(subject.dense.clone(), subject.quant, family, weights, tokens, threads, kv_dtype)
        produced, ran_on = blocks(simulated, tokens, plan.vocab_size), f"{family}, {SIMULATED}"
    found = compare(source, produced, tokens, threads)
    whole = distance(found)
    short = held_out(engine.tokenizer, plan.vocab_size, LAYER_TOKENS, plan.max_seq_len)
    tokens = [text.tokens for text in short]
    layers = layer_errors(subject.dense.clone(), subject.quant, weights, tokens, threads, family)
    formats = [layer.method for layer in layers]
    formats += [FP8_KV for group in plan.kv_groups if group.dtype == "e4m3"]
    values: dict[str, float | None] = {"kl": whole.kl, "top1": whole.top1, "layer": layers[0].error}
    if whole.source_perplexity is not None:
        ratio = None if whole.perplexity is None else whole.perplexity / whole.source_perplexity
        values["ppl"] = rounded(ratio, 4)
    if full is not None:
        values |= full_values(full)
    finite = Check("finite", FINITE, rounded(1 - whole.broken / whole.positions, 4), 1.0, least=True)
    return Measured(
        isa=ran_on,
        checks=(*config.checks(values, limits_of(formats)), finite),
        whole=whole,
        texts=tuple(TextDistance(text.name, distance([one])) for text, one in zip(texts, found, strict=True)),
        ranges=by_position(found),
        layers=layers,
        full=full,
    )
