"""The quality report as one self-contained HTML page: no scripts, no files, light and dark."""

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from enginewright.builder.gate.plots import bars, lines
from enginewright.manifest import About
from enginewright.runtime.commands.quality import (
    Distance,
    Full,
    LayerError,
    Measured,
    QualityReport,
    positions_compared,
)

MIB = 1 << 20
_OF_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --dim: #62676e; --page: #fff; --rule: #d9dce0; --bad: #b3261e;
  --good: #1b6e3c; --c0: #1f5a96; --c1: #b3541e; --c2: #3a7d44; --c3: #7b4fa3; --c4: #8a6d00; --c5: #a33b6a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e7e9; --dim: #9aa0a7; --page: #16181b; --rule: #34383d;
  --bad: #f2857d; --good: #7ecb9a; --c0: #79b0e8; --c1: #e79a6b; --c2: #85c98f; --c3: #bd9be0; --c4: #d9bd55;
  --c5: #e58fb5; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } p { color: var(--dim); }
div { overflow-x: auto; } svg { min-width: 34rem; }  /* narrower, they are moved sideways */
table { border-collapse: collapse; white-space: nowrap; }
td, th { padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--rule); }
th { text-align: left; color: var(--dim); font-weight: 500; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: var(--bad); } .good { color: var(--good); }
svg { width: 100%; height: auto; font-size: 12px; } svg text { fill: var(--dim); }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; } svg .grid { stroke: var(--rule); }
svg .axis { stroke: var(--dim); } svg .line { fill: none; stroke: var(--c); stroke-width: 1.5; }
svg .dot, svg .bar { fill: var(--c); }
""" + "".join(f".c{number} {{ --c: var(--c{number}); }} " for number in range(6))


def page(report: QualityReport, measured: Measured, about: About) -> str:
    """Writes the page.

    Args:
        report: the quality report.
        measured: its first platform; each other one has a part of its own.
        about: facts about the engine.
    """
    verdict = "refused" if report.failed else "passed"
    recipe = ", ".join(f"{key} {value}" for key, value in about.recipe.items())
    body = [
        f"<h1>{escape(about.name)}: what the build has lost</h1>",
        f"<p>{escape(about.model_type)}, {escape(recipe)}; built by enginewright {escape(about.builder_version)}.</p>",
        f'<p>Gate {escape(report.gate)}: <strong class="{"bad" if report.failed else "good"}">{verdict}</strong></p>',
    ]
    for one in (measured, *report.also):
        body += [f"<h1>Computed with {escape(one.isa)}</h1>", *_measured(one)]
    title = f"<title>{escape(about.name)}: quality</title>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}<style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _measured(measured: Measured) -> Iterator[str]:
    yield from _checks(measured)
    yield from _by_layer(measured.layers)
    yield "<h2>KL by position</h2><p>Mean over all texts, of the positions from one number to the next.</p>"
    yield bars(
        [
            {"KL": (entry.kl or 0.0, f"{entry.begin} to {entry.end - 1}: {_number(entry.kl)}")}
            for entry in measured.ranges
        ],
        [str(entry.begin) for entry in measured.ranges],
        "position in the text",
        "KL, nats",
    )
    yield from _texts(measured)
    if measured.full is not None:
        yield from _full(measured.full)
    yield from _layers(measured.layers)


def _checks(measured: Measured) -> Iterator[str]:
    yield f"<p>Over {positions_compared(measured)} of held-out text. "
    yield "The intervals have the value for all texts like these (confidence 99 %).</p>"
    yield from _table(
        ("", "value", "interval", "limit", "", "measure"),
        (
            (
                check.name,
                _number(check.value),
                "" if check.interval is None else " to ".join(map(_number, check.interval)),
                "none" if check.limit is None else f"{'≥' if check.is_minimum else '≤'} {check.limit:g}",
                "" if check.limit is None else "passed" if check.passed else "failed",
                check.what,
            )
            for check in measured.checks
        ),
    )


def _by_layer(layers: Sequence[LayerError]) -> Iterator[str]:
    """Plots errors and sizes in the order of the model, with a colour for each kind of layer."""
    errors: dict[str, list[tuple[float, float, str]]] = {}
    sizes: dict[int, dict[str, tuple[float, str]]] = {}
    tables: list[str] = []
    placed = [(match, layer) for layer in layers for match in [_OF_LAYER.fullmatch(layer.name)]]
    for match, layer in sorted(placed, key=lambda entry: (int(entry[0][1]), entry[1].name) if entry[0] else (-1, "")):
        size = f"{layer.nbytes / MIB:.2f} MiB as {layer.method}"
        if match is None:
            tables.append(f"{layer.name} {size}")
            continue
        number, kind = int(match[1]), match[2]
        label = f"{layer.name}: {_number(layer.error)}"
        errors.setdefault(kind, []).append((number, 100 * (layer.error or 0.0), label))
        sizes.setdefault(number, {})[kind] = (layer.nbytes / MIB, f"{layer.name}: {size}")
    yield "<h2>Error by layer</h2><p>Of each linear layer's output on the source's activations, relative to it.</p>"
    yield lines(errors, "layer", "error, %")
    yield "<h2>Size by layer</h2><p>Weights with their scales, as the file holds them. "
    yield f"In addition: {escape(', '.join(tables))}.</p>"
    yield bars([*sizes.values()], [*map(str, sizes)], "layer", "MiB")


def _texts(measured: Measured) -> Iterator[str]:
    yield "<h2>Texts</h2>"
    rows = [(text.name, *_distance(text.distance)) for text in measured.texts]
    rows.append(("all", *_distance(measured.whole)))
    yield from _table(("text", "positions", "KL", "±", "same token first", "perplexity", "the source's"), rows)


def _distance(distance: Distance) -> tuple[str, ...]:
    values = (distance.kl, distance.kl_standard_error, distance.top1, distance.perplexity, distance.source_perplexity)
    return str(distance.positions), *map(_number, values)


def _full(full: Full) -> Iterator[str]:
    yield "<h2>Needles</h2><p>A number that a text tells once: is it repeated when the text asks for it?</p>"
    found = {True: "found", False: "lost"}
    yield from _table(
        ("tokens", "depth", "source", "engine"),
        ((str(one.length), f"{one.depth:g}", found[one.source], found[one.engine]) for one in full.needles),
    )
    yield "<h2>Writing</h2><p>How many tokens the source would have written as well, before it went another way.</p>"
    words = {None: "", True: "yes", False: "no"}
    yield from _table(
        ("after", "tokens", "agreed", "valid JSON"),
        ((one.prompt, str(one.tokens), str(one.agreed), words[one.valid_json]) for one in full.writings),
    )


def _layers(layers: Sequence[LayerError]) -> Iterator[str]:
    yield f"<h2>Layers</h2><details><summary>All {len(layers)}, the worst first</summary>"
    yield from _table(
        ("layer", "format", "error", "MiB"),
        ((one.name, one.method, _number(one.error), f"{one.nbytes / MIB:.2f}") for one in layers),
    )
    yield "</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    body = list(rows)
    yield "<div><table>"
    yield f"<tr>{''.join(_cell('th', text, [row[at] for row in body]) for at, text in enumerate(head))}</tr>"
    for row in body:
        yield f"<tr>{''.join(_cell('td', text, [text]) for text in row)}</tr>"
    yield "</table></div>"


def _cell(tag: str, text: str, kind_of: Sequence[str]) -> str:
    """Writes a cell. kind_of: texts that decide its style: its own, or those below it."""
    kind = {"failed": "bad", "lost": "bad", "passed": "good"}.get(text, "")
    if kind_of and all(other.replace(".", "").replace("e-", "").isdigit() for other in kind_of):
        kind = "number"
    return f'<{tag} class="{kind}">{escape(text)}</{tag}>' if kind else f"<{tag}>{escape(text)}</{tag}>"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
