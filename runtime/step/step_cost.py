"""What a step takes by its number of tokens, learned from the steps that were."""

from enginewright.manifest import WEIGHTS
from enginewright.plan import Plan
from enginewright.runtime.engine import Engine

DECAY = 0.98  # of what an earlier step weighs, each time: depth and load of a machine change
# Operations that a machine makes while it reads a byte of weights: some CPUs make fewer, and GPUs more. It is believed
# as much as one step that was measured.
OPERATIONS_PER_BYTE = 16.0
SLOWEST = 2.0  # a step counts as this many times what was expected, at most: it was disturbed


class StepCost:
    """Seconds of a step of `n` tokens with a row of logits each: `fixed + n · of_token`, by least squares.

    As long as steps of one size alone were seen, the plan says how the two share the time: the bytes of the weights are
    fixed, and a token adds its operations.

    Args:
        weight_bytes: that a step reads.
    """

    def __init__(self, plan: Plan, weight_bytes: int) -> None:
        operations = sum(call.cost.of_token for call in plan.calls)
        self._ratio = operations / max(weight_bytes, 1) / OPERATIONS_PER_BYTE  # of_token by fixed
        self._weight = self._tokens = self._squares = 0.0  # sums over steps: 1, n, n²
        self._seconds = self._products = 0.0  # seconds, n · seconds
        self.fixed, self.of_token = 1.0, self._ratio  # only their ratio matters before the first step

    @staticmethod
    def of(engine: Engine) -> "StepCost":
        """Of the plan that an engine was opened with."""
        names = engine.plan.weight_names()
        return StepCost(engine.plan, sum(engine.file.sections[f"{WEIGHTS}{name}"].nbytes for name in names))

    @property
    def is_measured(self) -> bool:
        """Whether it knows seconds, and not their ratio alone."""
        return self._weight > 0

    def seconds(self, tokens: float) -> float:
        return self.fixed + tokens * self.of_token

    def learn(self, tokens: float, seconds: float) -> None:
        """A step of so many tokens took so long."""
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
