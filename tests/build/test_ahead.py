"""Making pieces ahead of their use: the same pieces, and the same errors."""

import time
from functools import partial

import pytest
import torch

from enginewright.builder.ahead import begin, in_order


@pytest.mark.parametrize("threads", [1, 3])
def test_tasks_are_done_ahead_and_come_in_order(threads: int) -> None:
    begun: list[int] = []

    def task(number: int) -> int:
        begun.append(number)
        time.sleep(0.01 * (number % 3))  # later ones may be ready first
        assert torch.get_num_threads() == 1
        return number

    taken = in_order((partial(task, number) for number in range(9)), threads)
    assert [next(taken), next(taken)] == [0, 1]
    assert len(begun) <= 2 + threads, "no more than one ahead for each thread"
    assert list(taken) == [2, 3, 4, 5, 6, 7, 8] and sorted(begun) == list(range(9))


def test_an_error_comes_when_its_piece_would() -> None:
    def fail() -> int:
        raise ValueError("no more")

    taken = in_order([lambda: 1, fail, lambda: 2], 2)
    assert next(taken) == 1
    with pytest.raises(ValueError, match="no more"):
        next(taken)


def test_what_was_begun_gives_its_result_or_its_error() -> None:
    assert begin(lambda: 7).result() == 7
    with pytest.raises(ZeroDivisionError):
        begin(lambda: 1 // 0).result()
