"""The quick gate looks after each batch of texts: when it may stop, when it may not, and how sure its figures are."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.gate.config import GateConfig
from enginewright.builder.gate.distance import Positions
from enginewright.builder.gate.gate import batches
from enginewright.builder.gate.intervals import ERROR, LOOKS, T_FACTORS, intervals
from enginewright.builder.progress import Silent
from enginewright.errors import QualityGateError
from enginewright.passes.quant import Int4Rtn, Int8Wo
from enginewright.runtime.commands.quality import Check, Measured, QualityReport, describe_quality
from tests.helpers.tiny import MemoryCheckpoint


@pytest.fixture(scope="module")
def checkpoint() -> MemoryCheckpoint:
    return MemoryCheckpoint.tiny("llama")


class Counted(Silent):
    """A console that counts the work of the last phase: in total, and done."""

    def __init__(self) -> None:
        self.name, self.total, self.done = "", 0, 0

    def phase(self, name: str, total: int = 0) -> None:
        if total:
            self.name, self.total, self.done = name, total, 0

    def advance(self, amount: int) -> None:
        self.done += amount


def built(checkpoint: MemoryCheckpoint, path: Path, progress: Counted | None = None, **limits: float) -> Measured:
    config = BuildConfig(quant=Int4Rtn(), gate=GateConfig(limits={"top1": 0.2, "ppl": 10.0, **limits}))
    measured = build_engine(checkpoint, config, path / "x.engine", progress).quality.measured
    assert measured is not None
    return measured


def texts(means: list[float], count: int, seed: int = 0) -> list[Positions]:
    """Texts of `count` positions and so many more, each with a mean of its own."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, mean in enumerate(means):
        kl = mean * torch.rand(count + 7 * number, generator=generator, dtype=torch.float64) * 2
        found.append(Positions(kl, torch.ones(len(kl), dtype=torch.bool), kl[1:], kl[1:]))
    return found


def test_a_sound_engine_is_not_compared_on_every_text(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    measured = built(checkpoint, tmp_path)
    assert measured.all_positions is not None and not measured.failed
    assert 0.2 * measured.all_positions < measured.whole.positions < 0.3 * measured.all_positions
    assert len(measured.texts) == 4, "a batch"
    assert (
        f"over {measured.whole.positions} of {measured.all_positions} positions"
        in describe_quality(QualityReport("quick", measured))[0]
    )


def test_an_undecided_one_is_compared_on_all_and_judged_by_them(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    """A limit that is within every interval, and just above or below what all texts say."""
    progress = Counted()
    middle = built(checkpoint, tmp_path).whole.kl
    assert middle is not None
    limit = middle
    for _ in range(4):  # until the limit is what all texts say
        try:
            all_of_it = built(checkpoint, tmp_path, progress, kl=limit)
            break
        except QualityGateError:
            limit *= 1.05
    assert all_of_it.whole.positions == all_of_it.all_positions and len(all_of_it.texts) == 16
    assert progress.name == "quality gate (quick)" and progress.done == progress.total > 0
    exact = all_of_it.whole.kl
    assert exact is not None
    assert built(checkpoint, tmp_path, kl=exact).whole.positions == all_of_it.all_positions
    with pytest.raises(QualityGateError, match=f"kl is {exact:g} "):
        built(checkpoint, tmp_path, kl=exact * 0.99)


def test_one_that_is_far_off_is_refused_after_a_batch(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    progress = Counted()
    with pytest.raises(QualityGateError, match="kl is "):
        built(checkpoint, tmp_path, progress, kl=0.0001)
    assert 0 < progress.done < 0.5 * progress.total
    assert list(tmp_path.iterdir()) == []


def test_full_compares_all(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    gate = GateConfig(full=True, limits={"needle": 0})
    measured = build_engine(checkpoint, BuildConfig(quant=Int8Wo(), gate=gate), tmp_path / "x.engine").quality.measured
    assert measured is not None and measured.whole.positions == measured.all_positions


def test_batches_have_every_text_once() -> None:
    for count in (1, 2, 5, 16):
        every = [index for batch in batches(count) for index in batch]
        assert sorted(every) == list(range(count))
    assert next(iter(batches(16))) == range(0, 16, 4)


def test_the_factors_are_students() -> None:
    """The tails beyond each, integrated."""
    for freedom, factor in enumerate(T_FACTORS, 1):
        constant = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        angles = np.linspace(0, math.atan(factor / math.sqrt(freedom)), 20001)  # t = √freedom tan(angle)
        density = constant * math.sqrt(freedom) * np.cos(angles) ** (freedom - 1)
        inside = 2 * float(np.sum((density[1:] + density[:-1]) / 2 * np.diff(angles)))
        assert 1 - inside == pytest.approx(ERROR / LOOKS, rel=0.02), freedom


def test_the_intervals_have_the_mean_although_texts_differ() -> None:
    """Of many samples of texts with different means, nearly all intervals hold the true mean; if positions counted as
    independent, a third or more would not.
    """
    generator = torch.Generator().manual_seed(1)
    misses = narrow = 0
    for draw in range(300):
        means = (1 + 0.3 * torch.randn(8, generator=generator)).clamp(min=0.1).tolist()
        found = texts(means, 100, draw)
        low, high = intervals(found)["kl"]
        misses += not low <= 1 <= high
        every = torch.cat([one.kl for one in found])
        narrow += abs(float(every.mean()) - 1) > 2.94 * float(every.std()) / len(every) ** 0.5
    assert misses <= 4 and narrow > 100


def test_a_share_that_was_never_seen_is_still_possible() -> None:
    low, high = intervals(texts([0.1] * 4, 100))["top1"]
    assert high == 1 and 1 - low == pytest.approx(5.7 / 442, rel=0.01)


def test_what_is_not_finite_is_left_out_of_intervals() -> None:
    found = texts([1, 1, 1], 100)
    found[1].kl[5] = math.nan
    low, high = intervals(found)["kl"]
    assert 0 < low < 1 < high < 3
    assert intervals(found[:1]) == {}


@pytest.mark.parametrize(
    ("limit", "is_minimum", "sure"),
    [
        (0.9, False, False),
        (0.4, False, True),
        (1.2, False, True),
        (0.9, True, False),
        (0.4, True, True),
        (1.2, True, True),
    ],
)
def test_sure_is_beyond_the_interval(limit: float, is_minimum: bool, sure: bool) -> None:
    assert Check("x", "", 0.8, limit, is_minimum, (0.5, 1.0)).sure is sure
    assert Check("x", "", 0.8, limit, is_minimum).sure


def test_reports_of_older_builds_are_shown_as_they_were() -> None:
    old = QualityReport.from_json(
        b'{"gate":"quick","measured":{"isa":"avx2","checks":[{"name":"kl","what":"","value":0.1,"limit":0.2,"least":'
        b'false}],"whole":{"positions":7,"broken":0,"kl":0.1,"kl_standard_error":0.01,"top1":0.5,"source_perplexity":2,'
        b'"perplexity":3},"texts":[],"ranges":[],"layers":[]}}'
    )
    assert describe_quality(old)[0] == "KL 0.1 ± 0.01 nats, over 7 positions"
