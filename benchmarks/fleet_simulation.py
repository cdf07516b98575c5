"""Simulates a fleet of replicas: what routing, prefill apart and a store of prefixes bring, and where they stop.

    python benchmarks/fleet_simulation.py [--requests 100000] [--replicas 64] [--publish]

Prompts begin with one of many shared prefixes, whose shares follow Zipf's law, and end with a part of their own. The
router is the code of `engine route`: its keys of real bodies, its memory of each replica, its choice. Replicas batch
as ours do, with steps that take as long as those measured by benchmarks/cpu.py. Everything follows from a seed.

The load is given in percent of what round robin serves if a fixed number of requests is always in flight. Prints the
table of docs/fleet.md. `--publish` writes it there, the chart of that page, and benchmarks/results/fleet.json.

    python benchmarks/fleet_simulation.py --fit benchmarks/results/cpu.json

fits the costs of steps again, and writes them to benchmarks/results/step_costs.json.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chart import FOLDER, ROOT, THEMES, Theme
from fleet.costs import StepCosts, fit_results
from fleet.simulation import FleetConfig, Link, Outcome, Simulation
from fleet.workload import Requests, Workload
from protocol.rows import in_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = ROOT / "benchmarks/results/fleet.json"
PAGE = ROOT / "docs/fleet.md"
TABLE = re.compile(r"[\d,]+ requests, [\d,]+ prefixes, seed \d+:\n\n(?:\|.*\n)+")  # in the page
COSTS = ROOT / "benchmarks/results/step_costs.json"
MEASURED = "smollm2, 8-bit", "engine cpu-w8a8"  # the model and the engine of benchmarks/cpu.py
CHUNK = 512  # tokens of a step in benchmarks/cpu.py
LOADS = (20, 60, 95)  # percent
IN_FLIGHT = 16  # requests of each replica at a time, where its throughput is found
SATURATING = 10_000  # requests of a run that finds it
POLICIES = ("round robin", "least requests", "prefixes")
STORE = Link(bytes_per_s=1.25e9, latency_s=0.005)  # 10 Gbit/s for all replicas together


# For each panel of the chart and each line of it, points of load and figure.
Curves = dict[str, dict[str, list[tuple[int, float]]]]


@dataclass(frozen=True)
class Run:
    """A simulated run."""

    name: str  # name of the case
    load: int | None  # percent of the throughput of round robin; None: a fixed number of requests in flight
    outcome: Outcome  # what it has shown


def cases(replicas: int) -> dict[str, FleetConfig]:
    """The fleets that are compared, by name."""
    base = FleetConfig("round robin", replicas)
    found = {policy: replace(base, policy=policy) for policy in POLICIES}
    best = replace(base, policy="prefixes")
    for share in (8, 4):
        found[f"prefixes, {replicas // share} prefill"] = replace(best, prefills=replicas // share)
    for policy in ("least requests", "prefixes"):
        found[f"{policy}, store"] = replace(base, policy=policy, store=STORE)
    slow = replace(STORE, bytes_per_s=STORE.bytes_per_s / 5)
    found["least requests, slow store"] = replace(base, policy="least requests", store=slow)
    return found


def simulate(replicas: int, requests: Requests, costs: StepCosts, loads: tuple[int, ...]) -> Iterator[Run]:
    """Runs all cases: first for their throughput, then at each load."""
    compared, capacity = cases(replicas), 0.0
    for name, config in compared.items():
        fixed = requests.at(1.0, SATURATING)
        run = Simulation(config, costs, fixed, in_flight=IN_FLIGHT * replicas).run()
        capacity = capacity or run.requests_per_s
        yield Run(name, None, run)
    for load in loads:
        for name, config in compared.items():
            arriving = requests.at(capacity * load / 100)
            yield Run(name, load, Simulation(config, costs, arriving).run())


def row(run: Run) -> str:
    """A line of the table."""
    found = run.outcome
    first = " | ".join(f"{one:.2f}" for one in found.first_token_s)
    figures = f"{first} | {found.gap_p99_s * 1e3:.0f} | {found.computed_share:.2f}"
    load = "full" if run.load is None else f"{run.load} %"
    return f"| {run.name} | {load} | {figures} | {found.requests_per_s:.0f} | {found.busy:.2f} |"


def table(runs: list[Run]) -> str:
    """The table as Markdown."""
    head = "load | first token p50 (s) | p95 | p99 | gap p99 (ms) | computed | requests/s | busy"
    return "\n".join([f"| | {head} |", "|---" * 9 + "|", *map(row, runs)])


def read(path: Path) -> list[Run]:
    """Reads published results."""
    runs = json.loads(path.read_text())["runs"]
    return [Run(run["name"], run["load"], Outcome(**run["outcome"])) for run in runs]


def publish(runs: list[Run], workload: Workload) -> None:
    """Writes the results, the chart and the table of the repository.

    Args:
        runs: the runs.
        workload: their requests.
    """
    kept = {"workload": asdict(workload), "runs": [asdict(run) for run in runs]}
    RESULTS.write_text(in_rows(kept) + "\n")
    for theme in THEMES:
        (FOLDER / f"fleet-{theme.name}.svg").write_bytes(render(chosen(runs), theme))
    about = f"{workload.requests:,} requests, {workload.prefixes:,} prefixes, seed {workload.seed}:"
    text = f"{about}\n\n{table(runs)}\n"
    PAGE.write_text(TABLE.sub(lambda _: text, PAGE.read_text()))


def render(curves: Curves, theme: Theme) -> bytes:
    """Draws the chart as SVG. Its description holds the figures as JSON, so that a test can compare them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings = {"font.size": 10, "svg.fonttype": "path", "svg.hashsalt": "enginewright", "text.color": theme.text}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(10.0, 3.6), layout="constrained")
        panels = figure.subplots(1, 3)
        for panel, (title, lines) in zip(panels, curves.items(), strict=True):
            _panel(panel, title, lines, theme)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        written = BytesIO()
        metadata = {"Date": None, "Description": json.dumps(curves, sort_keys=True)}
        figure.savefig(written, format="svg", transparent=True, metadata=metadata)
    return written.getvalue()


def chosen(runs: list[Run]) -> Curves:
    """Data of the chart: for each panel and case, figures by load."""
    half = next(run.name for run in runs if "prefill" in run.name)
    shown = ("round robin", "least requests", "least requests, store", "prefixes", half)
    figures = {
        "Time to first token, p95 (s)": lambda one: one.first_token_s[1],
        "Time between tokens, p99 (ms)": lambda one: one.gap_p99_s * 1e3,
        "Prompt tokens computed (%)": lambda one: one.computed_share * 100,
    }
    return {
        title: {
            name: [(run.load, round(of(run.outcome), 3)) for run in runs if run.name == name and run.load is not None]
            for name in shown
        }
        for title, of in figures.items()
    }


def _panel(axes: "Axes", title: str, lines: dict[str, list[tuple[int, float]]], theme: Theme) -> None:
    styles = ((theme.peer, "-"), (theme.note, "-"), (theme.note, "--"), (theme.ours, "-"), (theme.ours, "--"))
    for (name, points), (color, line) in zip(lines.items(), styles, strict=True):
        axes.plot(*zip(*points, strict=True), line, color=color, label=name, linewidth=2)
    axes.set_title(title, fontsize=10, loc="left", color=theme.text)
    axes.set_xlabel("load (%)", color=theme.note)
    if title.startswith("Time to first"):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0)
    axes.tick_params(colors=theme.note, which="both", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, help="results of benchmarks/cpu.py, to fit the costs of steps")
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS)
    parser.add_argument("--requests", type=int, default=Workload.requests)
    parser.add_argument("--prefixes", type=int, default=Workload.prefixes)
    parser.add_argument("--exponent", type=float, default=Workload.exponent)
    parser.add_argument("--seed", type=int, default=Workload.seed)
    parser.add_argument("--publish", action="store_true", help="write the results and the chart of the repository")
    arguments = parser.parse_args()
    if arguments.fit is not None:
        command = f"python benchmarks/cpu.py; python benchmarks/fleet_simulation.py --fit {arguments.fit}"
        found: dict[str, Any] = {"command": command, **fit_results(arguments.fit, *MEASURED, CHUNK)}
        COSTS.write_text(in_rows(found) + "\n")
        return
    workload = Workload(
        requests=arguments.requests, prefixes=arguments.prefixes, exponent=arguments.exponent, seed=arguments.seed
    )
    requests, runs = Requests(workload), list[Run]()
    for run in simulate(arguments.replicas, requests, StepCosts.read(arguments.costs), tuple(arguments.loads)):
        runs.append(run)
        print(row(run), file=sys.stderr, flush=True)
    print(table(runs))
    if arguments.publish:
        publish(runs, workload)


if __name__ == "__main__":
    main()
