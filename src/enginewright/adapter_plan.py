"""Extends a plan so that rows of a step may have adapters (LoRA, https://arxiv.org/abs/2106.09685).

Before the GEMM of each adapter site a call `adapter_delta@1` writes what the adapters of the step's rows add to its
product, and the GEMM adds it before its epilogue. So an engine need not be built for adapters, and steps whose adapters
do not change a layer skip its calls. On a GPU these calls have the launches that the plan has for them
(`Plan.adapting`), and the rows of a step, sorted by their slots, are inputs.

Rows of a layer of experts are copies of tokens, sorted by expert. A call `adapter_rows@1` before its first GEMM finds
those of each expert and adapter. After the call that looks up embeddings a call `adapter_embed@1` changes them.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from enginewright.adapter_sites import Site
from enginewright.plan import (
    AdapterLaunches,
    AdaptersOperand,
    Buffer,
    BufferOperand,
    Extent,
    Input,
    InputOperand,
    KernelCall,
    Launch,
    Linear,
    Operand,
    Plan,
    WeightOperand,
    linear,
)

TOKENS, LOGIT_ROWS = linear(tokens=1), linear(logit_rows=1)  # rows of products that may have adapters
SLOTS = Input("adapter_slots", TOKENS)  # slot of each token's adapter; -1: none
KERNEL = "adapter_delta@1"  # kernel that computes what adapters add; no op of a graph has it
HEAD_KERNEL = "head_adapter_delta@1"  # the same of a layer with a matrix for each head
TABLE_KERNEL = "adapter_embed@1"  # kernel that changes embeddings
GROUP_KERNEL = "adapter_rows@1"  # kernel that groups the rows of a layer of experts by their adapters
EMBED = "embed_"  # start of the names of kernels that look up embeddings
HEAD_GEMM = "head_gemm_"  # start of the names of kernels with a matrix for each head
RANK_ALIGN = 16  # ranks of a site are padded to a multiple of this
OF_TILE = 3  # numbers of a tile of rows: its slot, its first entry among the sorted rows, and their number


class RowInputs:
    """Inputs of a plan for GPUs about the adapters of a step's tokens, or of its rows of logits.

    Args:
        rows: rows that they are about.

    Attributes:
        slots: slot of each row's adapter; -1: none.
        sorted: rows with an adapter, sorted by its slot.
        tiles: number of tiles of these, then OF_TILE numbers for each.
    """

    def __init__(self, rows: Linear) -> None:
        prefix = "adapter" if rows == TOKENS else "adapter_logit"
        self.slots = Input(f"{prefix}_slots", rows)
        self.sorted = Input(f"{prefix}_rows", rows)
        self.tiles = Input(f"{prefix}_tiles", Linear(1, tuple((dim, OF_TILE * factor) for dim, factor in rows.terms)))

    @property
    def inputs(self) -> tuple[Input, ...]:
        """All of them."""
        return self.slots, self.sorted, self.tiles

    @property
    def operands(self) -> Mapping[str, Operand]:
        """Role → operand of the calls that read them."""
        names = {"slots": self.slots.name, "rows": self.sorted.name, "tiles": self.tiles.name}
        return {role: InputOperand(name) for role, name in names.items()}


ROW_INPUTS = {rows: RowInputs(rows) for rows in (TOKENS, LOGIT_ROWS)}


def linear_weight(call: KernelCall) -> str | None:
    """Names the weight of a linear layer, of experts or of heads, too; None if the call is none."""
    weight = call.operands.get("weight")
    is_linear = call.kernel.startswith(("gemm_", HEAD_GEMM))
    return weight.name if is_linear and isinstance(weight, WeightOperand) else None


def table_weight(call: KernelCall) -> str | None:
    """Names the table in which a call looks up embeddings; None if the call does something else."""
    table = call.operands.get("table")
    return table.name if call.kernel.startswith(EMBED) and isinstance(table, WeightOperand) else None


def has_several(call: KernelCall) -> bool:
    """True for a layer with a matrix for each expert, or for each head."""
    return "starts" in call.operands or call.kernel.startswith(HEAD_GEMM)


def padded_rank(ranks: Sequence[int]) -> int:
    """Computes the rows of A of a site, from the ranks of its modules."""
    return -(-sum(ranks) // RANK_ALIGN) * RANK_ALIGN


def site_rank(site: Site, max_rank: int) -> int:
    """Computes the largest number of rows of A that a site may have.

    Args:
        site: the site.
        max_rank: largest rank of a module.
    """
    return padded_rank([max_rank] * len({run.module for run in site.runs}))


def max_site_rank(sites: Sequence[Site], max_rank: int) -> int:
    """Computes the largest number of rows of A that any site may have.

    Args:
        sites: the engine's sites.
        max_rank: largest rank of a module.
    """
    return max(site_rank(site, max_rank) for site in sites)


def with_adapters(plan: Plan, sites: Sequence[Site], max_rank: int, num_slots: int) -> Plan:
    """Copies a plan with adapters at these sites.

    Args:
        plan: the plan of an engine that generates text.
        sites: linear layers and tables that may have adapters.
        max_rank: largest rank of a module.
        num_slots: largest number of adapters in a step.
    """
    site_of = {site.weight: index for index, site in enumerate(sites) if site.kind != "table"}
    table_of = {site.weight: index for index, site in enumerate(sites) if site.kind == "table"}
    buffers, calls = list(plan.buffers), list[KernelCall]()
    # A delta lives from the call before a GEMM to the GEMM, so that all of them share one slot of the arena.
    delta_slot = 1 + max(buffer.slot for buffer in plan.buffers)
    ranks = max_site_rank(sites, max_rank)
    places: dict[int, BufferOperand] = {}  # buffer of the starts of experts → that of the rows of their tokens
    grouped: int | None = None  # buffer of the starts by which rows are grouped
    for call in plan.calls:
        weight, x = linear_weight(call), call.operands.get("x")
        starts, rows_of_tokens = call.operands.get("starts"), call.operands.get("places")
        if isinstance(starts, BufferOperand) and isinstance(rows_of_tokens, BufferOperand):
            places[starts.index], grouped = rows_of_tokens, None  # it routes
        site = None if weight is None else site_of.get(weight)
        if site is None or not isinstance(x, BufferOperand) or "out" not in call.operands:
            calls.append(call)
            if (table := table_of.get(table_weight(call) or "")) is not None:
                changed: dict[str, Operand] = {role: call.operands[role] for role in ("tokens", "out")}
                changed["adapters"] = AdaptersOperand(table)
                calls.append(KernelCall(TABLE_KERNEL, changed, {"scale": call.attributes["scale"]}))
            continue
        rows, dtype = plan.buffers[x.index].rows, plan.buffers[x.index].dtype
        tokens, heads = rows, sites[site].heads
        added: dict[str, Operand] = {"adapters": AdaptersOperand(site)}
        own: dict[str, Operand] = {}
        if isinstance(starts, BufferOperand):
            own["places"] = places[starts.index]
            tokens = plan.buffers[places[starts.index].index].rows
            if grouped != starts.index:
                calls.append(KernelCall(GROUP_KERNEL, {**own, **added, "starts": starts}, {}))
                grouped = starts.index
        assert tokens in ROW_INPUTS, f"{call.kernel} has no rows that could have adapters"
        shrunk, launches = ranks, tuple[Launch, ...]()
        if plan.adapting is not None:
            added |= ROW_INPUTS[rows].operands
            shrunk = num_splits(plan.adapting, dtype, x.columns) * site_rank(sites[site], max_rank)
            launches = _launches(plan.adapting, dtype, rows, sites[site], num_slots)
        new = [("delta", sites[site].rows * (heads or 1), delta_slot)]
        for role, columns, slot in new if heads else [*new, ("shrunk", shrunk, delta_slot + 1)]:
            buffers.append(Buffer("f32", rows, columns, slot))
            added[role] = BufferOperand(len(buffers) - 1, 0, columns)
        read = {role: operand for role, operand in call.operands.items() if role in ("x", "x_scale")}
        has_group = "x_scale" in read and "group" in call.attributes
        attributes = {"group": call.attributes["group"]} if has_group else {}
        if plan.adapting is None and not heads:  # threads of a CPU multiply the columns that they have computed
            attributes["gated"] = int(call.attributes["epilogue"] != "none")
        calls.append(KernelCall(HEAD_KERNEL if heads else KERNEL, {**read, **own, **added}, attributes, launches))
        operands = {role: added[role] for role in ("adapters", "delta", "slots") if role in added}
        calls.append(replace(call, operands={**call.operands, **operands}))
    of_rows = [one for inputs in ROW_INPUTS.values() for one in inputs.inputs]
    inputs = (*plan.inputs, *(of_rows if plan.adapting is not None else [SLOTS]))
    extended = replace(plan, inputs=inputs, buffers=tuple(buffers), calls=tuple(calls))
    extended.check()
    return extended


def num_splits(adapting: AdapterLaunches, dtype: str, columns: int) -> int:
    """Computes the parts of K whose sums stand apart before they are added.

    Args:
        adapting: launches for adapters.
        dtype: number type of x.
        columns: columns of x, K.
    """
    return -(-columns // adapting.shrink[dtype].grid[1].per)


def _launches(adapting: AdapterLaunches, dtype: str, rows: Linear, site: Site, num_slots: int) -> tuple[Launch, ...]:
    """Makes the launches of a call, each for few and for many rows: blocks for as many tiles as there can be.

    A tile has rows of one adapter, so a few rows have at most as many tiles as rows, and many of them one for each
    TILE_ROWS rows and one more for each adapter.
    """
    launches = []
    sizes = (adapting.shrink[dtype], site.columns), (adapting.expand, site.rows)
    for launch, size in sizes:
        tile, others, ranks = launch.grid
        fewest = -(-tile.per * (num_slots + 1) // (tile.per - 1))  # rows from which the second bound is the smaller one
        with_others = Linear(tile.per * num_slots, rows.terms)
        bounds = (Extent(rows), 1, fewest - 1), (Extent(with_others, tile.per), fewest, launch.high)
        for tiles, low, high in bounds:
            grid = tiles, replace(others, rows=Linear(size)), ranks
            launches.append(replace(launch, grid=grid, rows=rows, low=low, high=high))
    return tuple(launches)


def max_top(plan: Plan) -> int:
    """The largest number of experts of a token in a plan with adapters; 0: no layer with adapters has experts."""
    places = (call.operands["places"] for call in plan.calls if call.kernel == GROUP_KERNEL)
    return max((rows.columns for rows in places if isinstance(rows, BufferOperand)), default=0)


__all__ = [
    "HEAD_GEMM",
    "ROW_INPUTS",
    "SLOTS",
    "has_several",
    "linear_weight",
    "max_site_rank",
    "max_top",
    "num_splits",
    "site_rank",
    "table_weight",
    "with_adapters",
]
