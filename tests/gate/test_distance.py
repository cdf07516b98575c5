"""Distances of distributions against all logits at once, in double precision."""

from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.gate import distance as module
from enginewright.builder.gate.distance import Positions, by_position, compare, compare_rows, distance
from enginewright.builder.gate.texts import held_out
from enginewright.builder.models import build_graph
from enginewright.errors import QualityGateError, UnsupportedModelError
from enginewright.passes.quant import Int8Wo
from enginewright.passes.streaming import stream
from enginewright.runtime.commands.score import forced, score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests import tolerances
from tests.helpers.tiny import MemoryCheckpoint

VOCAB = 307


def reference(expected: torch.Tensor, actual: torch.Tensor, following: list[int]) -> Positions:
    """The definition."""
    p, q = expected.double().log_softmax(1), actual.double().log_softmax(1)
    count = len(following)
    rows = torch.arange(count)
    return Positions(
        kl=(p.exp() * (p - q)).sum(1),
        same=p.argmax(1) == q.argmax(1),
        source_loss=-p[rows, following],
        loss=-q[rows, following],
    )


def assert_close(actual: Positions, expected: Positions) -> None:
    assert torch.equal(actual.same, expected.same)
    for name in ("kl", "source_loss", "loss"):
        ours, theirs = vars(actual)[name], vars(expected)[name]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerances.GATE_NATS)


@pytest.mark.parametrize("size", [1e-3, 0.3, 5.0])
def test_rows_are_compared_as_defined(size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    expected = 8 * torch.randn(23, VOCAB, generator=generator) + 100
    actual = expected + size * torch.randn(23, VOCAB, generator=generator) - 70
    following = torch.randint(0, VOCAB, (22,), generator=generator).tolist()
    found = compare_rows(expected, actual, following)
    assert_close(found, reference(expected, actual, following))
    whole = distance([found])
    assert whole.kl is not None and whole.kl > 0 and whole.positions == 23


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_positions_without_finite_logits_are_counted_and_left_out(value: float) -> None:
    expected = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(2))
    actual = expected + 0.1
    actual[2, 5] = value
    whole = distance([compare_rows(expected, actual, [1] * 6)])
    assert (whole.positions, whole.broken, whole.top1) == (7, 1, 1.0)
    assert whole.kl == pytest.approx(0, abs=1e-6)
    with pytest.raises(QualityGateError, match="before anything is quantized"):
        compare_rows(actual, expected, [1] * 6)


def test_nothing_finite_is_no_number() -> None:
    expected = torch.zeros(3, VOCAB)
    whole = distance([compare_rows(expected, expected * float("nan"), [1, 1])])
    assert whole.broken == 3 and whole.kl is None and whole.top1 is None and whole.perplexity is None
    assert whole.source_perplexity == VOCAB


def test_ranges_of_positions_double() -> None:
    kl = torch.arange(6, dtype=torch.float64)
    text = Positions(kl, torch.ones(6, dtype=torch.bool), kl[1:], kl[1:])
    short = Positions(kl[:2] + 2, text.same[:2], kl[:1], kl[:1])
    found = [(entry.begin, entry.end, entry.kl) for entry in by_position([text, short])]
    assert found == [(0, 1, 1.0), (1, 2, 2.0), (2, 4, 2.5), (4, 6, 4.5)]


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_and_threads_change_nothing(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = MemoryCheckpoint.tiny("qwen3")
    build_engine(checkpoint, BuildConfig(quant=Int8Wo(), gate=None), tmp_path / "tiny.engine")
    texts = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1, 2, 61, 97)]
    source = stream(build_graph(checkpoint), texts)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 13 * VOCAB)
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 5 * VOCAB)
    with Engine.open(tmp_path / "tiny.engine") as engine:
        limits = RuntimeConfig(97, 1, max_num_batched_tokens=40, max_logit_rows=40)
        found = compare(source, forced(CpuExecutor(engine, limits), texts), texts, threads)
        every = score(CpuExecutor(engine, limits), texts)
    for number, (text, one) in enumerate(zip(texts, found, strict=True)):
        logits = source.logits(number, 0, len(text))
        assert_close(one, reference(logits, torch.from_numpy(every[number]), text[1:]))


def test_held_out_texts_are_cut_by_one_share(tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.tiny("llama")
    build_engine(checkpoint, BuildConfig(gate=None), tmp_path / "tiny.engine")
    with Engine.open(tmp_path / "tiny.engine") as engine:
        whole, cut = held_out(engine.tokenizer, VOCAB), held_out(engine.tokenizer, VOCAB, 4096, 300)
        with pytest.raises(UnsupportedModelError, match="the model has 100"):
            held_out(engine.tokenizer, 100)
    assert len(whole) == len({text.name for text in whole}) == 16
    assert 4096 - 16 * 100 < sum(len(text.tokens) for text in cut) <= 4096
    assert max(len(text.tokens) for text in cut) == 300
    for all_of_it, part in zip(whole, cut, strict=True):
        assert list(all_of_it.tokens[: len(part.tokens)]) == list(part.tokens)
