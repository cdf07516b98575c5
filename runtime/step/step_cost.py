"""Predicts the duration of a step from its number of tokens, and learns from measured steps."""

from enginewright.manifest import WEIGHTS
from enginewright.plan import Plan
from enginewright.runtime.engine import Engine

DECAY = 0.98  # factor on the weight of earlier steps at each new one, since sequences grow and a machine's load changes
# Operations that a machine makes while it reads a byte of weights: fewer on some CPUs, more on GPUs. This assumption
# weighs as much as one measured step.
OPERATIONS_PER_BYTE = 16.0
SLOWEST = 2.0  # maximum of measured / predicted seconds that counts: a slower step was disturbed by something else


class StepCost:
    """Seconds of a step of `n` tokens with a row of logits each, `fixed + n · of_token`, fitted by least squares.

    As long as all measured steps have the same size, the plan determines the ratio of the two: reading the weights
    takes a fixed time, and each token adds its operations.

    Args:
        plan: of the engine that runs the steps.
        weight_bytes: number of bytes of weights that a step reads.
    """

    def __init__(self, plan: Plan, weight_bytes: int) -> None:
        operations = sum(call.cost.of_token for call in plan.calls)
        self._ratio = operations / max(weight_bytes, 1) / OPERATIONS_PER_BYTE  # of_token / fixed
        self._weight = self._tokens = self._squares = 0.0  # sums over steps: 1, n, n²
        self._seconds = self._products = 0.0  # seconds, n · seconds
        self.fixed, self.of_token = 1.0, self._ratio  # only their ratio matters before the first step

    @staticmethod
    def of(engine: Engine) -> "StepCost":
        """Makes the cost model of the plan that an engine was opened with."""
        names = engine.plan.weight_names()
        return StepCost(engine.plan, sum(engine.file.sections[f"{WEIGHTS}{name}"].nbytes for name in names))

    @property
    def is_measured(self) -> bool:
        """True once a step has been measured. Before that, only ratios of costs have a meaning, and not seconds."""
        return self._weight > 0

    def seconds(self, tokens: float) -> float:
        """Predicts the duration of a step of a number of tokens."""
        return self.fixed + tokens * self.of_token

    def learn(self, tokens: float, seconds: float) -> None:
        """Updates the fit with a step of `tokens` tokens that took `seconds`."""
        if self._weight:
            seconds = min(seconds, SLOWEST * self.seconds(tokens))
        self._weight = DECAY * self._weight + 1
        self._tokens = DECAY * self._tokens + tokens
        self._squares = DECAY * self._squares + tokens * tokens
        self._seconds = DECAY * self._seconds + seconds
        self._products = DECAY * self._products + tokens * seconds
        ratio = self._ratio
        ones, mixed, squares = self._weight + ratio * ratio, self._tokens - ratio, self._squares + 1.0
        determinant = ones * squares - mixed * mixed
        of_token = (ones * self._products - mixed * self._seconds) / determinant
        self.of_token = max(of_token, 0.0)
        self.fixed = max((self._seconds - self.of_token * self._tokens) / self._weight, 0.0)
