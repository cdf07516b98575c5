"""Plots as SVG text in one style: lines, and stacked bars. Colours are those of the page (`--c0`, …)."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 40  # around the axes
COLOURS = 6  # number of colours
TICKS = 5  # approximate number of ticks
LEGEND_LINE = 20  # height of a line of the legend


def lines(series: Mapping[str, Sequence[tuple[float, float, str]]], x_label: str, y_label: str) -> str:
    """Plots lines.

    Args:
        series: name → points (x, y, tooltip).
        x_label: label of the x axis.
        y_label: label of the y axis.
    """
    points = [point for own in series.values() for point in own]
    axes = _Axes([x for x, _, _ in points], [y for _, y, _ in points], x_label, y_label)
    body = []
    for number, own in enumerate(series.values()):
        colour = f"c{number % COLOURS}"
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y, _ in own)
        body.append(f'<polyline class="line {colour}" points="{path}"/>')
        body += [
            f'<circle class="dot {colour}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3">'
            f"<title>{escape(tooltip)}</title></circle>"
            for x, y, tooltip in own
        ]
    return axes.drawn(body, list(series))


def bars(heights: Sequence[Mapping[str, tuple[float, str]]], labels: Sequence[str], x_label: str, y_label: str) -> str:
    """Plots stacked bars.

    Args:
        heights: for each bar, name of a part → (height, tooltip).
        labels: label of each bar.
        x_label: label of the x axis.
        y_label: label of the y axis.
    """
    names = list(dict.fromkeys(name for parts in heights for name in parts))
    totals = [sum(height for height, _ in parts.values()) for parts in heights]
    axes = _Axes([-0.5, len(heights) - 0.5], totals, x_label, y_label, labels)
    body, wide = [], 0.8 * (axes.x(1) - axes.x(0))
    for index, parts in enumerate(heights):
        below = 0.0
        for name, (height, tooltip) in parts.items():
            top, bottom = axes.y(below + height), axes.y(below)
            body.append(
                f'<rect class="bar c{names.index(name) % COLOURS}" x="{axes.x(index) - wide / 2:.1f}" y="{top:.1f}" '
                f'width="{wide:.1f}" height="{max(bottom - top, 0):.1f}"><title>{escape(tooltip)}</title></rect>'
            )
            below += height
    return axes.drawn(body, names if len(names) > 1 else [])


class _Axes:
    """Axes that start at 0, but for bars; `labels` replace whole numbers on x."""

    def __init__(
        self, xs: Sequence[float], ys: Sequence[float], x_label: str, y_label: str, labels: Sequence[str] = ()
    ) -> None:
        self._low, self._high = min(xs, default=0.0), max(xs, default=1.0)
        self._top = (max(ys, default=0.0) or 1.0) * 1.05
        self._x_label, self._y_label, self._labels = x_label, y_label, labels

    def x(self, value: float) -> float:
        """Converts a value to a horizontal position."""
        return LEFT + (value - self._low) / ((self._high - self._low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Converts a value to a vertical position."""
        return HEIGHT - BOTTOM - value / self._top * (HEIGHT - TOP - BOTTOM)

    def drawn(self, body: Sequence[str], names: Sequence[str]) -> str:
        """Writes the whole plot; `names` are those of the legend."""
        foot, left, right = HEIGHT - BOTTOM, LEFT, WIDTH - RIGHT
        parts = []
        for value in _ticks(0.0, self._top):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="end" x="{left - 6}" y="{y + 4:.1f}">{value:g}</text>')
        for value, label in self._x_ticks():
            parts.append(f'<text class="middle" x="{self.x(value):.1f}" y="{foot + 16}">{escape(label)}</text>')
        parts += body
        parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{foot}" y2="{foot}"/>')
        middle = (left + right) / 2
        parts.append(f'<text class="middle" x="{middle:.0f}" y="{HEIGHT - 6}">{escape(self._x_label)}</text>')
        rotation = f'transform="translate(14 {(TOP + foot) / 2:.0f}) rotate(-90)"'
        parts.append(f'<text class="middle" {rotation}>{escape(self._y_label)}</text>')
        parts += self._legend(names)
        height = HEIGHT + (LEGEND_LINE if names else 0)
        return f'<div><svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg></div>'

    def _legend(self, names: Sequence[str]) -> list[str]:
        parts, step = [], (WIDTH - LEFT - RIGHT) / max(len(names), 1)
        for number, name in enumerate(names):
            x, y = LEFT + number * step, HEIGHT + LEGEND_LINE - 8
            parts.append(f'<rect class="bar c{number % COLOURS}" x="{x:.0f}" y="{y - 9}" width="10" height="10"/>')
            parts.append(f'<text x="{x + 15:.0f}" y="{y}">{escape(name)}</text>')
        return parts

    def _x_ticks(self) -> list[tuple[float, str]]:
        if not self._labels:
            return [(value, f"{value:g}") for value in _ticks(self._low, self._high)]
        step = -(-len(self._labels) // 16)
        return [(float(index), self._labels[index]) for index in range(0, len(self._labels), step)]


def _ticks(low: float, high: float) -> list[float]:
    """Returns ticks at multiples of 1, 2 or 5 times a power of ten."""
    rough = ((high - low) or 1.0) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((power * factor for factor in (1, 2, 5, 10)), key=lambda size: abs(size - rough))
    count = math.floor(high / step + 1e-9)
    return [float(f"{index * step:.6g}") for index in range(math.ceil(low / step), count + 1)]
