"""One request to an OpenAI-compatible server, and the times at which its completion arrived.

The client may share its cores with the server, so it does little work: bodies are bytes before the run begins, a block
of the stream gets its time before anything else, and each event is decoded once, into the few fields that are needed.
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

MAX_EVENT_BYTES = 16 << 20  # limit of a line of the stream
MAX_ERROR_BYTES = 4096  # limit of an error's body
KEEP_ALIVE_S = 2.0  # shorter than servers' own, so that no request uses a connection that is just being closed
FAILED = ("abort", "error")  # finish reasons of an incomplete completion


class _Message(msgspec.Struct):
    """A message, or a part of one."""

    role: str | None = None  # role of the sender
    content: str | None = None  # text
    reasoning: str | None = None  # text of the reasoning, as some servers name it
    reasoning_content: str | None = None  # text of the reasoning, as other servers name it


class _Choice(msgspec.Struct):
    """A choice of an event."""

    text: str | None = None  # text, of a completion
    delta: _Message | None = None  # part of a message, of a chat
    finish_reason: str | None = None  # reason of the end, in the last event

    @property
    def is_piece(self) -> bool:
        """True if it may be a token. Some tokens have no text; events with the role or the end alone are no tokens."""
        if self.text or (self.delta and (self.delta.content or self.delta.reasoning or self.delta.reasoning_content)):
            return True
        return not self.finish_reason and (self.delta is None or self.delta.role is None)


class _Details(msgspec.Struct):
    """Details of the usage."""

    cached_tokens: int | None = None  # prompt tokens that the prefix cache had


class _Usage(msgspec.Struct):
    """Numbers of tokens, as the server counts them."""

    prompt_tokens: int = 0  # tokens of the prompt
    completion_tokens: int = 0  # generated tokens
    prompt_tokens_details: _Details | None = None  # details, if the server has them


class _Event(msgspec.Struct):
    """An event of the stream."""

    choices: list[_Choice] | None = None  # parts of the completion
    usage: _Usage | None = None  # numbers of tokens, in the last event
    error: Any = None  # error of the server


class _Failed(Exception):
    """The completion is incomplete: kind and detail of a Failure."""


class AnswerReader:
    """Reader of one completion's server-sent events, in blocks as they come from the network."""

    _decoder = msgspec.json.Decoder(_Event)

    def __init__(self, answer: RequestRecord) -> None:
        self._answer = answer
        self._rest = b""
        self._ended = False

    def feed(self, block: bytes, now: float) -> None:
        """Reads a block.

        Args:
            block: bytes of the stream.
            now: time of their arrival, in seconds.

        Raises:
            _Failed: the server reports an error, or the stream is not one of events.
            msgspec.DecodeError: an event is not valid JSON.
        """
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise _Failed("not an event stream", f"a line is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data and data != b"[DONE]":
                    self._read_event(self._decoder.decode(data), now)

    def close(self) -> None:
        """Ends the reading. Raises _Failed if the completion has not ended."""
        if not self._ended:
            raise _Failed("answer cut short", f"the stream ended after {len(self._answer.piece_s)} pieces")
        if not self._answer.has_usage:
            self._answer.tokens = len(self._answer.piece_s)

    def _read_event(self, event: _Event, now: float) -> None:
        answer = self._answer
        if event.error is not None:
            raise _Failed("error in the stream", _message({"error": event.error}))
        if event.usage is not None:
            answer.prompt_tokens, answer.tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            answer.cached_tokens = (details.cached_tokens if details is not None else None) or 0
            answer.has_usage = True
        for choice in event.choices or ():
            ends = bool(choice.finish_reason)  # some servers send "" before the end
            if choice.is_piece or (ends and not answer.piece_s):  # a completion without text counts its end as a piece
                answer.piece_s.append(now)
            if choice.finish_reason in FAILED:
                raise _Failed(f"finish_reason {choice.finish_reason}", f"after {len(answer.piece_s)} pieces")
            self._ended = self._ended or ends


class Client:
    """A connection to one server: no proxy of the environment, no redirection.

    Attributes:
        start: time.perf_counter() at the begin of the run; times of completions count from there.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """Prepares a session.

        Args:
            base_url: http or https, with or without /v1 at its end.
            api_key: key of the server; None sends none.
            timeout_s: limit of one request, in seconds.

        Raises:
            UsageError: the address is not valid.
        """
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
        """Lists the names of the server's models.

        Raises:
            EngineError: it cannot be reached, or has no list.
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

    async def send(self, path: str, body: bytes, answer: RequestRecord) -> None:
        """Sends a request and records its result, or its failure.

        Args:
            path: path of the endpoint.
            body: body of the request.
            answer: record to fill.
        """
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
    """A model of the server."""

    id: str  # name


class _Models(msgspec.Struct):
    """The server's list of models."""

    data: list[_Model]  # models


def checked_url(url: str) -> str:
    """Checks an address, and removes /v1 at its end. Raises UsageError if it is not valid."""
    example = "Write for example --base-url http://127.0.0.1:8000."
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"--base-url {url} is not an address", str(error), example) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"--base-url {url} is not an address", "it must begin with http:// or https:// and a host", example
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError("--base-url is more than an address", "a key goes into --api-key", example)
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def unreachable(url: str, why: str) -> EngineError:
    """Makes the error for a server that cannot be reached.

    Args:
        url: address of the server.
        why: the reason.
    """
    return EngineError(f"{url} cannot be reached", why, "Start the server, or name its address with --base-url.")


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Reads a body up to a limit."""
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
    """Returns the text of an error, in any of the usual forms."""
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
