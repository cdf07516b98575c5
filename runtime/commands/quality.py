"""The quality report: how far an engine is from the model that it was built from, as its build has measured it.

It is evidence: rounded, so that machines of one class write the same, and without times, paths or memory figures.
"""

from typing import Any

import msgspec

from enginewright.errors import CorruptEngineError

QUALITY = "quality"  # the section of the engine file
SIMULATED = "simulated"  # ends the `isa` of targets that were not at hand


class Check(msgspec.Struct, frozen=True):
    """A measured value beside its limit."""

    name: str  # of the limit, in `--gate`
    what: str  # in words, for messages
    value: float | None  # None: not a number
    limit: float | None  # None: there is none
    least: bool  # the limit is the least that passes; otherwise the most
    interval: tuple[float, float] | None = None  # that has the value of all texts like these; None: not of a sample

    @property
    def sure(self) -> bool:
        """Whether the whole interval is on one side of the limit, so that more texts would tell nothing else."""
        if self.limit is None or self.value is None or self.interval is None:
            return True
        low, high = self.interval
        return high <= self.limit or low > self.limit if not self.least else low >= self.limit or high < self.limit

    @property
    def passed(self) -> bool:
        if self.limit is None:
            return True
        if self.value is None:
            return False
        return self.value >= self.limit if self.least else self.value <= self.limit


class Distance(msgspec.Struct, frozen=True):
    """Next-token distributions of the engine beside the source's, over some positions. None: nothing to measure."""

    positions: int  # all that were compared; of an embedding model, texts
    broken: int  # positions where the engine's logits are not finite; they are not counted below
    kl: float | None  # KL(source || engine), nats, mean
    kl_standard_error: float | None  # as if positions were independent; the intervals of `Check` know that they are not
    top1: float | None  # share of positions where both have the same likeliest token
    source_perplexity: float | None
    perplexity: float | None


class TextDistance(msgspec.Struct, frozen=True):
    """The distance on one text."""

    name: str
    distance: Distance


class PositionRange(msgspec.Struct, frozen=True):
    """A range of positions of all texts."""

    begin: int
    end: int  # not included
    kl: float | None  # nats, mean


class LayerError(msgspec.Struct, frozen=True):
    """A linear layer, or an embedding or head, as the file holds it."""

    name: str
    method: str  # what `--quant` calls its format
    nbytes: int  # in the file, with scales
    # |y - x Wᵀ| / |x Wᵀ|, mean over tokens: x is the source's, and y has x and W as the engine has them. Of an
    # embedding or head the same of its rows. None: not a number.
    error: float | None


class Needle(msgspec.Struct, frozen=True):
    """Whether a number that stands once in a text is repeated where the text asks for it."""

    length: int  # tokens of the text
    depth: float  # where in it the number stands, a share of the length
    source: bool  # whether the source repeats it
    engine: bool  # whether the engine does


class Writing(msgspec.Struct, frozen=True):
    """What the engine writes after a prompt, greedily."""

    prompt: str
    tokens: int  # how many it writes
    agreed: int  # how many of these the source would have written as well, before another one
    valid_json: bool | None  # None: JSON was not asked for


class Full(msgspec.Struct, frozen=True):
    """What `--gate full` adds."""

    needles: tuple[Needle, ...]
    writings: tuple[Writing, ...]


class Measured(msgspec.Struct, frozen=True):
    """What the gate measured on one platform."""

    isa: str  # instruction set that ran the engine; "cuda, simulated": what GPUs would compute
    checks: tuple[Check, ...]
    whole: Distance
    texts: tuple[TextDistance, ...]
    ranges: tuple[PositionRange, ...]
    layers: tuple[LayerError, ...]  # the worst first
    full: Full | None = None
    all_positions: int | None = None  # of the held-out text, of which some may have been enough; None: not recorded

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)


class QualityReport(msgspec.Struct, frozen=True):
    """What the quality gate of a build found."""

    gate: str  # "quick", "full", or "off", where nothing is measured
    measured: Measured | None = None
    also: tuple[Measured, ...] = ()  # what was measured on other platforms

    @property
    def failed(self) -> Measured | None:
        """The first that did not pass."""
        return next((one for one in self._platforms if one.failed), None)

    @property
    def limits(self) -> dict[str, float]:
        """By the names of checks: those that hold on every platform. Others are what a format has without `--gate`."""
        tables = [{(check.name, check.limit) for check in one.checks} for one in self._platforms]
        shared = set.intersection(*tables) if tables else set()
        return {name: limit for name, limit in sorted(shared, key=lambda entry: entry[0]) if limit is not None}

    @property
    def _platforms(self) -> tuple[Measured, ...]:
        return (self.measured, *self.also) if self.measured else ()

    def to_json(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")

    def to_dict(self) -> dict[str, Any]:
        """As JSON would hold it."""
        fields: dict[str, Any] = msgspec.json.decode(self.to_json())
        return fields

    def figures(self) -> dict[str, Any]:
        """What two engines may be compared by: checks by name, and errors by layer."""
        if self.measured is None:
            return {"gate": self.gate}
        checks = {check.name: check.value for check in self.measured.checks}
        return {"gate": self.gate, **checks, "layers": {layer.name: layer.error for layer in self.measured.layers}}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> "QualityReport":
        return msgspec.convert(fields, QualityReport)

    @staticmethod
    def from_json(data: bytes) -> "QualityReport":
        try:
            return msgspec.json.decode(data, type=QualityReport)
        except msgspec.MsgspecError as error:
            raise CorruptEngineError("the quality report cannot be read", str(error), "Build it again.") from error


def rounded(value: float | None, digits: int = 3) -> float | None:
    """To so many significant digits; None if it is no finite number."""
    if value is None or not abs(value) < float("inf"):
        return None
    return float(f"{value:.{digits}g}")


def describe_quality(report: QualityReport) -> list[str]:
    """A report in a few lines."""
    if report.measured is None:
        return ["not measured (--gate off)"]
    lines = []
    for one in (report.measured, *report.also):
        if one.isa.endswith(SIMULATED):
            lines.append(f"on {one.isa}:")
        lines += _described(one, report.gate)
    return lines


def _described(measured: Measured, gate: str) -> list[str]:
    whole = measured.whole
    if any(check.name == "cosine" for check in measured.checks):
        return [f"vectors of {whole.positions} texts", f"gate {gate}: {', '.join(map(_judged, measured.checks))}"]
    intervals = {check.name: check.interval for check in measured.checks if check.interval is not None}
    kl, top1 = f"KL {_number(whole.kl)}", f"the same likeliest token at {_percent(whole.top1)}"
    if "kl" in intervals:
        low, high = intervals["kl"]
        kl += f" nats ({low:g} to {high:g})"
    else:
        kl += f" ± {_number(whole.kl_standard_error)} nats"
    if "top1" in intervals:
        low, high = intervals["top1"]
        top1 += f" ({low:.1%} to {high:.1%})"
    lines = [
        f"{kl}, over {positions_compared(measured)}",
        f"{top1}; perplexity {_number(whole.perplexity)}, the source's {_number(whole.source_perplexity)}",
    ]
    return [*lines, f"gate {gate}: {', '.join(map(_judged, measured.checks))}"]


def positions_compared(measured: Measured) -> str:
    """`2209 of 4087 positions`, or `4087 positions` where that is all."""
    compared, every = measured.whole.positions, measured.all_positions
    return f"{compared} positions" if every in (None, compared) else f"{compared} of {every} positions"


def _judged(check: Check) -> str:
    """A value, and the limit that it has to keep, if there is one."""
    limit = "" if check.limit is None else f" {'≥' if check.least else '≤'} {check.limit:g}"
    return f"{check.name} {_number(check.value)}{limit}{'' if check.passed else ' (failed)'}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"
