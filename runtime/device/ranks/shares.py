"""The part of each rank of an engine: bytes that it reads, keeps and exchanges, computed from plans alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from enginewright.errors import UsageError
from enginewright.plan import Plan, WeightOperand, step_sizes
from enginewright.rank_layout import RankLayout, WeightSizes, send_results
from enginewright.rank_plan import ALL_GATHER, EVERY, bytes_of_gather
from enginewright.runtime.config import MAX_RANKS
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.cpu.weight_parts import WeightForm, columns_of, part_of_weight
from enginewright.stage_plan import RECEIVE, SEND, bytes_of
from enginewright.targets import CPU


def check_ranks(layout: RankLayout, target: str) -> None:
    """Checks that an engine may run on several ranks.

    Args:
        layout: arrangement of the ranks.
        target: platform that it runs on.

    Raises:
        UsageError: it may not.
    """
    sizes = {"--tensor-parallel-size": layout.tensor, "--pipeline-parallel-size": layout.pipeline}
    used = [name for name, size in sizes.items() if size > 1]
    if used and target != CPU:
        raise UsageError(f"{used[0]} works on CPUs alone so far", f"this engine runs on {target}")
    if layout.size > MAX_RANKS:
        raise UsageError(f"{' × '.join(used)} is {layout.size}", f"it must be {MAX_RANKS} or less")


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


def rank_shares(plan: Plan, form: Callable[[str], WeightForm], layout: RankLayout) -> list[RankShare]:
    """Computes the part of each rank.

    Args:
        plan: the plan of an engine for CPUs.
        form: form of a weight, by its name.
        layout: arrangement of the ranks.

    Raises:
        UsageError: the plan cannot be divided into so many stages.
    """
    sizes = WeightSizes(lambda name: columns_of(form(name)), lambda name: form(name).nbytes)
    return [_share(layout.plan(plan, rank, sizes), plan, form, rank, layout) for rank in range(layout.size)]


def _union_bytes(ranges: Iterable[tuple[str, int, int]]) -> int:
    """Sum of the bytes of ranges, each a weight's name, begin and end; what several ranges have counts once."""
    total, weight, reached = 0, "", 0
    for name, begin, end in sorted(ranges):
        reached = max(reached, begin) if name == weight else begin
        total += max(end - reached, 0)
        weight, reached = name, max(reached, end)
    return total


def _share(plan: Plan, engine: Plan, form: Callable[[str], WeightForm], rank: int, layout: RankLayout) -> RankShare:
    read = {
        (operand.name, *one)
        for call in plan.calls
        for operand in call.operands.values()
        if isinstance(operand, WeightOperand)
        for one in part_of_weight(form(operand.name), operand).ranges
    }
    exchanges = [call for call in plan.calls if call.kernel in (ALL_GATHER, SEND, RECEIVE)]
    results = send_results(engine) if rank == 0 and layout.pipeline > 1 else []
    part, size = rank % layout.tensor, layout.tensor
    received = {"tokens": 0, "logit_rows": 0}
    for row in received:
        one = step_sizes(**(dict.fromkeys(plan.dims, 0) | {row: 1}))
        for call in exchanges:
            if call.kernel == ALL_GATHER and call.attributes["root"] in (EVERY, part):
                of_row = bytes_of_gather(plan, call, one)
                received[row] += sum(of_row(other, size) for other in range(size) if other != part)
            elif call.kernel == RECEIVE:
                received[row] += bytes_of(plan, call.operands["out"], one)
        received[row] += sum(bytes_of(engine, call.operands["x"], one) for call in results)
    return RankShare(
        weight_bytes=_union_bytes(read),
        kv_bytes_per_token=plan.kv_bytes_per_token(),
        state_bytes_per_sequence=plan.state_bytes_per_sequence(),
        exchanges=len(exchanges) + len(results),
        received_bytes_per_token=received["tokens"],
        received_bytes_per_logits=received["logit_rows"],
    )
