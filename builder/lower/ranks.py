"""Lowers the plans of ranks: GPUs that compute one model together.

`enginewright.rank_plan` cuts a plan, whatever it is for. Kernels for CPUs take the sizes of what they are given, so
that happens when an engine is loaded. Kernels for GPUs are specialized to these sizes, so here the calls of each rank
get launches of their own, and buffers that only they use. What the order of sums depends on is decided by the whole
call, so a number has the same bits on any number of ranks.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from enginewright.builder.lower.arena import assign_slots, nominal_sizes
from enginewright.builder.lower.pack import PackedForm
from enginewright.builder.lower.specialize import BufferShape, Specializer, matrix_of
from enginewright.plan import Buffer, BufferOperand, CacheGroup, KernelCall, Launch, Linear, Operand, Plan
from enginewright.plugins import KernelBinding
from enginewright.plugins.elementwise.exchange_cuda import EXCHANGE_SOURCES, copy_launch
from enginewright.plugins.kernel import Call, CudaKernel, Matrix
from enginewright.rank_plan import ALL_GATHER, EVERY, PACKED, part_of_gather, plan_of_rank
from enginewright.runtime.device.cpu.weight_parts import columns_of

_NUMBER = "number"  # attribute by which a cut call is found among the whole ones, only in between


def rank_plans(
    plan: Plan,
    size: int,
    bindings: Sequence[KernelBinding],
    own: Collection[int],
    specializer: Specializer,
    forms: Mapping[str, PackedForm],
) -> tuple[Plan, ...]:
    """Makes the plan of each rank, in which all launches are those of its part.

    Args:
        plan: the whole plan, for GPUs.
        size: number of ranks.
        bindings: kernel of each call.
        own: buffers that only one call uses.
        specializer: maker of launches, which has the kernels of all plans.
        forms: name of a weight → its form.
    """
    bare = _without(plan, own)
    lowering = [_RankLowering(plan, bare, rank, size, bindings, specializer, forms) for rank in range(size)]
    plans = tuple(one.run() for one in lowering)
    assert tuple(specializer.dims) == plan.dims, "parts of calls depend on the sizes that the whole ones depend on"
    return plans


def _without(plan: Plan, own: Collection[int]) -> Plan:
    """Copies a plan without launches, and without buffers that only one call uses. Its calls are numbered."""
    kept = [index for index in range(len(plan.buffers)) if index not in own]
    moved = {index: place for place, index in enumerate(kept)}

    def operands_of(call: KernelCall) -> dict[str, Operand]:
        found: dict[str, Operand] = {}
        for role, operand in call.operands.items():
            if not isinstance(operand, BufferOperand):
                found[role] = operand
            elif operand.index in moved:
                found[role] = replace(operand, index=moved[operand.index])
        return found

    return replace(
        plan,
        buffers=tuple(replace(plan.buffers[index], slot=0) for index in kept),
        calls=tuple(
            replace(call, operands=operands_of(call), attributes={**call.attributes, _NUMBER: number}, launches=())
            for number, call in enumerate(plan.calls)
        ),
        outputs={name: moved[index] for name, index in plan.outputs.items()},
        given={name: moved[index] for name, index in plan.given.items()},
        sampling=None,
        adapting=None,
    )


class _RankLowering:
    """The plan of one rank."""

    def __init__(
        self,
        whole: Plan,
        bare: Plan,
        rank: int,
        size: int,
        bindings: Sequence[KernelBinding],
        specializer: Specializer,
        forms: Mapping[str, PackedForm],
    ) -> None:
        self.whole, self.rank, self.size = whole, rank, size
        self.bindings, self.specializer, self.forms = bindings, specializer, forms
        self.plan = plan_of_rank(bare, rank, size, lambda name: columns_of(forms[name]))
        self.buffers = _shapes(self.plan)
        self.lasting: list[int] = []  # buffers that keep their content from step to step

    def run(self) -> Plan:
        """Makes it."""
        calls = [self._exchange(call) if call.kernel == ALL_GATHER else self._call(call) for call in self.plan.calls]
        outputs, given = self.plan.outputs.values(), self.plan.given.values()
        nominal = nominal_sizes(self.plan.dims, self.plan.caches)
        slots = assign_slots(self.buffers, calls, outputs, nominal, self.lasting, given)
        plan = replace(
            self.plan,
            buffers=tuple(Buffer(*entry, slot) for entry, slot in zip(self.buffers, slots, strict=True)),
            calls=tuple(calls),
            sampling=self.whole.sampling,
        )
        plan.check()
        return plan

    def _call(self, call: KernelCall) -> KernelCall:
        """Gives a call its launches, and the buffers that only it uses."""
        number = call.attributes[_NUMBER]
        assert isinstance(number, int)
        binding, before, operands = self.bindings[number], self.whole.calls[number], dict(call.operands)
        shapes, groups = _shapes(self.whole), self.whole.caches
        matrices = {role: self._matrix(one, shapes, groups) for role, one in before.operands.items()}
        whole = self.specializer.call(matrices, before.attributes)

        def part() -> Call:
            matrices = {role: self._matrix(one, self.buffers, self.plan.caches) for role, one in operands.items()}
            attributes = {name: value for name, value in call.attributes.items() if name != _NUMBER}
            return self.specializer.call(matrices, attributes, whole)

        scratch = binding.scratch and binding.scratch(part())
        if scratch is not None:
            role, rows, columns = scratch
            operands[role] = self._extra("f32", rows, columns)
        if isinstance(binding, CudaKernel) and binding.counters is not None:
            role, rows, columns = binding.counters(part())
            counters = operands[role] = self._extra("i32", rows, columns)
            self.lasting.append(counters.index)
        described = part()
        launches = self.specializer.launches(binding, described)
        return replace(call, operands=operands, attributes=dict(described.attributes), launches=launches)

    def _exchange(self, call: KernelCall) -> KernelCall:
        """Gives an exchange a buffer for each rank's part, and the launches that fill its own, and read the others."""
        x = call.operands["x"]
        assert isinstance(x, BufferOperand)
        dtype, rows, all_columns = self.buffers[x.index]
        receives = call.attributes["root"] in (EVERY, self.rank)
        parts = {rank: part for rank in range(self.size) if (part := part_of_gather(call, rank, self.size)) is not None}
        operands = dict(call.operands)
        for rank, part in parts.items():
            if receives or rank == self.rank:
                operands[_part(rank)] = part
                operands[f"{PACKED}{rank}"] = self._extra(dtype, rows, part.columns)
        matrices = {role: self._matrix(one, self.buffers, self.plan.caches) for role, one in operands.items()}
        zeros = 0 if dtype == "f32" or x.columns < all_columns else matrices["x"].padded - x.columns
        written = {_part(rank): zeros for rank, part in parts.items() if part.column + part.columns == all_columns}
        for role in written.keys() & matrices.keys():
            matrices[role] = dataclasses.replace(matrices[role], padded=matrices[role].columns + zeros)
        described = self.specializer.call(matrices, {})

        def copied(source: str, to: str) -> Launch:
            return self.specializer.named(copy_launch(described, source, to), EXCHANGE_SOURCES)

        launches = [copied(_part(self.rank), f"{PACKED}{self.rank}")] if self.rank in parts else []
        for rank in parts if receives else ():
            # A rank has its own part, but perhaps not the zeros after it.
            if rank != self.rank or written.get(_part(rank)):
                launches.append(copied(f"{PACKED}{rank}", _part(rank)))
        return replace(call, operands=operands, launches=tuple(launches))

    def _matrix(self, operand: Operand, buffers: Sequence[BufferShape], groups: Sequence[CacheGroup]) -> Matrix:
        return matrix_of(operand, buffers, groups, self.forms.__getitem__)

    def _extra(self, dtype: str, rows: Linear, columns: int) -> BufferOperand:
        self.buffers.append((dtype, rows, columns))
        return BufferOperand(len(self.buffers) - 1, 0, columns)


def _shapes(plan: Plan) -> list[BufferShape]:
    return [(one.dtype, one.rows, one.columns) for one in plan.buffers]


def _part(rank: int) -> str:
    """Role of the columns that a rank has computed."""
    return f"part.{rank}"
