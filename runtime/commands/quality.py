"""The quality report: the distance between an engine and the model that it was built from, measured in its build.

It is evidence: rounded, so that similar machines write the same bytes, and without times, paths or memory figures.
"""

from typing import Any

import msgspec

from enginewright.errors import CorruptEngineError

QUALITY = "quality"  # the section of the engine file
SIMULATED = "simulated"  # suffix of the `isa` of targets that the build machine did not have


class Check(msgspec.Struct, frozen=True):
    """A measured value and its limit."""

    name: str  # name of the limit, in `--gate`
    what: str  # description for messages
    value: float | None  # measured value; None means NaN
    limit: float | None  # limit; None means no limit
    # True if the limit is a minimum, False if it is a maximum; engine files have it under the name `least`
    is_minimum: bool = msgspec.field(name="least")
    # confidence interval of the value for similar texts; None if it is not from a sample
    interval: tuple[float, float] | None = None

    @property
    def sure(self) -> bool:
        """True if the whole interval is on one side of the limit, so that more texts would not change the result."""
        if self.limit is None or self.value is None or self.interval is None:
            return True
        low, high = self.interval
        return high <= self.limit or low > self.limit if not self.is_minimum else low >= self.limit or high < self.limit

    @property
    def passed(self) -> bool:
        """True if the value is within the limit."""
        if self.limit is None:
            return True
        if self.value is None:
            return False
        return self.value >= self.limit if self.is_minimum else self.value <= self.limit

    @property
    def description(self) -> str:
        """The value of a check with a limit, in words."""
        value = "not a number" if self.value is None else f"{self.value:g}"
        if self.value is not None and self.interval is not None:
            low, high = self.interval
            value += f" ({low:g} to {high:g})"
        bound = "at least" if self.is_minimum else "at most"
        return f"{self.name} is {value}, {bound} {self.limit:g} passes ({self.what})"


class Distance(msgspec.Struct, frozen=True):
    """Next-token distributions of the engine compared with the source's, over some positions; None is not measured."""

    positions: int  # number of compared positions; for an embedding model, of texts
    broken: int  # number of positions with logits that are not finite, which do not count below
    kl: float | None  # mean KL(source || engine), in nats
    # standard error if positions were independent; the intervals of `Check` consider that they are not
    kl_standard_error: float | None
    top1: float | None  # share of positions where both have the same likeliest token
    source_perplexity: float | None  # perplexity of the source
    perplexity: float | None  # perplexity of the engine


class TextDistance(msgspec.Struct, frozen=True):
    """Distance on one text."""

    name: str  # name of the text
    distance: Distance  # distance on the text


class PositionRange(msgspec.Struct, frozen=True):
    """A range of positions of all texts."""

    begin: int  # first position
    end: int  # position after the last one
    kl: float | None  # mean KL(source || engine), in nats


class LayerError(msgspec.Struct, frozen=True):
    """Error of a linear layer, an embedding or a head, as the file stores it."""

    name: str  # name of the layer
    method: str  # name of its format in `--quant`
    nbytes: int  # bytes in the file, with scales
    # mean of |y - x Wᵀ| / |x Wᵀ| over tokens, where x is the source's input, and y is computed from x and W as the
    # engine stores them; for an embedding or a head the same over its rows. None means NaN.
    error: float | None


class Needle(msgspec.Struct, frozen=True):
    """Test whether a number in a long text is repeated where the text asks for it."""

    length: int  # number of tokens of the text
    depth: float  # position of the number in the text, as a share of the length
    source: bool  # True if the source repeats it
    engine: bool  # True if the engine repeats it


class Writing(msgspec.Struct, frozen=True):
    """Text that the engine generates greedily after a prompt."""

    prompt: str  # prompt
    tokens: int  # number of generated tokens
    agreed: int  # number of tokens before the first that the source would not have generated
    valid_json: bool | None  # True if the text is valid JSON; None if JSON was not requested


class Full(msgspec.Struct, frozen=True):
    """Additional results of `--gate full`."""

    needles: tuple[Needle, ...]  # results of the needle tests
    writings: tuple[Writing, ...]  # generated texts


class Measured(msgspec.Struct, frozen=True):
    """Results of the gate on one platform."""

    isa: str  # instruction set that ran the engine; "cuda, simulated" is what GPUs would compute
    checks: tuple[Check, ...]  # values and their limits
    whole: Distance  # distance over all texts
    texts: tuple[TextDistance, ...]  # distances by text
    ranges: tuple[PositionRange, ...]  # distances by range of positions
    layers: tuple[LayerError, ...]  # errors by layer, the largest first
    full: Full | None = None  # results of `--gate full`
    # number of positions of the held-out text, of which a part may have been enough; None is not recorded
    all_positions: int | None = None

    @property
    def failed(self) -> tuple[Check, ...]:
        """Checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


class QualityReport(msgspec.Struct, frozen=True):
    """Results of the quality gate of a build."""

    gate: str  # "quick", "full", or "off", which measures nothing
    measured: Measured | None = None  # results on the platform of the build
    also: tuple[Measured, ...] = ()  # results on further platforms

    @property
    def failed(self) -> Measured | None:
        """Results of the first platform that did not pass."""
        return next((one for one in self._platforms if one.failed), None)

    @property
    def limits(self) -> dict[str, float]:
        """Limits that are the same on every platform, by the names of checks; others are defaults of a format."""
        tables = [{(check.name, check.limit) for check in one.checks} for one in self._platforms]
        shared = set.intersection(*tables) if tables else set()
        return {name: limit for name, limit in sorted(shared, key=lambda entry: entry[0]) if limit is not None}

    @property
    def _platforms(self) -> tuple[Measured, ...]:
        return (self.measured, *self.also) if self.measured else ()

    def to_json(self) -> bytes:
        """The report as the bytes of its section."""
        return msgspec.json.encode(self, order="sorted")

    def to_dict(self) -> dict[str, Any]:
        """The report, ready for JSON."""
        fields: dict[str, Any] = msgspec.json.decode(self.to_json())
        return fields

    def figures(self) -> dict[str, Any]:
        """Numbers for a comparison of two engines: checks by name, and errors by layer."""
        if self.measured is None:
            return {"gate": self.gate}
        checks = {check.name: check.value for check in self.measured.checks}
        return {"gate": self.gate, **checks, "layers": {layer.name: layer.error for layer in self.measured.layers}}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> "QualityReport":
        """Reads a report from JSON objects."""
        return msgspec.convert(fields, QualityReport)

    @staticmethod
    def from_json(data: bytes) -> "QualityReport":
        """Reads the section. Raises CorruptEngineError if it is damaged."""
        try:
            return msgspec.json.decode(data, type=QualityReport)
        except msgspec.MsgspecError as error:
            raise CorruptEngineError("the quality report cannot be read", str(error), "Build it again.") from error


def rounded(value: float | None, digits: int = 3) -> float | None:
    """Rounds to significant digits; None if the value is not finite."""
    if value is None or not abs(value) < float("inf"):
        return None
    return float(f"{value:.{digits}g}")


def describe_quality(report: QualityReport) -> list[str]:
    """Formats a report in a few lines."""
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
        return [f"vectors of {whole.positions} texts", f"gate {gate}: {', '.join(map(_check_text, measured.checks))}"]
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
    return [*lines, f"gate {gate}: {', '.join(map(_check_text, measured.checks))}"]


def positions_compared(measured: Measured) -> str:
    """Formats the number of positions: `2209 of 4087 positions`, or `4087 positions` if all were compared."""
    compared, every = measured.whole.positions, measured.all_positions
    return f"{compared} positions" if every in (None, compared) else f"{compared} of {every} positions"


def _check_text(check: Check) -> str:
    """A value and its limit, if there is one."""
    limit = "" if check.limit is None else f" {'≥' if check.is_minimum else '≤'} {check.limit:g}"
    return f"{check.name} {_number(check.value)}{limit}{'' if check.passed else ' (failed)'}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"
