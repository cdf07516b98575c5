"""Types of the C++ extension (csrc/cpu/module.cpp)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Sizes = Sequence[int]  # of a step, by the positions of the plan's dims
_Linear = Sequence[int]  # the constant, then the factor of each dim

def isa_names() -> list[str]:
    """Instruction sets of this machine, best first: of "amx", "avx512", "avx2", "portable"."""

def dtypes() -> list[tuple[str, int]]:
    """Names and bits of the types of numbers, as C++ has them."""

def kernel_names(isa: str) -> list[str]: ...

class CacheBlocks:
    """The blocks of a paged cache, of all its layers: zeroed, 64-byte aligned, committed as they are touched."""

    def __init__(
        self, layers: int, num_blocks: int, block_size: int, planes: Sequence[tuple[str, int, int, str]]
    ) -> None:
        """planes: name, heads, dim of a head, and dtype, of those in csrc/cpu/kv.h."""
    @property
    def nbytes(self) -> int: ...
    def scrub(self, blocks: Sequence[int]) -> None:
        """Zeroes blocks, in all layers. A kernel may assume that blocks hold finite numbers only."""

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, in all layers: pairs of from and to."""

    def plane(self, layer: int, name: str) -> NDArray[np.uint16 | np.int8 | np.uint8]:
        """View of a plane, [num_blocks, heads, tile] (layout: csrc/cpu/kv.h): bits of bf16, int8, or bytes, with those
        of the scales after them. layer: index inside the group.
        """

    def places(self) -> NDArray[np.uint8]:
        """View of all layers' bytes, [num_blocks, bytes of a block]."""

class StateSlots:
    """The slots of a recurrent state, of all its layers: zeroed, committed as they are touched."""

    def __init__(self, layers: int, num_slots: int, tensors: Sequence[tuple[str, int, str]]) -> None:
        """tensors: name, elements of a sequence, and dtype: "f32"."""
    @property
    def nbytes(self) -> int: ...
    def scrub(self, slots: Sequence[int]) -> None:
        """Zeroes slots, in all layers: what a sequence begins with."""

    def copy(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copies slots, in all layers: pairs of from and to."""

    def tensor(self, layer: int, name: str) -> NDArray[np.float32]:
        """View of a tensor, [num_slots, elements], laid out as the kernel says that writes it. layer: index inside the
        group.
        """

    def places(self) -> NDArray[np.uint8]:
        """View of all layers' bytes, [num_slots, bytes of a slot]."""

_Piece = tuple[int, int, int, int, Any]  # begin, count, rank, first_rank, B
# site, rank, A, pieces, bias, gain, experts, "a" or "b" if it is one matrix for all of them
_Change = tuple[int, int, Any, Sequence[_Piece], Any | None, Any | None, Sequence[int], str]

_Replaced = tuple[int, int, Any, Any]  # site, number of rows, ids, rows

class Adapters:
    """The adapters that an executor has loaded, in slots (csrc/cpu/adapters.h). ValueError where something does not
    fit.
    """

    def __init__(
        self,
        sites: Sequence[tuple[int, int, int]],
        num_slots: int,
        max_rank: int,
        max_tokens: int,
        max_logit_rows: int,
        max_top: int,
        tables: Sequence[int] = (),
    ) -> None:
        """sites: rows and columns of each linear layer's weight, or of one of its matrices; and their number, or 0.
        max_rank: rows of A, a multiple of 16. max_top: experts of a token. tables: those sites that are tables of
        embeddings.
        """
    def load(self, slot: int, changes: Sequence[_Change], replaced: Sequence[_Replaced] = ()) -> None:
        """Loads an adapter between two steps. Buffers are kept alive: A and B as bits of bf16, bias and gain as f32,
        ids of replaced rows as i32. A and B of a layer of experts or heads are as many matrices as are named, in the
        same order.
        """

    def unload(self, slot: int) -> None: ...

class OperandSpec:
    """Where an operand of a kernel lies. Dtypes and layouts are those of docs/engine-file.md."""

    @staticmethod
    def weight(buffer: Any, dtype: str, layout: str, rows: int, columns: int, matrices: int = 1) -> OperandSpec:
        """A packed weight: any object with the buffer protocol (kept alive). A vector is [1, columns]."""

    @staticmethod
    def arena(
        offset_bytes: int, dtype: str, rows: _Linear, columns: int, stride: int, column_offset: int = 0, pad: int = 0
    ) -> OperandSpec:
        """Columns [column_offset, column_offset + columns) of the buffer at offset_bytes; stride and offset in
        elements. pad: columns after `columns` that belong to the operand (a whole buffer: stride - columns)."""

    @staticmethod
    def step(name: str) -> OperandSpec: ...
    @staticmethod
    def cache(blocks: CacheBlocks, layer: int, plane: str) -> OperandSpec:
        """layer: index inside the group."""

    @staticmethod
    def state(slots: StateSlots, layer: int, tensor: str) -> OperandSpec:
        """layer: index inside the group."""

    @staticmethod
    def adapters(adapters: Adapters, site: int) -> OperandSpec: ...

class Ranks:
    """The ranks that compute one model together, from the view of one of them (csrc/cpu/ranks.h)."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def slot_bytes(self) -> int:
        """The most bytes that a rank may send in one exchange."""

    def check(self) -> None:
        """Raises RuntimeError with a sentence that names rank and reason if the group has failed. Results of steps
        since then are worth nothing.
        """

    def fail(self, rank: int, reason: str) -> None:
        """Fails the group, in all ranks that can be reached, and ends all waits at once. The first reason stays."""

    def close(self) -> None:
        """Leaves the group, by which it fails for the others; ends threads and closes sockets."""

    def stats(self) -> tuple[int, int]:
        """Returns since the last call: bytes sent, and nanoseconds that the executor's first thread has waited."""

class SharedRanks(Ranks):
    """Ranks that are processes of one machine and exchange by memory that all of them map."""

    def __init__(self, fd: int, rank: int, size: int, slot_bytes: int, timeout_s: float) -> None:
        """fd: a file of `bytes_needed` zero bytes, new for each group. It is mapped here and may be closed then.
        ValueError where something does not fit.
        """
    @staticmethod
    def bytes_needed(size: int, slot_bytes: int) -> int: ...

class SocketRanks(Ranks):
    """Ranks that exchange by stream sockets, one between each two of them."""

    def __init__(self, fds: Sequence[int], rank: int, slot_bytes: int, timeout_s: float) -> None:
        """fds: connected sockets to the other ranks, and -1 at the own place. They are duplicated here and may be
        closed then. ValueError where something does not fit.
        """

class Executor:
    """A plan, bound to memory. ValueError for whatever does not fit; KeyError for an unknown kernel."""

    def __init__(
        self, isa: str, threads: int, limits: _Sizes, inputs: Sequence[tuple[str, _Linear, _Linear]], arena_bytes: int
    ) -> None: ...
    def add_kernel(
        self, name: str, operands: dict[str, OperandSpec], attributes: dict[str, int | float | str]
    ) -> None: ...
    def add_all_gather(
        self, operand: OperandSpec, unit: int, root: int, ranks: Ranks, starts: OperandSpec | None = None
    ) -> None:
        """Adds the kernel all_gather@1: rank r of n has computed the operand's columns from unit * (columns // unit * r
        // n) to the next rank's, and after it the rank `root` has all of them, or each rank for -1. Keeps `ranks`.
        With `starts` the ranks have computed rows of experts (csrc/cpu/ranks.h).
        """
    def run(self, arrays: Sequence[NDArray[np.int32]], sizes: _Sizes) -> None:
        """One step: the inputs in the constructor's order, checked (ValueError) before anything is written."""

    def profile(self, arrays: Sequence[NDArray[np.int32]], sizes: _Sizes) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """One step, and of each kernel: nanoseconds, from barrier to barrier, and its struct Work (kernel.h)."""

    def sample(
        self,
        logits: NDArray[np.float32],
        rows: NDArray[np.void],
        history: NDArray[np.void],
        biases: NDArray[np.void],
        allowed: NDArray[np.uint32] | None = None,
    ) -> list[tuple[int, float | None, tuple[tuple[int, float], ...], bool]]:
        """`_cpu.sample`, its rows shared by the executor's threads; the same draws."""

    def buffer(self, offset_bytes: int, rows: int, columns: int, stride: int, dtype: str) -> NDArray[Any]:
        """View of the arena: f32, i32 or i8 as such, bf16 as uint16. Overwritten by the next step."""

class MappedFile:
    """While one exists, pages of a mapped file that cannot be read are zeros; without, SIGBUS ends the process."""

    def __init__(self, mapping: Any) -> None:
        """mapping: the whole of it, by the buffer protocol (kept alive). ValueError where it does not begin a page."""
    @property
    def faulted(self) -> bool:
        """Whether a page could not be read, so that what was computed since then is worth nothing."""

def dot_rates(isa: str, threads: int, seconds: float) -> dict[str, tuple[str, float]]:
    """Operands ("int8", "bf16", "fp32") → the best instruction for their dot products on registers, and operations/s.

    isa: also "avx2", if the machine has it. ValueError if it has no such instruction set. Takes `seconds` in all.
    """

def read_rate(buffers: Sequence[Any], threads: int, seconds: float) -> float:
    """Bytes/s of all threads together, reading contiguous buffers in order, again and again; at least twice."""

SAMPLING_ROW: np.dtype[np.void]  # struct SamplingRow of csrc/cpu/sampling.h
TOKEN_COUNT: np.dtype[np.void]  # token, count: i32
TOKEN_BIAS: np.dtype[np.void]  # token: i32, bias: f32

def sample(
    logits: NDArray[np.float32],
    rows: NDArray[np.void],
    history: NDArray[np.void],
    biases: NDArray[np.void],
    allowed: NDArray[np.uint32] | None = None,
) -> list[tuple[int, float | None, tuple[tuple[int, float], ...], bool]]:
    """Draws a token for each row of logits [n, vocab] (a row is contiguous, rows may be padded).

    rows: SAMPLING_ROW [n]. history: TOKEN_COUNT, the tokens of prompt and output, each once, row after row; biases:
    TOKEN_BIAS, in the same order; a row's entries end at its history_end and bias_end. allowed: [n, ceil(vocab / 32)];
    bit t % 32 of word t // 32 is 1 if token t may be sampled; None allows all. Returns the fields of SampledToken
    (runtime/sampling/sampler.py) for each row. ValueError for whatever does not fit.
    """

def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10: four words of counter and two of key to four random words."""
