"""What `--gate` asks for: how much is measured, and how far an engine may be from its source."""

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
    """Something that is measured, and may have a limit."""

    name: str  # of the limit, in `--gate`
    what: str  # in words, for messages
    least: bool = False  # the limit is the least that passes; otherwise the most
    highest: float = math.inf  # possible value of the limit
    full: bool = False  # measured by `--gate full` alone


MEASURES = (
    Measure("kl", "mean KL divergence from the source, in nats"),
    Measure("top1", "share of positions at which the same token is the likeliest", least=True, highest=1),
    Measure("ppl", "perplexity, over the source's"),
    Measure("layer", "error of the worst layer's output, relative to it"),
    Measure("cosine", "mean cosine of the vectors of texts and the source's", least=True, highest=1),
    Measure("needle", "share of the needles found that the source finds", least=True, highest=1, full=True),
    Measure("json", "share of answers asked for in JSON that are", least=True, highest=1, full=True),
    Measure("divergence", "tokens written before the source goes another way, median", least=True, full=True),
)
LEVELS = ("quick", "full", "off")
_BY_NAME = {measure.name: measure for measure in MEASURES}

NEEDLE = 0.75  # of nine, two may be lost


def limits_of(formats: Iterable[str], kv_dtypes: Iterable[str] = ()) -> dict[str, float]:
    """The loosest of each limit, of an engine whose layers have these formats, and its KV caches these dtypes."""
    rows = [QUANT_METHODS[name].limits for name in set(formats)]
    rows += [KV_LIMITS[name] for name in set(kv_dtypes) & KV_LIMITS.keys()]
    loosest = {
        measure.name: (min if measure.least else max)(row[measure.name] for row in rows)
        for measure in MEASURES
        if measure.name in rows[0]
    }
    return {**loosest, "needle": NEEDLE}


@dataclass(frozen=True)
class GateConfig:
    """How much the gate measures, and its limits."""

    full: bool = False  # more than the distance on held-out text
    limits: Mapping[str, float] = field(default_factory=dict)  # by the names of MEASURES, in place of the formats'

    @property
    def name(self) -> str:
        return "full" if self.full else "quick"

    def checks(
        self,
        values: Mapping[str, float | None],
        defaults: Mapping[str, float],
        intervals: Mapping[str, tuple[float, float]] | None = None,
    ) -> tuple[Check, ...]:
        """Each measured value beside its limit. values: by name; what is not there was not measured."""
        limits = {**defaults, **self.limits}
        return tuple(
            Check(
                name=measure.name,
                what=measure.what,
                value=values[measure.name],
                limit=limits.get(measure.name),
                least=measure.least,
                interval=(intervals or {}).get(measure.name),
            )
            for measure in MEASURES
            if measure.name in values
        )


def parse_gate(text: str) -> GateConfig | None:
    """`quick`, `full` or `off` (None), and limits: `full,kl=0.05,top1=0.97`; limits alone are of `quick`.

    Raises:
        UsageError: anything else, a limit that is out of range, or one of `full` for `quick`.
    """
    words = [word.strip() for word in text.lower().split(",")]
    level, *more = [word for word in words if "=" not in word] or ["quick"]
    if more or level not in LEVELS:
        raise UsageError(f"--gate {text!r} is not known", _did_you_mean(more[0] if more else level))
    limits: dict[str, float] = {}
    for name, _, number in (word.partition("=") for word in words if "=" in word):
        name = name.strip()
        if name not in _BY_NAME:
            raise UsageError(f"--gate knows no limit {name!r}", _did_you_mean(name))
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
        most = "up" if math.isinf(measure.highest) else f"to {measure.highest:g}"
        raise UsageError(f"--gate {measure.name}={number} is not possible", f"it is a number from 0 {most}")
    return value


def _did_you_mean(word: str) -> str:
    known = [*LEVELS, *(f"{name}=…" for name in _BY_NAME)]
    near = get_close_matches(word, [*LEVELS, *_BY_NAME], n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
