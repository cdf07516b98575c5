"""Making pieces ahead of their use: the same pieces, and the same errors."""

from collections.abc import Iterator

import pytest

from enginewright.builder.ahead import ahead, begin


def test_pieces_come_in_order_and_one_is_made_ahead() -> None:
    made: list[int] = []

    def pieces() -> Iterator[int]:
        for piece in range(5):
            made.append(piece)
            yield piece

    taken = ahead(pieces())
    assert [next(taken), next(taken)] == [0, 1]
    assert len(made) <= 3, "no more than one ahead"
    assert list(taken) == [2, 3, 4] and made == [0, 1, 2, 3, 4]


def test_an_error_comes_when_its_piece_would() -> None:
    def pieces() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    taken = ahead(pieces())
    assert next(taken) == 1
    with pytest.raises(ValueError, match="no more"):
        next(taken)


def test_what_was_begun_gives_its_result_or_its_error() -> None:
    assert begin(lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        begin(lambda: 1 // 0).result()
