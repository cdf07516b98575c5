"""Draws the chart of the README: tokens per second of this engine and its peers, for a light and a dark page.

    python benchmarks/chart.py

Reads `benchmarks/results/cpu.json`, which `benchmarks/cpu.py` writes, and writes `docs/assets/throughput-light.svg` and
`docs/assets/throughput-dark.svg`. Each bar is the median of the rounds, each peer at the best of its settings.
"""

import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.figures import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/cpu.json"
FOLDER = ROOT / "docs/assets"
MODEL = "llama-1b"
POINTS = {
    "prefill-512": "Reading a prompt of 512 tokens",
    "decode-512x1": "Writing one answer",
    "in-flight-32x128x64": "Writing 32 answers at once",
}
CLASSES = {"8-bit": "8-bit weights", "4-bit": "4-bit weights"}
NAMES = {None: "enginewright", "OpenVINO": "OpenVINO GenAI", "llama.cpp": "llama.cpp"}
WIDTH_IN, HEIGHT_IN = 10.0, 3.3
BAR, GAP = 0.8, 0.7  # height of a bar, and distance between two precision classes, in bars


@dataclass(frozen=True)
class Theme:
    """Colors of a chart on one background, which itself is transparent."""

    name: str  # part of the file's name
    text: str
    note: str
    ours: str
    peer: str


THEMES = (
    Theme("light", text="#1f2328", note="#59636e", ours="#1f6feb", peer="#b6bec8"),
    Theme("dark", text="#e6edf3", note="#9198a1", ours="#4493f8", peer="#4a535e"),
)
Rates = dict[str, dict[str, dict[str, float]]]


def rates(found: dict[str, Any]) -> Rates:
    """Medians of tokens per second, by point, precision class and engine.

    Args:
        found: a file of results, as `benchmarks/cpu.py` writes it.
    """
    chosen: Rates = {}
    for point in POINTS:
        for group in CLASSES:
            there = shown(found["speed"][f"{MODEL}, {group}"][point]["value"])
            chosen.setdefault(point, {})[group] = {
                NAMES[one.peer]: round(one.rate.median, 2) for one in there.values() if one.peer in NAMES
            }
    return chosen


def render(chosen: Rates, theme: Theme) -> bytes:
    """Draws the chart as SVG. Its description holds the figures as JSON, so that a test can compare them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings = {"font.size": 10, "svg.fonttype": "path", "svg.hashsalt": "enginewright", "text.color": theme.text}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        panels = figure.subplots(1, len(POINTS), sharey=True)
        for panel, (point, title) in zip(panels, POINTS.items(), strict=True):
            _panel(panel, chosen[point], title, theme)
        figure.suptitle("Tokens per second, Llama of a 1B shape, two CPU cores (longer is faster)", fontsize=11)
        written = BytesIO()
        metadata = {"Date": None, "Description": json.dumps(chosen, sort_keys=True)}
        figure.savefig(written, format="svg", transparent=True, metadata=metadata)
    return written.getvalue()


def _panel(axes: "Axes", classes: dict[str, dict[str, float]], title: str, theme: Theme) -> None:
    place = 0.0
    ticks: list[float] = []
    labels: list[str] = []
    longest = max(rate for engines in classes.values() for rate in engines.values())
    for group, engines in classes.items():
        axes.text(0, place + 0.2, CLASSES[group], color=theme.note, fontsize=8.5, va="bottom")
        for name in NAMES.values():
            place += 1
            rate, ours = engines[name], name == NAMES[None]
            axes.barh(place, rate, height=BAR, color=theme.ours if ours else theme.peer)
            weight = "bold" if ours else "normal"
            axes.text(rate + longest * 0.02, place, f"{rate:.0f}", va="center", fontsize=9, fontweight=weight)
            ticks.append(place)
            labels.append(name)
        place += 1 + GAP
    axes.set_title(title, fontsize=10, loc="left", color=theme.text)
    axes.set_yticks(ticks, labels, color=theme.text)
    axes.set_ylim(place - GAP - 0.3, -0.8)
    axes.set_xlim(0, longest * 1.15)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def main() -> None:
    chosen = rates(json.loads(RESULTS.read_text()))
    for theme in THEMES:
        (FOLDER / f"throughput-{theme.name}.svg").write_bytes(render(chosen, theme))


if __name__ == "__main__":
    main()
