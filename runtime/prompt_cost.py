"""What a token of a prompt costs by its position: the deeper it stands, the more its attention reads."""

from enginewright.plan import BufferOperand, Linear, Plan, Step

TOKENS = Linear(tokens=1)
GATED = ("swiglu", "geglu")
# How much longer an operation takes in attention than in a GEMM: about what chunks of 16 to 128 tokens showed at depths
# up to 4000, their pass over the KV included. It need not be exact: it shapes chunks, and no result depends on it.
ATTENTION_FACTOR = 3.0


class PromptCost:
    """In tokens at position 0, from the operations of a plan."""

    def __init__(self, plan: Plan) -> None:
        gemms = sum(_gemm_operations(plan, step) for step in plan.steps)
        slopes: dict[int, float] = {}  # by window
        for step in plan.steps:
            if step.kernel.startswith("paged_attention@"):
                window, wide = int(step.attributes["window"]), _columns(step, "q")
                # Q Kᵀ and P V, a multiplication and an addition each, a position and a column.
                slopes[window] = slopes.get(window, 0.0) + ATTENTION_FACTOR * 4 * wide / gemms
        self._slopes = tuple(slopes.items())

    def at(self, position: int) -> float:
        """The cost of one token there."""
        return 1.0 + sum(slope * (min(position, window) if window else position) for window, slope in self._slopes)


def _gemm_operations(plan: Plan, step: Step) -> int:
    """Of one token; a head that runs on rows of logits has none."""
    out = step.operands.get("out")
    if not step.kernel.startswith("gemm_") or not isinstance(out, BufferOperand):
        return 0
    if plan.buffers[out.index].rows != TOKENS:
        return 0
    rows = out.columns * (2 if step.attributes["epilogue"] in GATED else 1)
    return 2 * rows * _columns(step, "x")


def _columns(step: Step, name: str) -> int:
    operand = step.operands[name]
    assert isinstance(operand, BufferOperand)
    return operand.columns
