"""`AsyncLLM`: the same engine as `LLM`, for one asyncio event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from weakref import finalize

from enginewright.errors import EngineError
from enginewright.runtime.collector import Collector
from enginewright.runtime.core import EngineCore, Request
from enginewright.runtime.devices import open_engine
from enginewright.runtime.engine import Engine
from enginewright.runtime.engine_thread import EngineThread, close_all
from enginewright.runtime.envelope import Envelope, runtime_config
from enginewright.runtime.outputs import Delta, RequestOutput, merge
from enginewright.runtime.params import default_params
from enginewright.runtime.prompts import Prompt, encode_prompt, text_of
from enginewright.runtime.sampling import SamplingParams
from enginewright.runtime.stats import Stats


class AsyncLLM:
    """An engine with memory to run in, and a thread that runs it. Make it, and use it, where the event loop runs.

    Args:
        model: an engine file, or an open engine (which stays open).
        limits: fields of RuntimeConfig.

    Raises:
        UsageError, EngineError: as `LLM`.
    """

    def __init__(self, model: str | Path | Engine, **limits: Any) -> None:
        config = runtime_config(**limits)
        self._loop = asyncio.get_running_loop()
        owned: Engine | None = None
        if not isinstance(model, Engine):
            model = owned = open_engine(model, config.device)
        self.engine = model
        try:
            self._core = EngineCore(self.engine, config)
        except BaseException:
            close_all(None, owned)
            raise
        self._thread = EngineThread(self._core, partial(_post, self._loop))
        self._close = finalize(self, close_all, self._thread, owned)  # also when it is dropped, and at exit
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._request_ids = count()

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    @property
    def envelope(self) -> Envelope:
        """Limits and memory."""
        return self._core.executor.envelope

    @property
    def isa(self) -> str:
        """The instruction set that it runs on: "amx", "avx512", …"""
        return self._core.executor.isa

    @property
    def threads(self) -> int:
        return self._core.executor.threads

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in any form, made in a thread of its own.

        Raises:
            UsageError: it is none of the forms that a prompt may have.
        """
        encode = partial(encode_prompt, prompt, self.engine.tokenizer, self.max_model_len)
        return await self._loop.run_in_executor(self._encoder, encode)

    def submit(self, prompt: list[int], params: SamplingParams, *, cache_salt: str = "") -> "AsyncRequest":
        """Ask for an answer.

        Raises:
            UsageError: prompt or parameters ask for what cannot be done.
            EngineDeadError: the engine has failed or is closed.
        """
        asked = AsyncRequest(params.n, self._thread.abort)
        asked.request = self._core.request(prompt, params, asked, cache_salt)
        self._thread.submit(asked.request)
        return asked

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """The answer so far, each time that it has grown, as vLLM's AsyncLLM gives it. Left early, it is aborted."""
        params = sampling_params or default_params(self.engine)
        ids = await self.encode(prompt)
        asked = self.submit(ids, params, cache_salt=cache_salt)
        name = request_id or str(next(self._request_ids))
        collector = Collector(name, text_of(prompt), ids, asked.request, self.engine.tokenizer)
        try:
            async for deltas in asked:
                for delta in deltas:
                    collector.add(delta)
                yield collector.output()
        finally:
            asked.abort()

    def stats(self) -> Stats:
        return self._thread.stats()

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self._thread.is_alive

    async def close(self) -> None:
        """Abort what runs, and give the memory back."""
        self._encoder.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._close)
        await asyncio.sleep(0)  # what the thread said last is delivered


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    if not loop.is_closed():  # else nobody is left to hear it
        loop.call_soon_threadsafe(call, *arguments)


class AsyncRequest:
    """An answer as it is written: an iterator of what came since the last look, one delta a choice at most.

    It ends when every choice has had its finish_reason.
    """

    request: Request

    def __init__(self, num_choices: int, abort: Callable[[Request], None]) -> None:
        self._left = num_choices
        self._abort = abort
        self._new: list[Delta] = []
        self._error: EngineError | None = None
        self._some = asyncio.Event()

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; known from the first delta on."""
        return self.request.num_cached_tokens

    def abort(self) -> None:
        """End it now; what has ended stays as it is. Its last deltas say "abort"."""
        if not self.request.finished:
            self._abort(self.request)

    def put(self, delta: Delta) -> None:
        self._new.append(delta)
        self._some.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._some.set()

    def __aiter__(self) -> "AsyncRequest":
        return self

    async def __anext__(self) -> list[Delta]:
        """Raises EngineDeadError if nothing more will come."""
        if self._left == 0:
            raise StopAsyncIteration
        await self._some.wait()
        if not self._new and self._error is not None:
            raise self._error
        deltas, self._new = merge(self._new), []
        if self._error is None:
            self._some.clear()
        self._left -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas
