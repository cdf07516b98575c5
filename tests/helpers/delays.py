"""A plugin of pytest that delays threads and event loops at random, so that rare orders of events become common.

    python -m pytest -p tests.helpers.delays --delays 7 tests/server/test_life.py

Delays come where one thread hands over to another: queues, calls of an event loop from other threads, executors,
starts of threads, and each turn of an event loop. Callbacks of a loop keep their order, which asyncio promises. The
seed decides how long each delay is, but not which thread gets it, so that a failure may take several runs to return.
It must be loaded by -p, before any module takes SimpleQueue from queue.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

SHORT_S, SHARE_OF_SHORT = 0.002, 1 / 16  # most delays only let another thread go first
LONG_S, SHARE_OF_LONG = 0.1, 1 / 500  # as a busy machine holds a thread up

Queue = queue.SimpleQueue


class _Delays:
    """Random delays, none until it is given a seed."""

    def __init__(self) -> None:
        self.random: Random | None = None

    def wait(self) -> None:
        if self.random is None:
            return
        number = self.random.random()
        if number < SHARE_OF_LONG:
            time.sleep(LONG_S * self.random.random())
        elif number < SHARE_OF_LONG + SHARE_OF_SHORT:
            time.sleep(SHORT_S * self.random.random())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--delays", type=int, metavar="SEED", required=True, help="Delay threads and event loops.")


def pytest_configure(config: pytest.Config) -> None:
    _delays.random = Random(config.getoption("--delays"))


def _delay(owner: type, name: str, *, after: bool = False) -> None:
    """Delay the calls of a method, before it and perhaps after it."""
    method = getattr(owner, name)

    def delayed(*arguments: Any, **named: Any) -> Any:
        _delays.wait()
        result = method(*arguments, **named)
        if after:
            _delays.wait()
        return result

    setattr(owner, name, delayed)


class _DelayedQueue(Queue):  # type: ignore[type-arg]
    def put(self, *arguments: Any, **named: Any) -> None:
        _delays.wait()
        super().put(*arguments, **named)
        _delays.wait()

    def get(self, *arguments: Any, **named: Any) -> Any:
        item = super().get(*arguments, **named)
        _delays.wait()
        return item


def _delay_executors() -> None:
    submit = ThreadPoolExecutor.submit

    def delayed(
        executor: ThreadPoolExecutor, work: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> Future[Any]:
        def run() -> Any:
            _delays.wait()
            try:
                return work(*arguments, **named)
            finally:
                _delays.wait()

        return submit(executor, run)

    ThreadPoolExecutor.submit = delayed  # type: ignore[method-assign, assignment]


_delays = _Delays()
queue.SimpleQueue = _DelayedQueue  # type: ignore[misc]
_delay_executors()
_delay(asyncio.BaseEventLoop, "_run_once")
_delay(asyncio.BaseEventLoop, "call_soon_threadsafe", after=True)
_delay(threading.Thread, "run")
