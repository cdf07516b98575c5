"""Cuts a plan for ranks: processes that compute one model together.

Every linear layer is cut by its output rows and never along K, and what a rank has not computed is gathered from the
others before a kernel reads it (`all_gather@1`). So each number is computed by one rank, in the same order of additions
as on a single one, and answers have the same bits on any number of ranks. Peers cut every second layer along K
(https://arxiv.org/abs/1909.08053) and add partial sums: half as many exchanges, but more bytes where the sums are
gathered in fp32 to be added in a fixed order, and other bits for other numbers of ranks.

Attention and recurrences are cut by heads, with their caches, and on CPUs layers of experts by experts. Kernels without
a rule are computed whole on each rank. For CPUs an engine need not be built for ranks: what a rank reads of a weight is
a range of its bytes in the mapped file. For GPUs the plans of ranks are made in the build, since kernels are
specialized to sizes.

What adapters add to a layer is cut as its product (adapter_plan.py). Each rank computes A x, whose input it has whole,
and multiplies the result by the rows of B that belong to its own rows of the weight, or by the matrices of its experts
or heads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from enginewright.adapter_plan import GROUP_KERNEL, HEAD_GEMM, HEAD_KERNEL, KERNEL
from enginewright.plan import (
    EXCHANGE,
    AdaptersOperand,
    BufferOperand,
    CacheGroup,
    CacheOperand,
    Cost,
    KernelCall,
    Operand,
    PagedCache,
    Plan,
    RecurrentState,
    StateTensor,
    StepSizes,
    WeightOperand,
)
from enginewright.targets import CPU

ALL_GATHER = EXCHANGE
# Start of the roles of the buffers that ranks exchange on GPUs, one for each rank's part; the rank's number follows.
PACKED = "packed."
ROWS = 16  # rows of a block of a weight, so columns of products are cut at multiples of this
ROOT = 0  # rank that has the plan's outputs
EVERY = -1  # attribute `root` of a gather whose result all ranks have


class Cut(NamedTuple):
    """Columns of a buffer that ranks have computed in parts. A part is a number of whole units."""

    begin: int  # first column
    columns: int  # number of columns
    unit: int  # columns of a unit; it divides `columns`

    @property
    def end(self) -> int:
        """The column after the last one."""
        return self.begin + self.columns

    def part(self, rank: int, size: int) -> tuple[int, int]:
        """Computes the columns that a rank computes: its own, or if there are fewer units than ranks, those of another.

        Args:
            rank: the rank.
            size: number of ranks.

        Returns:
            First column in the buffer, and the number of columns.
        """
        first, count = units_of_rank(self.columns // self.unit, rank, size)
        return self.begin + first * self.unit, max(count, 1) * self.unit

    def at(self, begin: int) -> "Cut":
        """The same cut of columns that begin elsewhere."""
        return self._replace(begin=begin)


def units_of_rank(units: int, rank: int, size: int) -> tuple[int, int]:
    """Computes which of a number of units belong to a rank (csrc/cpu/all_gather.cpp has the same rule).

    Args:
        units: number of units.
        rank: the rank.
        size: number of ranks.

    Returns:
        First unit, and the number of units, perhaps 0.
    """
    first = units * rank // size
    return first, units * (rank + 1) // size - first


class Experts(NamedTuple):
    """Rows of a buffer that ranks have computed in parts, those of their experts."""

    starts: BufferOperand  # first row of each expert, and the end

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.starts.columns - 1


def plan_of_rank(plan: Plan, rank: int, size: int, width: Callable[[str], int]) -> Plan:
    """Makes the plan that one of several ranks runs.

    Args:
        plan: the plan of an engine, perhaps with adapters. One for GPUs has no adapters, no launches, since those are
            made for its parts (builder/lower/ranks.py), and no buffers that only one call uses.
        rank: the rank; rank 0 has the outputs.
        size: number of ranks.
        width: number of columns of a weight, by its name.
    """
    if size == 1:
        return plan
    cutting = _Cutting(plan, rank, size, width)
    cut = cutting.run()
    cut.check()
    return cut


def part_of_gather(call: KernelCall, rank: int, size: int) -> BufferOperand | None:
    """Finds the columns that a rank sends in an exchange; None if it has none.

    Args:
        call: a call of ALL_GATHER, without experts.
        rank: the rank.
        size: number of ranks.
    """
    x, unit = _buffer(call, "x"), int(call.attributes["unit"])
    first, count = units_of_rank(x.columns // unit, rank, size)
    return BufferOperand(x.index, x.column + first * unit, count * unit) if count else None


def bytes_of_gather(plan: Plan, call: KernelCall, sizes: StepSizes) -> Callable[[int, int], int]:
    """Finds how many bytes ranks send in an exchange. Rows of experts count as if they were divided evenly.

    Args:
        plan: the plan of a rank.
        call: a call of ALL_GATHER.
        sizes: sizes of the step.

    Returns:
        A function of a rank and the number of ranks.
    """
    x, unit = _buffer(call, "x"), int(call.attributes["unit"])
    buffer = plan.buffers[x.index]
    rows = buffer.rows.at(sizes)
    if "starts" in call.operands:
        return lambda rank, size: rows * x.columns * buffer.element_bytes // size
    return lambda rank, size: rows * units_of_rank(x.columns // unit, rank, size)[1] * unit * buffer.element_bytes


def exchange_bytes(plan: Plan, limits: StepSizes, size: int, width: Callable[[str], int]) -> int:
    """Computes the most bytes that a rank sends in one exchange of a step. A rank may have all rows of experts.

    Args:
        plan: the plan of the engine.
        limits: sizes of the largest step.
        size: number of ranks.
        width: as for `plan_of_rank`.
    """
    largest = 0
    for call in plan_of_rank(plan, ROOT, size, width).calls:
        if call.kernel == ALL_GATHER:
            sent = bytes_of_gather(plan, call, limits)
            each = [sent(rank, size) for rank in range(size)]
            largest = max(largest, sum(each) + size if "starts" in call.operands else max(each))
    return largest


Piece = Cut | tuple[int, int]  # a cut, or columns that each rank computes: the first, and their number


class Heads(NamedTuple):
    """The rule by which a kernel is cut by heads."""

    groups: str  # attribute with the number of groups of heads that share keys; "": each head is a group
    of_head: tuple[str, ...]  # roles of operands with columns for each head
    of_group: tuple[str, ...] = ()  # roles of operands with columns for each group
    weights: tuple[str, ...] = ()  # roles of weights with rows for each head
    parts: tuple[str, ...] = ()  # parts of caches with something for each group, or where `groups` is "" for each head


_ATTENTION = Heads("kv_heads", ("q", "q_out", "out", "partials"), ("k", "v"), ("sinks",), ("key", "value"))
_RECURRENCE = Heads(
    "key_heads", ("value", "decay", "beta", "out"), ("query", "key"), ("log_a", "dt_bias", "skip"), ("state",)
)
_LATENT = Heads("", ("q", "q_rope", "q_out", "out", "partials"))
_BY_HEADS: Mapping[str, Heads] = {
    "gated_delta": _RECURRENCE,
    "head_gemm_bf16": Heads("", ("x", "out"), weights=("weight",)),
    "latent_attention": _LATENT,
    "latent_write": _LATENT,
    "paged_attention": _ATTENTION,
    "rope": Heads("", ("x", "out")),
    "rope_kv_write": _ATTENTION,
    "rope_queries": _ATTENTION,
    "selective_state": _RECURRENCE,
}
# Kernel whose columns are apart → roles of the operands with the same columns as `out`.
_BY_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "activation": ("x", "gate"),
    "add": ("a", "b"),
    "cast": ("x",),
    "causal_conv": ("x", "before", "behind"),
    "gated_rms_norm": ("x", "z"),
    "gather_rows": ("x",),
    "position_scale": ("x",),
    "rms_norm": ("x",),
    "scale": ("x",),
    "softcap": ("x",),
}
_BY_ROWS = ("quantize_rows",)  # kernels whose rows are apart
# Kernel → roles of the operands that it writes. All others write `out` alone.
_CODES = ("out", "scale", "largest")
_OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "activation": _CODES,
    "add_rms_norm": ("sum", "normed", "scale", "largest"),
    "gated_rms_norm": _CODES,
    "gather_columns": _CODES,
    "latent_attention": ("out", "partials"),
    "latent_write": ("q_out",),
    "layer_norm": _CODES,
    "paged_attention": ("out", "partials"),
    "quantize_rows": ("q", "scale", "largest"),
    "rms_norm": _CODES,
    "rope_kv_write": ("q_out",),
    "rope_queries": ("q_out",),
    "rope_table": ("cos", "sin"),
    "route": ("places", "share", "starts", "scores"),
    "sort_rows": _CODES,
}


class _Cutting:
    """Cuts the calls of a plan in order, and follows what ranks have computed in parts; all else is whole on each."""

    def __init__(self, plan: Plan, rank: int, size: int, width: Callable[[str], int]) -> None:
        self.plan, self.rank, self.size, self.width = plan, rank, size, width
        # On CPUs a rank has whole experts, and sends their rows. On GPUs it has a part of each: only the device knows
        # how many rows an expert has, but the host says how many bytes are exchanged.
        self.has_whole_experts = plan.target == CPU
        self.calls: list[KernelCall] = []
        self.adds: KernelCall | None = None  # call that computes what adapters add to the next product
        self.groups: KernelCall | None = None  # call that groups the rows of the last layer of experts
        self.grouped: BufferOperand | None = None  # starts of the experts by which these rows are grouped
        self.cuts: dict[int, list[Cut]] = {}  # buffer → columns that are computed in parts
        self.experts: dict[int, Experts] = {}  # buffer → experts whose rows are computed in parts
        self.by_heads = {
            (layer, part) for group in plan.caches for part in self._parts_by_heads(group) for layer in group.layers
        }
        self.wanted: dict[int, list[Cut]] = {}  # buffer → cuts in which its columns are read
        self._want_gates()
        for call in reversed(plan.calls):
            self._want(call)
        self.by_columns = {  # part of a recurrent state with numbers for each column → pieces of the columns
            (layer, part): pieces
            for group in plan.caches
            for part, pieces in self._parts_by_columns(group)
            for layer in group.layers
        }

    def run(self) -> Plan:
        """Cuts the plan."""
        last_use = {
            operand.index: call
            for call in self.plan.calls
            for operand in call.operands.values()
            if isinstance(operand, BufferOperand)
        }
        for call in self.plan.calls:
            if self._has_set_aside(call):
                continue
            if not self._cut(call):
                self._whole(call)
            for index, experts in list(self.experts.items()):
                if last_use[index] is call:
                    del self.experts[index]
                elif last_use[experts.starts.index] is call:  # its memory is used again from here on
                    self._gather(BufferOperand(index, 0, self.plan.buffers[index].columns))
        for index in self.plan.outputs.values():
            self._gather(BufferOperand(index, 0, self.plan.buffers[index].columns), ROOT)
        caches = tuple(self._cache(group) for group in self.plan.caches)
        return replace(self.plan, caches=caches, calls=tuple(self.calls))

    def _cut(self, call: KernelCall) -> bool:
        """Cuts a call. Returns False if it cannot be cut."""
        kernel = _kernel(call)
        if kernel in _BY_HEADS:
            return self._by_heads(call)
        if kernel.startswith("gemm_"):
            by_experts = "starts" in call.operands and self.has_whole_experts
            return self._experts(call) if by_experts else self._product(call)
        if kernel in _BY_COLUMNS:
            return self._by_columns(call)
        return kernel in _BY_ROWS and self._by_rows(call)

    # Caches

    def _parts_by_heads(self, group: CacheGroup) -> list[str]:
        """Parts of a cache group that can be cut by heads, since all kernels that touch them are."""
        found = []
        for part in group.parts:
            users = [call for call in self.plan.calls if _touches(call, group, part)]
            rules = [_BY_HEADS.get(_kernel(call)) for call in users]
            if not all(rule is not None and part in rule.parts for rule in rules):
                continue
            if len({call.attributes[rule.groups] for call, rule in zip(users, rules, strict=True) if rule}) == 1:
                found.append(part)
        return found

    def _parts_by_columns(self, group: CacheGroup) -> list[tuple[str, list[Piece]]]:
        """Parts of a cache group with numbers for each column, and how these are cut, alike in all layers."""
        found = []
        for part in group.parts:
            users = [call for call in self.plan.calls if _touches(call, group, part)]
            if not users or not all(_kernel(call) == "causal_conv" for call in users):
                continue
            outs = [_buffer(call, "out") for call in users]
            pieces = [_at(self._pieces(call), -out.column) for call, out in zip(users, outs, strict=True)]
            have_zeros = all(self._has_zeros(out, pieces[0]) for out in outs)
            are_cut = any(isinstance(piece, Cut) for piece in pieces[0])
            if are_cut and have_zeros and all(one == pieces[0] for one in pieces):
                found.append((part, pieces[0]))
        return found

    def _cache(self, group: CacheGroup) -> CacheGroup:
        layer = group.layers[0]
        if isinstance(group, PagedCache):
            planes = []
            for plane in group.planes:
                heads = Cut(0, plane.heads, 1).part(self.rank, self.size)[1]
                if (layer, plane.name) in self.by_heads:
                    size = plane.bytes_per_token // plane.heads * heads
                    plane = replace(plane, heads=heads, bytes_per_token=size)
                planes.append(plane)
            return replace(group, planes=tuple(planes))
        tensors: list[StateTensor] = []
        for tensor in group.tensors:
            place = layer, tensor.name
            if place in self.by_heads:
                tensors.append(replace(tensor, shape=(self._heads_of_state(group, tensor), *tensor.shape[1:])))
            elif place in self.by_columns:
                for index, piece in enumerate(self.by_columns[place]):
                    shape = *tensor.shape[:-1], self._part(piece)[1]
                    tensors.append(replace(tensor, name=_piece_name(tensor.name, index), shape=shape))
            else:
                tensors.append(tensor)
        return replace(group, tensors=tuple(tensors))

    def _heads_of_state(self, group: RecurrentState, tensor: StateTensor) -> int:
        call = next(call for call in self.plan.calls if _touches(call, group, tensor.name))
        value = _buffer(call, "value")
        return self._cuts_of_heads(call)["value"].part(self.rank, self.size)[1] * tensor.shape[0] // value.columns

    # What is wanted in which parts

    def _want_gates(self) -> None:
        """Notes that what is multiplied by the results of heads, such as a gate, is wanted in the same cuts."""
        made: dict[int, list[Cut]] = {}  # buffer → cuts in which heads write its columns
        for call in self.plan.calls:
            if _kernel(call) in _BY_HEADS and self._keeps_heads(call):
                cuts = self._cuts_of_heads(call)
                for role in outputs(call):
                    made[_buffer(call, role).index] = [cuts[role]]
            elif (roles := _columnwise(call)) is not None:
                out = _buffer(call, "out")
                for operand in (_buffer(call, role) for role in roles):
                    columns = Cut(operand.column, operand.columns, 1)
                    cuts_of_out = [
                        cut.at(cut.begin - operand.column + out.column)
                        for cut in made.get(operand.index, [])
                        if (cut.begin, cut.end) == (columns.begin, columns.end)
                    ]
                    if cuts_of_out:
                        made[out.index] = cuts_of_out
                        for cut in cuts_of_out:
                            self._want_of_columns(call, roles, cut)

    def _want_of_columns(self, call: KernelCall, roles: Sequence[str], cut: Cut) -> None:
        """Notes that a kernel whose columns are apart reads them in a cut of its output."""
        for role in roles:
            operand = _buffer(call, role)
            self._want_cut(operand, cut.at(cut.begin - _buffer(call, "out").column + operand.column))

    def _want(self, call: KernelCall) -> None:
        """Notes in which cuts a call reads its inputs. Calls after it are known."""
        kernel, written = _kernel(call), outputs(call)
        if kernel in _BY_HEADS:
            if self._keeps_heads(call):
                for role, cut in self._cuts_of_heads(call).items():
                    if role not in written:
                        self._want_cut(_buffer(call, role), cut)
        elif (roles := _columnwise(call)) is not None:
            for piece in self._pieces(call):
                if isinstance(piece, Cut):
                    self._want_of_columns(call, roles, piece)

    def _want_cut(self, operand: BufferOperand, cut: Cut) -> None:
        others = self.wanted.setdefault(operand.index, [])
        if not any(_overlap(cut, other) for other in others):
            others.append(cut)

    def _pieces(self, call: KernelCall) -> list[Piece]:
        """Cuts the columns that a call writes as they are read; a convolution's otherwise evenly, as a product's."""
        out = _buffer(call, "out")
        wanted = self.wanted.get(out.index, [])
        if _kernel(call) == "causal_conv" or wanted:
            return _pieces(out, wanted, even=_kernel(call) == "causal_conv")
        return []

    # State of buffers

    def _part(self, piece: Piece) -> tuple[int, int]:
        return piece.part(self.rank, self.size) if isinstance(piece, Cut) else piece

    def _inside(self, operand: BufferOperand) -> list[Cut]:
        """Cuts that have columns of an operand."""
        columns = Cut(operand.column, operand.columns, 1)
        return [cut for cut in self.cuts.get(operand.index, []) if _overlap(cut, columns)]

    def _has(self, index: int, wanted: Piece) -> bool:
        """True if each rank has its part of a piece, without an exchange."""
        for rank in range(self.size):
            begin, columns = wanted.part(rank, self.size) if isinstance(wanted, Cut) else wanted
            for cut in self._inside(BufferOperand(index, begin, columns)):
                first, count = cut.part(rank, self.size)
                if not (first <= begin and begin + columns <= first + count):
                    return False
        return True

    def _gather(self, operand: BufferOperand, root: int = EVERY) -> None:
        """Gathers what is computed in parts of an operand."""
        of_experts = self.experts.pop(operand.index, None)
        if of_experts is not None:
            whole = BufferOperand(operand.index, 0, self.plan.buffers[operand.index].columns)
            operands: dict[str, Operand] = {"x": whole, "starts": of_experts.starts}
            self.calls.append(KernelCall(ALL_GATHER, operands, {"unit": whole.columns, "root": root}))
        for cut in self._inside(operand):
            x = BufferOperand(operand.index, cut.begin, cut.columns)
            self.calls.append(KernelCall(ALL_GATHER, {"x": x}, {"unit": cut.unit, "root": root}))
            self.cuts[operand.index].remove(cut)

    def _gather_inputs(self, call: KernelCall, but: Sequence[str] = ()) -> None:
        """Gathers what a call reads, except for some roles."""
        for role, operand in call.operands.items():
            if isinstance(operand, BufferOperand) and role not in (*outputs(call), *but):
                self._gather(operand)

    def _written(self, operand: BufferOperand, cuts: Sequence[Cut] = ()) -> None:
        """Notes that columns have been written: in parts, or else whole."""
        columns = Cut(operand.column, operand.columns, 1)
        left = [cut for cut in self.cuts.get(operand.index, []) if not _overlap(cut, columns)]
        self.cuts[operand.index] = [*left, *cuts]
        if columns.columns == self.plan.buffers[operand.index].columns:
            self.experts.pop(operand.index, None)

    # Adapters

    def _has_set_aside(self, call: KernelCall) -> bool:
        """Sets a call for adapters aside until the product is cut. Returns False if it is no such call."""
        if call.kernel == GROUP_KERNEL:
            self.groups, self.grouped = call, None
        elif call.kernel in (KERNEL, HEAD_KERNEL):
            self.adds = call
        else:
            return False
        return True

    def _append(self, call: KernelCall) -> None:
        """Appends a call; before a product with adapters those that compute what they add to this rank's part of it.

        Args:
            call: the call, for this rank's rows or matrices of a weight.
        """
        delta, adapters = call.operands.get("delta"), call.operands.get("adapters")
        if isinstance(delta, BufferOperand) and isinstance(adapters, AdaptersOperand):
            part, columns = _part_of_adapters(call, adapters, delta.columns)
            changed: dict[str, Operand] = {"adapters": part, "delta": BufferOperand(delta.index, 0, columns)}
            self._append_groups(call, part)
            assert self.adds is not None, "with_adapters has put it before the product"
            read = {role: call.operands[role] for role in ("x", "x_scale") if role in self.adds.operands}
            self.calls.append(replace(self.adds, operands={**self.adds.operands, **read, **changed}))
            call = replace(call, operands={**call.operands, **changed})
        self.calls.append(call)

    def _append_groups(self, call: KernelCall, part: AdaptersOperand) -> None:
        """Appends the call that groups the rows of a layer of experts, unless it has grouped those of these experts."""
        starts = call.operands.get("starts")
        if isinstance(starts, BufferOperand) and starts != self.grouped:
            assert self.groups is not None, "with_adapters has put it before the product"
            operands = {**self.groups.operands, "starts": starts, "adapters": part}
            self.calls.append(replace(self.groups, operands=operands))
            self.grouped = starts

    # Rules

    def _whole(self, call: KernelCall) -> None:
        """Computes a call on each rank."""
        self._gather_inputs(call)
        self._append(call)
        for role in outputs(call):
            self._written(_buffer(call, role))

    def _product(self, call: KernelCall) -> bool:
        out = _buffer(call, "out")
        pieces = _pieces(out, self.wanted.get(out.index, []), even=True)
        if not any(isinstance(piece, Cut) for piece in pieces) or not self._has_zeros(out, pieces):
            return False
        self._gather_inputs(call)
        is_gated = call.attributes["epilogue"] != "none"
        experts = Experts(_buffer(call, "starts")).num_experts if "starts" in call.operands else 0
        each = (0, experts, experts) if experts else None
        for piece in pieces:
            begin, columns = self._part(piece)
            first = begin - out.column
            rows = ((first, columns), *([(out.columns + first, columns)] if is_gated else []))
            operands = {
                role: replace(operand, rows=rows, matrices=each) if isinstance(operand, WeightOperand) else operand
                for role, operand in call.operands.items()
            }
            operands["out"] = BufferOperand(out.index, begin, columns)
            self._append(replace(call, operands=operands, cost=_share(call.cost, columns, out.columns)))
        self._written(out, [piece for piece in pieces if isinstance(piece, Cut)])
        return True

    def _has_zeros(self, out: BufferOperand, pieces: Sequence[Piece]) -> bool:
        """True if nobody reads the padding of a buffer, or one gather writes its zeros."""
        return self.plan.buffers[out.index].dtype == "f32" or len(pieces) == 1

    def _experts(self, call: KernelCall) -> bool:
        """A product of experts: each rank computes the rows of its experts."""
        out, starts = _buffer(call, "out"), _buffer(call, "starts")
        experts = Experts(starts)
        if experts.num_experts < self.size or out.columns != self.plan.buffers[out.index].columns:
            return False
        with_rows = [
            role
            for role, operand in call.operands.items()
            if isinstance(operand, BufferOperand) and self.experts.get(operand.index) == experts
        ]
        self._gather_inputs(call, with_rows)
        first, count = units_of_rank(experts.num_experts, self.rank, self.size)
        operands = {
            role: replace(operand, matrices=(first, count, experts.num_experts))
            if isinstance(operand, WeightOperand)
            else operand
            for role, operand in call.operands.items()
        }
        operands["starts"] = BufferOperand(starts.index, starts.column + first, count + 1)
        self._append(replace(call, operands=operands, cost=_share(call.cost, count, experts.num_experts)))
        self._written(out)
        self.experts[out.index] = experts
        return True

    def _by_rows(self, call: KernelCall) -> bool:
        """A kernel whose rows are apart, after experts: rows of other ranks' experts are computed for nothing."""
        experts = self.experts.get(_buffer(call, "x").index)
        if experts is None:
            return False
        self._gather_inputs(call, ["x"])
        self.calls.append(call)
        for role in outputs(call):
            self._written(_buffer(call, role))
            self.experts[_buffer(call, role).index] = experts
        return True

    def _by_columns(self, call: KernelCall) -> bool:
        roles, state = _columnwise(call), call.operands.get("state")
        if roles is None:
            return False
        operands, out = [_buffer(call, role) for role in roles], _buffer(call, "out")
        if isinstance(state, CacheOperand):
            pieces = self.by_columns.get((state.layer, state.part), [])
            for operand in operands:
                if not all(self._has(operand.index, piece) for piece in _at(pieces, operand.column)):
                    self._gather(operand)
        else:
            pieces = self._pieces_as_read(call, operands, out)
        if not any(isinstance(piece, Cut) for piece in pieces):
            return False
        self._gather_inputs(call, roles)
        for index, piece in enumerate(pieces):
            begin, columns = self._part(piece)
            parts: dict[str, Operand] = dict(call.operands)
            for role in (*roles, "out"):
                operand = _buffer(call, role)
                parts[role] = BufferOperand(operand.index, operand.column + begin, columns)
            for role, weight in call.operands.items():
                if isinstance(weight, WeightOperand) and self._is_by_columns(role, weight, out.columns):
                    parts[role] = replace(weight, rows=((begin, columns),))
            if isinstance(state, CacheOperand):
                parts["state"] = replace(state, part=_piece_name(state.part, index))
            self.calls.append(replace(call, operands=parts))
        self._written(out, [cut.at(cut.begin + out.column) for cut in pieces if isinstance(cut, Cut)])
        return True

    def _pieces_as_read(self, call: KernelCall, operands: Sequence[BufferOperand], out: BufferOperand) -> list[Piece]:
        """Cuts the columns of a call as ranks have computed those that it reads. Nothing, if it has to be whole.

        Args:
            call: a kernel whose columns are apart.
            operands: its inputs with columns.
            out: its output.
        """
        first = operands[0]
        pieces = _with_rest([cut.at(cut.begin - first.column) for cut in self._inside(first)], out.columns)
        have_them = all(self._has(one.index, piece) for one in operands for piece in _at(pieces, one.column))
        of_experts = any(operand.index in self.experts for operand in (*operands, out))
        if not have_them or of_experts or not self._has_zeros(out, pieces):
            return []
        return pieces if all(self._fits(call, piece) for piece in pieces) else []

    def _is_by_columns(self, role: str, weight: WeightOperand, columns: int) -> bool:
        """True if a weight has a row, or a number, for each column."""
        return role == "taps" or self.width(weight.name) == columns

    def _fits(self, call: KernelCall, piece: Piece) -> bool:
        """True if no columns that a kernel reads together are cut in two."""
        kernel, weight = _kernel(call), call.operands.get("weight")
        if kernel not in ("rms_norm", "gated_rms_norm"):
            return True
        assert isinstance(weight, WeightOperand)
        together = int(call.attributes["run"]) if "run" in call.attributes else self.width(weight.name)
        begin, unit = (piece.begin, piece.unit) if isinstance(piece, Cut) else piece
        return begin % together == 0 == unit % together

    def _keeps_heads(self, call: KernelCall) -> bool:
        """True if what a kernel with heads writes to caches is cut by them, or is the same on each rank."""
        parts = _BY_HEADS[_kernel(call)].parts
        touched = [one for one in call.operands.values() if isinstance(one, CacheOperand) and one.part in parts]
        return all((one.layer, one.part) in self.by_heads for one in touched)

    def _cuts_of_heads(self, call: KernelCall) -> dict[str, Cut]:
        """Cuts the operands of a kernel with heads: a rank has some groups, and the heads that read their keys.

        With more ranks than groups, several ranks have the same group, and share its heads if they divide.
        """
        rule, heads = _BY_HEADS[_kernel(call)], int(call.attributes["heads"])
        groups = int(call.attributes[rule.groups]) if rule.groups else heads
        shared = self.size % groups == 0 and heads % self.size == 0
        cuts = {}
        for role, operand in call.operands.items():
            if isinstance(operand, BufferOperand) and role in rule.of_head:
                unit = operand.columns // heads * (1 if shared else heads // groups)
                cuts[role] = Cut(operand.column, operand.columns, unit)
            elif isinstance(operand, BufferOperand) and role in rule.of_group:
                cuts[role] = Cut(operand.column, operand.columns, operand.columns // groups)
        return cuts

    def _by_heads(self, call: KernelCall) -> bool:
        if not self._keeps_heads(call):
            return False
        rule, cuts, heads = _BY_HEADS[_kernel(call)], self._cuts_of_heads(call), int(call.attributes["heads"])
        out = _buffer(call, outputs(call)[0])
        if "weight" in rule.weights and cuts["out"].unit % ROWS:
            return False
        attributes, operands = dict(call.attributes), dict(call.operands)
        for role, cut in cuts.items():
            operand = _buffer(call, role)
            if role not in outputs(call) and not self._has(operand.index, cut):
                self._gather(operand)
            operands[role] = BufferOperand(operand.index, *cut.part(self.rank, self.size))
        self._gather_inputs(call, list(cuts))
        cut = cuts[outputs(call)[0]]
        begin, columns = cut.part(self.rank, self.size)
        first, mine = (begin - cut.begin) * heads // cut.columns, columns * heads // cut.columns
        attributes["heads"] = mine
        if rule.groups:
            groups = int(call.attributes[rule.groups])
            attributes[rule.groups] = Cut(0, groups, 1).part(self.rank, self.size)[1]
        for role in rule.weights:
            if isinstance(weight := operands.get(role), WeightOperand):
                each = (out.columns if role == "weight" else self.width(weight.name)) // heads
                operands[role] = replace(weight, rows=((first * each, mine * each),))
        if isinstance(partials := operands.get("partials"), BufferOperand):
            operands["partials"] = replace(partials, column=0)  # a buffer of its own, which no other kernel reads
        self._append(replace(call, operands=operands, attributes=attributes, cost=_share(call.cost, mine, heads)))
        for role in outputs(call):
            self._written(_buffer(call, role), [cuts[role]] if role != "partials" else [])
        return True


def _kernel(call: KernelCall) -> str:
    return call.kernel.partition("@")[0]


def _buffer(call: KernelCall, role: str) -> BufferOperand:
    operand = call.operands[role]
    assert isinstance(operand, BufferOperand), f"{role} of {call.kernel} is a buffer"
    return operand


def _part_of_adapters(call: KernelCall, adapters: AdaptersOperand, columns: int) -> tuple[AdaptersOperand, int]:
    """Finds the part of a site that a product with a part of its weight has.

    Args:
        call: the product.
        adapters: the whole site.
        columns: columns of what its adapters add to the whole product.

    Returns:
        The part, and the columns of what adapters add to it.
    """
    weight = call.operands["weight"]
    assert isinstance(weight, WeightOperand), "it is that of a linear layer"
    if call.kernel.startswith(HEAD_GEMM) and weight.rows:
        ((begin, rows),) = weight.rows
        heads = int(call.attributes["heads"])
        each = rows // heads
        return replace(adapters, matrices=(begin // each, heads, columns // each)), rows
    rows = sum(count for _, count in weight.rows) if weight.rows else columns
    return replace(adapters, rows=weight.rows, matrices=weight.matrices), rows


def outputs(call: KernelCall) -> tuple[str, ...]:
    """Roles of the buffers that a call writes."""
    roles = _OUTPUTS.get(_kernel(call), ("out",))
    return tuple(role for role in roles if isinstance(call.operands.get(role), BufferOperand))


def _touches(call: KernelCall, group: CacheGroup, part: str) -> bool:
    operands = (one for one in call.operands.values() if isinstance(one, CacheOperand))
    return any(one.layer in group.layers and one.part == part for one in operands)


def _piece_name(part: str, index: int) -> str:
    """Name of a piece of a part of a recurrent state."""
    return f"{part}.{index}"


def _columnwise(call: KernelCall) -> tuple[str, ...] | None:
    """Roles of the operands with the same columns as `out`; None if columns of the call are not apart."""
    roles = _BY_COLUMNS.get(_kernel(call))
    if roles is None or (_kernel(call) != "scale" and "scale" in call.operands):
        return None  # numbers of a whole row decide about its codes
    found = tuple(role for role in roles if role in call.operands)
    operands = [call.operands[role] for role in found]
    columns = _buffer(call, "out").columns
    same = all(isinstance(operand, BufferOperand) and operand.columns == columns for operand in operands)
    return found if same else None


def _overlap(a: Cut, b: Cut) -> bool:
    return a.begin < b.end and b.begin < a.end


def _at(pieces: Sequence[Piece], shift: int) -> list[Piece]:
    """The same pieces of columns that begin elsewhere."""
    return [
        piece.at(piece.begin + shift) if isinstance(piece, Cut) else (piece[0] + shift, piece[1]) for piece in pieces
    ]


def _share(cost: Cost, part: int, whole: int) -> Cost:
    """The cost of a part of a call."""
    return replace(cost, of_token=cost.of_token * part // whole, of_position=cost.of_position * part // whole)


def _begin(piece: Piece) -> int:
    return piece.begin if isinstance(piece, Cut) else piece[0]


def _columns_of(piece: Piece) -> int:
    return piece.columns if isinstance(piece, Cut) else piece[1]


def _with_rest(pieces: Sequence[Piece], columns: int) -> list[Piece]:
    """Adds the columns between pieces, and after them, each as a piece that all ranks compute."""
    found: list[Piece] = []
    begin = 0
    for piece in [*sorted(pieces, key=_begin), (columns, 0)]:
        if begin < _begin(piece):
            found.append((begin, _begin(piece) - begin))
        if _columns_of(piece):
            found.append(piece)
        begin = _begin(piece) + _columns_of(piece)
    return found


def _pieces(out: BufferOperand, wanted: Sequence[Cut], *, even: bool) -> list[Piece]:
    """Cuts columns that are written as they are wanted. Each piece has to begin at a block of the weight's rows.

    Args:
        out: the columns.
        wanted: cuts of the buffer.
        even: True to cut all others evenly; otherwise each rank computes them.

    Returns:
        Pieces in order. Nothing, if one would begin inside of a block.
    """
    end = out.column + out.columns
    inside = [cut for cut in wanted if out.column <= cut.begin and cut.end <= end]
    pieces: list[Piece] = []
    for piece in _with_rest(_at(inside, -out.column), out.columns):
        whole = 0 if isinstance(piece, Cut) or not even else piece[1] // ROWS * ROWS
        if isinstance(piece, Cut) and piece.unit % ROWS == 0:
            pieces.append(piece)
            continue
        begin, columns = _begin(piece), _columns_of(piece)
        if whole:
            pieces.append(Cut(begin, whole, ROWS))
        if columns > whole:
            rest = begin + whole, columns - whole
            before = pieces[-1] if pieces else None
            if isinstance(before, tuple) and not isinstance(before, Cut):
                pieces[-1] = before[0], before[1] + rest[1]
            else:
                pieces.append(rest)
    return _at(pieces, out.column) if all(_begin(piece) % ROWS == 0 for piece in pieces) else []
