"""`AsyncLLM`: the engine of `LLM` for one asyncio event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from weakref import finalize

from enginewright.adapter_file import AdapterFile
from enginewright.errors import EngineError, UsageError, shorten
from enginewright.runtime.api.collector import Collector
from enginewright.runtime.api.embeddings import Vector, not_finite
from enginewright.runtime.api.engine_thread import EngineThread, close_all
from enginewright.runtime.api.vllm_options import check_call_options, runtime_config
from enginewright.runtime.cache.eviction import NOT_RETAINED, Retention
from enginewright.runtime.cache.store import ReadEntries
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.embedding_core import EmbeddingCore, TextTokens, open_core
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.engine_kind import refuse_answers
from enginewright.runtime.core.outputs import Delta, RequestOutput, merge
from enginewright.runtime.core.params import params_of
from enginewright.runtime.core.prompts import Prompt, encode_prompt, salt_of, text_of
from enginewright.runtime.core.request import Request
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import RequestOutputKind, SamplingParams
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.sampling.token_mask import Grammar
from enginewright.runtime.step.work_class import DEFAULT_WORK, WorkClass

T = TypeVar("T")
Structure = Callable[[Sequence[int]], StructuredOutputsParams | None]


class AsyncEngineArgs:
    """Arguments of an AsyncLLM as attributes, for scripts that collect them first; the AsyncLLM checks them.

    Args:
        model: an engine file, or an open engine.
        limits: further arguments of AsyncLLM.
    """

    def __init__(self, model: str | Path | Engine, **limits: Any) -> None:
        vars(self).update(limits, model=model)


ENCODERS = 2  # threads that encode prompts, so that a long one does not delay the next


class AsyncLLM:
    """An open engine, and a thread that runs it. Create and use it where the event loop runs.

    Args:
        model: an engine file, or an open engine (which stays open).
        limits: fields of RuntimeConfig, and options of vLLM that have no effect here.

    Raises:
        UsageError, EngineError: as `LLM`.
    """

    def __init__(self, model: str | Path | Engine, **limits: Any) -> None:
        config = runtime_config(**limits)
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError as error:
            fix = "Make it in a coroutine, under asyncio.run, or use LLM."
            raise UsageError("an AsyncLLM needs an event loop that runs", fix=fix) from error
        owned: Engine | None = None
        if not isinstance(model, Engine):
            model = owned = open_engine(model, config.device)
        try:
            self._begin(open_core(model, config), owned)
        except BaseException:
            close_all(None, owned)
            raise

    def _begin(self, core: EngineCore | EmbeddingCore, owned: Engine | None) -> None:
        """Starts the thread; `owned` is an engine that is closed with it."""
        self.engine, self.max_model_len = core.engine, core.max_model_len
        self.max_loras = core.max_loras
        executor = core.executor
        self.memory_plan, self.isa, self.threads = executor.memory_plan, executor.isa, executor.threads
        self._thread = EngineThread(core, partial(_post, self._loop))
        self._close = finalize(self, close_all, self._thread, owned)  # also when it is garbage-collected, and at exit
        self._encoder = ThreadPoolExecutor(ENCODERS, thread_name_prefix="tokenizer")
        self._request_ids = count()

    @classmethod
    async def open(cls, engine: Engine, config: RuntimeConfig) -> "AsyncLLM":
        """Opens an AsyncLLM without blocking the event loop. The engine is closed with it.

        Args:
            engine: the open engine.
            config: its limits.

        Raises:
            EngineError: the engine, which stays open then, does not fit.
        """
        llm = cls.__new__(cls)
        llm._loop = asyncio.get_running_loop()
        llm._begin(await asyncio.to_thread(open_core, engine, config), engine)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> "AsyncLLM":
        """Creates an AsyncLLM from arguments that were collected before."""
        if not isinstance(engine_args, AsyncEngineArgs):
            raise UsageError(f"engine_args is {shorten(engine_args)}", "it must be an AsyncEngineArgs")
        return cls(**vars(engine_args))

    @property
    def _core(self) -> EngineCore | EmbeddingCore:
        return self._thread.core

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Converts a prompt in any form to token ids, in a thread of its own.

        Args:
            prompt: the prompt.
            add_special_tokens: whether to start a text with the tokens that the model was trained with.

        Raises:
            UsageError: the prompt has none of the accepted forms.
            EngineDeadError: the engine has failed or is closed.
        """
        return await self.in_tokenizer(partial(self._encode, prompt, add_special_tokens))

    def _encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        tokenizer, max_tokens = self.engine.tokenizer, self.max_model_len
        return encode_prompt(prompt, tokenizer, max_tokens, add_special_tokens=add_special_tokens)

    async def in_tokenizer(self, work: Callable[[], T]) -> T:
        """Runs a function that tokenizes in a thread of its own, and returns its result.

        Raises:
            EngineDeadError: the engine has failed or is closed.
        """
        if self._thread.error is not None:
            raise self._thread.error
        return await self._loop.run_in_executor(self._encoder, work)

    async def rows(self, texts: Sequence[TextTokens], work: WorkClass = DEFAULT_WORK) -> list[Vector]:
        """Computes the rows of an embedding model for texts; if the caller is cancelled, they are aborted.

        Args:
            texts: the texts as tokens.
            work: priority and tenant.

        Returns:
            A vector or score per text, in their order.

        Raises:
            UsageError: the engine does not take a text.
            EngineError: the model's numbers are not finite, or the engine has failed.
        """
        core, ends = self._core, [self._loop.create_future() for _ in texts]
        assert isinstance(core, EmbeddingCore)
        requests = [core.text(text, partial(_settle, end), work) for text, end in zip(texts, ends, strict=True)]
        del core  # a waiting request must not keep it alive
        try:
            for request in requests:
                self._thread.submit(request)
            await asyncio.gather(*ends)
        finally:
            for request in requests:
                if not request.finished:
                    self._thread.abort(request)
        return [request.vector for request in requests if request.vector is not None]

    async def decode(self, token_ids: list[int]) -> str:
        """Converts token ids to text, special tokens included, in a thread of its own."""
        work = partial(self.engine.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self._loop.run_in_executor(self._encoder, work)

    async def decode_each(self, token_ids: list[int]) -> list[str]:
        """Converts each token id to a text by itself, in a thread of its own."""
        decode = partial(self.engine.tokenizer.decode, skip_special_tokens=False)
        return await self._loop.run_in_executor(self._encoder, lambda: list(map(decode, token_ids)))

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str = "",
        work: WorkClass = DEFAULT_WORK,
        retention: Retention = NOT_RETAINED,
        structure: Structure | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        adapter: Path | None = None,
    ) -> "AsyncRequest":
        """Prepares a request for `start`: encodes its prompt, and compiles its grammar, in other threads.

        Args:
            prompt: the prompt.
            params: its sampling parameters.
            cache_salt: prompts with different salts share no cache blocks.
            work: priority and tenant.
            retention: hint for what the request leaves in the prefix cache.
            structure: gives the structure of the answers from the prompt's token ids; None leaves it to params.
            kv_transfer_params: vLLM's: leases the prompt's KV blocks to another server (`do_remote_decode`), or fetches
                them from one (`do_remote_prefill`). If that fails, the prompt is computed.
            adapter: file of the adapter that the request is computed with; None: the engine's own weights.

        Raises:
            UsageError: prompt or parameters are not valid, or the adapter does not fit the engine.
            EngineDeadError: the engine has failed or is closed.
        """
        token_ids, params = await self.in_tokenizer(partial(self._encode_for, prompt, params, structure))
        grammars: Sequence[Grammar] = ()
        if params.structured_outputs is not None:  # compiling may take long, and delays no other request
            assert isinstance(self._core, EngineCore), "engines of other kinds are refused in _encode_for"
            await asyncio.wrap_future(self._core.compile(params.structured_outputs))
            grammars = self._core.walks(params)
        transfer = kv_transfer_params or {}
        fetched = None
        if transfer.get("do_remote_prefill"):
            fetched = await asyncio.wrap_future(self._fetch(token_ids, cache_salt, transfer))
        leases = bool(transfer.get("do_remote_decode"))
        return await self.in_tokenizer(
            partial(
                self._prepare,
                token_ids,
                params,
                cache_salt,
                work,
                retention,
                grammars,
                fetched,
                leases_prompt=leases,
                adapter=adapter,
            )
        )

    def _fetch(self, token_ids: list[int], cache_salt: str, params: dict[str, Any]) -> "Future[ReadEntries]":
        """Begins to fetch the KV blocks of a prompt from another server."""
        assert isinstance(self._core, EngineCore), "engines of other kinds are refused in _encode_for"
        transfer = self._core.transfer
        if transfer is None or not transfer.fetches_prompts:
            raise UsageError("kv_transfer_params name blocks to fetch", "this server's --kv-role is not decode or both")
        return transfer.fetch(token_ids, cache_salt, params)

    def _encode_for(
        self, prompt: Prompt, params: SamplingParams, structure: Structure | None
    ) -> tuple[list[int], SamplingParams]:
        """Token ids of a prompt, and parameters with the structure of its answers."""
        refuse_answers(self.engine)
        token_ids = self._encode(prompt)
        if structure is not None and (wanted := structure(token_ids)) is not None:
            params = replace(params, structured_outputs=wanted)
        return token_ids, params

    def _prepare(
        self,
        token_ids: list[int],
        params: SamplingParams,
        cache_salt: str,
        work: WorkClass,
        retention: Retention = NOT_RETAINED,
        grammars: Sequence[Grammar] = (),
        fetched: ReadEntries | None = None,
        *,
        leases_prompt: bool = False,
        adapter: Path | None = None,
    ) -> "AsyncRequest":
        buffer = _DeltaBuffer()
        assert isinstance(self._core, EngineCore), "engines of other kinds are refused in _encode_for"
        opened = None if adapter is None else self.open_adapter(adapter)
        request = self._core.request(
            token_ids,
            params,
            buffer.put,
            cache_salt,
            grammars,
            work,
            retention=retention,
            fetched=fetched,
            leases_prompt=leases_prompt,
            adapter=opened,
        )
        return AsyncRequest(token_ids, request, buffer, self._thread.abort)

    def open_adapter(self, path: Path) -> AdapterFile:
        """Opens the adapter of a file ahead of requests, or checks that it is open; it may be called in any thread.

        Raises:
            UsageError: there is no such file, or the adapter does not fit the engine or its limits.
            EngineError: the file cannot be read.
        """
        if not isinstance(self._core, EngineCore):
            raise UsageError(f"the adapter {path.name} cannot be used", "the engine generates no text")
        return self._core.open_adapter(path)

    def start(self, prepared: "AsyncRequest") -> None:
        """Starts a prepared request.

        Raises:
            EngineDeadError: the engine has failed or is closed.
        """
        self._thread.submit(prepared.request)

    def submit(
        self, prompt: list[int], params: SamplingParams, *, cache_salt: str = "", work: WorkClass = DEFAULT_WORK
    ) -> "AsyncRequest":
        """Prepares and starts a request at once; only for short prompts, since the event loop waits meanwhile.

        Args:
            prompt: the token ids.
            params: the sampling parameters.
            cache_salt: prompts with different salts share no cache blocks.
            work: priority and tenant.

        Raises:
            UsageError, EngineDeadError: as `prepare` and `start`.
        """
        prepared = self._prepare(*self._encode_for(prompt, params, None), cache_salt, work)
        self.start(prepared)
        return prepared

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        **vllm_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields an answer while it is generated, like vLLM's AsyncLLM; stopping early aborts the request.

        Args:
            prompt: a text, token ids, messages, a TextPrompt or a TokensPrompt.
            sampling_params: None means the model's defaults. Its output_kind selects what is yielded whenever the
                answer has
                grown: the whole answer so far, or the new part, or only the final answer.
            request_id: the id of the outputs; None chooses a number.
            cache_salt: prompts with different salts share no cache blocks; a prompt may have a salt of its own.
            priority: lower values are more urgent (WorkClass).
            vllm_options: arguments of vLLM's, such as lora_request, at values that change nothing.

        Raises:
            UsageError: prompt or parameters are not valid.
            EngineDeadError: the engine has failed or is closed.
        """
        check_call_options(vllm_options)
        params = params_of(
            sampling_params, self.engine
        ).clone()  # a copy, since the caller may change them while this coroutine waits
        salt, work = salt_of(prompt, cache_salt), WorkClass(priority)
        prepared = await self.prepare(prompt, params, cache_salt=salt, work=work)
        self.start(prepared)
        name = request_id or str(next(self._request_ids))
        collector = Collector(name, text_of(prompt), prepared.token_ids, prepared.request, self.engine.tokenizer)
        try:
            async for deltas in prepared:
                for delta in deltas:
                    collector.add(delta)
                if params.output_kind is RequestOutputKind.DELTA:
                    yield collector.latest(deltas)
                elif params.output_kind is RequestOutputKind.CUMULATIVE or collector.finished:
                    yield collector.output()
        finally:
            prepared.abort()

    def stats(self) -> Stats:
        """Statistics of the engine."""
        return self._thread.stats()

    @property
    def is_alive(self) -> bool:
        """True if requests can be served."""
        return self._thread.is_alive

    @property
    def error(self) -> EngineError | None:
        """The error of further requests, since the engine has failed or is closed; None if it is alive."""
        return self._thread.error

    @property
    def step_s(self) -> float:
        """Seconds since the running step began; 0 without one."""
        return self._thread.step_s

    async def close(self) -> None:
        """Aborts running requests, and frees the memory. Waits for the running step and for the tokenizer."""
        self._encoder.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._thread.close)
        await asyncio.to_thread(
            self._encoder.shutdown
        )  # it may use the chat template of the engine, which is closed next
        await asyncio.to_thread(self._close)
        await asyncio.sleep(0)  # lets the thread's last calls be delivered

    def shutdown(self) -> None:
        """Closes it from scripts that do not await; the event loop waits until the running step has ended."""
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self._close()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    if not loop.is_closed():  # a closed loop has no readers
        loop.call_soon_threadsafe(call, *arguments)


def _settle(end: asyncio.Future[None], item: Delta | EngineError) -> None:
    """Sets the result of a text: called by the engine when the text is computed, or with its error."""
    if end.done():  # the caller no longer waits
        return
    if isinstance(item, EngineError):
        end.set_exception(item)
    elif item.finish_reason == "error":
        end.set_exception(not_finite())
    elif item.finish_reason == "abort":
        end.cancel()
    else:
        end.set_result(None)


class _DeltaBuffer:
    """Unread deltas of a request. It has no reference to the request, which would be a cycle."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.error: EngineError | None = None
        self.has_some = asyncio.Event()

    def put(self, item: Delta | EngineError) -> None:
        """The request's output sink: called with each delta, or with the error that ends the request."""
        if isinstance(item, EngineError):
            self.error = item
        else:
            self.deltas.append(item)
        self.has_some.set()


class AsyncRequest:
    """A request: an asynchronous iterator of the deltas since the last iteration, at most one per choice.

    It ends once every choice has its finish_reason.

    Args:
        token_ids: the token ids of the prompt.
        request: the engine's request.
        buffer: collects its deltas.
        abort: aborts a request.
    """

    def __init__(
        self, token_ids: list[int], request: Request, buffer: _DeltaBuffer, abort: Callable[[Request], None]
    ) -> None:
        self.token_ids, self.request = token_ids, request
        self._buffer, self._abort = buffer, abort
        self._left = request.params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self.request.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; known from the first delta on."""
        return self.request.num_cached_tokens

    def abort(self) -> None:
        """Ends the request now; ended choices stay as they are, and the last deltas of others say "abort"."""
        if not self.request.finished:
            self._abort(self.request)

    def __aiter__(self) -> "AsyncRequest":
        return self

    async def __anext__(self) -> list[Delta]:
        """The new deltas. Raises EngineDeadError if no more will come."""
        if self._left == 0:
            raise StopAsyncIteration
        buffer = self._buffer
        await buffer.has_some.wait()
        if not buffer.deltas and buffer.error is not None:
            raise buffer.error
        deltas, buffer.deltas = merge(buffer.deltas), []
        if buffer.error is None:
            buffer.has_some.clear()
        self._left -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas
