"""The options of `--gate`: the amount of measurement, and the limits of an engine's distance from its source."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from enginewright.builder.gate.kv import KV_LIMITS
from enginewright.errors import UsageError
from enginewright.quant_methods import QUANT_METHODS
from enginewright.runtime.commands.quality import Check


@dataclass(frozen=True)
class Measure:
    """A figure that is measured, and may have a limit."""

    name: str  # name of the limit in `--gate`
    what: str  # description in words, for messages
    is_minimum: bool = False  # True if the limit is a minimum; otherwise a maximum
    highest: float = math.inf  # greatest possible limit
    full: bool = False  # True if only `--gate full` measures it


MEASURES = (
    Measure("kl", "mean KL divergence from the source, in nats"),
    Measure("top1", "share of positions at which the same token is the likeliest", is_minimum=True, highest=1),
    Measure("ppl", "perplexity, over the source's"),
    Measure("layer", "error of the worst layer's output, relative to it"),
    Measure("cosine", "mean cosine of the vectors of texts and the source's", is_minimum=True, highest=1),
    Measure("needle", "share of the needles found that the source finds", is_minimum=True, highest=1, full=True),
    Measure("json", "share of answers asked for in JSON that are", is_minimum=True, highest=1, full=True),
    Measure("divergence", "tokens written before the source goes another way, median", is_minimum=True, full=True),
)
LEVELS = ("quick", "full", "off")
_BY_NAME = {measure.name: measure for measure in MEASURES}

NEEDLE = 0.75  # two of nine may be lost


def limits_of(formats: Iterable[str], kv_dtypes: Iterable[str] = ()) -> dict[str, float]:
    """Combines the limits of an engine: the loosest of each.

    Args:
        formats: formats of its layers.
        kv_dtypes: dtypes of its KV caches.
    """
    rows = [QUANT_METHODS[name].limits for name in set(formats)]
    rows += [KV_LIMITS[name] for name in set(kv_dtypes) & KV_LIMITS.keys()]
    loosest = {
        measure.name: (min if measure.is_minimum else max)(row[measure.name] for row in rows)
        for measure in MEASURES
        if measure.name in rows[0]
    }
    return {**loosest, "needle": NEEDLE}


@dataclass(frozen=True)
class GateConfig:
    """The amount of measurement, and the limits."""

    full: bool = False  # True if it measures more than the distance on held-out text
    limits: Mapping[str, float] = field(default_factory=dict)  # name in MEASURES → limit, in place of the formats'

    @property
    def name(self) -> str:
        """Name of the level."""
        return "full" if self.full else "quick"

    def checks(
        self,
        values: Mapping[str, float | None],
        defaults: Mapping[str, float],
        intervals: Mapping[str, tuple[float, float]] | None = None,
    ) -> tuple[Check, ...]:
        """Compares each measured value with its limit.

        Args:
            values: name in MEASURES → value; a missing one was not measured.
            defaults: name → limit of the formats.
            intervals: name → confidence interval.
        """
        limits = {**defaults, **self.limits}
        return tuple(
            Check(
                name=measure.name,
                what=measure.what,
                value=values[measure.name],
                limit=limits.get(measure.name),
                is_minimum=measure.is_minimum,
                interval=(intervals or {}).get(measure.name),
            )
            for measure in MEASURES
            if measure.name in values
        )


def parse_gate(text: str) -> GateConfig | None:
    """Parses `quick`, `full` or `off` (None), and limits: `full,kl=0.05,top1=0.97`; limits alone mean `quick`.

    Raises:
        UsageError: the text has another form, a limit is out of range, or `quick` has a limit of `full`.
    """
    words = [word.strip() for word in text.lower().split(",")]
    level, *more = [word for word in words if "=" not in word] or ["quick"]
    if more or level not in LEVELS:
        raise UsageError(f"--gate {text!r} is not known", _did_you_mean(more[0] if more else level))
    limits: dict[str, float] = {}
    for name, _, number in (word.partition("=") for word in words if "=" in word):
        name = name.strip()
        if name not in _BY_NAME:
            raise UsageError(f"--gate has no limit {name!r}", _did_you_mean(name))
        if name in limits:
            raise UsageError(f"--gate sets {name} twice")
        limits[name] = _limit(_BY_NAME[name], number.strip())
        if _BY_NAME[name].full and level == "quick":
            raise UsageError(f"--gate quick does not measure {name}", fix=f"Use --gate full,{name}={limits[name]:g}.")
    if level == "off":
        if limits:
            raise UsageError("--gate off measures nothing", f"so {', '.join(limits)} cannot be limited")
        return None
    return GateConfig(level == "full", limits)


def _limit(measure: Measure, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 <= value <= measure.highest or math.isinf(value):
        range_end = "up" if math.isinf(measure.highest) else f"to {measure.highest:g}"
        raise UsageError(f"--gate {measure.name}={number} is not possible", f"it is a number from 0 {range_end}")
    return value


def _did_you_mean(word: str) -> str:
    known = [*LEVELS, *(f"{name}=…" for name in _BY_NAME)]
    near = get_close_matches(word, [*LEVELS, *_BY_NAME], n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
