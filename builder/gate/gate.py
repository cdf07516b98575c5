"""The gate: compares a built engine with the model that it was built from, and decides if it may be written.

`quick` compares one batch of texts after another, and ends when every limit is certain to hold, or one is certain to be
broken: see `intervals`. The batches and the end depend only on computed values, never on a clock.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
import torch

from enginewright.builder.gate.config import GateConfig, limits_of
from enginewright.builder.gate.distance import Positions, by_position, compare, distance
from enginewright.builder.gate.full import full_values, measure_full
from enginewright.builder.gate.intervals import LOOKS, intervals
from enginewright.builder.gate.layers import FileWeights, layer_errors
from enginewright.builder.gate.simulate import blocks, simulate
from enginewright.builder.gate.texts import HeldOutText, held_out
from enginewright.builder.progress import Progress
from enginewright.passes.graph import LinearLayer, head_of, linear_of, nodes_of
from enginewright.passes.quant import QuantConfig
from enginewright.passes.streaming import Streamed, Visit, stream
from enginewright.passes.weights import shape_of
from enginewright.plugins.target import CPU_TARGET, Target
from enginewright.runtime import env
from enginewright.runtime.commands.quality import (
    SIMULATED,
    Check,
    LayerError,
    Measured,
    QualityReport,
    TextDistance,
    rounded,
)
from enginewright.runtime.commands.score import forced
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.engine import Engine

TOKENS = 4096  # tokens of held-out text
BATCHES = LOOKS + 1  # batches of texts
LAYER_TOKENS = 512  # tokens on which every layer's error is measured
LAYER_PRODUCTS = 4  # work of a layer's error, in products of its weight with a token
STEP_ELEMENTS = 1 << 25  # elements of the engine's logits in a step
FINITE = "share of positions with finite logits"


@dataclass(frozen=True)
class Subject:
    """The engine that is judged, and its source."""

    engine: Path  # finished file, under a temporary name
    source: ir.Model  # graph as imported
    dense: ir.Model  # graph before it was quantized (`keep` of run_pipeline)
    sections: Mapping[str, str]  # name of a weight in the graph → its name in the plan
    quant: QuantConfig  # method that it was quantized with
    targets: Sequence[Target] = (CPU_TARGET,)  # targets that it was built for


def measure(config: GateConfig, subject: Subject, progress: Progress) -> QualityReport:
    """Measures an engine; the report does not depend on the number of threads.

    Args:
        config: options of the gate.
        subject: the engine and its source.
        progress: receiver of progress.

    Raises:
        QualityGateError: the source's own logits are not finite.
        UnsupportedModelError: the tokenizer does not belong to the model.
    """
    threads = env.num_threads() or num_cores()
    with Engine.open(subject.engine, subject.targets[0].name) as engine:
        plan = engine.plan
        texts = held_out(engine.tokenizer, plan.vocab_size, TOKENS, plan.max_seq_len)
        short = held_out(engine.tokenizer, plan.vocab_size, LAYER_TOKENS, plan.max_seq_len)
        work = _Work.of(subject.source)
        progress.phase(
            f"quality gate ({config.name})",
            work.total(
                [len(text.tokens) for text in texts], [len(text.tokens) for text in short], len(subject.targets)
            ),
        )
        subjects = [_OnTarget(config, subject, target, engine, texts, threads, progress) for target in subject.targets]
        for each in subjects:
            each.measure_layers([text.tokens for text in short])
        for batch in batches(len(texts)) if not config.full else [range(len(texts))]:
            tokens = [texts[index].tokens for index in batch]
            source = stream(subject.source, tokens, work.watch(progress), threads)
            for each in subjects:
                each.compare(source, batch)
            if not config.full and all(each.is_decided for each in subjects):
                break
        measured = [each.measured() for each in subjects]
    return QualityReport(config.name, measured[0], tuple(measured[1:]))


def batches(count: int) -> Iterator[range]:
    """Yields batches of texts by number, in the order of comparison.

    Each batch takes texts at equal distances from the file, which groups them by kind, so that it has some of each
    kind.
    """
    yield from (batch for first in range(BATCHES) if (batch := range(first, count, BATCHES)))


@dataclass(frozen=True)
class _Work:
    """The work to do, in multiplications, as an estimate of the time."""

    layers: int  # elements of the weights of all linear layers but the head
    head: int  # elements of the head

    @staticmethod
    def of(source: ir.Model) -> "_Work":
        """Estimates the work from the source's graph."""
        logits = head_of(source)
        assert logits is not None, "embedding models have a gate of their own"
        head = logits.weight
        linears = [linear_of(node.outputs[0]) for node in nodes_of(source, "MatMul")]
        every = [linear.weight for linear in linears if linear is not None and linear.weight is not head]
        return _Work(sum(math.prod(shape_of(weight)) for weight in every), math.prod(shape_of(head)))

    def total(self, lengths: Sequence[int], short: Sequence[int], targets: int) -> int:
        """Estimates the work for texts of these lengths, and for the layers' errors on the short ones."""
        position = self.layers + targets * self.of_position
        return sum(lengths) * position + targets * LAYER_PRODUCTS * sum(short) * self.layers

    @property
    def of_position(self) -> int:
        """Work for a position of an engine, with the logits of both models."""
        return self.layers + 2 * self.head

    @staticmethod
    def watch(progress: Progress) -> Visit:
        """Makes a visitor for `stream` that counts a layer when it is visited."""

        def visit(linear: LinearLayer, inputs: Sequence[torch.Tensor]) -> None:
            progress.advance(sum(map(len, inputs)) * math.prod(shape_of(linear.weight)))

        return visit


@dataclass
class _OnTarget:
    """The measurement of an engine on a target: it runs if the build can run it, and is simulated if not."""

    config: GateConfig  # options of the gate
    subject: Subject  # engine and source
    target: Target  # target
    engine: Engine  # the engine, open
    texts: Sequence[HeldOutText]  # held-out texts
    threads: int  # number of threads
    progress: Progress  # receiver of progress
    layers: tuple[LayerError, ...] = ()  # errors of layers, the worst first
    compared: dict[int, Positions] = field(default_factory=dict)  # number of a text → its differences

    def __post_init__(self) -> None:
        self._weights = FileWeights(self.engine, self.subject.sections)
        self._executor: CpuExecutor | None = None
        if self.target.runs_in_builds:
            longest, vocab_size = max(len(text.tokens) for text in self.texts), self.engine.plan.vocab_size
            rows = max(min(STEP_ELEMENTS // vocab_size, longest), 1)
            limits = RuntimeConfig(longest, 1, max_num_batched_tokens=rows, max_logit_rows=rows, threads=self.threads)
            self._executor = CpuExecutor(self.engine, limits)

    def measure_layers(self, texts: Sequence[Sequence[int]]) -> None:
        """Measures the errors of layers on some texts."""
        tokens = sum(map(len, texts))

        def done(elements: int) -> None:
            self.progress.advance(LAYER_PRODUCTS * tokens * elements)

        dense, quant = self.subject.dense.clone(), self.subject.quant
        self.layers = layer_errors(dense, quant, self._weights, texts, self.threads, self.target, done)

    def compare(self, source: Streamed, batch: Sequence[int]) -> None:
        """Compares a batch of texts, which `source` has streamed."""
        plan, tokens = self.engine.plan, [self.texts[index].tokens for index in batch]
        if self._executor is not None:
            produced = forced(self._executor, tokens)
        else:
            dense, kv_dtype = self.subject.dense.clone(), plan.kv_dtype()
            simulated = simulate(dense, self.subject.quant, self.target, self._weights, tokens, self.threads, kv_dtype)
            produced = blocks(simulated, tokens, plan.vocab_size)
        work = _Work.of(self.subject.source).of_position
        found = compare(
            source, produced, tokens, self.threads, lambda positions: self.progress.advance(positions * work)
        )
        self.compared |= dict(zip(batch, found, strict=True))

    @property
    def is_decided(self) -> bool:
        """True if further texts cannot change the decision."""
        checks = self._checks({})
        refused = any(check.sure and not check.passed for check in checks)
        return len(self.compared) > 1 and (refused or all(check.sure for check in checks))

    def measured(self) -> Measured:
        """Makes the report of the target."""
        full = None
        if self.config.full and self.target.runs_in_builds:
            full = measure_full(self.subject.source, self.engine, self.threads)
        found = self._found
        names = [self.texts[index].name for index in sorted(self.compared)]
        return Measured(
            isa=self._executor.isa if self._executor is not None else f"{self.target.name}, {SIMULATED}",
            checks=self._checks({} if full is None else full_values(full)),
            whole=distance(found),
            texts=tuple(TextDistance(name, distance([one])) for name, one in zip(names, found, strict=True)),
            ranges=by_position(found),
            layers=self.layers,
            full=full,
            all_positions=sum(len(text.tokens) for text in self.texts),
        )

    @property
    def _found(self) -> list[Positions]:
        """Differences in the order of the texts, whatever the order of comparison."""
        return [self.compared[index] for index in sorted(self.compared)]

    def _checks(self, more: Mapping[str, float | None]) -> tuple[Check, ...]:
        """Checks the limits on the texts so far. more: name in MEASURES → other value."""
        formats = [layer.method for layer in self.layers]
        kv_dtypes = [plane.dtype for cache in self.engine.plan.paged_caches for plane in cache.planes]
        more = {"layer": self.layers[0].error, **more}
        return check_distance(self.config, self._found, limits_of(formats, kv_dtypes), more)


def check_distance(
    config: GateConfig, found: Sequence[Positions], limits: Mapping[str, float], more: Mapping[str, float | None]
) -> tuple[Check, ...]:
    """Checks the limits of an engine's distance from its source.

    Args:
        config: options of the gate.
        found: differences on each text.
        limits: name in MEASURES → limit of the formats.
        more: name in MEASURES → value that is not computed from the differences.
    """
    whole = distance(found)
    values: dict[str, float | None] = {"kl": whole.kl, "top1": whole.top1, **more}
    if whole.source_perplexity is not None:
        ratio = None if whole.perplexity is None else whole.perplexity / whole.source_perplexity
        values["ppl"] = rounded(ratio, 4)
    finite = Check("finite", FINITE, rounded(1 - whole.broken / whole.positions, 4), 1.0, is_minimum=True)
    return (*config.checks(values, limits, intervals(found)), finite)
