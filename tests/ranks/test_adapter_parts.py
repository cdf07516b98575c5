"""Parts of adapters are the rows, matrices and ranks that they should be, packed again by another code."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from enginewright.adapter_file import AdapterPiece, Factor, ReplacedRows, SiteAdapter
from enginewright.adapter_sites import RowRun, Site
from enginewright.plan import AdaptersOperand
from enginewright.runtime.device.cpu.adapter_parts import part_of_site, size_of_part

COLUMNS, RANK = 21, 48
RANDOM = np.random.default_rng(3)
# first row, number of rows, rank, first rank: with rows between them that nothing is added to, and unaligned
PIECES = ((0, 40, 7, 0), (40, 19, 16, 7), (75, 50, 3, 23), (130, 30, 20, 27))
ROWS = 167


def packed(matrix: NDArray[np.generic]) -> memoryview:
    """A matrix as r16_columns."""
    rows, columns = matrix.shape
    content = np.zeros((-(-rows // 16), columns, 16), matrix.dtype)
    for row, column in np.ndindex(rows, columns):
        content[row // 16, column, row % 16] = matrix[row, column]
    return memoryview(content.tobytes())


def factor(rows: int, columns: int, *, of_codes: bool) -> tuple[Factor, NDArray[np.generic], NDArray[np.float32]]:
    """A factor, and its numbers and scales."""
    low, high = (-127, 128) if of_codes else (1, 1 << 16)
    matrix = RANDOM.integers(low, high, (rows, columns)).astype("i1" if of_codes else "<u2")
    scale = RANDOM.random(rows, np.float32)
    return Factor(packed(matrix), memoryview(scale.tobytes()) if of_codes else None), matrix, scale


def dense(one: Factor, rows: int, columns: int) -> NDArray[np.generic]:
    """The numbers of a factor, whose padding has to be zeros."""
    blocks = np.frombuffer(one.data, "<u2" if one.scale is None else "i1").reshape(-1, columns, 16)
    whole = np.concatenate([block.T for block in blocks])
    assert not whole[rows:].any() and len(whole) == -(-rows // 16) * 16
    return whole[:rows]


@pytest.mark.parametrize("of_codes", [False, True])
@pytest.mark.parametrize(
    "ranges",
    [((0, 16),), ((16, 48),), ((48, 119),), ((112, 55),), ((59, 16),), ((0, 33), (80, 33)), ((37, 11), (120, 11))],
)
def test_rows(ranges: Sequence[tuple[int, int]], of_codes: bool) -> None:
    a, a_numbers, a_scale = factor(RANK, COLUMNS, of_codes=of_codes)
    of_pieces = [factor(count, rank, of_codes=of_codes) for _, count, rank, _ in PIECES]
    pieces = tuple(AdapterPiece(*piece, b) for piece, (b, _, _) in zip(PIECES, of_pieces, strict=True))
    ids = np.array([1, 14, 15, 16, 40, 41, 60, 61, 81, 112, 113, 125, 140, 166], "<i4")
    rows, row_numbers, row_scale = factor(len(ids), COLUMNS, of_codes=of_codes)
    bias, gain = RANDOM.random((2, ROWS), np.float32)
    change = SiteAdapter(
        ROWS, COLUMNS, RANK, a, pieces, memoryview(bias), memoryview(gain),
        replaced=ReplacedRows(len(ids), memoryview(ids), rows),
    )  # fmt: skip
    part = part_of_site(change, AdaptersOperand(0, tuple(ranges)))
    assert part is not None
    own = np.concatenate([np.arange(first, first + count) for first, count in ranges])
    assert part.rows == len(own) and part.columns == COLUMNS and part.bias is not None and part.gain is not None
    assert np.array_equal(np.frombuffer(part.bias, "<f4"), bias[own])
    assert np.array_equal(np.frombuffer(part.gain, "<f4"), gain[own])
    found, end = {}, 0
    for piece in part.pieces:
        assert piece.begin >= end
        end = piece.begin + piece.count
        numbers, scales = dense(piece.b, piece.count, piece.rank), piece.b.scale
        ranks = range(piece.first_rank, piece.first_rank + piece.rank)
        of_a, scales_of_a = dense(part.a, part.rank, COLUMNS), part.a.scale
        for row in range(piece.count):
            found[int(own[piece.begin + row])] = (
                numbers[row].tolist(),
                None if scales is None else scales.cast("B").cast("f")[row],
                of_a[ranks].tolist(),
                None if scales_of_a is None else np.frombuffer(scales_of_a, "<f4")[ranks].tolist(),
            )
    expected = {}
    for (begin, count, rank, first_rank), (_, numbers, scale) in zip(PIECES, of_pieces, strict=True):
        ranks = range(first_rank, first_rank + rank)
        for row in set(range(begin, begin + count)) & set(own.tolist()):
            expected[row] = (
                numbers[row - begin].tolist(),
                float(scale[row - begin]) if of_codes else None,
                a_numbers[ranks].tolist(),
                a_scale[ranks].tolist() if of_codes else None,
            )
    assert found == expected
    places = [place for place in own.tolist() if place in ids]
    if not places:
        assert part.replaced is None
        return
    assert part.replaced is not None and part.replaced.count == len(places)
    assert own[np.frombuffer(part.replaced.ids, "<i4")].tolist() == places
    index = np.searchsorted(ids, places)
    assert np.array_equal(dense(part.replaced.rows, len(places), COLUMNS), row_numbers[index])
    if of_codes:
        assert part.replaced.rows.scale is not None
        assert np.array_equal(np.frombuffer(part.replaced.rows.scale, "<f4"), row_scale[index])


def test_rows_that_nothing_is_added_to() -> None:
    """They get + 0 in one process, since other rows of the layer are changed."""
    a, _, _ = factor(16, COLUMNS, of_codes=False)
    b, _, _ = factor(16, 4, of_codes=False)
    change = SiteAdapter(48, COLUMNS, 16, a, (AdapterPiece(0, 16, 4, 0, b),), None, None)
    part = part_of_site(change, AdaptersOperand(0, ((16, 32),)))
    assert part is not None and (part.rank, part.pieces, part.gain) == (0, (), None)
    assert part.bias is not None and np.array_equal(np.frombuffer(part.bias, "<f4"), np.zeros(32))


@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_matrices(shared: str) -> None:
    matrices = (1, 2, 5, 6) if not shared else tuple(range(7))
    every = [[factor(rows, columns, of_codes=True) for _ in matrices] for rows, columns in ((16, COLUMNS), (33, 7))]

    def joined(place: int, name: str) -> Factor:
        if name == shared:
            return every[place][0][0]
        scales = [scale.tobytes() for _, _, scale in every[place]]
        return Factor(memoryview(b"".join(one.data for one, _, _ in every[place])), memoryview(b"".join(scales)))

    piece = AdapterPiece(0, 33, 7, 2, joined(1, "b"))
    change = SiteAdapter(33, COLUMNS, 16, joined(0, "a"), (piece,), None, None, matrices, shared)  # type: ignore[arg-type]
    for first, count in ((0, 2), (2, 5), (5, 1), (0, 7)):
        part = part_of_site(change, AdaptersOperand(0, matrices=(first, count, 7)))
        kept = [place for place, matrix in enumerate(matrices) if first <= matrix < first + count]
        assert part is not None and part.matrices == tuple(matrices[place] - first for place in kept)
        for place, (name, one) in enumerate((("a", part.a), ("b", part.pieces[0].b))):
            wanted = [0] if name == shared else kept
            assert bytes(one.data) == b"".join(bytes(every[place][matrix][0].data) for matrix in wanted)
            assert one.scale is not None
            assert bytes(one.scale) == b"".join(every[place][matrix][2].tobytes() for matrix in wanted)
    nothing = part_of_site(change, AdaptersOperand(0, matrices=(3, 2, 7)))
    assert (nothing is None) == (not shared)


def test_sizes() -> None:
    plain = Site("w", 40, 21, (RowRun("m", 0, 40),))
    assert size_of_part(plain, AdaptersOperand(0)) == (40, 21, 0)
    assert size_of_part(plain, AdaptersOperand(0, ((0, 16), (20, 16)))) == (32, 21, 0)
    experts = Site("w", 40, 21, (RowRun("m.{}", 0, 40),), experts=7)
    assert size_of_part(experts, AdaptersOperand(0, matrices=(2, 3, 7))) == (40, 21, 3)
    assert size_of_part(experts, AdaptersOperand(0)) == (40, 21, 7)
