"""What a server logs: one line per request, throughput every ten seconds of work, warnings and tracebacks.

A line is an event with fields, as text or as JSON. Of what a client sends, lines of requests have its X-Request-Id, the
path that it asks for, and the names of keys of its body that nothing uses: no prompts, no answers, no API keys.
"""

import json
import logging
import os
import re
import threading
import time
from asyncio import TimerHandle, get_running_loop
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
from starlette.types import Message, Scope, Send

from enginewright.printable import printable, printable_json, printable_lines
from enginewright.runtime.core.engine_core import Request
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.sampling.sampling import SamplingParams
from enginewright.runtime.server.errors import ApiError, Headers
from enginewright.runtime.server.form import Choice
from enginewright.runtime.server.keys import UnusedKeys
from enginewright.runtime.server.wire import header

logger = logging.getLogger(__name__)

Fields = dict[str, Any]  # by name; None: not known, or does not apply

LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
FORMATS = ("text", "json")
STDERR = 2
INTERVAL_S = 10.0  # from one line about throughput to the next
WINDOW_S = 10.0  # in which MAX_LIKE_LINES lines that are alike are written, and the others counted
MAX_LIKE_LINES = 20
MAX_QUEUED_LINES = 10_000  # while nobody reads stderr; then lines are lost, and counted
CLOSE_S = 1.0  # for the lines that are left, if nobody reads them
MAX_PATH_CHARS = 100
CONTINUATION = "\n  "  # of a text's further lines, so that what stands at the left is always a line of the log
WARNING_HEADER = b"x-enginewright-warning"
REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,64}")
CLIENT_GONE = 499  # as nginx has it; no client ever sees this status
PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)  # needs no quotes in a text line


def log_event(level: int, event: str, fields: Fields, limited: str | None = None) -> None:
    """Log a line of fields.

    Args:
        level: of the logging module.
        event: what the line is about; its fields depend on it alone.
        limited: what is counted of lines beyond MAX_LIKE_LINES; None: all of them are written.
    """
    if logger.isEnabledFor(level):
        logger.log(level, "%s %s", event, fields, extra={"event": event, "fields": fields, "limited": limited})


class RequestLog:
    """The line of one request, written once it has ended.

    Args:
        scope: of ASGI.
    """

    def __init__(self, scope: Scope) -> None:
        given = header(scope, b"x-request-id")
        self.client_id = given[0] if len(given) == 1 and REQUEST_ID.fullmatch(given[0]) else None
        self.request_id: str | None = None  # of the response
        self.model: str | None = None
        self._failure: tuple[int, str | None] | None = None  # status and code of the error that the client got
        self.is_gone = False  # the client
        self._method, self._path = scope["method"], scope["path"]
        self.figures: Fields | None = None  # None: the request has not reached the engine
        self.params: SamplingParams | None = None  # of its answers
        self.unused: UnusedKeys | None = None  # of its body; None: it has not been read

    def failed(self, error: ApiError) -> None:
        """Record the error that the client got. It is not kept: its traceback leads back to this log."""
        self._failure = error.status, error.code

    def answered(
        self,
        requests: Sequence[Request],
        choices: Sequence[Sequence[Choice]],
        first_token_s: float | None,
        total_s: float,
    ) -> None:
        """Record what the engine computed for this request.

        Args:
            requests: one per prompt.
            choices: of each of them.
            first_token_s: from the arrival of the HTTP request to the first token of any answer; None: none came.
            total_s: from there to the end.
        """
        self.params = requests[0].params
        prompt_tokens = cached_tokens = output_tokens = 0
        queue_s: float | None = None  # the longest
        finish_reasons: dict[str, int] = {}
        for request in requests:
            prompt_tokens += request.num_prompt_tokens
            cached_tokens += request.num_cached_tokens
            if (waited_s := request.queue_s) is not None:
                queue_s = waited_s if queue_s is None else max(queue_s, waited_s)
        for choice in chain.from_iterable(choices):
            output_tokens += choice.num_tokens
            reason = choice.finish_reason or "abort"
            finish_reasons[reason] = finish_reasons.get(reason, 0) + 1
        self.figures = {
            "model": self.model,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "output_tokens": output_tokens,
            "n": requests[0].params.n,
            "queue_s": None if queue_s is None else round(queue_s, 4),
            "first_token_s": None if first_token_s is None else round(first_token_s, 4),
            "total_s": round(total_s, 4),
            "tokens_per_s": round(output_tokens / total_s, 1),
            "finish_reasons": finish_reasons,
        }

    def embedded(self, prompt_tokens: int, total_s: float, finish_reason: str) -> None:
        """Record what the engine computed of the texts of this request; as `answered`."""
        self.figures = {
            "model": self.model,
            "prompt_tokens": prompt_tokens,
            "total_s": round(total_s, 4),
            "tokens_per_s": round(prompt_tokens / total_s, 1),
            "finish_reasons": {finish_reason: 1},
        }

    def returning(self, send: Send) -> Send:
        """`send`, with the client's X-Request-Id, and a warning of what is not used, among the response's headers."""

        def with_headers(message: Message) -> Awaitable[None]:  # no coroutine of its own: streams send many messages
            if message["type"] == "http.response.start" and (mine := self._headers()):
                message = {**message, "headers": [*message.get("headers", ()), *mine]}
            return send(message)

        return with_headers

    def _headers(self) -> Headers:
        mine = [] if self.client_id is None else [(b"x-request-id", self.client_id)]
        return mine if self._warning is None else [*mine, (WARNING_HEADER, self._warning.encode("ascii"))]

    @property
    def _warning(self) -> str | None:
        return None if self.unused is None else self.unused.warning

    @property
    def status(self) -> int:
        return CLIENT_GONE if self.is_gone else 200 if self._failure is None else self._failure[0]

    @property
    def code(self) -> str | None:
        return "client_gone" if self.is_gone else None if self._failure is None else self._failure[1]

    def write(self) -> None:
        """Write the line of the request.

        Its event is "request" if the request has reached the engine; otherwise "refused", "gone" (the client left
        before that) or "http".
        """
        status, code = self.status, self.code
        # Who ends a server on purpose need not be warned that its requests end, too.
        level = logging.WARNING if status >= 500 and code != "server_shutdown" else logging.INFO
        fields: Fields = {
            "request_id": self.request_id,
            "client_request_id": None if self.client_id is None else self.client_id.decode(),
            "status": status,
            "code": code,
        }
        if self._warning is not None:
            ids = {name: fields[name] for name in ("request_id", "client_request_id")}
            log_event(logging.INFO, "unused", ids | {"keys": self._warning}, limited="keys")
        if self.figures is not None:
            log_event(level, "request", fields | self.figures)
            return
        fields |= {"method": self._method, "path": self._path[:MAX_PATH_CHARS]}
        if status == 200:
            log_event(logging.DEBUG, "http", {name: fields[name] for name in ("client_request_id", "method", "path")})
        else:
            log_event(level, "gone" if self.is_gone else "refused", fields, limited=str(status))


def log_refused_bytes(error: ApiError) -> None:
    """Log that a client was refused whose bytes are no request, with what it heard."""
    fields: Fields = dict.fromkeys(("request_id", "client_request_id", "status", "code", "method", "path"))
    log_event(logging.INFO, "refused", fields | {"status": error.status, "code": error.code}, limited=str(error.status))


class Throughput:
    """A line every ten seconds as long as there is work; an idle server has no timer, and writes nothing.

    Args:
        stats: what the engine counts.
        interval_s: from one line to the next.
    """

    def __init__(self, stats: Callable[[], Stats], interval_s: float = INTERVAL_S) -> None:
        self._stats, self._interval_s = stats, interval_s
        self._before, self._since = Stats(), 0.0
        self._timer: TimerHandle | None = None

    def begin(self) -> None:
        """There is work. To be called in the event loop."""
        if self._timer is None and logger.isEnabledFor(logging.INFO):
            self._wait(self._stats())

    def end(self) -> None:
        """There is no engine any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, stats: Stats) -> None:
        self._before, self._since = stats, time.perf_counter()
        self._timer = get_running_loop().call_later(self._interval_s, self._write)

    def _write(self) -> None:
        before, stats, seconds = self._before, self._stats(), time.perf_counter() - self._since
        prompt_tokens = stats.prompt_tokens - before.prompt_tokens
        generated_tokens = stats.generated_tokens - before.generated_tokens
        if stats.num_steps == before.num_steps and not stats.num_running + stats.num_waiting:
            self._timer = None
            return
        hits = stats.cached_prompt_tokens - before.cached_prompt_tokens
        fields = {
            "prompt_tokens_per_s": round(prompt_tokens / seconds, 1),
            "generated_tokens_per_s": round(generated_tokens / seconds, 1),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_usage": round(stats.kv_usage, 3),
            "prefix_hit_rate": round(hits / prompt_tokens, 3) if prompt_tokens else None,
        }
        log_event(logging.INFO, "throughput", fields)
        self._wait(stats)


@contextmanager
def log_to(fd: int, level: str, form: str) -> Iterator[Callable[[str], None]]:
    """Write what is logged, by anybody in this process, to a file descriptor.

    Args:
        level: of LEVELS; lines below it are left out.
        form: of FORMATS.

    Yields:
        A function that writes a line whatever the level is: where the server is.
    """
    root, ours = logging.getLogger(), logging.getLogger("enginewright")
    before, handler = ours.level, LineHandler(fd, as_json if form == "json" else as_text)
    handler.setLevel(LEVELS[level])
    ours.setLevel(LEVELS[level])
    root.addHandler(handler)
    try:
        yield handler.announce
    finally:
        root.removeHandler(handler)
        ours.setLevel(before)
        handler.close()


@dataclass(frozen=True)
class Line:
    """A line of the log, before it is formatted."""

    at: float  # seconds since 1970
    level: str  # a name of LEVELS
    event: str  # "log" is a message
    fields: Fields  # "message" is a text for people, "traceback" has several lines
    is_announced: bool = False  # for who started the server: a text has nothing but its message

    @property
    def ts(self) -> str:
        return datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_json(line: Line) -> str:
    fields = {"ts": line.ts, "level": line.level, "event": line.event, **line.fields}
    return printable_json(msgspec.json.encode(fields).decode())


def as_text(line: Line) -> str:
    fields = dict(line.fields)
    message, traceback = fields.pop("message", None), fields.pop("traceback", None)
    if line.is_announced:
        return str(message)
    words = [line.ts, line.level, line.event if message is None else message]
    words += [f"{name}={_shown(value)}" for name, value in fields.items() if value is not None]
    text = " ".join(words) if traceback is None else f"{' '.join(words)}\n{traceback}"
    return printable_lines(text).replace("\n", CONTINUATION)


def _message(record: logging.LogRecord) -> Fields:
    """Fields of a record that is no event. Names in it are escaped, and have no line of their own."""
    args = record.args
    if isinstance(args, tuple):
        args = tuple(printable(str(one)) if isinstance(one, str | Path) else one for one in args)
    message = logging.makeLogRecord(record.__dict__ | {"args": args}).getMessage()
    fields = {"message": message.strip(), "logger": record.name}
    if record.exc_info:
        fields["traceback"] = logging.Formatter().formatException(record.exc_info)
    return {name: printable_lines(text) for name, text in fields.items()}


def _shown(value: Any) -> str:
    """A value that cannot be taken for anything else, whatever a client put into it."""
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) else json.dumps(value)
    if isinstance(value, dict):
        return ",".join(f"{key}:{number}" for key, number in value.items())
    return str(value)


class WriterSignal(Enum):
    """What the thread that writes takes from its queue beside lines."""

    WINDOW = auto()  # there is something to say when the window ends
    END = auto()


class LineHandler(logging.Handler):
    """Formats and writes records in a thread of its own.

    Whoever logs never waits for who reads: neither the event loop, nor the engine's thread. Lines that are alike
    (refusals, warnings from one place in the code) are written MAX_LIKE_LINES times in a window, and then counted.

    Args:
        fd: where lines go; it stays open.
    """

    def __init__(self, fd: int, form: Callable[[Line], str], window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._fd, self._form, self._window_s = fd, form, window_s
        self._lines: SimpleQueue[Line | WriterSignal] = SimpleQueue()
        self._mutex = threading.RLock()  # around what follows
        self._num_lost = 0
        self._window_end = 0.0  # by time.monotonic
        self._seen: Counter[str] = Counter()  # kind → lines in this window
        self._held: Counter[tuple[str, str]] = Counter()  # (kind, what is counted) → those that were not written
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def announce(self, message: str) -> None:
        """Write a message for who started the server."""
        with self._mutex:
            fields = {"message": printable_lines(message)}
            self._put(Line(time.time(), "info", "ready", fields, is_announced=True))

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        event: str = getattr(record, "event", "log")
        is_message = event == "log"
        kind = f"{record.name}:{record.lineno}" if is_message else event
        limited: str | None = level if is_message else record.__dict__["limited"]
        with self._mutex:
            if limited is None or self._passes(kind, limited):
                fields = _message(record) if is_message else record.__dict__["fields"]
                self._put(Line(record.created, level, event, fields))

    def close(self) -> None:
        """Write what is left, unless nobody reads it."""
        with self._mutex:
            self._end_window()
            self._lines.put(WriterSignal.END)
        self._thread.join(CLOSE_S)
        super().close()

    def _passes(self, kind: str, counted: str) -> bool:
        if time.monotonic() >= self._window_end:
            self._end_window()
            self._window_end = time.monotonic() + self._window_s
        self._seen[kind] += 1
        if self._seen[kind] <= MAX_LIKE_LINES:
            return True
        if not self._held:
            self._lines.put(WriterSignal.WINDOW)
        self._held[kind, counted] += 1
        return False

    def _end_window(self) -> None:
        """Say what was left out."""
        for kind in {kind for kind, _ in self._held}:
            counts = {counted: count for (other, counted), count in self._held.items() if other == kind}
            fields = {"what": kind, "lines": sum(counts.values()), "counts": counts}
            self._put(Line(time.time(), "warning", "suppressed", fields))
        self._seen.clear()
        self._held.clear()

    def _put(self, line: Line) -> None:
        if self._lines.qsize() >= MAX_QUEUED_LINES:
            self._num_lost += 1
            return
        if self._num_lost:
            lost, self._num_lost = self._num_lost, 0
            self._lines.put(Line(line.at, "warning", "lost", {"lines": lost}))
        self._lines.put(line)

    def _run(self) -> None:
        line: Line | WriterSignal = WriterSignal.WINDOW
        while line is not WriterSignal.END:
            if isinstance(line, Line):
                self._write(f"{self._form(line)}\n".encode())
            with self._mutex:
                left_s = self._window_end - time.monotonic()
                if self._held and left_s <= 0:
                    self._end_window()
                timeout = left_s if self._held else None
            try:
                line = self._lines.get(timeout=timeout)
            except Empty:
                line = WriterSignal.WINDOW

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # who read it is gone, or the disk is full: the server goes on
            with self._mutex:
                self._num_lost += 1
