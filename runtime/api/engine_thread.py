"""A thread that steps an engine: requests arrive through a queue, and deltas go to their output sinks."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from enginewright.errors import EngineDeadError, EngineError
from enginewright.runtime.core.embedding_core import EmbeddingCore, TextRequest
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.core.request import Request
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.engine import Engine

logger = logging.getLogger(__name__)

AnyRequest = Request | TextRequest
StepDeltas = Sequence[tuple[AnyRequest, Delta]]  # deltas of one step of the core


class EngineThread:
    """Steps a core as long as there is work, and sleeps otherwise.

    Only this object refers to the core permanently, so that `close` frees all of its memory, even if requests still
    exist.

    Args:
        core: the core, which only this thread may step. It is closed with the thread, or if that cannot start.
        post: passes a call to the readers' thread: `loop.call_soon_threadsafe`, or None to call them from the engine's
            thread. There is one call per step, for all requests together.
    """

    def __init__(self, core: EngineCore | EmbeddingCore, post: Callable[..., object] | None = None) -> None:
        self._core: Any = core  # EngineCore or EmbeddingCore; None once it is closed
        self._last_stats = Stats()  # statistics at the end
        self._post = post
        self._inbox: SimpleQueue[tuple[Callable[[AnyRequest], None], AnyRequest] | None] = (
            SimpleQueue()
        )  # None ends the thread
        self._open: set[AnyRequest] = set()
        self._lock = threading.Lock()  # orders the end of the thread and requests that arrive at the same time
        self.error: EngineDeadError | None = None
        self._failure: EngineError | None = None  # error that something outside of a step has caused
        self._step_began: float | None = None  # time.monotonic at the start of the running step; None between steps
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        try:
            core.executor.watch(self._fail)
            self._thread.start()
        except BaseException:
            core.close()
            raise

    @property
    def is_alive(self) -> bool:
        """True until the engine has failed or is closed."""
        return self.error is None

    def submit(self, request: AnyRequest) -> None:
        """Queues a request. Raises EngineDeadError if the thread has ended."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._inbox.put((self._add, request))

    def abort(self, request: AnyRequest) -> None:
        """Ends a request at any time, from any thread; ended choices stay as they are."""
        self._inbox.put((self._abort, request))

    @property
    def core(self) -> EngineCore | EmbeddingCore:
        """The core, for calls that any thread may make. Keep it no longer than for preparing a request.

        Raises:
            EngineDeadError: it is closed.
        """
        core: EngineCore | EmbeddingCore | None = self._core
        if core is None:
            raise EngineDeadError("the engine is closed")
        return core

    def stats(self) -> Stats:
        """Statistics of the core; requests still in the queue count as waiting."""
        core = self._core
        if core is None:
            return self._last_stats
        stats: Stats = core.stats()
        return replace(stats, num_waiting=stats.num_waiting + self._inbox.qsize())

    @property
    def step_s(self) -> float:
        """Seconds since the running step began; 0 without one."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Aborts open requests, ends the thread, and frees the core's memory. A second call does nothing."""
        with self._lock:
            self.error = self.error or EngineDeadError("the engine is closed")
            self._inbox.put(None)
        self._thread.join()
        with self._lock:
            if self._core is not None:
                self._core.close()
                self._last_stats = self._core.stats()
                self._core = None

    def _run(self) -> None:
        try:
            while True:
                while not self._inbox.empty() or not self._core.has_work:
                    message = self._inbox.get()
                    if message is None and self._failure is not None:
                        raise self._failure
                    if message is None:
                        for request in list(self._open):
                            self._abort(request)
                        return
                    act, request = message
                    act(request)
                self._step_began = time.monotonic()
                outputs = self._core.step()
                self._step_began = None
                self._send(outputs)
        except BaseException as error:
            if isinstance(error, EngineError):  # its message says enough without a traceback
                # As a text: a handler that keeps records would keep the error's frames, and with them the engine.
                logger.error("the engine's thread has ended: %s", str(error))
            else:
                logger.exception("the engine's thread has ended")
            self._die(EngineDeadError.of(error))

    def _fail(self, error: EngineError) -> None:
        """Ends the thread, also while it waits for requests. It may be called from any thread."""
        self._failure = error
        self._inbox.put(None)

    def _add(self, request: AnyRequest) -> None:
        self._open.add(request)
        self._core.add(request)

    def _abort(self, request: AnyRequest) -> None:
        self._send(self._core.abort(request))

    def _send(self, outputs: StepDeltas) -> None:
        if not outputs:
            return
        self._open.difference_update(request for request, delta in outputs if delta.finish_reason and request.finished)
        if self._post is None:
            _deliver(outputs)
        else:
            self._post(_deliver, outputs)

    def _die(self, error: EngineDeadError) -> None:
        self._step_began = None
        with self._lock:
            self.error = error
            while not self._inbox.empty():  # requests that arrived too late get the error, too
                message = self._inbox.get()
                if message is not None:
                    self._open.add(message[1])
        for request in self._open:
            if self._post is None:
                request.sink(error)
            else:
                self._post(request.sink, error)


def _deliver(outputs: StepDeltas) -> None:
    for request, delta in outputs:
        request.sink(delta)


def close_all(thread: EngineThread | None, engine: Engine | None) -> None:
    """Ends a thread, then closes the engine that it uses; either may be None."""
    if thread is not None:
        thread.close()
    if engine is not None:
        engine.close()
