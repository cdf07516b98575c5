"""Extends a plan so that rows of a step may have adapters (LoRA, https://arxiv.org/abs/2106.09685).

Before the GEMM of each adapter site a call `adapter_delta@1` writes what the adapters of the step's rows add to its
product, and the GEMM adds it before its epilogue. So an engine need not be built for adapters, and steps whose
adapters do not change a layer skip its calls.

Rows of a layer of experts are copies of tokens, sorted by expert. A call `adapter_rows@1` before its first GEMM finds
those of each expert and adapter.
"""

from collections.abc import Sequence

import msgspec

from enginewright.adapter_sites import Site
from enginewright.plan import (
    AdaptersOperand,
    Buffer,
    BufferOperand,
    Input,
    KernelCall,
    Operand,
    Plan,
    linear,
)

SLOTS = Input("adapter_slots", linear(tokens=1))  # slot of each token's adapter; -1: none
KERNEL = "adapter_delta@1"  # kernel that computes what adapters add; no op of a graph has it
HEAD_KERNEL = "head_adapter_delta@1"  # the same of a layer with a matrix for each head
GROUP_KERNEL = "adapter_rows@1"  # kernel that groups the rows of a layer of experts by their adapters
RANK_ALIGN = 16  # ranks of a site are padded to a multiple of this
ROWS = (linear(tokens=1), linear(logit_rows=1))  # rows of products that may have adapters


def padded_rank(ranks: Sequence[int]) -> int:
    """Computes the rows of A of a site, from the ranks of its modules."""
    return -(-sum(ranks) // RANK_ALIGN) * RANK_ALIGN


def max_site_rank(sites: Sequence[Site], max_rank: int) -> int:
    """Computes the largest number of rows of A that a site may have.

    Args:
        sites: the engine's sites.
        max_rank: largest rank of a module.
    """
    return max(padded_rank([max_rank] * len({run.module for run in site.runs})) for site in sites)


def with_adapters(plan: Plan, sites: Sequence[Site], max_rank: int) -> Plan:
    """Copies a plan with adapters at these sites.

    Args:
        plan: the plan of an engine that generates text.
        sites: linear layers that may have adapters.
        max_rank: largest rank of a module.
    """
    site_of = {site.weight: index for index, site in enumerate(sites)}
    buffers, calls = list(plan.buffers), list[KernelCall]()
    # A delta lives from the call before a GEMM to the GEMM, so that all of them share one slot of the arena.
    delta_slot = 1 + max(buffer.slot for buffer in plan.buffers)
    ranks = max_site_rank(sites, max_rank)
    places: dict[int, BufferOperand] = {}  # buffer of the starts of experts → that of the rows of their tokens
    grouped: int | None = None  # buffer of the starts by which rows are grouped
    for call in plan.calls:
        weight, x = call.operands.get("weight"), call.operands.get("x")
        starts, rows_of_tokens = call.operands.get("starts"), call.operands.get("places")
        if isinstance(starts, BufferOperand) and isinstance(rows_of_tokens, BufferOperand):
            places[starts.index], grouped = rows_of_tokens, None  # it routes
        site = site_of.get(getattr(weight, "name", ""))
        if site is None or not isinstance(x, BufferOperand) or "out" not in call.operands:
            calls.append(call)
            continue
        rows = tokens = plan.buffers[x.index].rows
        added: dict[str, Operand] = {"adapters": AdaptersOperand(site)}
        own: dict[str, Operand] = {}
        if isinstance(starts, BufferOperand):
            own["places"] = places[starts.index]
            tokens = plan.buffers[places[starts.index].index].rows
            if grouped != starts.index:
                calls.append(KernelCall(GROUP_KERNEL, {**own, **added, "starts": starts}, {}))
                grouped = starts.index
        assert tokens in ROWS, f"{call.kernel} has no rows that could have adapters"
        heads = sites[site].heads
        new = [("delta", sites[site].rows * (heads or 1), delta_slot)]
        for role, columns, slot in new if heads else [*new, ("shrunk", ranks, delta_slot + 1)]:
            buffers.append(Buffer("f32", rows, columns, slot))
            added[role] = BufferOperand(len(buffers) - 1, 0, columns)
        read = {role: operand for role, operand in call.operands.items() if role in ("x", "x_scale")}
        attributes = {name: call.attributes[name] for name in ("group",) if "x_scale" in read}
        if not heads:
            attributes["gated"] = int(call.attributes["epilogue"] != "none")
        calls.append(KernelCall(HEAD_KERNEL if heads else KERNEL, {**read, **own, **added}, attributes))
        operands = {**call.operands, "adapters": added["adapters"], "delta": added["delta"]}
        calls.append(msgspec.structs.replace(call, operands=operands))
    extended = msgspec.structs.replace(plan, inputs=(*plan.inputs, SLOTS), buffers=tuple(buffers), calls=tuple(calls))
    extended.check()
    return extended


def max_top(plan: Plan) -> int:
    """The largest number of experts of a token in a plan with adapters; 0: no layer with adapters has experts."""
    places = (call.operands["places"] for call in plan.calls if call.kernel == GROUP_KERNEL)
    return max((rows.columns for rows in places if isinstance(rows, BufferOperand)), default=0)


__all__ = ["SLOTS", "max_site_rank", "max_top", "padded_rank", "with_adapters"]
