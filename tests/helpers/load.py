"""Clients that keep a deployment busy, while a test ends and replaces its processes."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.helpers.serving import wait_until

CLIENTS = 6


class Load:
    """Clients that send one request after the other. outcomes: how many have ended how.

    Args:
        ask: sends the request of a number, and gives how it ended.
    """

    def __init__(self, ask: Callable[[int], str]) -> None:
        self._ask, self._ends, self._lock = ask, threading.Event(), threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self._number = 0

    def _run(self) -> None:
        while not self._ends.is_set():
            with self._lock:
                self._number += 1
                number = self._number
            outcome = self._ask(number)
            with self._lock:
                self.outcomes[outcome] += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(self._run) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self._ends.set()
        for one in running:
            one.result()

    def wait_for_more(self) -> None:
        """Waits until each client has had some answers."""
        before = self.outcomes.total()
        wait_until(lambda: self.outcomes.total() >= before + 4 * CLIENTS, 300)
