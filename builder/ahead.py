"""Runs work in threads ahead of its use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def begin(function: Callable[[], T]) -> Future[T]:
    """Calls a function in a thread of its own."""
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(function)
    finally:
        thread.shutdown(wait=False)


def in_order(tasks: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """Yields the results of tasks, in their order.

    Threads compute the next results while the caller uses one; torch computes each task with one thread.

    Args:
        tasks: the tasks.
        threads: number of threads.
    """
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running: deque[Future[T]] = deque()
        for task in tasks:
            running.append(pool.submit(task))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
