"""Figures from results: rates, shares of the roofline, and ratios within rounds, each a median with its range."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median and range of one figure over the rounds."""

    median: float
    min: float
    max: float


def spread(values: Iterable[float]) -> Spread:
    found = list(values)
    return Spread(median(found), min(found), max(found))


@dataclass(frozen=True)
class Shown:
    """An engine at a point, at the best of its settings."""

    name: str
    peer: str | None  # None for ours
    setting: str  # the best one
    seconds: Sequence[float]  # of each round
    rate: Spread  # tokens per second
    roofline_share: Spread  # the least time that the roofline allows, divided by the time it took


@dataclass(frozen=True)
class Ratio:
    """Speed of our engine over that of the fastest peer, within each round."""

    ours: str  # name of our engine
    peer: str  # name of the fastest peer
    value: Spread


def shown(value: dict[str, Any]) -> dict[str, Shown]:
    """The engines of a point that were measured, by name."""
    found: dict[str, Shown] = {}
    for row in value.get("contestants", []):
        if "not_measured" in row:
            continue
        seconds = row["seconds"]
        one = Shown(
            name=row["name"],
            peer=row["peer"],
            setting=row["setting"],
            seconds=seconds,
            rate=spread(value["tokens"] / time for time in seconds),
            roofline_share=spread(
                roofline / time for roofline, time in zip(row["roofline_seconds"], seconds, strict=True)
            ),
        )
        before = found.get(one.name)
        if before is None or one.rate.median > before.rate.median:
            found[one.name] = one
    return found


def best_peer(there: dict[str, Shown]) -> Shown | None:
    peers = [one for one in there.values() if one.peer is not None]
    return max(peers, key=lambda one: one.rate.median, default=None)


def over(one: Shown, other: Shown) -> Spread:
    """Speed of one engine over that of another, within each round."""
    return spread(theirs / mine for mine, theirs in zip(one.seconds, other.seconds, strict=True))


def ratios(value: dict[str, Any]) -> list[Ratio]:
    """Each of ours over the fastest peer of the class."""
    there = shown(value)
    best = best_peer(there)
    ours = [one for one in there.values() if one.peer is None]
    return [] if best is None else [Ratio(one.name, best.name, over(one, best)) for one in ours]
