"""Making one thing while another is used."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def begin(function: Callable[[], T]) -> Future[T]:
    """Calls it in a thread of its own."""
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(function)
    finally:
        thread.shutdown(wait=False)


def ahead(pieces: Iterator[T]) -> Iterator[T]:
    """The same pieces; a thread makes the next one while the caller is busy with this one."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, pieces, None)
        while (piece := following.result()) is not None:
            following = thread.submit(next, pieces, None)
            yield piece
