"""A small server of OpenAI's API in a thread of its own: it gives scripted answers, and counts the requests."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}, {"id": "other", "object": "model"}]}


@dataclass(frozen=True)
class Say:
    """The scripted answer to one request.

    tokens: number of tokens; None is the number that the request wants. first_s, gap_s: pauses in seconds before the
    first and between tokens. fails: error that is sent as an event after the tokens. drop_after: number of tokens after
    which the connection is reset; cut_after: number after which the stream ends in good order, without a finish_reason.
    together: tokens in one write. until_together: number of requests that have to arrive before the first token.
    """

    status: int = 200
    body: Any = None
    headers: tuple[str, ...] = ()
    content_type: str = "text/event-stream"
    tokens: int | None = None
    first_s: float = 0.0
    gap_s: float = 0.0
    usage: bool = True
    cached_tokens: int | None = None
    finish_reason: str = "length"
    fails: Any = None
    drop_after: int | None = None
    cut_after: int | None = None
    together: int = 1
    until_together: int = 0


@dataclass
class Seen:
    """A request that the server has received. headers: by names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any] = field(default_factory=dict)


class BenchServer:
    """The server. answer: gives the answer to a request by its number, from 0, and its body."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Say] = lambda number, body: Say()) -> None:
        self._answer = answer
        self.seen: list[Seen] = []
        self.in_flight = self.max_in_flight = 0
        self.models: Say = Say(body=MODELS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench server")

    @property
    def asked(self) -> list[Seen]:
        """The requests for completions so far."""
        return [seen for seen in self.seen if seen.method == "POST"]

    def __enter__(self) -> "BenchServer":
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> asyncio.Server:
        self._changed = asyncio.Condition()
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *fields = head.decode().strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in fields)}
                seen = Seen(*line.split()[:2], headers=headers)
                seen.body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
                self.seen.append(seen)
                if seen.method == "GET":
                    await self._plain(writer, self.models)
                else:
                    await self._generate(writer, self._answer(len(self.asked) - 1, seen.body), seen)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left, or was dropped
        finally:
            writer.close()

    async def _generate(self, writer: asyncio.StreamWriter, say: Say, seen: Seen) -> None:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.max_in_flight >= say.until_together)
        try:
            if say.status != 200 or say.content_type != "text/event-stream":
                await self._plain(writer, say)
            else:
                await self._stream(writer, say, seen)
        finally:
            self.in_flight -= 1

    async def _plain(self, writer: asyncio.StreamWriter, say: Say) -> None:
        body = say.body.encode() if isinstance(say.body, str) else json.dumps(say.body).encode()
        head = [f"HTTP/1.1 {say.status} Whatever", f"Content-Length: {len(body)}", "Content-Type: application/json"]
        writer.write("\r\n".join([*head, *say.headers, "", ""]).encode() + body)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, say: Say, seen: Seen) -> None:
        head = ["HTTP/1.1 200 OK", f"Content-Type: {say.content_type}; charset=utf-8", "Transfer-Encoding: chunked"]
        writer.write("\r\n".join([*head, "", ""]).encode())
        chat = seen.path.endswith("/chat/completions")
        count = seen.body["max_tokens"] if say.tokens is None else say.tokens
        if chat:
            _chunk(writer, _event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}))
        _chunk(writer, b": a comment\n\n")
        await writer.drain()
        await asyncio.sleep(say.first_s)
        waiting = b""
        for number in range(count):
            if number == say.drop_after:
                await writer.drain()
                writer.transport.abort()
                raise ConnectionResetError
            if number == say.cut_after:
                break
            if number and say.gap_s:
                await asyncio.sleep(say.gap_s)
            reason = say.finish_reason if number == count - 1 and not chat else None
            piece = {"delta": {"content": "x "}} if chat else {"text": "x "}
            waiting += _event({**piece, "index": 0, "finish_reason": reason})
            if (number + 1) % say.together == 0 or number == count - 1:
                _chunk(writer, waiting)
                waiting = b""
                await writer.drain()
        if say.fails is not None:
            _chunk(writer, b"data: " + json.dumps({"error": say.fails}).encode() + b"\n\n")
        elif say.cut_after is None:
            if chat:
                _chunk(writer, _event({"delta": {}, "finish_reason": say.finish_reason}))
            if say.usage:
                _chunk(writer, self._usage(say, seen, count))
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    def _usage(say: Say, seen: Seen, count: int) -> bytes:
        prompt = seen.body.get("prompt", seen.body.get("messages"))
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": count}
        if say.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": say.cached_tokens}
        return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\r\n\r\n"


def _event(choice: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
