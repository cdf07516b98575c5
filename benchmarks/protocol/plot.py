"""Plot of the results: every engine of a class and its fastest peer, at each point."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.figures import best_peer, over, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, ROW_IN, HEAD_IN = 7.2, 0.34, 1.1
OURS, GRID = "#1f5a96", "#e2e2e2"
PEERS = {
    "llama.cpp": "#b3541e",
    "ik_llama.cpp": "#e0a03c",
    "OpenVINO": "#4f8f4f",
    "vLLM": "#8a5fa8",
    "transformers": "#808080",
}
MARKERS = "Ds^vPX*"


def plot(found: dict[str, Any], path: Path) -> None:
    """Plots one panel for each model and class with a measured peer. The file is written completely or not at all."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = {}
    for group, points in found.get("speed", {}).items():
        rows = {name: shown(entry["value"]) for name, entry in points.items()}
        rows = {name: there for name, there in rows.items() if best_peer(there) is not None}
        if rows:
            panels[group] = rows
    if not panels:
        return
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    tallest = max(map(len, panels.values()))
    size = (WIDTH_IN * columns, (HEAD_IN + ROW_IN * tallest) * lines + 0.4)
    with mpl.rc_context({"font.size": 9, "svg.fonttype": "path", "svg.hashsalt": "enginewright"}):
        figure = Figure(figsize=size, layout="constrained")
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for one, (group, rows) in zip(axes, panels.items(), strict=False):
            _panel(one, group, rows)
        for one in axes[len(panels) :]:
            one.set_axis_off()
        figure.suptitle("Tokens/s over the fastest peer's of the class (right is faster; lines: range of rounds)")
        part = path.with_name(f".{path.name}.part")
        figure.savefig(part, format="svg", metadata={"Date": None})
        part.replace(path)


def _panel(axes: "Axes", group: str, rows: dict[str, Any]) -> None:
    names = list(dict.fromkeys(name for there in rows.values() for name in there))
    peers = {one.name: one.peer for there in rows.values() for one in there.values()}
    shapes = iter(MARKERS)  # ours may be several; a peer has its color
    for name in names:
        peer = peers[name]
        color, marker = (OURS, next(shapes, ".")) if peer is None else (PEERS[peer], "o")
        places, middles, below, above = [], [], [], []
        for place, there in enumerate(rows.values()):
            best = best_peer(there)
            if name in there and best is not None:
                value = over(there[name], best)
                places.append(place + (-0.12 if peer is None else 0.12))
                middles.append(value.median)
                below.append(value.median - value.min)
                above.append(value.max - value.median)
        axes.errorbar(
            middles, places, xerr=(below, above), fmt=marker, color=color, markersize=5, elinewidth=1, label=name
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} ×")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(group, loc="left", fontsize=10)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
