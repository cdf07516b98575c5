"""The part of each rank of an engine: bytes that it reads, keeps and exchanges, computed from plans alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from enginewright.errors import UsageError
from enginewright.plan import BufferOperand, KernelCall, Plan, StepSizes, WeightOperand, step_sizes
from enginewright.rank_layout import RankLayout, WeightSizes, send_results
from enginewright.rank_plan import ALL_GATHER, EVERY, PACKED, bytes_of_gather
from enginewright.runtime.config import MAX_RANKS
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.cpu.weight_parts import WeightForm, columns_of, part_of_weight
from enginewright.stage_plan import RECEIVE, SEND, bytes_of


def check_ranks(layout: RankLayout) -> None:
    """Checks that an engine may run on so many ranks.

    Raises:
        UsageError: it may not.
    """
    sizes = {"--tensor-parallel-size": layout.tensor, "--pipeline-parallel-size": layout.pipeline}
    if layout.size > MAX_RANKS:
        used = " × ".join(name for name, size in sizes.items() if size > 1)
        raise UsageError(f"{used} is {layout.size}", f"it must be {MAX_RANKS} or less")


def check_gpu_ranks(layout: RankLayout) -> None:
    """Checks that GPUs can be arranged like this.

    Raises:
        UsageError: they cannot.
    """
    if layout.pipeline > 1:
        fix = "Use --tensor-parallel-size."
        raise UsageError("--pipeline-parallel-size is for CPUs", "stages on GPUs are not implemented", fix)


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
    plans = [layout.plan(plan, rank, sizes) for rank in range(layout.size)]
    results = send_results(plan) if layout.pipeline > 1 else []
    return [
        _share(one, form, rank % layout.tensor, layout.tensor, [] if rank else results)
        for rank, one in enumerate(plans)
    ]


def shares_of(plans: Sequence[Plan], form: Callable[[str], WeightForm]) -> list[RankShare]:
    """Computes the part of each rank of one stage.

    Args:
        plans: the plan of each.
        form: form of a weight, by its name.
    """
    return [_share(one, form, rank, len(plans), []) for rank, one in enumerate(plans)]


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


def _share(
    plan: Plan, form: Callable[[str], WeightForm], part: int, size: int, results: Sequence[KernelCall]
) -> RankShare:
    """Computes the part of one rank.

    Args:
        plan: its plan.
        form: form of a weight, by its name.
        part: number of the rank in its stage.
        size: number of ranks of the stage.
        results: calls that send it the outputs of the plan.
    """
    read = {
        (operand.name, *one)
        for call in plan.calls
        for operand in call.operands.values()
        if isinstance(operand, WeightOperand)
        for one in part_of_weight(form(operand.name), operand).ranges
    }
    exchanges = [call for call in plan.calls if call.kernel in (ALL_GATHER, SEND, RECEIVE)]
    received = {"tokens": 0, "logit_rows": 0}
    for row in received:
        one = step_sizes(**(dict.fromkeys(plan.dims, 0) | {row: 1}))
        others = [other for other in range(size) if other != part]
        for call in exchanges:
            if call.kernel == RECEIVE:
                received[row] += bytes_of(plan, call.operands["out"], one)
            elif call.kernel == ALL_GATHER and call.attributes["root"] in (EVERY, part):
                if call.launches:
                    received[row] += sum(_packed_bytes(plan, call, one, other) for other in others)
                else:
                    of_row = bytes_of_gather(plan, call, one)
                    received[row] += sum(of_row(other, size) for other in others)
        received[row] += sum(bytes_of(plan, call.operands["x"], one) for call in results)
    return RankShare(
        weight_bytes=_union_bytes(read),
        kv_bytes_per_token=plan.kv_bytes_per_token(),
        state_bytes_per_sequence=plan.state_bytes_per_sequence(),
        exchanges=len(exchanges) + len(results),
        received_bytes_per_token=received["tokens"],
        received_bytes_per_logits=received["logit_rows"],
    )
