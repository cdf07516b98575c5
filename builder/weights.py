"""A checkpoint's tensors as initializers, which are read when their values are needed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch

from enginewright.builder.checkpoint.quantized import QuantizedFormat
from enginewright.builder.harmless_tensors import HARMLESS_TENSORS
from enginewright.builder.tensors import Read, Tensors
from enginewright.errors import UnsupportedModelError
from enginewright.passes.origin import Origin
from enginewright.passes.quant.act_order import ActOrdered
from enginewright.passes.quant.method import forget_format, pick_weight, stack_weights, stored
from enginewright.passes.weights import RowReader, RowsTensor, open_rows, origin_of, shape_of, transposed_by_head

STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NAMES_SHOWN = 5  # names of tensors that an error lists
ELEMENTS_COMPARED = 1 << 20  # elements of two weights that are compared at once


@dataclass(frozen=True)
class _Stored:
    """The position of a layer inside a larger tensor of the checkpoint. Names have no `.weight` or `.bias`."""

    whole: str  # name of the larger tensor in the checkpoint
    height: int  # rows of the larger tensor
    rows: Sequence[int]  # its rows that belong to the layer, in this order
    transposed: bool = False  # True if the checkpoint has weights [in, out]


class Weights:
    """Makes initializers: one for each tensor, the same one every time.

    Values are rounded to bfloat16, the precision that engines are built from, and presented as FLOAT. Weights that are
    stored quantized are presented as FLOAT, too, and keep their format. Nothing that was read is kept.

    Attributes:
        tensors: tensors of the checkpoint.
        harmless: end of a tensor's name → the reason why it need not be read.
    """

    def __init__(self, tensors: Tensors, format: QuantizedFormat | None = None) -> None:
        """Starts without initializers.

        Args:
            tensors: tensors of the checkpoint.
            format: format of the weights that are stored quantized, if any; it has the same `tensors`.
        """
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
        """Number of tensor reads."""
        return self.tensors.reads

    def tensor(self, name: str, shape: tuple[int, ...], offset: float = 0.0, scale: float = 1.0) -> ir.Value:
        """Makes the initializer of a tensor.

        Args:
            name: name of the tensor.
            shape: shape of the tensor.
            offset: added to its values, in fp32 after the rounding.
            scale: factor on the sum, in fp32.

        Raises:
            EngineError: there is no such tensor, or it has another shape.
            UnsupportedModelError: it is stored in a form that is not implemented.
        """
        if name not in self._values:
            self._values[name] = self._placed(name, shape, offset, scale)
        return self._values[name]

    def by_head(self, name: str, shape: tuple[int, int], heads: int = 0) -> ir.Value:
        """Makes the initializer of a weight in which each head has its own rows.

        A quantized one is restored: no kernel for heads reads a format.

        Args:
            name: name of the tensor.
            shape: its shape.
            heads: number of heads whose rows become columns: [heads · shape[1], shape[0] / heads]; 0 leaves them.
        """
        if name not in self._values:
            value = self._placed(name, shape)
            if self._format and stored(value):
                self._format.note(
                    "a projection of each head, for which no kernel reads this format, is restored to bfloat16"
                )
                forget_format(value)
            self._values[name] = transposed_by_head(name, value, heads) if heads else value
        return self._values[name]

    def taps(self, name: str, channels: int, width: int) -> ir.Value:
        """Makes the initializer [channels, width] of a depthwise convolution's weight, stored as [channels, 1, width].

        Args:
            name: name of the tensor.
            channels: number of channels.
            width: taps of a channel.
        """
        if name not in self._values:
            stem, _, kind = name.rpartition(".")
            place = self._stored.get(stem, _Stored(stem, channels, range(channels)))
            read = self._take(f"{place.whole}.{kind}", (place.height, 1, width))
            shape, rows = (channels, width), _rounded
            taps = RowsTensor(name, torch.float32, shape, lambda: rows(lambda: read()[list(place.rows), 0]))
            self._values[name] = taps.initializer()
        return self._values[name]

    def inside(self, prefix: str) -> None:
        """Maps names `model.…` of the blocks to `prefix.…` in the checkpoint, or to `…` without a prefix."""
        self._inside = f"{prefix}." if prefix else ""

    def renamed(self, end: str, stored: str) -> None:
        """Lets tensors whose name ends in `end` end in `stored` in the checkpoint.

        Args:
            end: end of the name in the blocks.
            stored: end of the name in the checkpoint.
        """
        self._renamed[end] = stored

    def leave_out(self, prefix: str, note: str) -> None:
        """Leaves out tensors, and notes that for users.

        Args:
            prefix: prefix of their names.
            note: sentence about the weights.
        """
        names = set(self._names(prefix))
        self._left_out |= names
        if names:
            self._notes[note] = self._notes.get(note, 0) + len(names)

    def is_tied(self, head: str, table: str, shape: tuple[int, int]) -> bool:
        """Checks if a head that should share an embedding's table does.

        It does not if the checkpoint has another weight for it, which is then used, with a note: transformers unties
        the two as well. If the checkpoint has both, both are read here, some rows at a time.

        Args:
            head: name of the head's weight.
            table: name of the embedding's table.
            shape: shape of both.

        Raises:
            EngineError: they have another shape.
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
        """Checks if the checkpoint has a tensor with this prefix."""
        return bool(self._names(prefix))

    @property
    def notes(self) -> dict[str, int]:
        """Facts about weights that users should know → number of weights."""
        return {**self._notes, **(self._format.notes if self._format else {})}

    def cut(self, whole: str, parts: Mapping[str, Sequence[int]], transposed: bool = False) -> None:
        """Declares a linear layer of the checkpoint whose rows belong to several layers.

        Args:
            whole: name in the checkpoint, without `.weight` and `.bias`.
            parts: name of a layer in the blocks → its rows, in its order. Every row belongs to a layer.
            transposed: True if the checkpoint has the weight [in, out].
        """
        height = sum(len(rows) for rows in parts.values())
        for name, rows in parts.items():
            self._stored[name] = _Stored(whole, height, rows, transposed)

    def borrow(self, name: str, value: ir.Value) -> None:
        """Uses an initializer of another graph, which keeps its name, for a tensor that the checkpoint lacks.

        Args:
            name: name of the tensor.
            value: the initializer.
        """
        self._values[name] = ir.Value(
            name=value.name, type=value.type, shape=value.shape, const_value=value.const_value
        )

    def reorder(self, name: str, order: Sequence[int]) -> None:
        """Reorders rows of a layer, or numbers of a vector.

        Args:
            name: name of the layer.
            order: current index of each row in the new order.
        """
        position = self._stored.get(name, _Stored(name, len(order), range(len(order))))
        self._stored[name] = replace(position, rows=[position.rows[row] for row in order])

    def multiply(self, name: str, *factors: tuple[int, float]) -> None:
        """Multiplies rows of a layer's weight, not its bias, in fp32 after rounding; a quantized one is restored.

        Args:
            name: name of the layer.
            factors: (rows, their factor), for all rows.
        """
        self._factors[f"{name}.weight"] = torch.cat([torch.full((rows, 1), factor) for rows, factor in factors])

    def table(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        """Makes the initializer of a weight whose rows are looked up; one in a format without lookup is restored.

        Args:
            name: name of the tensor.
            shape: its shape.
        """
        value = self.tensor(name, shape)
        existing = stored(value)
        if self._format and existing and existing.stored_as.tables != existing.stored_as:
            self._format.note("an embedding, which no kernel looks up in its format, is restored to bfloat16")
            forget_format(value)
        return value

    def exact(self, name: str, columns: int) -> ir.Value:
        """Makes the initializer of a vector in fp32, unrounded: for numbers that are compared, or exponents.

        Args:
            name: name of the tensor, stored as [columns], [1, columns] or [1, 1, columns, 1].
            columns: its length.
        """
        if name not in self._values:
            read = self._take(name, (columns,), (1, columns), (1, 1, columns, 1))

            def open() -> RowReader:
                values = read().flatten().float()
                return lambda begin, end: values[begin:end]

            self._values[name] = RowsTensor(name, torch.float32, (columns,), open).initializer()
        return self._values[name]

    def stacked(self, name: str, parts: Sequence[str], shape: tuple[int, ...], factors: str | None = None) -> ir.Value:
        """Makes one initializer from tensors of one shape, one after another along the rows.

        Args:
            name: name of the result.
            parts: names of the tensors.
            shape: shape of each.
            factors: as in `fused`, for the parts.

        Raises:
            EngineError: one is missing, or has another shape.
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
        """Checks if the matrices of all experts are in one tensor of this name, or in a format's tensors."""
        return any(self._has(stored) for stored in (name, f"{name}_blocks"))

    def first_of(self, *names: str) -> str:
        """Returns the first of a tensor's names that the checkpoint has; the last one, if it has none."""
        return next((name for name in names if self._has(name)), names[-1])

    def fused(
        self,
        name: str,
        shape: tuple[int, ...],
        transposed: bool = False,
        order: Sequence[int] | None = None,
        factors: str | None = None,
    ) -> ir.Value:
        """Makes an initializer from one tensor with the matrices of all experts: [experts · rows, columns].

        Vectors, [experts, rows], become [experts · rows].

        Args:
            name: name of the tensor.
            shape: [experts, rows, columns] or [experts, rows].
            transposed: True if they are stored as [experts, columns, rows].
            order: stored index of each row of an expert.
            factors: name of a tensor [experts] that multiplies their matrices in fp32; quantized ones are restored.
        """
        if name not in self._values:
            experts, rows, *columns = shape
            whole = self._format.experts(self._stored_as(name), shape) if self._format and columns else None
            self._any_quantized |= whole is not None
            origin = Origin.of(self._stored_as(name), experts * rows) if columns else None
            if whole is not None:
                whole.set_origin(origin)
            else:
                stored_shape = (experts, *columns, rows) if transposed else shape
                read = self._take(name, stored_shape)
                of_all = (experts * rows, *columns)
                whole = RowsTensor(name, torch.float32, of_all, lambda: _of_experts(read(), rows, transposed), origin)
            value = whole.initializer()
            if factors is not None:
                value = self._by_expert(name, value, factors, experts)
            if order is not None:
                positions = torch.arange(0, experts * rows, rows)[:, None] + torch.tensor(order)
                value = pick_weight(name, value, positions.flatten())
            self._values[name] = value
        return self._values[name]

    def ignore(self, suffix: str, reason: str) -> None:
        """Allows tensors to be left over.

        Args:
            suffix: end of their names.
            reason: as in HARMLESS_TENSORS.
        """
        self.harmless[suffix] = reason

    def __iter__(self) -> Iterator[ir.Value]:
        """Yields the initializers, in the order of their first use."""
        return iter(self._values.values())

    def refuse_left_over(self, prefix: str = "") -> None:
        """Raises UnsupportedModelError if tensors with this prefix were not requested; it names them."""
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
                "The model has parts that are not implemented, or its config.json does not declare them.",
            )

    def note_none_quantized(self) -> None:
        """Notes for users that the config names a format that none of the weights has."""
        if self._format is None or self._any_quantized:
            return
        for value in self._values.values():
            if len(shape_of(value)) == 2:
                self._format.note("not quantized, though the checkpoint's quantization_config names a format")

    def _names(self, prefix: str) -> list[str]:
        return [name for name in self.tensors.names if name.startswith(prefix)]

    def _placed(self, name: str, shape: tuple[int, ...], offset: float = 0.0, scale: float = 1.0) -> ir.Value:
        """Makes an initializer, of the rows that `cut` and `reorder` declared."""
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
        """Makes an initializer of a whole tensor of the checkpoint, transposed back if it is stored [in, out]."""
        matrix = len(shape) == 2
        quantized = self._format.weight(self._stored_as(name), shape) if self._format and matrix else None
        self._any_quantized |= quantized is not None
        origin = Origin.of(self._stored_as(name), shape[0]) if shape and not offset and scale == 1 else None
        if quantized is not None:
            quantized.set_origin(origin)
            return self._multiplied(name, quantized.initializer())
        across = transposed and matrix
        read = self._take(name, shape[::-1] if across else shape)
        oriented = (lambda: read().t()) if across else read
        tensor = RowsTensor(name, torch.float32, shape, lambda: _rounded(oriented, offset, scale), origin)
        return self._multiplied(name, tensor.initializer())

    def _multiplied(self, name: str, value: ir.Value) -> ir.Value:
        """Applies the factors of `multiply`."""
        factors, origin = self._factors.get(name), origin_of(value)
        if factors is None:
            return value
        return self._by_rows(name, value, lambda: factors, origin.scaled(factors.flatten()) if origin else None)

    def _by_expert(self, name: str, value: ir.Value, factors: str, experts: int) -> ir.Value:
        """Multiplies the rows of each expert by its factor, from a tensor [experts], in fp32."""
        read, rows = self._take(factors, (experts,)), shape_of(value)[0] // experts
        return self._by_rows(name, value, lambda: read().float().repeat_interleave(rows)[:, None])

    def _by_rows(
        self, name: str, value: ir.Value, read_factors: Callable[[], torch.Tensor], origin: Origin | None = None
    ) -> ir.Value:
        """Multiplies rows by their factors, [rows, 1], in fp32; origin: that of the product, if it is known."""
        if self._format and stored(value):
            self._format.note("a weight that the model multiplies by a factor is restored to bfloat16")

        def open() -> RowReader:
            reader, factors = open_rows(value), read_factors()
            return lambda begin, end: reader(begin, end) * factors[begin:end]

        return RowsTensor(name, torch.float32, shape_of(value), open, origin).initializer()


def _same(one: ir.Value, other: ir.Value, shape: tuple[int, int]) -> bool:
    """Checks if two weights [N, K] have the same numbers."""
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
    """Reads rows of all experts, counted through.

    The tensor is [experts, rows, columns], or [experts, columns, rows] if it is transposed, or vectors [experts, rows].
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
