"""Makes an engine's `adapter_sites`: from the origins of the weights that a plan's matrix products read."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from enginewright.adapter_plan import HEAD_GEMM, has_several, linear_weight, table_weight
from enginewright.adapter_sites import ADAPTER_SITES, EXPERT, AdapterSites, RowRun, Site, SiteKind
from enginewright.builder.adapters.merge import HEAD
from enginewright.builder.lower import Weight
from enginewright.passes.origin import Origin
from enginewright.passes.weights import origin_of
from enginewright.plan import KernelCall, Plan, WeightOperand

MAX_RUNS = 64  # runs of rows of a site, above which the order of its rows has a section of its own


def site_sections(plan: Plan, weights: Mapping[str, Weight], head: str | None, *, on_cpu: bool) -> dict[str, bytes]:
    """Makes the section, and those of its vectors. No tensor of the checkpoint is read.

    Args:
        plan: the plan.
        weights: name in the plan → weight.
        head: name of the output head's weight in the graph; None: there is none.
        on_cpu: True if these are sites, too: layers with a matrix for each expert or head, the output head, and tables
            of embeddings.
    """
    sites: dict[str, Site] = {}
    sections: dict[str, bytes] = {}
    tables = [name for call in plan.calls if (name := table_weight(call)) is not None]
    for call in plan.calls:
        site: Site | None = None
        if (table := table_weight(call)) is not None and tables.count(table) == 1 and on_cpu:
            site = _site(table, None, weights, sections, kind="table")
        elif (name := linear_weight(call)) is not None and name not in sites:
            is_head = weights[name].value.name == head
            if not on_cpu and (is_head or has_several(call)):
                continue
            heads = int(call.attributes["heads"]) if call.kernel.startswith(HEAD_GEMM) else 0
            site = _site(
                name, _name(call, "bias"), weights, sections, heads, kind="output_head" if is_head else "linear"
            )
            if site is not None and is_head and name in tables:  # PEFT changes a tied head by its own name
                site = replace(site, runs=tuple(replace(run, module=HEAD) for run in site.runs))
        if site is not None:
            sites[site.key] = site
    return {ADAPTER_SITES: AdapterSites(tuple(sites.values())).to_json(), **sections}


def _name(call: KernelCall, role: str) -> str | None:
    operand = call.operands.get(role)
    return operand.name if isinstance(operand, WeightOperand) else None


def _site(
    name: str,
    bias: str | None,
    weights: Mapping[str, Weight],
    sections: dict[str, bytes],
    heads: int = 0,
    kind: SiteKind = "linear",
) -> Site | None:
    """Makes a site, and adds its vectors to `sections`; None if the weight's numbers have no known origin."""
    origin, shape = origin_of(weights[name].value), weights[name].form.shape
    if origin is None or origin.transposed_heads not in (0, heads):
        return None
    if (heads or kind == "table") and _has_factors(origin):
        return None
    if kind != "linear" and not _is_whole(origin):
        return None
    experts = shape[0] if len(shape) == 3 else 0
    of_one = _rows_of_each(origin.rows, experts) if experts else origin.rows
    if of_one is None or not (experts or all(tensor.endswith(".weight") for tensor, _ in of_one)):
        return None
    of_bias = origin_of(weights[bias].value) if bias is not None and not experts else None
    if of_bias is not None and not _have_same_rows(origin, of_bias):
        of_bias = None

    def vector(kind: str, values: torch.Tensor | None, dtype: str) -> str | None:
        if values is None:
            return None
        section = f"{ADAPTER_SITES}/{name}.{kind}"
        sections[section] = values.numpy().astype(dtype).tobytes()
        return section

    rows, columns = shape[-2:]
    runs, order = _runs(of_one)
    return Site(
        weight=name,
        rows=rows // (heads or 1),
        columns=columns,
        runs=runs,
        bias=bias if of_bias is not None else None,
        row_order=vector("row_order", order, "<i4"),
        row_factors=vector("row_factors", origin.row_factors, "<f4"),
        bias_factors=vector("bias_factors", of_bias.row_factors if of_bias is not None else None, "<f4"),
        column_factors=vector("column_factors", origin.column_factors, "<f4"),
        column_order=vector("column_order", origin.column_order, "<i4"),
        experts=experts,
        heads=heads,
        transposed=origin.transposed_heads > 0,
        kind=kind,
    )


def _is_whole(origin: Origin) -> bool:
    """True if the rows are those of one tensor from the first on, in its order."""
    return len(origin.rows) == 1 and torch.equal(origin.rows[0][1].long(), torch.arange(len(origin.rows[0][1])))


def _has_factors(origin: Origin) -> bool:
    vectors = origin.row_factors, origin.column_factors, origin.column_order
    return any(vector is not None for vector in vectors)


def _rows_of_each(rows: Sequence[tuple[str, torch.Tensor]], experts: int) -> Sequence[tuple[str, torch.Tensor]] | None:
    """The rows of one expert's matrix, with `{}` for its number in names; None if experts differ in more than that.

    Args:
        rows: rows of the matrices of all experts, one after another.
        experts: number of the matrices.
    """
    height = sum(len(own) for _, own in rows) // experts
    matrices: list[list[tuple[str, torch.Tensor]]] = [[] for _ in range(experts)]
    place = 0
    for tensor, own in rows:
        while len(own):
            expert, inside = divmod(place, height)
            part, own = own[: height - inside], own[height - inside :]
            matrices[expert].append((tensor, part))
            place += len(part)
    if experts < 2 or len({len(matrix) for matrix in matrices}) > 1:
        return None
    found: list[tuple[str, torch.Tensor]] = []
    for same in zip(*matrices, strict=True):
        name, (_, first) = _name_of_each([tensor for tensor, _ in same]), same[0]
        step = 0 if name is None or EXPERT in name else height
        if name is None or not all(torch.equal(part, first + step * expert) for expert, (_, part) in enumerate(same)):
            return None
        found.append((name, first))
    return found


def _name_of_each(tensors: Sequence[str]) -> str | None:
    """The name of a tensor of each expert, with `{}` for its number; None if there is none.

    Args:
        tensors: name of each expert's tensor; all are the same if the tensor has the matrices of all experts.
    """
    if len(set(tensors)) == 1:
        return tensors[0]
    parts = tensors[0].split(".")
    for place, part in enumerate(parts):
        name = ".".join((*parts[:place], EXPERT, *parts[place + 1 :]))
        same = all(tensor == name.replace(EXPERT, str(expert)) for expert, tensor in enumerate(tensors))
        if part == "0" and same and name.endswith(".weight"):
            return name
    return None


def _have_same_rows(weight: Origin, bias: Origin) -> bool:
    """Checks if a bias has the numbers of the layers that a weight's rows are of."""
    return len(weight.rows) == len(bias.rows) and all(
        tensor.removesuffix(".weight") == other.removesuffix(".bias") and torch.equal(rows, numbers)
        for (tensor, rows), (other, numbers) in zip(weight.rows, bias.rows, strict=True)
    )


def _runs(rows: Sequence[tuple[str, torch.Tensor]]) -> tuple[tuple[RowRun, ...], torch.Tensor | None]:
    """Lists runs of rows, and the order of rows in them; None if it is theirs."""
    of_modules = [(tensor.removesuffix(".weight"), of_tensor) for tensor, of_tensor in rows]
    runs = [
        RowRun(module, int(found[0]), len(found))
        for module, of_module in of_modules
        for found in np.split(of_module.numpy(), np.flatnonzero(np.diff(of_module.numpy()) != 1) + 1)
    ]
    if len(runs) <= MAX_RUNS:
        return tuple(runs), None
    whole: list[RowRun] = []
    shifts: dict[str, int] = {}  # module → position of its row 0 among the rows of `whole`
    position = 0
    for module in dict.fromkeys(run.module for run in runs):
        first = min(run.first for run in runs if run.module == module)
        end = max(run.first + run.count for run in runs if run.module == module)
        whole.append(RowRun(module, first, end - first))
        shifts[module] = position - first
        position += end - first
    return tuple(whole), torch.cat([of_module + shifts[module] for module, of_module in of_modules])
