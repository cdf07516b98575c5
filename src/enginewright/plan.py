"""The plan: what an executor needs to run a model, and no more.

A plan is a list of kernel calls over matrices. A matrix is a weight, a step input, or a buffer in one
arena. Its columns are known at build time; its rows are linear in the sizes of a step (`Sizes`), so the
runtime chooses its own limits and the arena is laid out once, at those limits (`arena_offsets`).
The builder writes plans (`enginewright.builder.lower`), the runtime reads them; this module is all that both
know of one. Encoded as canonical JSON in the engine file.
"""

from math import prod
from typing import Any

import msgspec

from enginewright.dtypes import DTYPES
from enginewright.errors import CorruptEngineError

ARENA_ALIGN_BYTES = 64
COLUMN_ALIGN = 64  # elements; rows of a buffer start at multiples of this (Buffer.stride)
MOST_SHARED_BYTES = 227 << 10  # of a block, on the GPUs that have most


class Sizes(msgspec.Struct, frozen=True):
    """The sizes of one step, or their limits.

    tokens: packed tokens of all sequences. sequences: sequences with at least one token in the step.
    logit_rows: tokens whose logits are wanted. kv_blocks: KV blocks of the longest sequence (the width of
    a block table). kv_splits: splits of 256 positions of the longest sequence (attention's partial results).
    """

    tokens: int
    sequences: int
    logit_rows: int
    kv_blocks: int
    kv_splits: int

    def as_tuple(self) -> tuple[int, int, int, int, int]:
        return self.tokens, self.sequences, self.logit_rows, self.kv_blocks, self.kv_splits


class Linear(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """constant + Σ coefficient × size: a number of rows or columns."""

    constant: int = 0
    tokens: int = 0
    sequences: int = 0
    logit_rows: int = 0
    kv_blocks: int = 0
    kv_splits: int = 0

    def as_tuple(self) -> tuple[int, int, int, int, int, int]:
        return self.constant, self.tokens, self.sequences, self.logit_rows, self.kv_blocks, self.kv_splits

    def at(self, sizes: Sizes) -> int:
        return (
            self.constant
            + self.tokens * sizes.tokens
            + self.sequences * sizes.sequences
            + self.logit_rows * sizes.logit_rows
            + self.kv_blocks * sizes.kv_blocks
            + self.kv_splits * sizes.kv_splits
        )


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An int32 array given with each step, [rows] or [rows, columns]."""

    name: str
    rows: Linear
    columns: Linear = Linear(constant=1)


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

    def bytes_at(self, sizes: Sizes) -> int:
        return self.rows.at(sizes) * self.stride * self.element_bytes


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `heads` × `dim` numbers for each token of each layer: its keys, or its values."""

    name: str  # what kernels ask for: "key", "value"
    heads: int
    dim: int  # of a head
    dtype: str  # as stored: bf16, or codes (i8, e4m3) with an f32 scale beside those of a head
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
    def bytes_per_token(self) -> int:
        """Of all layers and planes."""
        return len(self.layers) * sum(plane.bytes_per_token for plane in self.planes)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bytes_per_token


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
    def bytes_per_sequence(self) -> int:
        """Of all layers and tensors."""
        one = sum(prod(tensor.shape) * DTYPES[tensor.dtype].bytes for tensor in self.tensors)
        return len(self.layers) * one


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


class KvOperand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="kv"):
    """The K and V pools of one layer."""

    layer: int


Operand = InputOperand | WeightOperand | BufferOperand | KvOperand


class Extent(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A dimension of a launch's grid: ceil(rows / per) blocks, and no more than `per_multiprocessor` for each
    multiprocessor where that is not 0.
    """

    rows: Linear = Linear(constant=1)
    per: int = 1
    per_multiprocessor: int = 0

    def at(self, sizes: Sizes, multiprocessors: int) -> int:
        blocks = -(-self.rows.at(sizes) // self.per)
        return min(blocks, self.per_multiprocessor * multiprocessors) if self.per_multiprocessor else blocks


class Launch(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One launch on a GPU. kernel: its name in the engine's code.

    arguments: behind the step's sizes, the addresses of operands by role; of a KV operand, "kv.keys" and "kv.values"; a
    role that the step lacks is a null pointer. It runs where low ≤ rows ≤ high, so a step's launches may be a table by
    shape. architectures: whose code has the kernel, and runs it; () is all.
    """

    kernel: str
    arguments: tuple[str, ...]
    grid: tuple[Extent, Extent, Extent]
    threads: int
    shared_bytes: int = 0
    rows: Linear = Linear(constant=1)
    low: int = 1
    high: int = 2**31 - 1
    architectures: tuple[str, ...] = ()

    def runs(self, sizes: Sizes) -> bool:
        return self.low <= self.rows.at(sizes) <= self.high


class Step(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One kernel call. kernel: versioned name, `gemm_bf16@1`. launches: what it is on a GPU, in order."""

    kernel: str
    operands: dict[str, Operand]
    attributes: dict[str, int | float | str]
    launches: tuple[Launch, ...] = ()


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything an executor runs, in order. logits: the buffer of the step's result, f32 [logit_rows, vocab_size].
    sampling: what a GPU draws tokens from them with, a block a row; its arguments are not operands but the runtime's.
    """

    target: str
    inputs: tuple[Input, ...]
    caches: tuple[PagedCache, ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    logits: int
    vocab_size: int
    max_seq_len: int
    sampling: Launch | None = None

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

        inputs = {entry.name for entry in self.inputs}
        layers = {layer for group in self.caches for layer in group.layers}
        require(len(inputs) == len(self.inputs), "two inputs have one name")
        for buffer in self.buffers:
            require(buffer.dtype in DTYPES and buffer.element_bytes, f"unknown dtype {buffer.dtype!r}")
            coefficients = buffer.rows.as_tuple()
            require(0 < buffer.columns < 2**31 and min(coefficients) >= 0, "a buffer has no size")
            require(max(coefficients) < 2**31 and 0 <= buffer.slot < len(self.buffers), "a buffer is out of range")
        for group in self.caches:
            fields = [group.block_size, *(n for p in group.planes for n in (p.heads, p.dim, p.bytes_per_token))]
            sane = group.layers and group.planes and min(fields) > 0 and max(fields) < 2**31
            require(sane and min(group.window, group.kept_tokens) >= 0, "a cache is empty")
        for step in self.steps:
            for name, operand in step.operands.items():
                match operand:
                    case InputOperand():
                        require(operand.name in inputs, f"{step.kernel} reads no such input {operand.name!r}")
                    case BufferOperand():
                        require(0 <= operand.index < len(self.buffers), f"{step.kernel}.{name} is no buffer")
                        columns = self.buffers[operand.index].columns
                        inside = operand.column >= 0 and 0 < operand.columns <= columns - operand.column
                        require(inside, f"{step.kernel}.{name} leaves its buffer")
                    case KvOperand():
                        require(operand.layer in layers, f"{step.kernel}.{name} is no KV layer")
        for entry in self.inputs:
            sizes = (*entry.rows.as_tuple(), *entry.columns.as_tuple())
            require(min(sizes) >= 0 and max(sizes) < 2**31, f"input {entry.name!r} has no size")
        launched = [bool(step.launches) for step in self.steps]
        require(all(launched) or not any(launched), "some steps are launched and others are not")
        for launch in (*(launch for step in self.steps for launch in step.launches), *filter(None, [self.sampling])):
            require(0 < launch.threads <= 1024 and launch.threads % 32 == 0, f"{launch.kernel} has no block of threads")
            require(0 <= launch.shared_bytes <= MOST_SHARED_BYTES, f"{launch.kernel} has no shared memory of its size")
            for extent in launch.grid:
                rows = extent.rows.as_tuple()
                sane = 0 < extent.per < 2**31 and 0 <= extent.per_multiprocessor <= 64 and min(rows) >= 0
                require(sane and max(rows) < 2**31, f"{launch.kernel} has no grid")
        require(0 <= self.logits < len(self.buffers), "the logits are no buffer")
        require(self.vocab_size == self.buffers[self.logits].columns, "the logits are not as wide as the vocabulary")

    def arena_offsets(self, limits: Sizes) -> tuple[list[int], int]:
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
        steps = tuple(
            msgspec.structs.replace(
                step,
                launches=tuple(one for one in step.launches if architecture in (one.architectures or (architecture,))),
            )
            for step in self.steps
        )
        return msgspec.structs.replace(self, steps=steps)

    def launches(self) -> list[Launch]:
        """Of all steps, in order, and what draws from their logits."""
        launches = [launch for step in self.steps for launch in step.launches]
        return [*launches, self.sampling] if self.sampling else launches

    def weight_names(self) -> list[str]:
        """Of the weights that kernels read, each once, in the order of their first use."""
        operands = (operand for step in self.steps for operand in step.operands.values())
        return list(dict.fromkeys(operand.name for operand in operands if isinstance(operand, WeightOperand)))

    def kv_bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.caches)
