"""Figures of a run, held against a computation by hand from the recorded times."""

import math
import random
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest

from enginewright.errors import UsageError
from enginewright_bench.cpu_time import CLOCK_TICKS, cpu_seconds
from enginewright_bench.figures import (
    Distribution,
    Failure,
    Goodput,
    RequestRecord,
    max_in_flight,
    serve_figures,
    tokens_over_time,
)


def by_hand(values: list[float], percent: float) -> float:
    """The textbook's percentile: between the values around the place percent × (n − 1)."""
    values = sorted(values)
    place = percent / 100 * (len(values) - 1)
    low, high = values[math.floor(place)], values[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def random_answers(count: int, seed: int) -> list[RequestRecord]:
    """Whole and failed ones, of one token and of many, with several tokens in a piece."""
    draw = random.Random(seed)
    answers = []
    for number in range(count):
        due = draw.uniform(0, 5)
        sent = due + draw.expovariate(100)
        times = [sent + draw.uniform(0.01, 1)]
        while len(times) < draw.choice([1, 2, 7, 31]):
            times.append(times[-1] + draw.expovariate(50))
        answer = RequestRecord(max_tokens=draw.randint(1, 40), due_s=due, sent_s=sent, piece_s=times)
        answer.end_s = times[-1] + draw.uniform(0, 0.01)
        answer.tokens, answer.prompt_tokens = len(times) + draw.choice([0, 0, 3]), draw.randint(1, 300)
        answer.cached_tokens, answer.has_usage = draw.randint(0, answer.prompt_tokens), draw.random() < 0.8
        if number % 5 == 4:
            answer.failure = Failure(draw.choice(["HTTP 500", "timeout"]), f"number {number}")
        answers.append(answer)
    return answers


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 23, 101])
def test_figures_are_what_the_times_say(count: int, seed: int) -> None:
    answers = random_answers(count, seed)
    figures = serve_figures(answers, Goodput(ttft=500, tpot=25, e2e=900))
    done = [answer for answer in answers if answer.failure is None]
    first = [(answer.piece_s[0] - answer.sent_s) * 1e3 for answer in done]
    each = [
        (answer.piece_s[-1] - answer.piece_s[0]) / (answer.tokens - 1) * 1e3 for answer in done if answer.tokens > 1
    ]
    gaps = [(b - a) * 1e3 for answer in done for a, b in zip(answer.piece_s, answer.piece_s[1:], strict=False)]
    whole = [(answer.end_s - answer.sent_s) * 1e3 for answer in done]
    late = [(answer.sent_s - answer.due_s) * 1e3 for answer in answers]
    latencies = [
        (figures.ttft_ms, first),
        (figures.tpot_ms, each),
        (figures.gap_ms, gaps),
        (figures.e2e_ms, whole),
        (figures.send_delay_ms, late),
    ]
    for found, values in latencies:
        if not values:
            assert found is None
            continue
        assert found is not None
        expected = {f"p{percent}": by_hand(values, percent) for percent in (50, 90, 95, 99)}
        expected |= {"mean": math.fsum(values) / len(values), "max": max(values)}
        assert asdict(found) == pytest.approx(expected)
    seconds = max(answer.end_s for answer in answers) - min(answer.sent_s for answer in answers)
    prompts, tokens = sum(answer.prompt_tokens for answer in done), sum(answer.tokens for answer in done)
    assert (figures.done, figures.failed) == (len(done), len(answers) - len(done))
    assert (figures.prompt_tokens, figures.generated_tokens, figures.duration_s) == (prompts, tokens, seconds)
    assert figures.cached_prompt_tokens == sum(answer.cached_tokens for answer in done)
    assert figures.requests_per_s == pytest.approx(len(done) / seconds)
    assert figures.prompt_tokens_per_s == pytest.approx(prompts / seconds)
    assert figures.generated_tokens_per_s == pytest.approx(tokens / seconds)
    assert figures.total_tokens_per_s == pytest.approx((prompts + tokens) / seconds)
    assert figures.short_answers == sum(answer.tokens < answer.max_tokens for answer in done)
    assert figures.without_usage == sum(not answer.has_usage for answer in done)
    good = 0
    for answer in done:
        tpot = (answer.piece_s[-1] - answer.piece_s[0]) / max(answer.tokens - 1, 1)
        fast = answer.piece_s[0] - answer.sent_s <= 0.5 and answer.end_s - answer.sent_s <= 0.9
        good += fast and (answer.tokens == 1 or tpot <= 0.025)
    assert figures.good == good and figures.good_requests_per_s == pytest.approx(good / seconds)
    failures = [answer.failure for answer in answers if answer.failure is not None]
    for kind, error in figures.errors.items():
        those = [failure for failure in failures if failure.kind == kind]
        assert (error.count, error.example) == (len(those), those[0].detail)
    assert sum(error.count for error in figures.errors.values()) == len(failures)


def test_a_run_in_which_everything_failed_at_once_has_figures() -> None:
    figures = serve_figures([RequestRecord(1, failure=Failure("timeout", "x"))])
    assert (figures.done, figures.failed, figures.requests_per_s) == (0, 1, 0)
    assert figures.ttft_ms is figures.tpot_ms is figures.gap_ms is figures.e2e_ms is None
    assert figures.good is None


def test_requests_at_once_are_counted_at_every_moment() -> None:
    answers = random_answers(40, seed=3)
    moments = [answer.sent_s for answer in answers]
    expected = max(sum(a.sent_s <= moment < a.end_s for a in answers) for moment in moments)
    assert max_in_flight(answers) == expected > 1
    one_after_another = [RequestRecord(1, sent_s=float(n), end_s=float(n + 1)) for n in range(3)]
    assert max_in_flight(one_after_another) == 1


@pytest.mark.parametrize(("max_bins", "min_bin_s"), [(60, 0.1), (7, 0.1), (60, 100.0)])
def test_tokens_over_time_add_up(max_bins: int, min_bin_s: float) -> None:
    answers = random_answers(31, seed=1)
    rates, edges = tokens_over_time(answers, max_bins, min_bin_s)
    done = [answer for answer in answers if answer.failure is None]
    assert len(rates) <= max_bins and edges[0] == 0 and edges[-1] == max(answer.piece_s[-1] for answer in done)
    assert float((rates * np.diff(edges)).sum()) == pytest.approx(sum(answer.tokens for answer in done))
    first = sum(answer.tokens / len(answer.piece_s) * (time < edges[1]) for answer in done for time in answer.piece_s)
    assert rates[0] == pytest.approx(first / edges[1]) or len(rates) == 1


def test_a_distribution_of_nothing_is_none() -> None:
    assert Distribution.of_seconds([]) is None
    assert asdict(Distribution.of_seconds([0.25]) or Distribution(*[0.0] * 6)) == {
        entry.name: 250.0 for entry in fields(Distribution)
    }


def test_goodput_is_read() -> None:
    assert Goodput.parse("ttft=500,tpot=50") == Goodput(ttft=500, tpot=50)
    assert Goodput.parse(" e2e = 1.5 ") == Goodput(e2e=1.5)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=-1", "ttft=0", "ttft=nan", "ttft=inf", "x=1", "e2e=1,e2e=2"]
)
def test_what_is_no_goodput_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--goodput") as caught:
        Goodput.parse(text)
    assert "ttft=500,tpot=50" in caught.value.fix


def stat(folder: Path, pid: int, parent: int, *ticks: int, name: str = "x") -> None:
    before = " ".join(["0"] * 9)
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} {before} {' '.join(map(str, ticks))} 20 0\n")


def test_cpu_time_is_that_of_a_process_and_all_below_it(tmp_path: Path) -> None:
    stat(tmp_path, 1, 0, 1000, 1000, 1000, 1000)
    stat(tmp_path, 10, 1, 1, 2, 30, 40, name="a (b) S 1 2")
    stat(tmp_path, 11, 10, 100, 200, 0, 0)
    stat(tmp_path, 12, 11, 5000, 0, 0, 0)
    stat(tmp_path, 20, 1, 7000, 7000, 0, 0)
    assert cpu_seconds(10, tmp_path) * CLOCK_TICKS == pytest.approx(1 + 2 + 30 + 40 + 100 + 200 + 5000)
    with pytest.raises(UsageError, match="99"):
        cpu_seconds(99, tmp_path)
