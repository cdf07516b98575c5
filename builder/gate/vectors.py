"""The gate of embedding models: compares an engine's vectors of the held-out texts with the source's."""

import math

import torch

from enginewright.builder.gate.config import GateConfig, limits_of
from enginewright.builder.gate.gate import FINITE, LAYER_TOKENS, TOKENS, Subject
from enginewright.builder.gate.layers import FileWeights, layer_errors
from enginewright.builder.gate.texts import held_out
from enginewright.builder.progress import Progress
from enginewright.passes.streaming import stream
from enginewright.quant_methods import QUANT_METHODS
from enginewright.runtime import env
from enginewright.runtime.commands.quality import Check, Distance, Measured, QualityReport, rounded
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.engine import Engine


def measure_vectors(config: GateConfig, subject: Subject, progress: Progress) -> QualityReport:
    """Measures an embedding engine; the report does not depend on the number of threads.

    Args:
        config: options of the gate.
        subject: the engine and its source.
        progress: receiver of progress.
    """
    threads = env.num_threads() or num_cores()
    with Engine.open(subject.engine, subject.targets[0].name) as engine:
        plan = engine.plan
        texts = held_out(engine.tokenizer, plan.vocab_size, TOKENS, plan.max_seq_len)
        short = held_out(engine.tokenizer, plan.vocab_size, LAYER_TOKENS, plan.max_seq_len)
        progress.phase(f"quality gate ({config.name})")
        weights = FileWeights(engine, subject.sections)
        layers = layer_errors(subject.dense.clone(), subject.quant, weights, [text.tokens for text in short], threads)
        tokens = [text.tokens for text in texts]
        expected = torch.stack(stream(subject.source, tokens, threads=threads).embedded())
        longest = max(map(len, tokens))
        executor = CpuExecutor(engine, RuntimeConfig(longest, 1, max_num_batched_tokens=longest, threads=threads))
        actual = torch.stack([torch.from_numpy(row[-1]) for row in score(executor, tokens, last_only=True)])
        if not engine.embeds:  # the scores of all texts are one vector
            expected, actual = expected.view(1, -1), actual.view(1, -1)
        cosines = torch.cosine_similarity(expected.double(), actual.double())
        finite = cosines.isfinite()
        cosine = float(cosines[finite].mean()) if finite.any() else math.nan
        formats = [layer.method for layer in layers]
        limits = {
            "cosine": min(filter(None, (QUANT_METHODS[name].min_cosine for name in set(formats)))),
            "layer": limits_of(formats)["layer"],
        }
        share = rounded(float(finite.double().mean()), 4)
        checks = (
            *config.checks({"layer": layers[0].error, "cosine": rounded(cosine, 6)}, limits),
            Check("finite", FINITE, share, 1.0, is_minimum=True),
        )
        whole = Distance(len(texts), int((~finite).sum()), None, None, None, None, None)
        return QualityReport(config.name, Measured(executor.isa, checks, whole, (), (), layers))
