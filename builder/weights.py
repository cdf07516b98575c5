"""A checkpoint's tensors as initializers that are read when somebody asks for their values, and not before."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch

from enginewright.builder.checkpoint.quantized import Format
from enginewright.builder.harmless_tensors import HARMLESS_TENSORS
from enginewright.builder.tensors import Read, Tensors
from enginewright.errors import UnsupportedModelError
from enginewright.passes.quant.act_order import ActOrdered
from enginewright.passes.quant.method import forget_format, pick_weight, stack_weights, stored
from enginewright.passes.weights import RowReader, RowsTensor, open_rows, shape_of, turned_by_head

STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NAMES_SHOWN = 5
ELEMENTS_COMPARED = 1 << 20  # of two weights, in memory at once


@dataclass(frozen=True)
class _Stored:
    """Where a tensor is that the checkpoint has in another shape. Names are without `.weight` and `.bias`."""

    whole: str  # the checkpoint's name of the tensor that it is a part of
    height: int  # rows of that
    rows: Sequence[int]  # which of them it has, in this order
    transposed: bool = False  # the checkpoint has weights [in, out]


class Weights:
    """Hands out initializers: one a tensor, the same one every time.

    Values are rounded to bfloat16, the precision that engines are built from, and presented as FLOAT; weights that are
    stored quantized are presented as FLOAT, too, and keep their form. Nothing that was read is kept.
    """

    def __init__(self, tensors: Tensors, format: Format | None = None) -> None:
        """format: of the weights that are stored quantized, where some are; it has the same `tensors`."""
        self.tensors = tensors
        self._format = format
        self._values: dict[str, ir.Value] = {}
        self._stored: dict[str, _Stored] = {}
        self.harmless: dict[str, str] = dict(HARMLESS_TENSORS)  # end of a name → why such tensors need not be read
        self._left_out: set[str] = set()
        self._any_quantized = False
        self._inside = "model."
        self._renamed: dict[str, str] = {}
        self._factors: dict[str, torch.Tensor] = {}
        self._notes: dict[str, int] = {}

    @property
    def reads(self) -> int:
        """How often a tensor was read."""
        return self.tensors.reads

    def tensor(self, name: str, shape: tuple[int, ...], offset: float = 0.0, scale: float = 1.0) -> ir.Value:
        """The initializer of a tensor; `offset` is added to its values, and `scale` multiplies the sum, in fp32 after
        the rounding.

        Raises:
            EngineError: there is no such tensor, or it is of another shape.
            UnsupportedModelError: it is stored in a form that is not implemented.
        """
        if name not in self._values:
            self._values[name] = self._placed(name, shape, offset, scale)
        return self._values[name]

    def by_head(self, name: str, shape: tuple[int, int], heads: int = 0) -> ir.Value:
        """As `tensor`, of a weight that each head has its own rows of. In a format it is restored: no kernel of heads
        reads one.

        Args:
            heads: if it is not 0, each head's rows become its columns: [heads · shape[1], shape[0] / heads].
        """
        if name not in self._values:
            value = self._placed(name, shape)
            if self._format and stored(value):
                self._format.note(
                    "a projection of heads' own, which no kernel has in its format, is restored to bfloat16"
                )
                forget_format(value)
            self._values[name] = turned_by_head(name, value, heads) if heads else value
        return self._values[name]

    def taps(self, name: str, channels: int, width: int) -> ir.Value:
        """The initializer [channels, width] of a depthwise convolution's weight, stored as [channels, 1, width]."""
        if name not in self._values:
            stem, _, kind = name.rpartition(".")
            place = self._stored.get(stem, _Stored(stem, channels, range(channels)))
            read = self._take(f"{place.whole}.{kind}", (place.height, 1, width))
            shape, rows = (channels, width), _rounded
            taps = RowsTensor(name, torch.float32, shape, lambda: rows(lambda: read()[list(place.rows), 0]))
            self._values[name] = taps.initializer()
        return self._values[name]

    def inside(self, prefix: str) -> None:
        """What blocks call `model.…` has the name `prefix.…` in the checkpoint, or `…` without a prefix."""
        self._inside = f"{prefix}." if prefix else ""

    def renamed(self, end: str, stored: str) -> None:
        """Tensors whose name ends in `end` may end in `stored` instead in the checkpoint."""
        self._renamed[end] = stored

    def leave_out(self, prefix: str, note: str) -> None:
        """Tensors whose name begins with `prefix` are left over, and people are told: note, of the weights."""
        names = set(self._names(prefix))
        self._left_out |= names
        if names:
            self._notes[note] = self._notes.get(note, 0) + len(names)

    def is_tied(self, head: str, table: str, shape: tuple[int, int]) -> bool:
        """True if a head whose weight should be an embedding's table is that table.

        It is not where the checkpoint has another weight for it, which is then used, with a note: transformers unties
        the two as well. Where the checkpoint has both, both are read here, some rows at a time.

        Args:
            head, table: names of the tensors.

        Raises:
            EngineError: they are of another shape.
            UnsupportedModelError: they are stored in a form that is not implemented.
        """
        own = f"{head.removesuffix('.weight')}."
        if not any(name.removeprefix(own).startswith(("weight", "qweight")) for name in self._names(own)):
            return True
        if _same(self.tensor(head, shape), self.table(table, shape), shape):
            del self._values[head]
            return True
        self._notes[f"{head} is not the embedding's table, though tie_word_embeddings is true: it is used"] = 1
        return False

    def has_any(self, prefix: str) -> bool:
        """Whether the checkpoint has a tensor whose name begins so."""
        return bool(self._names(prefix))

    @property
    def notes(self) -> dict[str, int]:
        """What people should know of weights, and of how many."""
        return {**self._notes, **(self._format.notes if self._format else {})}

    def cut(self, whole: str, parts: Mapping[str, Sequence[int]], transposed: bool = False) -> None:
        """A linear layer of the checkpoint whose rows are several layers': each has its own, in its own order.

        Args:
            whole: the checkpoint's name, without `.weight` and `.bias`.
            parts: name of a layer, as blocks ask for it → its rows. All rows have a place.
            transposed: the checkpoint has the weight [in, out].
        """
        height = sum(len(rows) for rows in parts.values())
        for name, rows in parts.items():
            self._stored[name] = _Stored(whole, height, rows, transposed)

    def borrow(self, name: str, value: ir.Value) -> None:
        """A tensor that the checkpoint lacks is an initializer of another graph, whose name it keeps."""
        self._values[name] = ir.Value(
            name=value.name, type=value.type, shape=value.shape, const_value=value.const_value
        )

    def reorder(self, name: str, order: Sequence[int]) -> None:
        """Rows of a layer, or numbers of a vector, are from now on in this order, of what they were."""
        place = self._stored.get(name, _Stored(name, len(order), range(len(order))))
        self._stored[name] = replace(place, rows=[place.rows[row] for row in order])

    def multiply(self, name: str, *factors: tuple[int, float]) -> None:
        """Rows of a layer's weight (not of its bias) are multiplied in fp32, after their rounding. In a format it is
        restored.

        Args:
            factors: (rows, their factor), for all rows.
        """
        self._factors[f"{name}.weight"] = torch.cat([torch.full((rows, 1), factor) for rows, factor in factors])

    def table(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        """As `tensor`, of a weight whose rows are looked up. In formats that no kernel looks up it is restored."""
        value = self.tensor(name, shape)
        already = stored(value)
        if self._format and already and already.stored_as.tables != already.stored_as:
            self._format.note("an embedding, which no kernel looks up in its format, is restored to bfloat16")
            forget_format(value)
        return value

    def exact(self, name: str, columns: int) -> ir.Value:
        """A vector in fp32 as it is stored, perhaps as [1, columns] or [1, 1, columns, 1]: of numbers that are
        compared, or in exponents.
        """
        if name not in self._values:
            read = self._take(name, (columns,), (1, columns), (1, 1, columns, 1))

            def open() -> RowReader:
                values = read().flatten().float()
                return lambda begin, end: values[begin:end]

            self._values[name] = RowsTensor(name, torch.float32, (columns,), open).initializer()
        return self._values[name]

    def stacked(self, name: str, parts: Sequence[str], shape: tuple[int, ...], factors: str | None = None) -> ir.Value:
        """Tensors of one shape, one behind the other along the rows, as one initializer of this name.

        Args:
            factors: as `fused` has it, of the parts.

        Raises:
            EngineError: one is not there, or is of another shape.
            UnsupportedModelError: they are stored in different formats, or in one that is not implemented.
        """
        if name not in self._values:
            values = [self._placed(part, shape) for part in parts]
            whole = stack_weights(name, values)
            if isinstance(whole, str):
                raise UnsupportedModelError("experts of one layer are stored in different formats", whole)
            if self._format and any(isinstance(value.const_value, ActOrdered) for value in values):
                self._format.note("integers of experts in act-order are restored to bfloat16")
            self._values[name] = whole if factors is None else self._by_expert(name, whole, factors, len(parts))
        return self._values[name]

    def has_fused(self, name: str) -> bool:
        """Whether the matrices of all experts are in one tensor of this name, or in those of a format."""
        return any(self._has(stored) for stored in (name, f"{name}_blocks"))

    def first_of(self, *names: str) -> str:
        """The first of some names of a tensor that the checkpoint has; the last one, if it has none."""
        return next((name for name in names if self._has(name)), names[-1])

    def fused(
        self,
        name: str,
        shape: tuple[int, ...],
        transposed: bool = False,
        order: Sequence[int] | None = None,
        factors: str | None = None,
    ) -> ir.Value:
        """The matrices of all experts, [experts, rows, columns], from one tensor: [experts · rows, columns]; and so
        vectors, [experts, rows]: [experts · rows].

        Args:
            transposed: they are stored as [experts, columns, rows].
            order: of the rows of each, as they are stored.
            factors: a tensor [experts], which multiplies their matrices in fp32. In a format they are restored.
        """
        if name not in self._values:
            experts, rows, *columns = shape
            whole = self._format.experts(self._stored_as(name), shape) if self._format and columns else None
            self._any_quantized |= whole is not None
            if whole is None:
                stored_shape = (experts, *columns, rows) if transposed else shape
                read = self._take(name, stored_shape)
                of_all = (experts * rows, *columns)
                whole = RowsTensor(name, torch.float32, of_all, lambda: _of_experts(read(), rows, transposed))
            value = whole.initializer()
            if factors is not None:
                value = self._by_expert(name, value, factors, experts)
            if order is not None:
                places = torch.arange(0, experts * rows, rows)[:, None] + torch.tensor(order)
                value = pick_weight(name, value, places.flatten())
            self._values[name] = value
        return self._values[name]

    def ignore(self, suffix: str, reason: str) -> None:
        """Tensors whose name ends in `suffix` may be left over. reason: as HARMLESS_TENSORS has it."""
        self.harmless[suffix] = reason

    def __iter__(self) -> Iterator[ir.Value]:
        """The initializers handed out, in the order of their first use."""
        return iter(self._values.values())

    def refuse_left_over(self, prefix: str = "") -> None:
        """Raise an error that names the tensors that the model did not ask for, of those whose name begins so."""
        left_over = sorted(self.tensors.names - self.tensors.taken - self._left_out)
        harmless = tuple(self.harmless)
        left_over = [name for name in left_over if name.startswith(prefix) and not name.endswith(harmless)]
        if self._format:
            left_over = [name for name in left_over if not self._format.means_nothing(name)]
        if left_over:
            more = f" and {len(left_over) - NAMES_SHOWN} more" if len(left_over) > NAMES_SHOWN else ""
            raise UnsupportedModelError(
                f"{len(left_over)} of the checkpoint's {len(self.tensors.names)} tensors are not used",
                f"{', '.join(left_over[:NAMES_SHOWN])}{more}",
                "The model has parts that are not implemented, or its config.json does not say that they are there.",
            )

    def note_none_quantized(self) -> None:
        """Tell people of a checkpoint whose config names a format that none of its weights has."""
        if self._format is None or self._any_quantized:
            return
        for value in self._values.values():
            if len(shape_of(value)) == 2:
                self._format.note("not quantized, though the checkpoint's quantization_config names a format")

    def _names(self, prefix: str) -> list[str]:
        return [name for name in self.tensors.names if name.startswith(prefix)]

    def _placed(self, name: str, shape: tuple[int, ...], offset: float = 0.0, scale: float = 1.0) -> ir.Value:
        """From where `cut` and `reorder` say that it is."""
        place = self._stored.get(name.rpartition(".")[0])
        if place is None:
            return self._whole(name, shape, offset, scale)
        whole = f"{place.whole}.{name.rpartition('.')[2]}"
        value = self._whole(whole, (place.height, *shape[1:]), offset, scale, place.transposed)
        every = place.rows == range(place.height)
        return value if every and whole == name else pick_weight(name, value, place.rows)

    def _stored_as(self, name: str) -> str:
        name = f"{self._inside}{name.removeprefix('model.')}" if name.startswith("model.") else name
        others = [name.removesuffix(end) + stored for end, stored in self._renamed.items() if name.endswith(end)]
        return next((other for other in others if self.tensors.find(other) is not None), name)

    def _has(self, name: str) -> bool:
        return self.tensors.find(self._stored_as(name)) is not None

    def _take(self, name: str, *shapes: tuple[int, ...]) -> Read:
        return self.tensors.take(self._stored_as(name), *shapes, dtypes=STORED_DTYPES)

    def _whole(
        self, name: str, shape: tuple[int, ...], offset: float, scale: float, transposed: bool = False
    ) -> ir.Value:
        """As the checkpoint has it, but not transposed."""
        matrix = len(shape) == 2
        quantized = self._format.weight(self._stored_as(name), shape) if self._format and matrix else None
        self._any_quantized |= quantized is not None
        if quantized is not None:
            return self._multiplied(name, quantized.initializer())
        across = transposed and matrix
        read = self._take(name, shape[::-1] if across else shape)
        turned = (lambda: read().t()) if across else read
        tensor = RowsTensor(name, torch.float32, shape, lambda: _rounded(turned, offset, scale))
        return self._multiplied(name, tensor.initializer())

    def _multiplied(self, name: str, value: ir.Value) -> ir.Value:
        """As `multiply` has it."""
        factors = self._factors.get(name)
        return value if factors is None else self._by_rows(name, value, lambda: factors)

    def _by_expert(self, name: str, value: ir.Value, factors: str, experts: int) -> ir.Value:
        """The rows of each expert times its factor, of a tensor [experts], in fp32."""
        read, rows = self._take(factors, (experts,)), shape_of(value)[0] // experts
        return self._by_rows(name, value, lambda: read().float().repeat_interleave(rows)[:, None])

    def _by_rows(self, name: str, value: ir.Value, read_factors: Callable[[], torch.Tensor]) -> ir.Value:
        """Rows times their factors, [rows, 1], in fp32."""
        if self._format and stored(value):
            self._format.note("a weight that the model multiplies by a factor is restored to bfloat16")

        def open() -> RowReader:
            reader, factors = open_rows(value), read_factors()
            return lambda begin, end: reader(begin, end) * factors[begin:end]

        return RowsTensor(name, torch.float32, shape_of(value), open).initializer()


def _same(one: ir.Value, other: ir.Value, shape: tuple[int, int]) -> bool:
    """True if two weights [N, K] have the same numbers."""
    (count, columns), readers = shape, (open_rows(one), open_rows(other))
    step = max(ELEMENTS_COMPARED // columns, 1)
    pieces = ((begin, min(begin + step, count)) for begin in range(0, count, step))
    return all(torch.equal(readers[0](*piece), readers[1](*piece)) for piece in pieces)


def _rounded(read: Read, offset: float = 0.0, scale: float = 1.0) -> RowReader:
    values = read()

    def rows(begin: int, end: int) -> torch.Tensor:
        rounded = values[begin:end].to(torch.bfloat16).to(torch.float32)
        if offset:
            rounded = rounded + offset
        return rounded if scale == 1 else rounded * scale

    return rows


def _of_experts(values: torch.Tensor, rows: int, transposed: bool) -> RowReader:
    """Rows of all experts, counted through, of a tensor [experts, rows, columns], or [experts, columns, rows] if it is
    transposed, or of vectors [experts, rows].
    """

    def read(begin: int, end: int) -> torch.Tensor:
        pieces = []
        while begin < end:
            expert, first = divmod(begin, rows)
            last = min(first + end - begin, rows)
            matrix = values[expert].t() if transposed else values[expert]
            pieces.append(matrix[first:last])
            begin += last - first
        return torch.cat(pieces).to(torch.bfloat16).to(torch.float32)

    return read
