"""The part of each rank of an engine: bytes that it reads, keeps and exchanges, computed from plans alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from enginewright.errors import UsageError
from enginewright.plan import BufferOperand, KernelCall, Plan, StepSizes, WeightOperand, step_sizes
from enginewright.rank_plan import ALL_GATHER, EVERY, PACKED, bytes_of_gather, plan_of_rank
from enginewright.runtime.config import MAX_RANKS
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.cpu.weight_parts import WeightForm, columns_of, part_of_weight


def check_ranks(size: int) -> None:
    """Checks that an engine may run on so many ranks.

    Raises:
        UsageError: it may not.
    """
    if size > MAX_RANKS:
        raise UsageError(f"--tensor-parallel-size is {size}", f"it must be {MAX_RANKS} or less")


@dataclass(frozen=True)
class RankShare:
    """The part of one rank."""

    weight_bytes: int  # bytes of the weights that it reads
    kv_bytes_per_token: int  # bytes of a token in its KV caches
    state_bytes_per_sequence: int  # bytes of a sequence in its recurrent states
    exchanges: int  # number of exchanges of a step
    received_bytes_per_token: int  # bytes that it receives from the others for a token whose logits are not wanted
    received_bytes_per_logits: int  # bytes that it receives, in addition, for a row of logits

    def describe(self) -> str:
        """Says it in one line."""
        weights, kv, received = map(
            format_bytes, (self.weight_bytes, self.kv_bytes_per_token, self.received_bytes_per_token)
        )
        exchanges = f"{self.exchanges} exchanges a step, {received} for a token"
        return f"reads {weights} of weights, keeps {kv} per token; {exchanges}"


def rank_shares(plan: Plan, form: Callable[[str], WeightForm], size: int) -> list[RankShare]:
    """Computes the part of each rank.

    Args:
        plan: the plan of an engine for CPUs.
        form: form of a weight, by its name.
        size: number of ranks.
    """
    plans = [plan_of_rank(plan, rank, size, lambda name: columns_of(form(name))) for rank in range(size)]
    return shares_of(plans, form)


def shares_of(plans: Sequence[Plan], form: Callable[[str], WeightForm]) -> list[RankShare]:
    """Computes the part of each rank.

    Args:
        plans: the plan of each.
        form: form of a weight, by its name.
    """
    return [_share(one, form, rank, len(plans)) for rank, one in enumerate(plans)]


def _union_bytes(ranges: Iterable[tuple[str, int, int]]) -> int:
    """Sum of the bytes of ranges, each a weight's name, begin and end; what several ranges have counts once."""
    total, weight, reached = 0, "", 0
    for name, begin, end in sorted(ranges):
        reached = max(reached, begin) if name == weight else begin
        total += max(end - reached, 0)
        weight, reached = name, max(reached, end)
    return total


def _packed_bytes(plan: Plan, call: KernelCall, sizes: StepSizes, rank: int) -> int:
    """Bytes that a GPU receives from a rank in an exchange."""
    packed = call.operands.get(f"{PACKED}{rank}")
    return plan.buffers[packed.index].bytes_at(sizes) if isinstance(packed, BufferOperand) else 0


def _share(plan: Plan, form: Callable[[str], WeightForm], rank: int, size: int) -> RankShare:
    read = {
        (operand.name, *one)
        for call in plan.calls
        for operand in call.operands.values()
        if isinstance(operand, WeightOperand)
        for one in part_of_weight(form(operand.name), operand).ranges
    }
    gathers = [call for call in plan.calls if call.kernel == ALL_GATHER]
    received = {"tokens": 0, "logit_rows": 0}
    for call in gathers:
        x = call.operands["x"]
        assert isinstance(x, BufferOperand)
        if call.attributes["root"] not in (EVERY, rank):
            continue
        for row in received:
            one = step_sizes(**(dict.fromkeys(plan.dims, 0) | {row: 1}))
            if call.launches:
                received[row] += sum(_packed_bytes(plan, call, one, other) for other in range(size) if other != rank)
            else:
                of_row = bytes_of_gather(plan, call, one)
                received[row] += sum(of_row(other, size) for other in range(size) if other != rank)
    return RankShare(
        weight_bytes=_union_bytes(read),
        kv_bytes_per_token=plan.kv_bytes_per_token(),
        state_bytes_per_sequence=plan.state_bytes_per_sequence(),
        exchanges=len(gathers),
        received_bytes_per_token=received["tokens"],
        received_bytes_per_logits=received["logit_rows"],
    )
