"""Logs of a server: one line per request, throughput every ten seconds of work, warnings and tracebacks.

A line is an event with fields, as text or as JSON. From the client, lines of requests contain its X-Request-Id and
X-Session-Id, the requested path, and the names of unused keys of its body: no prompts, no answers, no API keys.
"""

import json
import logging
import os
import re
import threading
import time
from asyncio import TimerHandle, get_running_loop
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
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
from enginewright.runtime.core.request import Request
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.server.errors import ApiError, Headers
from enginewright.runtime.server.form import Choice
from enginewright.runtime.server.keys import UnusedKeys
from enginewright.runtime.server.wire import header

logger = logging.getLogger(__name__)

LogFields = dict[str, Any]  # values by name; None means unknown or not applicable

LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
FORMATS = ("text", "json")
STDERR = 2
INTERVAL_S = 10.0  # seconds between two lines about throughput
WINDOW_S = 10.0  # seconds in which MAX_LIKE_LINES similar lines are written, and further ones counted
MAX_LIKE_LINES = 20
MAX_QUEUED_LINES = 10_000  # lines kept while nobody reads stderr; further lines are lost, and counted
CLOSE_S = 1.0  # seconds to write the remaining lines at the end
MAX_PATH_CHARS = 100
CONTINUATION = "\n  "  # indents the further lines of a message, so that text at the margin always starts a log line
WARNING_HEADER = b"x-enginewright-warning"
REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,64}")
CLIENT_GONE = 499  # nginx's status for a client that disconnected; no client ever sees it
PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)  # values that need no quotes in a text line


def log_event(level: int, event: str, fields: LogFields, limited: str | None = None) -> None:
    """Logs a line of fields.

    Args:
        level: a level of the logging module.
        event: the name of the event, which determines the fields.
        fields: values by name.
        limited: what is counted for lines beyond MAX_LIKE_LINES; None means that all lines are written.
    """
    if logger.isEnabledFor(level):
        logger.log(level, "%s %s", event, fields, extra={"event": event, "fields": fields, "limited": limited})


class RequestLog:
    """The log line of one request, written once it has ended.

    Args:
        scope: the ASGI scope.
    """

    def __init__(self, scope: Scope) -> None:
        given = header(scope, b"x-request-id")
        self.client_id = given[0] if len(given) == 1 and REQUEST_ID.fullmatch(given[0]) else None
        self._session: str | None = None  # name of the client's session
        self.request_id: str | None = None  # id of the response
        self.model: str | None = None
        self._failure: tuple[int, str | None] | None = None  # status and code of the error that the client got
        self.is_gone = False  # True once the client has disconnected
        self._method, self._path = scope["method"], scope["path"]
        self.figures: LogFields | None = None  # None until the request has reached the engine
        self.params: SamplingParams | None = None  # sampling parameters of the answers
        self.unused: UnusedKeys | None = None  # unused keys of the body; None until it is read

    def named_session(self, session: str | None) -> None:
        """Records the name of the client's session, unless it is no id."""
        if session is not None and REQUEST_ID.fullmatch(session.encode("latin-1", "replace")):
            self._session = session

    def failed(self, error: ApiError) -> None:
        """Records the client's error. The exception is not kept: its traceback refers to this log."""
        self._failure = error.status, error.code

    def answered(
        self,
        requests: Sequence[Request],
        choices: Sequence[Sequence[Choice]],
        first_token_s: float | None,
        total_s: float,
    ) -> None:
        """Records what the engine computed for this request.

        Args:
            requests: one per prompt.
            choices: the completions of each prompt.
            first_token_s: seconds from the arrival of the HTTP request to the first token of any answer; None if there
                was none.
            total_s: seconds from the arrival to the end.
        """
        self.params = requests[0].params
        prompt_tokens = cached_tokens = output_tokens = 0
        queue_s: float | None = None  # the longest wait of a prompt
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
        """Records what the engine computed for the texts of this request.

        Args:
            prompt_tokens: the number of tokens of all texts.
            total_s: seconds from the arrival of the HTTP request to the end.
            finish_reason: "stop", "abort" or "error".
        """
        self.figures = {
            "model": self.model,
            "prompt_tokens": prompt_tokens,
            "total_s": round(total_s, 4),
            "tokens_per_s": round(prompt_tokens / total_s, 1),
            "finish_reasons": {finish_reason: 1},
        }

    def with_headers_in(self, send: Send) -> Send:
        """Wraps `send` to add the client's X-Request-Id and a warning about unused keys to the headers."""

        def with_headers(message: Message) -> Awaitable[None]:  # a plain function saves a coroutine per message
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
        """HTTP status of the response, or CLIENT_GONE."""
        return CLIENT_GONE if self.is_gone else 200 if self._failure is None else self._failure[0]

    @property
    def code(self) -> str | None:
        """Error code of the response; None without an error."""
        return "client_gone" if self.is_gone else None if self._failure is None else self._failure[1]

    def write(self) -> None:
        """Writes the line of the request.

        Its event is "request" if the request has reached the engine; otherwise "refused", "gone" (the client
        disconnected before that) or "http".
        """
        status, code = self.status, self.code
        # Requests that end because the server was stopped on purpose need no warning.
        level = logging.WARNING if status >= 500 and code != "server_shutdown" else logging.INFO
        fields: LogFields = {
            "request_id": self.request_id,
            "client_request_id": None if self.client_id is None else self.client_id.decode(),
            "session_id": self._session,
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
    """Logs the error of a client whose bytes are no HTTP request."""
    names = ("request_id", "client_request_id", "session_id", "status", "code", "method", "path")
    fields: LogFields = dict.fromkeys(names)
    log_event(logging.INFO, "refused", fields | {"status": error.status, "code": error.code}, limited=str(error.status))


class Throughput:
    """Logs the throughput every ten seconds as long as there is work; an idle server has no timer, and logs nothing.

    Args:
        stats: gives the engine's counters.
        live: the requests that have not ended. One that the engine has not received yet is work, too.
        interval_s: seconds between two lines.
    """

    def __init__(self, stats: Callable[[], Stats], live: Collection[object], interval_s: float = INTERVAL_S) -> None:
        self._stats, self._live, self._interval_s = stats, live, interval_s
        self._before, self._since = Stats(), 0.0
        self._timer: TimerHandle | None = None

    def begin(self) -> None:
        """Starts the timer, if it does not run. To be called in the event loop when there is work."""
        if self._timer is None and logger.isEnabledFor(logging.INFO):
            self._wait(self._stats())

    def end(self) -> None:
        """Stops the timer, since the engine is closed."""
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
        if stats.num_steps == before.num_steps and not self._live:
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
    """Writes all log records of this process to a file descriptor.

    Args:
        fd: the file descriptor.
        level: one of LEVELS; lines below it are left out.
        form: one of FORMATS.

    Yields:
        A function that writes a line at any level, for the server's address.
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
    level: str  # name of the level, one of LEVELS
    event: str  # name of the event; "log" is a message
    fields: LogFields  # values by name; "message" is a text for people, "traceback" has several lines
    is_announced: bool = False  # True for the person who started the server: a text line then has only its message

    @property
    def ts(self) -> str:
        """Time of the line in UTC, ISO 8601 with milliseconds."""
        return datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_json(line: Line) -> str:
    """Formats a line as JSON."""
    fields = {"ts": line.ts, "level": line.level, "event": line.event, **line.fields}
    return printable_json(msgspec.json.encode(fields).decode())


def as_text(line: Line) -> str:
    """Formats a line as text."""
    fields = dict(line.fields)
    message, traceback = fields.pop("message", None), fields.pop("traceback", None)
    if line.is_announced:
        return str(message)
    words = [line.ts, line.level, line.event if message is None else message]
    words += [f"{name}={_shown(value)}" for name, value in fields.items() if value is not None]
    text = " ".join(words) if traceback is None else f"{' '.join(words)}\n{traceback}"
    return printable_lines(text).replace("\n", CONTINUATION)


def _message(record: logging.LogRecord) -> LogFields:
    """Fields of a record that is no event. Names in it are escaped, so that they cannot start a line."""
    args = record.args
    if isinstance(args, tuple):
        args = tuple(printable(str(one)) if isinstance(one, str | Path) else one for one in args)
    message = logging.makeLogRecord(record.__dict__ | {"args": args}).getMessage()
    fields = {"message": message.strip(), "logger": record.name}
    if record.exc_info:
        fields["traceback"] = logging.Formatter().formatException(record.exc_info)
    return {name: printable_lines(text) for name, text in fields.items()}


def _shown(value: Any) -> str:
    """A value in a form that no client can use to imitate other fields."""
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) else json.dumps(value)
    if isinstance(value, dict):
        return ",".join(f"{key}:{number}" for key, number in value.items())
    return str(value)


class WriterSignal(Enum):
    """Messages to the writing thread, in its queue of lines."""

    WINDOW = auto()  # lines were suppressed, which is reported when the window ends
    END = auto()  # write what is left, and stop


class LineHandler(logging.Handler):
    """Formats and writes records in a thread of its own.

    Threads that log never wait for the reader of the log: neither the event loop, nor the engine's thread. Similar
    lines (refusals, warnings from one place in the code) are written MAX_LIKE_LINES times in a window, and then
    counted.

    Args:
        fd: the file descriptor to write to; it stays open.
        form: formats a line.
        window_s: seconds of a window.
    """

    def __init__(self, fd: int, form: Callable[[Line], str], window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._fd, self._form, self._window_s = fd, form, window_s
        self._lines: SimpleQueue[Line | WriterSignal] = SimpleQueue()
        self._mutex = threading.RLock()  # guards the attributes below
        self._num_lost = 0
        self._window_end = 0.0  # by time.monotonic
        self._seen: Counter[str] = Counter()  # number of lines in this window, by kind
        self._suppressed: Counter[tuple[str, str]] = Counter()  # number of suppressed lines, by (kind, what is counted)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def announce(self, message: str) -> None:
        """Writes a message for the person who started the server."""
        with self._mutex:
            fields = {"message": printable_lines(message)}
            self._put(Line(time.time(), "info", "ready", fields, is_announced=True))

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record, unless similar lines are suppressed."""
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
        """Writes what is left, unless nobody reads it."""
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
        if not self._suppressed:
            self._lines.put(WriterSignal.WINDOW)
        self._suppressed[kind, counted] += 1
        return False

    def _end_window(self) -> None:
        """Reports the suppressed lines."""
        for kind in {kind for kind, _ in self._suppressed}:
            counts = {counted: count for (other, counted), count in self._suppressed.items() if other == kind}
            fields = {"what": kind, "lines": sum(counts.values()), "counts": counts}
            self._put(Line(time.time(), "warning", "suppressed", fields))
        self._seen.clear()
        self._suppressed.clear()

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
                if self._suppressed and left_s <= 0:
                    self._end_window()
                timeout = left_s if self._suppressed else None
            try:
                line = self._lines.get(timeout=timeout)
            except Empty:
                line = WriterSignal.WINDOW

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # the reader is gone, or the disk is full: the server goes on
            with self._mutex:
                self._num_lost += 1
