"""The time of a replica's steps, fitted to measured ones."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step: what every step takes, and what its tokens add."""

    fixed_s: float  # seconds of a step without tokens, mostly the reading of weights
    token_s: float  # seconds that each token adds
    row_s: float  # seconds that each row of logits adds: one for each answer, and for each prompt that is complete
    position_s: float  # seconds that each position adds that a token attends to

    def step(self, tokens: float, rows: float, positions: float) -> float:
        """Seconds of a step.

        Args:
            tokens: number of its tokens.
            rows: number of its rows of logits.
            positions: sum of its tokens' positions.
        """
        return self.fixed_s + tokens * self.token_s + rows * self.row_s + positions * self.position_s

    def prompt(self, tokens: int, chunk: int, first: int = 0) -> float:
        """Seconds to compute the end of a prompt alone.

        Args:
            tokens: number of tokens of the prompt.
            chunk: maximum number of tokens in a step.
            first: number of tokens that are cached.
        """
        seconds = 0.0
        for start in range(first, tokens, chunk):
            count = min(chunk, tokens - start)
            seconds += self.step(count, start + count == tokens, count * (start + (count - 1) / 2))
        return seconds

    @staticmethod
    def read(path: Path) -> "StepCosts":
        """Reads the coefficients from a file that `fit` has written."""
        found = json.loads(path.read_text())
        return StepCosts(**found["coefficients"])


@dataclass(frozen=True)
class Measured:
    """A measured sequence of equal steps."""

    name: str  # name of the point in benchmarks/cpu.py
    seconds: float  # median of the rounds
    steps: int  # number of steps
    tokens: int  # tokens of all steps
    rows: int  # rows of logits of all steps
    positions: float  # sum of all tokens' positions

    @staticmethod
    def of(name: str, seconds: list[float], tokens: int, chunk: int) -> "Measured":
        """A point of benchmarks/cpu.py.

        Args:
            name: the name of the point: prefill-LENGTH, or decode-DEPTHxBATCH.
            seconds: the times of its rounds.
            tokens: tokens of a round.
            chunk: maximum number of tokens in a step.
        """
        middle = statistics.median(seconds)
        kind, _, size = name.partition("-")
        if kind == "prefill":
            length = int(size)
            prompts, steps = tokens // length, -(-length // chunk)
            return Measured(name, middle, prompts * steps, tokens, prompts, prompts * length * (length - 1) / 2)
        depth, batch = map(int, size.split("x"))
        # Decoding goes on from round to round, after one that warms up: the middle of the rounds is that of these.
        steps = tokens // batch
        middle_position = depth + steps * (len(seconds) + 2) / 2
        return Measured(name, middle, steps, tokens, tokens, tokens * middle_position)


def fit(points: list[Measured]) -> StepCosts:
    """Fits coefficients by least squares of relative errors; one that would be negative is 0."""
    counts = np.array([[one.steps, one.tokens, one.rows, one.positions] for one in points], float)
    counts /= np.array([[one.seconds] for one in points])
    used = np.ones(4, bool)
    while True:
        found = np.zeros(4)
        found[used] = np.linalg.lstsq(counts[:, used], np.ones(len(points)))[0]
        if (found >= 0).all():
            return StepCosts(*map(float, found))
        used[found.argmin()] = False


def fit_results(results: Path, model: str, engine: str, chunk: int) -> dict[str, Any]:
    """Coefficients from a file of benchmarks/cpu.py, with what they were fitted to.

    Args:
        results: the file.
        model: the model and class, such as "smollm2, 8-bit".
        engine: the name of the engine, such as "engine cpu-w8a8".
        chunk: maximum number of tokens in a step of the measurement.
    """
    speed = json.loads(results.read_text())["speed"][model]
    points = []
    for name, point in speed.items():
        (seconds,) = (one["seconds"] for one in point["value"]["contestants"] if one["name"] == engine)
        if not name.startswith("in-flight"):
            points.append(Measured.of(name, seconds, point["value"]["tokens"], chunk))
    costs = fit(points)
    errors = {
        one.name: round(
            (one.steps * costs.fixed_s + one.tokens * costs.token_s + one.rows * costs.row_s
             + one.positions * costs.position_s) / one.seconds - 1, 3
        )
        for one in points
    }  # fmt: skip
    return {"model": model, "engine": engine, "coefficients": asdict(costs), "relative_errors": errors}
