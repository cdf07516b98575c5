"""The plan: what an executor needs to run a model, and no more.

A plan is a list of kernel calls over matrices. A matrix is a weight, a step input, or a buffer in one
arena. Its columns are known at build time; its rows are linear in the sizes of a step (`Plan.dims` has their names),
so the runtime chooses its own limits and the arena is laid out once, at those limits (`arena_offsets`).
The builder writes plans (`enginewright.builder.lower`), the runtime reads them; this module is all that both
know of one. Encoded as canonical JSON in the engine file.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import msgspec

from enginewright.dtypes import DTYPES
from enginewright.embedding import RESULTS
from enginewright.errors import CorruptEngineError

ARENA_ALIGN_BYTES = 64
COLUMN_ALIGN = 64  # elements; rows of a buffer start at multiples of this (Buffer.stride)
MOST_SHARED_BYTES = 227 << 10  # of a block, on the GPUs that have most
# The sizes that every step has: packed tokens of all sequences, sequences with at least one token in the step, and
# tokens whose logits are wanted.
COMMON_DIMS = ("tokens", "sequences", "logit_rows")
# Hidden states of a step's tokens, f32 [tokens, columns]: an output; and those that a plan is given to guess from.
HIDDEN, HIDDEN_BEFORE = "hidden", "hidden_before"
MOST_DIMS = 8  # of a plan (csrc/cpu/kernel.h and csrc/cuda/device.cuh have room for so many)


class StepSizes(msgspec.Struct, frozen=True):
    """The sizes of one step, or their limits."""

    dims: tuple[str, ...]  # their names, as the plan has them: COMMON_DIMS, then others
    counts: tuple[int, ...]  # of each dim, in the same order

    @property
    def tokens(self) -> int:
        return self.counts[0]

    @property
    def sequences(self) -> int:
        return self.counts[1]

    @property
    def logit_rows(self) -> int:
        return self.counts[2]

    def __getitem__(self, dim: str) -> int:
        return self.counts[self.dims.index(dim)]


def step_sizes(*, tokens: int, sequences: int, logit_rows: int, **others: int) -> StepSizes:
    """Sizes by their names; the order of `others` is that of their dims."""
    return StepSizes((*COMMON_DIMS, *others), (tokens, sequences, logit_rows, *others.values()))


class Linear(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """constant + Σ factor × size: a number of rows or columns. `linear` makes one."""

    constant: int = 0
    terms: tuple[tuple[str, int], ...] = ()  # dim and its factor, in the order of the dims' names

    def at(self, sizes: StepSizes) -> int:
        total = self.constant
        for dim, factor in self.terms:
            total += factor * sizes[dim]
        return total

    def by_position(self, dims: Sequence[str]) -> tuple[int, ...]:
        """The constant, then the factor of each of `dims`."""
        factors = dict(self.terms)
        return (self.constant, *(factors.get(dim, 0) for dim in dims))


def linear(constant: int = 0, **factors: int) -> Linear:
    """`linear(tokens=2, constant=1)` is 2 × tokens + 1."""
    return Linear(constant, tuple(sorted((dim, factor) for dim, factor in factors.items() if factor)))


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An int32 array given with each step, [rows] or [rows, columns]."""

    name: str
    rows: Linear
    columns: Linear = Linear(1)


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row-major matrix in the arena; a row takes `stride` elements. Buffers of one slot are never alive together."""

    dtype: str
    rows: Linear
    columns: int
    slot: int

    @property
    def stride(self) -> int:
        """Elements from one row to the next: columns rounded up to an odd multiple of COLUMN_ALIGN.

        With an even multiple, rows would fall into few sets of a cache: at 2048 columns GEMMs lose a quarter.
        """
        return (-(-self.columns // COLUMN_ALIGN) | 1) * COLUMN_ALIGN

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype].bytes

    def bytes_at(self, sizes: StepSizes) -> int:
        return self.rows.at(sizes) * self.stride * self.element_bytes


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `heads` × `dim` numbers for each token of each layer: its keys, or its values."""

    name: str  # what kernels ask for: "key", "value"
    heads: int
    dim: int  # of a head
    dtype: str  # as stored: bf16, or codes with what scales them beside those of a head (csrc/cpu/kv.h)
    bytes_per_token: int  # in one layer, as stored: padding and scales included


class PagedCache(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="paged"):
    """What attention reads of each earlier token, in blocks of tokens, for layers whose caches live and die together:
    each sequence has one block table for all of them. https://arxiv.org/abs/2309.06180
    """

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    block_size: int  # tokens
    window: int = 0  # positions that a query sees, its own included; 0: all
    kept_tokens: int = 0  # first positions that are seen from everywhere, whatever the window (attention sinks)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(plane.name for plane in self.planes)

    @property
    def bytes_per_token(self) -> int:
        """Of all layers and planes."""
        return len(self.layers) * sum(plane.bytes_per_token for plane in self.planes)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bytes_per_token

    def offset_bytes(self, layer: int, part: str) -> int:
        """Where a layer's plane begins in a block: layers in their order, and in each of them its planes in theirs."""
        sizes = [self.block_size * plane.bytes_per_token for plane in self.planes]
        before = sizes[: [plane.name for plane in self.planes].index(part)]
        return self.layers.index(layer) * sum(sizes) + sum(before)


class StateTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a sequence's recurrent state, in one layer."""

    name: str  # what kernels ask for: "conv", "state"
    shape: tuple[int, ...]
    dtype: str


class RecurrentState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="recurrent"):
    """What a recurrence keeps of all earlier tokens: as much for a long sequence as for a short one."""

    layers: tuple[int, ...]
    tensors: tuple[StateTensor, ...]
    snapshot_tokens: int  # copies are kept at multiples of so many tokens, for sequences that begin alike

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def bytes_per_sequence(self) -> int:
        """Of all layers and tensors."""
        return len(self.layers) * sum(self._tensor_bytes())

    def offset_bytes(self, layer: int, part: str) -> int:
        """Where a layer's tensor begins in a slot: layers in their order, and in each of them its tensors in theirs."""
        sizes = self._tensor_bytes()
        return self.layers.index(layer) * sum(sizes) + sum(sizes[: self.parts.index(part)])

    def _tensor_bytes(self) -> list[int]:
        return [prod(tensor.shape) * DTYPES[tensor.dtype].bytes for tensor in self.tensors]


CacheGroup = PagedCache | RecurrentState  # what a sequence leaves behind it between steps, in some of the layers


class InputOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="step"):
    name: str


class WeightOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="weights"):
    name: str


class BufferOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="arena"):
    """Columns [column, column + columns) of a buffer."""

    index: int
    column: int
    columns: int


class CacheOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="cache"):
    """A part of a layer's cache."""

    layer: int  # that writes it; others may read it
    part: str  # the name of a plane or of a state's tensor


def cache_of(groups: Sequence[CacheGroup], operand: CacheOperand) -> CacheGroup:
    """The group that has a part of a layer's cache: a layer may be in two, with attention and a recurrence."""
    return next(group for group in groups if operand.layer in group.layers and operand.part in group.parts)


Operand = InputOperand | WeightOperand | BufferOperand | CacheOperand


class Extent(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A dimension of a launch's grid: ceil(rows / per) blocks, and no more than `per_multiprocessor` for each
    multiprocessor where that is not 0.
    """

    rows: Linear = Linear(1)
    per: int = 1
    per_multiprocessor: int = 0

    def at(self, sizes: StepSizes, multiprocessors: int) -> int:
        blocks = -(-self.rows.at(sizes) // self.per)
        return min(blocks, self.per_multiprocessor * multiprocessors) if self.per_multiprocessor else blocks


class Launch(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One launch on a GPU. It runs where low ≤ rows ≤ high, so the launches of a call may be a table by shape."""

    kernel: str  # its name in the engine's code
    # Behind the step's sizes: the addresses of operands, by role. A role that the call lacks is a null pointer.
    arguments: tuple[str, ...]
    grid: tuple[Extent, Extent, Extent]
    threads: int  # of a block
    shared_bytes: int = 0  # of a block
    rows: Linear = Linear(1)
    low: int = 1
    high: int = 2**31 - 1
    architectures: tuple[str, ...] = ()  # whose code has the kernel, and runs it; () is all

    def runs(self, sizes: StepSizes) -> bool:
        return self.low <= self.rows.at(sizes) <= self.high


class Cost(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Operations that a call makes for one token of a prompt; a product that is added to a sum is two."""

    of_token: int = 0
    of_position: int = 0  # for each position that the token sees
    window: int = 0  # positions that it sees at most, its own included; 0: all


class KernelCall(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One kernel call."""

    kernel: str  # versioned name, `gemm_bf16@1`
    operands: dict[str, Operand]  # by role
    attributes: dict[str, int | float | str]
    launches: tuple[Launch, ...] = ()  # what it is on a GPU, in order
    cost: Cost = Cost()  # where it is large: of matrix products and attention


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything an executor runs, in order."""

    target: str  # the platform: cpu, cuda
    dims: tuple[str, ...]  # names of a step's sizes: COMMON_DIMS, and behind these what else rows and columns follow
    inputs: tuple[Input, ...]
    caches: tuple[CacheGroup, ...]
    buffers: tuple[Buffer, ...]
    calls: tuple[KernelCall, ...]
    # Name → buffer: "logits", f32 [logit_rows, vocab_size], and perhaps HIDDEN; or one of RESULTS, f32 with a row for
    # each text that ends.
    outputs: dict[str, int]
    vocab_size: int
    max_seq_len: int
    # What a GPU samples from the logits with, a block per row; its arguments are not operands but the runtime's.
    sampling: Launch | None = None
    whole_texts: bool = False  # all tokens of a sequence are in one step, since tokens see those behind them
    given: dict[str, int] = {}  # Name → buffer that is written before each step: HIDDEN_BEFORE, or nothing

    @property
    def result_name(self) -> str:
        """What it gives: "logits", or one of RESULTS."""
        return next(name for name in self.outputs if name != HIDDEN)

    @property
    def result(self) -> int:
        """The buffer of that."""
        return self.outputs[self.result_name]

    @property
    def generates(self) -> bool:
        """Whether it gives logits, of which tokens are sampled."""
        return "logits" in self.outputs

    def to_json(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(data: bytes) -> "Plan":
        try:
            plan = msgspec.json.decode(data, type=Plan)
        except msgspec.MsgspecError as error:
            raise CorruptEngineError("the plan cannot be read", str(error), "Build the engine again.") from error
        plan._check()
        return plan

    def _check(self) -> None:
        """References stay inside the plan; sizes are sane. Kernels check shapes among themselves."""

        def require(holds: Any, what: str) -> None:
            if not holds:
                raise CorruptEngineError("the plan is damaged", what, "Build the engine again.")

        def require_size(size: Linear, least: int, what: str) -> None:
            names = [dim for dim, _ in size.terms]
            require(names == sorted(set(names)) and set(names) <= set(self.dims), f"{what} of no dim of the plan")
            numbers = size.by_position(names)
            require(least <= min(numbers) and max(numbers) < 2**31, f"{what} that is out of range")

        require(self.dims[: len(COMMON_DIMS)] == COMMON_DIMS, f"its dims do not begin with {', '.join(COMMON_DIMS)}")
        require(len(set(self.dims)) == len(self.dims) <= MOST_DIMS, "two dims have one name, or there are too many")
        inputs = {entry.name for entry in self.inputs}
        require(len(inputs) == len(self.inputs), "two inputs have one name")
        for buffer in self.buffers:
            require(buffer.dtype in DTYPES and buffer.element_bytes, f"unknown dtype {buffer.dtype!r}")
            require_size(buffer.rows, 0, "a buffer has a size")
            require(0 < buffer.columns < 2**31, "a buffer has no size")
            require(0 <= buffer.slot < len(self.buffers), "a buffer is out of range")
        for group in self.caches:
            require(group.layers and group.parts, "a cache is empty")
            require(len(set(group.parts)) == len(group.parts), "two parts of a cache have one name")
            match group:
                case PagedCache():
                    fields = [group.block_size, *(n for p in group.planes for n in (p.heads, p.dim, p.bytes_per_token))]
                    require(min(group.window, group.kept_tokens) >= 0, "a cache has a window below 0")
                case RecurrentState():
                    fields = [group.snapshot_tokens, *(size for tensor in group.tensors for size in tensor.shape)]
                    for tensor in group.tensors:
                        known = tensor.dtype in DTYPES and DTYPES[tensor.dtype].bytes
                        require(known, f"unknown dtype {tensor.dtype!r}")
            require(min(fields) > 0 and max(fields) < 2**31, "a cache has no size")
        parts = [(layer, part) for group in self.caches for layer in group.layers for part in group.parts]
        require(len(set(parts)) == len(parts), "two caches have the same part of one layer")
        for call in self.calls:
            cost = call.cost.of_token, call.cost.of_position, call.cost.window
            require(min(cost) >= 0 and max(cost) < 2**53, f"{call.kernel} has no cost")
            for name, operand in call.operands.items():
                match operand:
                    case InputOperand():
                        require(operand.name in inputs, f"{call.kernel} reads no such input {operand.name!r}")
                    case BufferOperand():
                        require(0 <= operand.index < len(self.buffers), f"{call.kernel}.{name} is no buffer")
                        columns = self.buffers[operand.index].columns
                        inside = operand.column >= 0 and 0 < operand.columns <= columns - operand.column
                        require(inside, f"{call.kernel}.{name} leaves its buffer")
                    case CacheOperand():
                        there = (operand.layer, operand.part) in parts
                        require(there, f"{call.kernel}.{name} is in no layer's cache")
        for entry in self.inputs:
            for size in (entry.rows, entry.columns):
                require_size(size, 0, f"input {entry.name!r} has a size")
        launched = [bool(call.launches) for call in self.calls]
        require(all(launched) or not any(launched), "some calls are launched and others are not")
        for launch in (*(launch for call in self.calls for launch in call.launches), *filter(None, [self.sampling])):
            require(0 < launch.threads <= 1024 and launch.threads % 32 == 0, f"{launch.kernel} has no block of threads")
            require(0 <= launch.shared_bytes <= MOST_SHARED_BYTES, f"{launch.kernel} has no shared memory of its size")
            require_size(launch.rows, -(2**31), f"{launch.kernel} has rows")
            for extent in launch.grid:
                require_size(extent.rows, 0, f"{launch.kernel} has a grid")
                sane = 0 < extent.per < 2**31 and 0 <= extent.per_multiprocessor <= 64
                require(sane, f"{launch.kernel} has no grid")
        for name, index in (*self.outputs.items(), *self.given.items()):
            require(0 <= index < len(self.buffers), f"the {name} are no buffer")
            if name in (HIDDEN, HIDDEN_BEFORE):
                states = self.buffers[index]
                require(states.dtype == "f32" and states.rows == linear(tokens=1), "hidden states are no f32 of tokens")
        results = set(self.outputs) - {HIDDEN}
        require(len(results) == 1 and results <= {"logits", *RESULTS}, "there are no logits")
        require(set(self.given) <= {HIDDEN_BEFORE}, "it is given what no release knows")
        result = self.buffers[self.result]
        require(result.dtype == "f32", "what it gives is not f32")
        require(not self.generates or self.vocab_size == result.columns, "the logits are not as wide as the vocabulary")

    def arena_offsets(self, limits: StepSizes) -> tuple[list[int], int]:
        """Byte offset of each buffer, and the arena's size, with every step size at its limit."""
        slot_bytes = [0] * (1 + max((buffer.slot for buffer in self.buffers), default=-1))
        for buffer in self.buffers:
            slot_bytes[buffer.slot] = max(slot_bytes[buffer.slot], buffer.bytes_at(limits))
        starts = [0]
        for size in slot_bytes:
            starts.append(starts[-1] + -(-size // ARENA_ALIGN_BYTES) * ARENA_ALIGN_BYTES)
        return [starts[buffer.slot] for buffer in self.buffers], starts[-1]

    def for_code(self, architecture: str) -> "Plan":
        """Without the launches that this architecture's code does not have."""
        calls = tuple(
            msgspec.structs.replace(
                call,
                launches=tuple(one for one in call.launches if architecture in (one.architectures or (architecture,))),
            )
            for call in self.calls
        )
        return msgspec.structs.replace(self, calls=calls)

    def launches(self) -> list[Launch]:
        """Of all calls, in order, and what draws from their logits."""
        launches = [launch for call in self.calls for launch in call.launches]
        return [*launches, self.sampling] if self.sampling else launches

    def weight_names(self) -> list[str]:
        """Of the weights that kernels read, each once, in the order of their first use."""
        operands = (operand for call in self.calls for operand in call.operands.values())
        return list(dict.fromkeys(operand.name for operand in operands if isinstance(operand, WeightOperand)))

    def with_weights(self, renamed: Callable[[str], str]) -> "Plan":
        """The same with other names of its weights."""
        calls = []
        for call in self.calls:
            operands = {
                role: WeightOperand(renamed(operand.name)) if isinstance(operand, WeightOperand) else operand
                for role, operand in call.operands.items()
            }
            calls.append(msgspec.structs.replace(call, operands=operands))
        return msgspec.structs.replace(self, calls=tuple(calls))

    @property
    def paged_caches(self) -> tuple[PagedCache, ...]:
        return tuple(group for group in self.caches if isinstance(group, PagedCache))

    @property
    def recurrent_states(self) -> tuple[RecurrentState, ...]:
        return tuple(group for group in self.caches if isinstance(group, RecurrentState))

    def kv_dtype(self) -> str:
        """What attention's planes hold; "bf16" where nothing attends."""
        return self.paged_caches[0].planes[0].dtype if self.paged_caches else "bf16"

    def kv_bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.paged_caches)

    def state_bytes_per_sequence(self) -> int:
        return sum(state.bytes_per_sequence for state in self.recurrent_states)
