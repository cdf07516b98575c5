"""Where the rows of a weight lie in its bytes, for ranks that read only their own (rank_plan.py)."""

from typing import NamedTuple, Protocol

from enginewright.dtypes import DTYPES
from enginewright.manifest import K_ALIGN, ROWS
from enginewright.plan import WeightOperand


class WeightForm(Protocol):
    """Form of a weight, as the manifest of an engine has it, or the builder before it is packed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        ...

    @property
    def dtype(self) -> str | None:
        """Number type; a weight has one, and so the next two."""
        ...

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the matrix, of several ones, or of a vector."""
        ...

    @property
    def layout(self) -> str | None:
        """Layout in which kernels read it (csrc/cpu/kernel.h)."""
        ...


class WeightPart(NamedTuple):
    """Rows of a weight, as ranges of its bytes."""

    ranges: tuple[tuple[int, int], ...]  # first byte, and the byte after the last one, in order
    shape: tuple[int, int, int]  # number of matrices, and rows and columns of each; of a vector (1, 1, numbers)


def columns_of(form: WeightForm) -> int:
    """Columns of a weight; of a vector, its numbers."""
    assert form.shape is not None, "kernels read it, so it has a shape"
    return form.shape[-1]


def part_of_weight(form: WeightForm, operand: WeightOperand) -> WeightPart:
    """Finds the rows that an operand names.

    Args:
        form: the weight's form, with a number type, a shape and a layout.
        operand: ranges of rows or matrices; without any it is the whole weight.

    Raises:
        ValueError: the weight does not have the rows, or not in one range of bytes; the message says which.
    """
    assert form.dtype is not None and form.shape is not None and form.layout is not None
    matrices, rows, columns = (1,) * (3 - len(form.shape)) + form.shape
    if not operand.rows and not operand.matrices:
        return WeightPart(((0, form.nbytes),), (matrices, rows, columns))
    bits = DTYPES[form.dtype].bits
    if form.layout == "plain":
        return _of_vector(operand, matrices * rows, columns, bits // 8)
    in_pairs, by_columns = form.layout.endswith("_pairs"), "_columns" in form.layout
    halves = 2 if in_pairs else 1
    blocks = halves * -(-rows // halves // ROWS)  # of a matrix
    block_bytes = ROWS * (columns if by_columns else -(-columns // K_ALIGN) * K_ALIGN) * bits // 8
    first, number, total = operand.matrices or (0, 1, 1)
    if total != matrices or first + number > matrices:
        raise ValueError(f"the weight {operand.name} has {matrices} matrices, so {operand.matrices} are none of it")
    size = blocks * block_bytes
    if not operand.rows:
        return WeightPart(((first * size, (first + number) * size),), (number, rows, columns))
    half = rows // halves
    row, count = operand.rows[0]
    expected = tuple((row + index * half, count) for index in range(halves))
    whole_blocks = row % ROWS == 0 and (count % ROWS == 0 or row + count == half)
    if operand.rows != expected or not whole_blocks or row + count > half:
        raise ValueError(f"rows {operand.rows} of the weight {operand.name} are not one range of blocks of {ROWS} rows")
    begin, end = halves * (row // ROWS) * block_bytes, halves * -(-(row + count) // ROWS) * block_bytes
    ranges = tuple((matrix * size + begin, matrix * size + end) for matrix in range(first, first + number))
    return WeightPart(ranges, (number, halves * count, columns))


def _of_vector(operand: WeightOperand, rows: int, numbers: int, number_bytes: int) -> WeightPart:
    """Ranges of numbers: those of the rows of a matrix, or of several matrices, one after the other."""
    ranges = operand.rows
    if operand.matrices:
        first, count, total = operand.matrices
        each, own = numbers // total, operand.rows
        ranges = ((first * each, count * each),)
        if any(row + size > each for row, size in own):
            raise ValueError(f"the vector {operand.name} has {each} numbers for each matrix, so {own} are none of it")
        if own:
            ranges = tuple((one * each + row, size) for one in range(first, first + count) for row, size in own)
    if rows != 1 or any(first + count > numbers for first, count in ranges):
        raise ValueError(f"the vector {operand.name} has {numbers} numbers, so {ranges} are none of it")
    parts = tuple((first * number_bytes, (first + count) * number_bytes) for first, count in ranges)
    return WeightPart(parts, (1, 1, sum(count for _, count in ranges)))
