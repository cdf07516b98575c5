"""The simulation of a fleet, compared with closed forms and with a slow simulation that goes step by step."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from chart import FOLDER, ROOT, THEMES, Theme
from fleet.costs import Measured, StepCosts, fit
from fleet.gaps import Gaps
from fleet.replica import Limits, Request
from fleet.simulation import FleetConfig, Link, Outcome, Simulation
from fleet.workload import Requests, Workload
from fleet_simulation import COSTS, RESULTS, cases, chosen, read, render, simulate, table

from enginewright import LLM, SamplingParams
from enginewright.route.choice import choose
from enginewright.route.prefixes import PrefixMemory, read_body
from tests import tolerances
from tests.helpers.serving import LIMITS, tiny_engine

MEASURED = StepCosts.read(COSTS)
ONE = FleetConfig("least requests", replicas=1)
SMALL = Workload(requests=400, prefixes=20, prefix_tokens=600, own_tokens=40, answer_tokens=20)
FLEET = FleetConfig("prefixes", replicas=4, limits=Limits(cache_keys=200))


def run(config: FleetConfig, requests: Sequence[Request], costs: StepCosts = MEASURED, **options: Any) -> Outcome:
    outcome = Simulation(config, costs, requests, **options).run()
    assert all(one.arrived_s < one.first_token_s <= one.ended_s for one in requests)
    return outcome


@pytest.mark.parametrize("tokens", [1, 96, 511, 512, 513, 1700])
def test_a_request_alone_takes_what_its_steps_take(tokens: int) -> None:
    (request,) = requests = [Request(3.0, (), tokens, answer_tokens=9)]
    run(ONE, requests)
    assert request.first_token_s - 3 == pytest.approx(MEASURED.prompt(tokens, 512))
    decoding = sum(MEASURED.step(1, 1, tokens + count) for count in range(1, 9))
    assert request.ended_s - request.first_token_s == pytest.approx(decoding)


def test_waiting_is_that_of_a_queue_with_fixed_service() -> None:
    """M/D/1: with Poisson arrivals and steps of one prompt each, a request waits ρ D / 2 (1 - ρ) on average."""
    rng, count, busy = np.random.default_rng(1), 60_000, 0.7
    service_s = MEASURED.prompt(512, 512)
    times = rng.exponential(service_s / busy, count).cumsum()
    requests = [Request(one, (), 512, answer_tokens=1) for one in times.tolist()]
    outcome = run(ONE, requests)
    waits = np.array([one.ended_s - one.arrived_s for one in requests]) - service_s
    assert waits.mean() == pytest.approx(busy * service_s / (2 * (1 - busy)), rel=tolerances.SIMULATED_WAIT)
    assert outcome.busy == pytest.approx(busy, rel=tolerances.SIMULATED_WAIT)


def step_by_step(requests: Sequence[Request], limits: Limits, costs: StepCosts) -> list[tuple[float, float]]:
    """The times of the first and the last token of each request: one loop over steps, without events."""
    now, first, last = 0.0, dict[int, float](), dict[int, float]()
    computed, written = dict.fromkeys(range(len(requests)), 0), dict.fromkeys(range(len(requests)), 0)
    while len(last) < len(requests):
        here = [number for number, one in enumerate(requests) if one.arrived_s <= now and number not in last]
        answers = [number for number in here if number in first]
        prompts = [number for number in here if number not in first]
        if not here:
            now = min(one.arrived_s for number, one in enumerate(requests) if number not in last)
            continue
        left = limits.max_tokens - len(answers)
        left = min(left, limits.chunk_tokens) if answers else left
        positions = sum(requests[number].prompt_tokens + written[number] for number in answers)
        tokens = rows = len(answers)
        done = []
        for number in prompts[: limits.max_sequences - len(answers)]:
            if left == 0:
                break
            count = min(left, requests[number].prompt_tokens - computed[number])
            positions += sum(range(computed[number], computed[number] + count))
            computed[number] += count
            tokens, left = tokens + count, left - count
            if computed[number] == requests[number].prompt_tokens:
                rows += 1
                done.append(number)
        now += costs.step(tokens, rows, positions)
        for number in done:
            first[number] = now
        for number in [*answers, *done]:
            written[number] += 1
            if written[number] == requests[number].answer_tokens:
                last[number] = now
    return [(first[number], last[number]) for number in range(len(requests))]


@pytest.mark.parametrize("seed", range(6))
def test_events_are_the_steps(seed: int) -> None:
    rng, limits = random.Random(seed), Limits(max_sequences=3, max_tokens=64, chunk_tokens=11)
    times = sorted(rng.uniform(0, 3) for _ in range(40))
    requests = [Request(one, (), rng.randint(1, 200), rng.randint(1, 30)) for one in times]
    run(replace(ONE, limits=limits), requests)
    expected = step_by_step(requests, limits, MEASURED)
    assert [(one.first_token_s, one.ended_s) for one in requests] == [pytest.approx(times) for times in expected]


def test_cached_prefixes_are_not_computed() -> None:
    keys = [bytes([number]) for number in range(10)]
    requests = [Request(0.0, keys, 330, 2), Request(10.0, [*keys[:5], b"x"], 200, 2), Request(20.0, keys, 320, 2)]
    outcome = run(ONE, requests)
    assert outcome.prompt_tokens == 850 and outcome.computed_tokens == 330 + (200 - 5 * 32) + 1
    first = requests[1].first_token_s - 10
    assert first == pytest.approx(MEASURED.prompt(200, 512, first=160))


def test_the_policies_differ_as_they_should() -> None:
    made = Requests(SMALL)
    found = {policy: run(replace(FLEET, policy=policy), made.at(8.0)) for policy in ("round robin", "prefixes")}
    assert found["prefixes"].computed_tokens < 0.8 * found["round robin"].computed_tokens
    assert found["prefixes"].prompt_tokens == found["round robin"].prompt_tokens
    assert run(FLEET, made.at(8.0)) == found["prefixes"]  # nothing depends on anything but the seed


class RealReplica:
    """An engine, as far as the router's choice needs it. No two requests run at a time."""

    is_healthy, num_running = True, 0

    def __init__(self, llm: LLM) -> None:
        self.llm, self.prefixes = llm, PrefixMemory()
        self.num_sent = self.num_computed = 0

    def answer(self, prompt: list[int], keys: Sequence[bytes]) -> list[int]:
        (output,) = self.llm.generate(list(prompt), SamplingParams(max_tokens=8, ignore_eos=True))
        self.num_sent += 1
        self.num_computed += len(prompt) - output.num_cached_tokens
        self.prefixes.remember(keys)
        return list(output.outputs[0].token_ids)


def keys_of(prompt: list[int]) -> list[bytes]:
    return read_body(msgspec.json.encode({"prompt": prompt})).keys(b"tenant")


def computed(policy: str) -> tuple[int, int]:
    """Prompt tokens that two real replicas compute in conversations, and two simulated ones in the same."""
    rng, requests = random.Random(0), list[Request]()
    conversations: list[list[int]] = [[] for _ in range(8)]
    with LLM(tiny_engine(), **LIMITS) as first, LLM(tiny_engine(), **LIMITS) as second:
        replicas = [RealReplica(first), RealReplica(second)]
        for _ in range(5):
            rng.shuffle(conversations)
            for prompt in conversations:
                prompt += [rng.randint(100, 250) for _ in range(120)]
                keys = keys_of(prompt)
                chosen = replicas[len(requests) % 2] if policy == "round robin" else choose(keys, replicas, 8)
                assert chosen is not None
                answer, length = chosen.answer(prompt, keys), len(prompt)
                prompt += answer
                requests.append(Request(0.0, keys, length, len(answer), keys_of(prompt)))
    outcome = run(FleetConfig(policy, replicas=2), requests, in_flight=1)
    return sum(one.num_computed for one in replicas), outcome.computed_tokens


def test_real_replicas_compute_what_simulated_ones_do() -> None:
    robin, ours = computed("round robin"), computed("prefixes")
    for real, simulated in (robin, ours):
        assert simulated == pytest.approx(real, rel=tolerances.SIMULATED_TOKENS)
    assert ours[0] / robin[0] == pytest.approx(ours[1] / robin[1], rel=tolerances.SIMULATED_TOKENS)
    assert ours[0] < 0.7 * robin[0]


def test_prompts_that_are_computed_apart() -> None:
    """No step of an answer has more than the end of a prompt, and a transfer takes what its bytes take."""
    keys = [bytes([number]) for number in range(100)]
    config = FleetConfig("prefixes", replicas=2, prefills=1, link=Link(1e6, 0.5), kv_bytes_per_token=1000)
    (request,) = requests = [Request(0.0, keys, 3205, 4)]
    outcome = run(config, requests)
    assert outcome.moved_bytes == 3_200_000
    expected = MEASURED.prompt(3205, 512) + 3.2 + 0.5 + MEASURED.prompt(3205, 512, first=3200)
    assert request.first_token_s == pytest.approx(expected)
    short = [Request(0.0, keys[:3], 99, 4)]
    assert run(config, short).moved_bytes == 0


def test_the_store_brings_what_is_faster_to_fetch() -> None:
    keys = [bytes([number]) for number in range(100)]
    config = FleetConfig("round robin", replicas=2, store=Link(1e9, 0.25), kv_bytes_per_token=1000)
    requests = [Request(0.0, keys, 3205, 4), Request(100.0, keys, 3205, 4)]
    outcome = run(config, requests)
    assert outcome.stored_bytes == 3_200_000 and outcome.computed_tokens == 3205 + 5
    assert requests[1].first_token_s == pytest.approx(100.2532 + MEASURED.prompt(3205, 512, first=3200))
    slow = [Request(0.0, keys, 3205, 4), Request(100.0, keys, 3205, 4)]
    outcome = run(replace(config, store=Link(1e6, 0.25)), slow)
    assert outcome.stored_bytes == 0 and outcome.computed_tokens == 2 * 3205


def test_a_fixed_number_in_flight() -> None:
    outcome = run(FLEET, Requests(SMALL).at(1.0), in_flight=16)
    assert outcome.busy > 0.8


def test_percentiles_of_gaps() -> None:
    gaps, values = Gaps(), np.random.default_rng(0).lognormal(-3, 1, 5000)
    for value in values.tolist():
        gaps.add(value, 1)
    for percent in (1, 50, 99):
        assert gaps.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=0.02)


def test_a_fit_finds_its_coefficients() -> None:
    costs = StepCosts(0.005, 0.0004, 0.0002, 1e-7)
    points = [(1, 512, 1, 130_816), (16, 512, 16, 7_936), (64, 64, 64, 0), (32, 256, 256, 140_000), (64, 64, 64, 3e5)]
    measured = [
        Measured("", (steps - 1) * costs.fixed_s + costs.step(tokens, rows, positions), steps, tokens, rows, positions)
        for steps, tokens, rows, positions in points
    ]  # fmt: skip
    found = fit(measured)
    for name in ("fixed_s", "token_s", "row_s", "position_s"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=1e-6)


def test_tables_and_chart() -> None:
    runs = list(simulate(4, Requests(SMALL), MEASURED, (20, 60)))
    lines = table(runs).splitlines()
    assert len([line for line in lines if line.startswith("| prefixes |")]) == 3 and len(lines) == 2 + 3 * len(cases(4))
    curves = chosen(runs)
    assert {len(points) for lines in curves.values() for points in lines.values()} == {2}
    assert all(render(curves, theme).startswith(b"<?xml") for theme in THEMES)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_published_chart_and_table_show_the_results(theme: Theme) -> None:
    runs = read(RESULTS)
    text = (FOLDER / f"fleet-{theme.name}.svg").read_text()
    (description,) = re.findall(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    assert json.loads(description.replace("&quot;", '"')) == json.loads(json.dumps(chosen(runs)))
    page = (ROOT / "docs/fleet.md").read_text()
    assert all(line in page for line in table(runs).splitlines()), "docs/fleet.md has another table"
