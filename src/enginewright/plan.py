"""The plan: everything that an executor needs to run a model.

A plan is a list of kernel calls over matrices. A matrix is a weight, a step input, or a buffer in one arena. Its
columns are known at build time; its rows are linear in the sizes of a step (`Plan.dims` has their names), so the
runtime chooses its own limits and lays the arena out once, at those limits (`arena_offsets`). The builder writes plans
(`enginewright.builder.lower`), and the runtime reads them; they share this module alone. The engine file has plans as
canonical JSON.
"""

from collections.abc import Callable, Sequence
from math import prod

import msgspec

from enginewright.dtypes import DTYPES
from enginewright.embedding import RESULTS
from enginewright.errors import CorruptEngineError

ARENA_ALIGN_BYTES = 64
COLUMN_ALIGN = 64  # elements; rows of a buffer start at multiples of this (Buffer.stride)
MAX_SHARED_BYTES = 227 << 10  # bytes of a block's shared memory on the GPUs with the most
# The sizes that every step has: packed tokens of all sequences, sequences with at least one token in the step, and
# tokens that need logits.
COMMON_DIMS = ("tokens", "sequences", "logit_rows")
# Hidden states of a step's tokens, f32 [tokens, columns]: an output, and the input of a plan that proposes draft
# tokens.
HIDDEN, HIDDEN_BEFORE = "hidden", "hidden_before"
# Kernel that gathers columns from all ranks, or with `starts` rows that are sorted by experts. No op of a graph has it.
EXCHANGE = "all_gather@1"
MAX_DIMS = 8  # dimensions of a plan (csrc/cpu/kernel.h and csrc/cuda/device.cuh have room for this number)


def _require(holds: object, fault: str) -> None:
    """Refuses a plan in which something does not hold."""
    if not holds:
        raise CorruptEngineError("the plan is damaged", fault, "Build the engine again.")


class StepSizes(msgspec.Struct, frozen=True):
    """Sizes of one step, or their limits."""

    dims: tuple[str, ...]  # names of the dimensions, in the plan's order: COMMON_DIMS, then others
    counts: tuple[int, ...]  # size of each dimension, in the same order

    @property
    def tokens(self) -> int:
        """Packed tokens of all sequences."""
        return self.counts[0]

    @property
    def sequences(self) -> int:
        """Sequences with at least one token in the step."""
        return self.counts[1]

    @property
    def logit_rows(self) -> int:
        """Tokens that need logits."""
        return self.counts[2]

    def __getitem__(self, dim: str) -> int:
        return self.counts[self.dims.index(dim)]


def step_sizes(*, tokens: int, sequences: int, logit_rows: int, **others: int) -> StepSizes:
    """Makes sizes from names.

    Args:
        tokens: packed tokens of all sequences.
        sequences: sequences with at least one token in the step.
        logit_rows: tokens that need logits.
        others: other dimensions, in the plan's order.
    """
    return StepSizes((*COMMON_DIMS, *others), (tokens, sequences, logit_rows, *others.values()))


class Linear(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """constant + Σ factor × size: a number of rows or columns. `linear` makes one."""

    constant: int = 0  # part that no size changes
    terms: tuple[tuple[str, int], ...] = ()  # dimension and its factor, sorted by the dimension's name

    def at(self, sizes: StepSizes) -> int:
        """Computes the number for a step of these sizes."""
        total = self.constant
        for dim, factor in self.terms:
            total += factor * sizes[dim]
        return total

    def by_position(self, dims: Sequence[str]) -> tuple[int, ...]:
        """Returns the constant, then the factor of each of `dims`."""
        factors = dict(self.terms)
        return (self.constant, *(factors.get(dim, 0) for dim in dims))

    def check(self, dims: Sequence[str], minimum: int, what: str) -> None:
        """Refuses unknown dimensions, and numbers that are out of range.

        Args:
            dims: dimensions of the plan.
            minimum: smallest constant and factor.
            what: start of the error's text, such as "a buffer has a size".
        """
        names = [dim for dim, _ in self.terms]
        _require(names == sorted(set(names)) and set(names) <= set(dims), f"{what} with an unknown dimension")
        numbers = self.by_position(names)
        _require(minimum <= min(numbers) and max(numbers) < 2**31, f"{what} that is out of range")


def linear(constant: int = 0, **factors: int) -> Linear:
    """Makes a linear number: `linear(tokens=2, constant=1)` is 2 × tokens + 1."""
    return Linear(constant, tuple(sorted((dim, factor) for dim, factor in factors.items() if factor)))


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An int32 array given with each step, [rows] or [rows, columns]."""

    name: str  # name, among the plan's inputs
    rows: Linear  # number of rows
    columns: Linear = Linear(1)  # number of columns; 1 is a vector

    def check(self, dims: Sequence[str]) -> None:
        """Refuses sizes that no step has."""
        for size in (self.rows, self.columns):
            size.check(dims, 0, f"input {self.name!r} has a size")


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row-major matrix in the arena; a row takes `stride` elements. Buffers of one slot are never alive together."""

    dtype: str  # number type
    rows: Linear  # number of rows
    columns: int  # elements of a row, without padding
    slot: int  # slot of the arena; buffers with the same slot share memory

    @property
    def stride(self) -> int:
        """Elements from one row to the next: columns rounded up to an odd multiple of COLUMN_ALIGN.

        With an even multiple, rows fall into few sets of a cache: GEMMs are a quarter slower at 2048 columns.
        """
        return (-(-self.columns // COLUMN_ALIGN) | 1) * COLUMN_ALIGN

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].bytes

    def bytes_at(self, sizes: StepSizes) -> int:
        """Computes the bytes of the buffer for a step of these sizes."""
        return self.rows.at(sizes) * self.stride * self.element_bytes

    def check(self, dims: Sequence[str], num_slots: int) -> None:
        """Refuses an unknown number type, sizes that no step has, and slots that are out of range.

        Args:
            dims: dimensions of the plan.
            num_slots: limit of the slots.
        """
        _require_dtype(self.dtype)
        self.rows.check(dims, 0, "a buffer has a size")
        _require(0 < self.columns < 2**31, "a buffer has no size")
        _require(0 <= self.slot < num_slots, "a buffer is out of range")


def _require_dtype(name: str) -> None:
    _require(name in DTYPES and DTYPES[name].bytes, f"unknown dtype {name!r}")


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of `heads` × `dim` numbers, one for each token and layer: keys, or values."""

    name: str  # part name that kernels refer to: "key", "value"
    heads: int  # heads of a row
    dim: int  # numbers of a head
    dtype: str  # number type as stored: bf16, or codes, each head with its scales (csrc/cpu/kv.h)
    bytes_per_token: int  # bytes of a token in one layer, padding and scales included


class PagedCache(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag="paged"):
    """Keys and values of earlier tokens, in blocks of tokens, for layers whose blocks are allocated and freed together.

    Each sequence has one block table for all these layers. https://arxiv.org/abs/2309.06180
    """

    layers: tuple[int, ...]  # indices of the layers
    planes: tuple[Plane, ...]  # kinds of rows: keys and values, or one of latent vectors
    block_size: int  # tokens of a block
    window: int = 0  # positions that a query sees, its own included; 0: all
    kept_tokens: int = 0  # first positions that every query sees, whatever the window (attention sinks)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the planes."""
        return tuple(plane.name for plane in self.planes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers and planes."""
        return len(self.layers) * sum(plane.bytes_per_token for plane in self.planes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers and planes."""
        return self.block_size * self.bytes_per_token

    def offset_bytes(self, layer: int, part: str) -> int:
        """Computes the start of a layer's plane in a block, in bytes: in the order of layers, then of planes.

        Args:
            layer: index of the layer.
            part: name of the plane.
        """
        sizes = [self.block_size * plane.bytes_per_token for plane in self.planes]
        before = sizes[: [plane.name for plane in self.planes].index(part)]
        return self.layers.index(layer) * sum(sizes) + sum(before)

    def check(self) -> None:
        """Refuses a group without layers or planes, and sizes that are out of range."""
        _require_parts(self)
        _require(min(self.window, self.kept_tokens) >= 0, "a cache has a window below 0")
        _require_sizes(self.block_size, *(n for p in self.planes for n in (p.heads, p.dim, p.bytes_per_token)))


class StateTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a sequence's recurrent state, in one layer."""

    name: str  # part name that kernels refer to: "conv", "state"
    shape: tuple[int, ...]  # shape of the tensor
    dtype: str  # number type


class RecurrentState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="recurrent"):
    """State of recurrent layers after a sequence's last token; its size does not depend on the sequence's length."""

    layers: tuple[int, ...]  # indices of the layers
    tensors: tuple[StateTensor, ...]  # tensors of each layer
    snapshot_tokens: int  # tokens between two snapshots of a state, which sequences with the same prefix share

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of a sequence's state in all layers and tensors."""
        return len(self.layers) * sum(self._tensor_bytes())

    def offset_bytes(self, layer: int, part: str) -> int:
        """Computes the start of a layer's tensor in a slot, in bytes: in the order of layers, then of tensors.

        Args:
            layer: index of the layer.
            part: name of the tensor.
        """
        sizes = self._tensor_bytes()
        return self.layers.index(layer) * sum(sizes) + sum(sizes[: self.parts.index(part)])

    def check(self) -> None:
        """Refuses a group without layers or tensors, unknown number types, and sizes that are out of range."""
        _require_parts(self)
        for tensor in self.tensors:
            _require_dtype(tensor.dtype)
        _require_sizes(self.snapshot_tokens, *(size for tensor in self.tensors for size in tensor.shape))

    def _tensor_bytes(self) -> list[int]:
        return [prod(tensor.shape) * DTYPES[tensor.dtype].bytes for tensor in self.tensors]


CacheGroup = PagedCache | RecurrentState  # what some of the layers store of a sequence between steps


def _require_parts(group: CacheGroup) -> None:
    _require(group.layers and group.parts, "a cache is empty")
    _require(len(set(group.parts)) == len(group.parts), "two parts of a cache have one name")


def _require_sizes(*sizes: int) -> None:
    _require(min(sizes) > 0 and max(sizes) < 2**31, "a cache has no size")


class InputOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="step"):
    """A step input."""

    name: str  # name of the input

    def check(self, plan: "Plan", call: str, role: str) -> None:
        """Refuses an input that the plan does not have.

        Args:
            plan: the plan.
            call: kernel that reads it.
            role: role of the operand.
        """
        _require(any(entry.name == self.name for entry in plan.inputs), f"{call} reads no such input {self.name!r}")


class WeightOperand(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="in", tag="weights"
):
    """A weight, or a part of one."""

    name: str  # name of the weight
    # Ranges of rows, each the first and their number, one after the other; (): all. Only plans of ranks have any.
    rows: tuple[tuple[int, int], ...] = ()
    # Of matrices, one for each expert: the first, their number, and of how many, of each of which there are `rows`;
    # None: all. As for `rows`.
    matrices: tuple[int, int, int] | None = None

    def check(self, plan: "Plan", call: str, role: str) -> None:
        """Refuses ranges below 0. The engine's file says which weights there are, and the executor, how many rows."""
        for first, count in (*self.rows, *([self.matrices[:2]] if self.matrices else [])):
            _require(first >= 0 and count > 0, f"{call}.{role} has no rows")


class BufferOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="arena"):
    """Columns [column, column + columns) of a buffer."""

    index: int  # index among the plan's buffers
    column: int  # first column
    columns: int  # number of columns

    def check(self, plan: "Plan", call: str, role: str) -> None:
        """Refuses columns outside of the plan's buffers.

        Args:
            plan: the plan.
            call: kernel that reads or writes it.
            role: role of the operand.
        """
        _require(0 <= self.index < len(plan.buffers), f"{call}.{role} is no buffer")
        inside = self.column >= 0 and 0 < self.columns <= plan.buffers[self.index].columns - self.column
        _require(inside, f"{call}.{role} leaves its buffer")


class CacheOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="cache"):
    """A part of a layer's cache."""

    layer: int  # index of the layer that writes it; others may read it
    part: str  # name of a plane or of a state's tensor

    def check(self, plan: "Plan", call: str, role: str) -> None:
        """Refuses a part that no cache group of the plan has.

        Args:
            plan: the plan.
            call: kernel that reads or writes it.
            role: role of the operand.
        """
        found = any(self.layer in group.layers and self.part in group.parts for group in plan.caches)
        _require(found, f"{call}.{role} is in no layer's cache")


class AdaptersOperand(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="in", tag="adapters"
):
    """The changes of a linear layer by the adapters of a step's rows, or a part of them.

    No engine file has one (adapter_plan.py).
    """

    site: int  # index of the layer among the engine's adapter sites
    rows: tuple[tuple[int, int], ...] = ()  # as in WeightOperand
    # Of matrices, one for each expert or head: the first, their number, and of how many; None: all
    matrices: tuple[int, int, int] | None = None

    def check(self, plan: "Plan", call: str, role: str) -> None:
        """Refuses a site and ranges below 0: the executor knows how many there are.

        Args:
            plan: the plan.
            call: kernel that reads it.
            role: role of the operand.
        """
        _require(self.site >= 0, f"{call}.{role} is no adapter site")
        for first, count in (*self.rows, *([self.matrices[:2]] if self.matrices else [])):
            _require(first >= 0 and count > 0, f"{call}.{role} has no rows")


def cache_of(groups: Sequence[CacheGroup], operand: CacheOperand) -> CacheGroup:
    """Finds the cache group that has a part of a layer; a layer with attention and a recurrence is in two groups.

    Args:
        groups: cache groups of the plan.
        operand: layer and part.
    """
    return next(group for group in groups if operand.layer in group.layers and operand.part in group.parts)


Operand = InputOperand | WeightOperand | BufferOperand | CacheOperand | AdaptersOperand


class Extent(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A dimension of a launch's grid: ceil(rows / per) blocks, within a limit for each multiprocessor."""

    rows: Linear = Linear(1)  # rows that the blocks share
    per: int = 1  # rows of a block
    per_multiprocessor: int = 0  # limit of the blocks for each multiprocessor; 0: no limit

    def at(self, sizes: StepSizes, multiprocessors: int) -> int:
        """Computes the number of blocks for a step of these sizes.

        Args:
            sizes: sizes of the step.
            multiprocessors: multiprocessors of the GPU.
        """
        blocks = -(-self.rows.at(sizes) // self.per)
        return min(blocks, self.per_multiprocessor * multiprocessors) if self.per_multiprocessor else blocks

    def check(self, dims: Sequence[str], kernel: str) -> None:
        """Refuses a grid that no GPU has.

        Args:
            dims: dimensions of the plan.
            kernel: kernel that is launched.
        """
        self.rows.check(dims, 0, f"{kernel} has a grid")
        _require(0 < self.per < 2**31 and 0 <= self.per_multiprocessor <= 64, f"{kernel} has no grid")


class Launch(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One launch on a GPU. It runs where low ≤ rows ≤ high, so that a call's launches may be a table by shape."""

    kernel: str  # name of the kernel in the engine's code
    # Roles of the operands whose addresses follow the step's sizes. A role that the call lacks is a null pointer.
    arguments: tuple[str, ...]
    grid: tuple[Extent, Extent, Extent]  # blocks in x, y and z
    threads: int  # threads of a block
    shared_bytes: int = 0  # dynamic shared memory of a block, in bytes
    rows: Linear = Linear(1)  # number that decides if the launch runs
    low: int = 1  # smallest number of rows with which it runs
    high: int = 2**31 - 1  # largest number of rows with which it runs
    architectures: tuple[str, ...] = ()  # GPU architectures whose code has the kernel; (): all

    def runs(self, sizes: StepSizes) -> bool:
        """Checks if the launch runs in a step of these sizes."""
        return self.low <= self.rows.at(sizes) <= self.high

    def check(self, dims: Sequence[str]) -> None:
        """Refuses blocks and grids that no GPU has."""
        _require(0 < self.threads <= 1024 and self.threads % 32 == 0, f"{self.kernel} has no block of threads")
        _require(0 <= self.shared_bytes <= MAX_SHARED_BYTES, f"{self.kernel} has no shared memory of its size")
        self.rows.check(dims, -(2**31), f"{self.kernel} has rows")
        for extent in self.grid:
            extent.check(dims, self.kernel)


class AdapterLaunches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Launches on a GPU that compute what adapters add. Their grids are for one row of one layer; `with_adapters` of
    adapter_plan.py makes those of each layer.
    """

    shrink: dict[str, Launch]  # number type of x → launch: grid of rows, columns of x, and blocks that share the ranks
    expand: Launch  # launch: grid of rows, and rows of the weight

    def check(self, dims: Sequence[str]) -> None:
        """Refuses blocks and grids that no GPU has."""
        for launch in self.launches():
            launch.check(dims)

    def launches(self) -> list[Launch]:
        """Lists them."""
        return [*self.shrink.values(), self.expand]


class Cost(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Operations of a call for one token of a prompt; a multiply-add counts as two."""

    of_token: int = 0  # operations for the token
    of_position: int = 0  # operations for each position that the token sees
    window: int = 0  # positions that the token sees, its own included; 0: all

    def check(self, kernel: str) -> None:
        """Refuses numbers that are out of range; `kernel` has the cost."""
        numbers = self.of_token, self.of_position, self.window
        _require(min(numbers) >= 0 and max(numbers) < 2**53, f"{kernel} has no cost")


class KernelCall(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One kernel call."""

    kernel: str  # versioned name, `gemm_bf16@1`
    operands: dict[str, Operand]  # role → operand
    attributes: dict[str, int | float | str]  # constants of the kernel
    launches: tuple[Launch, ...] = ()  # launches on a GPU, in order
    cost: Cost = Cost()  # operations, where they are many: matrix products and attention

    def check(self, plan: "Plan") -> None:
        """Refuses a cost, operands and launches that do not fit the plan. Kernels check their own shapes."""
        self.cost.check(self.kernel)
        for role, operand in self.operands.items():
            operand.check(plan, self.kernel, role)
        for launch in self.launches:
            launch.check(plan.dims)


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything an executor runs, in order."""

    target: str  # platform: cpu, cuda
    dims: tuple[str, ...]  # names of a step's sizes: COMMON_DIMS, then others that rows and columns depend on
    inputs: tuple[Input, ...]  # step inputs
    caches: tuple[CacheGroup, ...]  # cache groups
    buffers: tuple[Buffer, ...]  # buffers of the arena
    calls: tuple[KernelCall, ...]  # kernel calls, in order
    # Name → buffer: "logits", f32 [logit_rows, vocab_size], and perhaps HIDDEN; or one of RESULTS, f32 with a row for
    # each text that ends in the step.
    outputs: dict[str, int]
    vocab_size: int  # tokens of the vocabulary
    max_seq_len: int  # tokens of the longest sequence
    # Launch that samples from the logits, a block per row; the runtime gives its arguments, which are no operands.
    sampling: Launch | None = None
    adapting: AdapterLaunches | None = None  # launches for adapters, of a plan that generates text on GPUs
    whole_texts: bool = False  # True if all tokens of a sequence must be in one step, since tokens attend to later ones
    given: dict[str, int] = {}  # name → buffer that is filled before each step: HIDDEN_BEFORE, or nothing

    @property
    def result_name(self) -> str:
        """Name of the plan's main output: "logits", or one of RESULTS."""
        return next(name for name in self.outputs if name != HIDDEN)

    @property
    def result(self) -> int:
        """Index of the buffer with the main output."""
        return self.outputs[self.result_name]

    @property
    def generates(self) -> bool:
        """True if the plan computes logits, from which tokens are sampled."""
        return "logits" in self.outputs

    def to_json(self) -> bytes:
        """Encodes the plan as canonical JSON."""
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(data: bytes) -> "Plan":
        """Decodes and checks a plan.

        Raises:
            CorruptEngineError: the JSON is not that of a plan.
        """
        try:
            plan = msgspec.json.decode(data, type=Plan)
        except msgspec.MsgspecError as error:
            raise CorruptEngineError("the plan cannot be read", str(error), "Build the engine again.") from error
        plan.check()
        return plan

    def check(self) -> None:
        """Checks that references stay inside the plan, and that sizes are sane.

        Raises:
            CorruptEngineError: they do not, or are not; the message says what is wrong.
        """
        _require(self.dims[: len(COMMON_DIMS)] == COMMON_DIMS, f"its dims do not begin with {', '.join(COMMON_DIMS)}")
        _require(len(set(self.dims)) == len(self.dims) <= MAX_DIMS, "two dims have one name, or there are too many")
        _require(len({entry.name for entry in self.inputs}) == len(self.inputs), "two inputs have one name")
        for entry in self.inputs:
            entry.check(self.dims)
        for buffer in self.buffers:
            buffer.check(self.dims, len(self.buffers))
        for group in self.caches:
            group.check()
        parts = [(layer, part) for group in self.caches for layer in group.layers for part in group.parts]
        _require(len(set(parts)) == len(parts), "two caches have the same part of one layer")
        for call in self.calls:
            call.check(self)
        # A rank that neither sends nor receives launches nothing for an exchange.
        launched = {bool(call.launches) for call in self.calls if call.kernel != EXCHANGE or call.launches}
        _require(len(launched) <= 1, "some calls are launched and others are not")
        if self.sampling:
            self.sampling.check(self.dims)
        if self.adapting:
            self.adapting.check(self.dims)
        self._check_outputs()

    def _check_outputs(self) -> None:
        for name, index in (*self.outputs.items(), *self.given.items()):
            _require(0 <= index < len(self.buffers), f"{name} is not a buffer")
            if name in (HIDDEN, HIDDEN_BEFORE):
                shown = self.buffers[index]
                _require(shown.dtype == "f32" and shown.rows == linear(tokens=1), "hidden states are no f32 of tokens")
        results = set(self.outputs) - {HIDDEN}
        _require(len(results) == 1 and results <= {"logits", *RESULTS}, "it has no main output, or more than one")
        unknown = set(self.given) - {HIDDEN_BEFORE}
        _require(not unknown, f"unknown plan input {', '.join(sorted(unknown))}")
        result = self.buffers[self.result]
        _require(result.dtype == "f32", "its main output is not f32")
        fits = not self.generates or self.vocab_size == result.columns
        _require(fits, "the logits are not as wide as the vocabulary")

    def arena_offsets(self, limits: StepSizes) -> tuple[list[int], int]:
        """Computes the byte offset of each buffer and the arena's bytes, with every step size at its limit."""
        slot_bytes = [0] * (1 + max((buffer.slot for buffer in self.buffers), default=-1))
        for buffer in self.buffers:
            slot_bytes[buffer.slot] = max(slot_bytes[buffer.slot], buffer.bytes_at(limits))
        starts = [0]
        for size in slot_bytes:
            starts.append(starts[-1] + -(-size // ARENA_ALIGN_BYTES) * ARENA_ALIGN_BYTES)
        return [starts[buffer.slot] for buffer in self.buffers], starts[-1]

    def for_architecture(self, architecture: str) -> "Plan":
        """Copies the plan without the launches that this architecture's code does not have."""
        calls = tuple(
            msgspec.structs.replace(
                call,
                launches=tuple(one for one in call.launches if architecture in (one.architectures or (architecture,))),
            )
            for call in self.calls
        )
        return msgspec.structs.replace(self, calls=calls)

    def launches(self) -> list[Launch]:
        """Lists the launches of all calls in order, then the one that samples, and those for adapters."""
        launches = [launch for call in self.calls for launch in call.launches]
        sampling = [self.sampling] if self.sampling else []
        return [*launches, *sampling, *(self.adapting.launches() if self.adapting else [])]

    def weight_names(self) -> list[str]:
        """Lists the names of weights that kernels read, each once, in the order of their first use."""
        operands = (operand for call in self.calls for operand in call.operands.values())
        return list(dict.fromkeys(operand.name for operand in operands if isinstance(operand, WeightOperand)))

    def with_renamed_weights(self, renamed: Callable[[str], str]) -> "Plan":
        """Copies the plan with its weights renamed."""
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
        """Cache groups of attention."""
        return tuple(group for group in self.caches if isinstance(group, PagedCache))

    @property
    def recurrent_states(self) -> tuple[RecurrentState, ...]:
        """Cache groups of recurrences."""
        return tuple(group for group in self.caches if isinstance(group, RecurrentState))

    def kv_dtype(self) -> str:
        """Returns the number type of the KV cache; "bf16" if the model has no attention."""
        return self.paged_caches[0].planes[0].dtype if self.paged_caches else "bf16"

    def kv_bytes_per_token(self) -> int:
        """Computes the bytes of a token in all KV caches."""
        return sum(group.bytes_per_token for group in self.paged_caches)

    def state_bytes_per_sequence(self) -> int:
        """Computes the bytes of a sequence's recurrent states in all layers."""
        return sum(state.bytes_per_sequence for state in self.recurrent_states)
