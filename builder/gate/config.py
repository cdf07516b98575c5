"""What `--gate` asks for: how much is measured, and how far an engine may be from its source."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from enginewright.builder.gate.kv import KV_LIMITS
from enginewright.errors import UsageError
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

# What a sound build of a small model may lose, one row per format: small models lose most, and the gate refuses what is
# broken, not what is coarse. Above each row is what SmolLM2-135M loses on the held-out text, its weights moved off the
# grid of 4 bits that they were published on. A layer whose scales are wrong is off by 1; int8 activations may leave the
# most extreme layer off by 0.2. Tiny models of random weights, whose distributions are flat, agree in 4 bits at 0.6,
# in FP4 at 0.5.
LIMITS: Mapping[str, Mapping[str, float]] = {
    # 0.0002, 0.993, 0.999, 0.002; with KV in int8 0.0014, 0.976
    "bf16": {"kl": 0.005, "top1": 0.96, "ppl": 1.02, "layer": 0.02},
    # 0.0068, 0.945, 1.002, 0.014
    "int8-wo": {"kl": 0.03, "top1": 0.90, "ppl": 1.05, "layer": 0.10},
    # 0.0110, 0.931, 1.007, 0.019; with one scale per token, which does not pass, 0.059, 0.860, 1.054, 0.067
    "w8a8": {"kl": 0.05, "top1": 0.88, "ppl": 1.06, "layer": 0.40},
    # 0.0097, 0.941, 0.999, 0.166
    "int8-sq": {"kl": 0.05, "top1": 0.88, "ppl": 1.06, "layer": 0.40},
    # 0.022, 0.899, 1.015, 0.034; with activations in FP8, on GPUs, 0.036, 0.880, 1.033
    "fp8": {"kl": 0.08, "top1": 0.82, "ppl": 1.08, "layer": 0.15},
    # 0.407, 0.642, 1.317, 0.133; in groups of 128, which do not pass, 0.589, 0.577, 1.54, 0.171
    "int4-rtn": {"kl": 0.60, "top1": 0.55, "ppl": 1.50, "layer": 0.40},
    # 0.175, 0.757, 1.134, 0.130
    "int4-awq": {"kl": 0.40, "top1": 0.55, "ppl": 1.30, "layer": 0.40},
    # 0.192, 0.763, 1.154, 0.113
    "int4-gptq": {"kl": 0.40, "top1": 0.55, "ppl": 1.30, "layer": 0.40},
    # 0.560, 0.601, 1.619, 0.155
    "mxfp4": {"kl": 0.80, "top1": 0.40, "ppl": 1.90, "layer": 0.40},
    # of its tables; each layer has the format that was chosen for it
    "auto": {"kl": 0.05, "top1": 0.88, "ppl": 1.06, "layer": 0.40},
}
NEEDLE = 0.75  # of nine, two may be lost


def limits_of(formats: Iterable[str], kv_dtypes: Iterable[str] = ()) -> dict[str, float]:
    """The loosest of each limit, of an engine whose layers have these formats, and its KV caches these dtypes."""
    rows = [LIMITS[name] for name in set(formats)] + [KV_LIMITS[name] for name in set(kv_dtypes) & KV_LIMITS.keys()]
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
