"""The part of an adapter that belongs to some rows of a weight, or to some of its matrices (rank_plan.py).

A is the same for all rows, so a part has those of its ranks that its rows use. What a part has of B, of vectors and of
rows that are replaced is copied, so that the rest of them need not stay in memory.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from enginewright.adapter_file import AdapterPiece, Factor, ReplacedRows, SiteAdapter
from enginewright.adapter_sites import Site
from enginewright.plan import AdaptersOperand

BLOCK_ROWS = 16  # rows of a block of a factor (r16_columns)

Ranges = Sequence[tuple[int, int]]  # of rows, each the first and their number


def size_of_part(site: Site, part: AdaptersOperand) -> tuple[int, int, int]:
    """Computes the size of a part of a site.

    Args:
        site: the site.
        part: its rows, or its matrices.

    Returns:
        Rows and columns of each matrix, and the number of matrices; 0 matrices: it is a plain layer.
    """
    rows = sum(count for _, count in part.rows) if part.rows else site.rows
    return rows, site.columns, part.matrices[1] if part.matrices else site.experts or site.heads


def part_of_site(change: SiteAdapter, part: AdaptersOperand) -> SiteAdapter | None:
    """Finds what an adapter changes in a part of a site.

    Args:
        change: its changes of the whole site.
        part: rows, of a plain layer, or matrices; without any it is the whole site.

    Returns:
        The changes of the part, whose rows and matrices count from its own first ones; None: it changes no matrix of
        the part.
    """
    if part.matrices is not None:
        return _of_matrices(change, *part.matrices[:2])
    return _of_rows(change, part.rows) if part.rows else change


def _of_matrices(change: SiteAdapter, first: int, count: int) -> SiteAdapter | None:
    kept = [place for place, matrix in enumerate(change.matrices) if first <= matrix < first + count]
    if not kept:
        return None
    total, begin, end = len(change.matrices), kept[0], kept[-1] + 1

    def of_kept(view: memoryview) -> memoryview:
        size = view.nbytes // total
        return memoryview(bytes(view[begin * size : end * size]))

    def factor(name: str, whole: Factor) -> Factor:
        if change.shared == name:
            return whole
        return Factor(of_kept(whole.data), None if whole.scale is None else of_kept(whole.scale))

    pieces = tuple(replace(piece, b=factor("b", piece.b)) for piece in change.pieces)
    matrices = tuple(change.matrices[place] - first for place in kept)
    return replace(change, a=factor("a", change.a), pieces=pieces, matrices=matrices)


def _of_rows(change: SiteAdapter, ranges: Ranges) -> SiteAdapter:
    pieces, begin = list[AdapterPiece](), 0
    for first, count in ranges:
        for piece in change.pieces:
            low, high = max(first, piece.begin), min(first + count, piece.begin + piece.count)
            if low < high:
                b = _rows_of(piece.b, piece.rank, [(low - piece.begin, high - low)])
                pieces.append(AdapterPiece(begin + low - first, high - low, piece.rank, piece.first_rank, b))
        begin += count
    bias, gain = (None if one is None else _numbers(one, "<f4", ranges) for one in (change.bias, change.gain))
    if not pieces and bias is None and gain is None:
        bias = np.zeros(begin, "<f4").data  # other rows of the site get + 0, which makes 0 of -0
    part = replace(change, rows=begin, bias=bias, gain=gain, replaced=_replaced(change, ranges))
    return _with_ranks(part, pieces)


def _with_ranks(part: SiteAdapter, pieces: Sequence[AdapterPiece]) -> SiteAdapter:
    """Sets the pieces of a part, and leaves out blocks of A that none of them reads."""
    if not pieces:
        return replace(part, rank=0, a=Factor(memoryview(b"")), pieces=())
    first = min(piece.first_rank for piece in pieces) // BLOCK_ROWS * BLOCK_ROWS
    end = -(-max(piece.first_rank + piece.rank for piece in pieces) // BLOCK_ROWS) * BLOCK_ROWS
    row_bytes = part.a.data.nbytes // part.rank
    scale = None if part.a.scale is None else part.a.scale[4 * first : 4 * end]
    a = Factor(part.a.data[first * row_bytes : end * row_bytes], scale)
    moved = tuple(replace(piece, first_rank=piece.first_rank - first) for piece in pieces)
    return replace(part, rank=end - first, a=a, pieces=moved)


def _replaced(change: SiteAdapter, ranges: Ranges) -> ReplacedRows | None:
    """The rows of some ranges that an adapter replaces."""
    if change.replaced is None:
        return None
    ids, begin = np.frombuffer(change.replaced.ids, "<i4"), 0
    own, places = list[NDArray[np.int32]](), list[tuple[int, int]]()
    for first, count in ranges:
        low, high = np.searchsorted(ids, (first, first + count)).tolist()
        if low < high:
            own.append(ids[low:high] - np.int32(first - begin))
            places.append((low, high - low))
        begin += count
    if not own:
        return None
    rows = _rows_of(change.replaced.rows, change.columns, places)
    return ReplacedRows(sum(count for _, count in places), np.concatenate(own).data, rows)


def _rows_of(factor: Factor, columns: int, ranges: Ranges) -> Factor:
    """Copies rows of a matrix, one range after the other.

    Args:
        factor: the matrix.
        columns: its columns.
        ranges: the rows.
    """
    blocks = np.frombuffer(factor.data, "<u2" if factor.scale is None else "i1").reshape(-1, columns, BLOCK_ROWS)
    count = sum(count for _, count in ranges)
    if len(ranges) == 1 and ranges[0][0] % BLOCK_ROWS == 0:
        first = ranges[0][0] // BLOCK_ROWS
        copied = blocks[first : first - (-count // BLOCK_ROWS)].copy()
        copied[-1, :, count - BLOCK_ROWS * len(copied) + BLOCK_ROWS :] = 0
    else:
        rows = np.zeros((-(-count // BLOCK_ROWS) * BLOCK_ROWS, columns), blocks.dtype)
        begin = 0
        for first, number in ranges:
            low, high = first // BLOCK_ROWS, -(-(first + number) // BLOCK_ROWS)
            own = blocks[low:high].transpose(0, 2, 1).reshape(-1, columns)
            rows[begin : begin + number] = own[first - low * BLOCK_ROWS :][:number]
            begin += number
        copied = np.ascontiguousarray(rows.reshape(-1, BLOCK_ROWS, columns).transpose(0, 2, 1))
    return Factor(copied.data, None if factor.scale is None else _numbers(factor.scale, "<f4", ranges))


def _numbers(vector: memoryview, dtype: str, ranges: Ranges) -> memoryview:
    """Copies numbers of a vector, one range after the other."""
    numbers = np.frombuffer(vector, dtype)
    return np.concatenate([numbers[first : first + count] for first, count in ranges]).data
