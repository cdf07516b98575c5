"""A light client as a worker process: python http_client.py URL MODEL plain|stream

Asks a server's /v1/completions for all prompts at once. It knows how many tokens came (the server's `usage`), not
which: each is given as 0.
"""

import asyncio
import json
import sys
from typing import Any

import aiohttp
from exchange import Prompts, Tokens, private_stdout, serve


async def _plain(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with session.post(url, json=body) as response:
        text = await response.text()
        if response.status != 200:
            raise SystemExit(f"{response.status}: {text}")
        return int(json.loads(text)["usage"]["completion_tokens"])


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{response.status}: {await response.text()}")
        before = last = b""
        async for line in response.content:  # one event and an empty line after it, each
            if line.startswith(b"data:"):
                before, last = last, line
        if last.strip() != b"data: [DONE]":
            raise SystemExit(f"the stream ended with {last!r}")
        return int(json.loads(before.removeprefix(b"data:"))["usage"]["completion_tokens"])


class HttpClient:
    def __init__(self, url: str, model: str, kind: str) -> None:
        self.url, self.model, self.ask = f"{url}/v1/completions", model, {"plain": _plain, "stream": _stream}[kind]

    def generate(self, prompts: Prompts, tokens: int) -> Tokens:
        return asyncio.run(self._generate(prompts, tokens))

    async def _generate(self, prompts: Prompts, tokens: int) -> Tokens:
        common = {"model": self.model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            requests = [self.ask(session, self.url, {**common, "prompt": ids}) for ids in prompts]
            return [[0] * count for count in await asyncio.gather(*requests)]


def main() -> None:
    url, model, kind = sys.argv[1:4]
    answers = private_stdout()
    serve(answers, {"client": f"aiohttp {aiohttp.__version__}"}, HttpClient(url, model, kind))


if __name__ == "__main__":
    main()
