"""One request to an OpenAI-compatible server, and the times at which its answer came.

It may share its cores with the server, so it does little: bodies are bytes before the run begins, a block of the
stream gets its time before anything else, and each event is decoded once, into the few fields that are needed.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from enginewright.errors import EngineError, UsageError
from enginewright_bench.figures import Failure, RequestRecord

MAX_EVENT_BYTES = 16 << 20
MAX_ERROR_BYTES = 4096
KEEP_ALIVE_S = 2.0  # shorter than servers' own, so that no request goes to a connection that is just being closed
FAILED = ("abort", "error")  # finish reasons of an answer that is not whole


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """text: of a completion. delta: of a chat."""

    text: str | None = None
    delta: _Message | None = None
    finish_reason: str | None = None

    @property
    def is_piece(self) -> bool:
        """Whether it may stand for a token. Some tokens have no text; what says the role or the end has none either."""
        if self.text or (self.delta and (self.delta.content or self.delta.reasoning or self.delta.reasoning_content)):
            return True
        return not self.finish_reason and (self.delta is None or self.delta.role is None)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Failed(Exception):
    """The answer is not whole: kind and detail of a Failure."""


class AnswerReader:
    """Server-sent events of one answer, in blocks as they come off the wire."""

    _decoder = msgspec.json.Decoder(_Event)

    def __init__(self, answer: RequestRecord) -> None:
        self._answer = answer
        self._rest = b""
        self._ended = False

    def feed(self, block: bytes, now: float) -> None:
        """Raises _Failed or msgspec.DecodeError for what is no part of an answer."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise _Failed("not an event stream", f"a line is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data and data != b"[DONE]":
                    self._take(self._decoder.decode(data), now)

    def close(self) -> None:
        """The stream is over. Raises _Failed if the answer is not."""
        if not self._ended:
            raise _Failed("answer cut short", f"the stream ended after {len(self._answer.piece_s)} pieces")
        if not self._answer.has_usage:
            self._answer.tokens = len(self._answer.piece_s)

    def _take(self, event: _Event, now: float) -> None:
        answer = self._answer
        if event.error is not None:
            raise _Failed("error in the stream", _message({"error": event.error}))
        if event.usage is not None:
            answer.prompt_tokens, answer.tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            answer.cached_tokens = (details.cached_tokens if details is not None else None) or 0
            answer.has_usage = True
        for choice in event.choices or ():
            ends = bool(choice.finish_reason)  # some servers say "" until it is there
            if choice.is_piece or (ends and not answer.piece_s):  # an answer without any text has its end for a piece
                answer.piece_s.append(now)
            if choice.finish_reason in FAILED:
                raise _Failed(f"finish_reason {choice.finish_reason}", f"after {len(answer.piece_s)} pieces")
            self._ended = self._ended or ends


class Client:
    """Talks to one server, and to nobody else: no proxy of the environment, no redirection.

    Args:
        base_url: http or https, with or without /v1 at its end.
        timeout_s: of one request.

    `start` is what time.perf_counter() said when the run began; times of answers count from there.

    Raises:
        UsageError: the address is none.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self._url = checked_url(base_url)
        headers = {"Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers=headers,
            trust_env=False,
        )
        self.start = time.perf_counter()

    def now(self) -> float:
        """Seconds since `start`."""
        return time.perf_counter() - self.start

    async def models(self) -> list[str]:
        """Names of the models that the server says it has.

        Raises:
            EngineError: it cannot be reached, or does not say.
        """
        url = f"{self._url}/v1/models"
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                body = await _read(response, MAX_EVENT_BYTES)
                if response.status != 200:
                    raise EngineError(f"{url} answers with HTTP {response.status}", _message(body), _hint(response))
                return [model.id for model in msgspec.json.decode(body, type=_Models).data]
        except msgspec.MsgspecError as error:
            raise EngineError(f"{url} is no list of models", str(error), "Name the model with --model.") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise unreachable(self._url, str(error) or "it did not answer in time") from error

    async def ask(self, path: str, body: bytes, answer: RequestRecord) -> None:
        """Send a request and note in `answer` what comes of it, failure included."""
        answer.sent_s = self.now()
        try:
            await self._stream(path, body, answer)
            answer.failure = None
        except _Failed as failed:
            answer.failure = Failure(*failed.args)
        except msgspec.MsgspecError as error:
            answer.failure = Failure("not the API's JSON", str(error))
        except TimeoutError:
            answer.failure = Failure("timeout", f"after {self.now() - answer.sent_s:.0f} s")
        except aiohttp.ClientConnectorError as error:
            answer.failure = Failure("cannot connect", str(error))
        except (aiohttp.ClientError, OSError) as error:
            answer.failure = Failure("connection dropped", str(error) or type(error).__name__)
        answer.end_s = self.now()

    async def _stream(self, path: str, body: bytes, answer: RequestRecord) -> None:
        async with self._session.post(self._url + path, data=body, allow_redirects=False) as response:
            if response.status != 200:
                raise _Failed(f"HTTP {response.status}", _message(await _read(response, MAX_ERROR_BYTES)))
            if response.content_type != "text/event-stream":
                raise _Failed("not an event stream", f"its type is {response.content_type}")
            reader = AnswerReader(answer)
            async for block in response.content.iter_any():
                reader.feed(block, self.now())
            reader.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def checked_url(url: str) -> str:
    """The address without /v1 at its end. Raises UsageError for what is none."""
    example = "Write for example --base-url http://127.0.0.1:8000."
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"--base-url {url} is no address", str(error), example) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"--base-url {url} is no address", "it must begin with http:// or https:// and a host", example
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError("--base-url has more than an address", "a key goes into --api-key", example)
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def unreachable(url: str, why: str) -> EngineError:
    return EngineError(f"{url} cannot be reached", why, "Start the server, or name its address with --base-url.")


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body, or as much of its beginning."""
    body = b""
    async for block in response.content.iter_any():
        body += block
        if len(body) >= limit_bytes:
            break
    return body[:limit_bytes]


def _hint(response: aiohttp.ClientResponse) -> str:
    return {
        401: "Give its key with --api-key.",
        403: "Give its key with --api-key.",
        404: "If it has no list of models, name one with --model.",
    }.get(response.status, "")


def _message(body: bytes | Mapping[str, Any]) -> str:
    """What an error says, in whichever of the usual forms."""
    found: Any = body
    if isinstance(body, bytes):
        try:
            found = msgspec.json.decode(body)
        except msgspec.MsgspecError:
            found = body.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(found, Mapping) and name in found:
            found = found[name]
    text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    return " ".join(text.split())[:300]
