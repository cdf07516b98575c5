"""Runs one completion request, from its prompts to the last byte of the response."""

import asyncio
import logging
import time
from asyncio import TaskGroup
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Send

from enginewright.errors import EngineError, UsageError, WorkerLostError
from enginewright.runtime.api.async_llm import AsyncRequest, Structure
from enginewright.runtime.cache.eviction import Retention
from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.core.prompts import Conversation, Prompt
from enginewright.runtime.core.request import Request
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.server.admission import Reservation
from enginewright.runtime.server.errors import ApiError, answer_error, from_engine, internal, overloaded, shutting_down
from enginewright.runtime.server.form import Choice, Form, Usage
from enginewright.runtime.server.log import RequestLog
from enginewright.runtime.server.slices import Measurements, slice_values
from enginewright.runtime.server.wire import ClientGone, send_json, until_gone
from enginewright.runtime.server.work import timed_out
from enginewright.runtime.step.work_class import WorkClass
from enginewright.runtime.text.messages.formats import Parser

if TYPE_CHECKING:
    from enginewright.runtime.server.service import Service

logger = logging.getLogger(__name__)

PREPARE_S = 30.0  # maximum seconds until a prompt and its grammar are prepared; grammars may wait for others
NewParsers = Callable[[Sequence[int], int], Sequence[Parser | None]]
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events
]


@contextmanager
def template_errors(prompt: Prompt) -> Iterator[None]:
    """Raises ApiError if the chat template cannot render a conversation, or its process is lost."""
    try:
        yield
    except UsageError:
        raise
    except WorkerLostError as error:
        logger.error("a request has failed: %s", error)
        raise internal() from None
    except EngineError as error:
        if not isinstance(prompt, Conversation):
            raise
        logger.warning(
            "a conversation is refused: %s", error.what
        )  # the reason may quote the conversation, which must not be logged
        raise ApiError(400, "the model's chat template cannot show these messages", param="messages") from None


class Generation:
    """The completions of one request, n for each prompt, streamed or sent in one piece.

    The head of a response is sent with its first bytes, so that earlier failures have an HTTP status of their own.

    Args:
        service: the engine.
        form: writes the response.
        params: sampling parameters of all completions.
        arrived: arrival of the request, by time.perf_counter.
        log: log line of the request.
        new_parsers: makes the parsers of a prompt's completions from its token ids and their number.
        structure: gives the structure of a prompt's completions from its token ids; None leaves it to params.
        work: priority and tenant.
        retention: hint for the KV blocks of prompts and completions.
        timeout_s: seconds from the arrival after which the request ends; None means never.
        kv_transfer_params: as for AsyncLLM.prepare.
        adapter: file of the adapter; None: the engine's own weights.
    """

    def __init__(
        self,
        service: "Service",
        form: Form,
        params: SamplingParams,
        arrived: float,
        log: RequestLog,
        new_parsers: NewParsers,
        structure: Structure | None,
        work: WorkClass,
        retention: Retention,
        timeout_s: float | None,
        kv_transfer_params: dict[str, Any] | None = None,
        adapter: Path | None = None,
    ) -> None:
        self.adapter = adapter
        self._new_parsers, self._structure = new_parsers, structure
        self._work, self._timeout_s, self._kv_transfer_params = work, timeout_s, kv_transfer_params
        self._retention = retention
        self._service, self._form, self._params, self.arrived = service, form, params, arrived
        self._log = log
        self._first_token_s: float | None = None  # seconds from the request's arrival
        self._requests: list[AsyncRequest] = []
        self._choices: list[list[Choice]] = []  # by prompt
        self._measured: list[Measurements] = []  # by prompt
        self._reservations: Sequence[Reservation] = ()
        self._preparing: asyncio.Task[AsyncRequest] | None = None  # preparation of the current prompt
        self._stopped: Exception | None = None  # error that ends the request early
        self._started = False  # True once the response's head was sent

    @property
    def adapter_name(self) -> str:
        """Name of the adapter, as the request has it; empty without one."""
        return "" if self.adapter is None else str(self._log.model).rpartition(":")[2]

    @property
    def is_waiting(self) -> bool:
        """True until the engine has begun with all prompts."""
        return not self._requests or any(request.request.queue_s is None for request in self._requests)

    async def run(self, prompts: Sequence[Prompt], salt: str, stream: bool, receive: Receive, send: Send) -> None:
        """Computes the completions, and sends them.

        Args:
            prompts: the prompts.
            salt: salt of the prefix cache.
            stream: whether to send the completions as they are generated.
            receive: ASGI channel from the client.
            send: ASGI channel to the client.

        Raises:
            ApiError: the request is refused, or fails before a byte is sent; later errors are sent as an event.
            ClientGone: the client has disconnected.
        """
        self._reservations = self._service.admission.enter(prompts, self._params)
        self._service.live.add(self)
        self._service.throughput.begin()
        watch, timer = asyncio.create_task(self._watch(receive)), self._timer()
        try:
            await self._submit(prompts, salt)
            await (self._stream(send) if stream else self._whole(send))
        except EngineError as error:
            await self._fail(from_engine(error, self._form.prompt_key), send)
        except ApiError as error:
            await self._fail(error, send)
        except Exception as error:
            if not self._started or isinstance(error, ClientGone):
                raise
            logger.exception("a stream has failed")
            await self._fail(internal(), send)
        finally:
            watch.cancel()
            if timer is not None:
                timer.cancel()
            self._close()

    def stop(self, why: Exception) -> None:
        """Ends the request early; `why` is raised where its completions are awaited."""
        self._stopped = self._stopped or why
        if self._preparing is not None:
            self._preparing.cancel()
        for request in self._requests:
            request.abort()

    def _timer(self) -> asyncio.TimerHandle | None:
        """Timer that ends the request at its timeout."""
        if self._timeout_s is None:
            return None
        left = self.arrived + self._timeout_s - time.perf_counter()
        return asyncio.get_running_loop().call_later(max(left, 0.0), self.stop, timed_out(self._timeout_s))

    async def _watch(self, receive: Receive) -> None:
        await until_gone(receive)
        self.stop(ClientGone())

    async def _submit(self, prompts: Sequence[Prompt], salt: str) -> None:
        """Starts all prompts, or none if one is refused."""
        if self._kv_transfer_params and len(prompts) > 1:
            why = f"kv_transfer_params are for one prompt, and there are {len(prompts)}"
            raise ApiError(400, why, param="kv_transfer_params")
        for prompt, reservation in zip(prompts, self._reservations, strict=True):
            request = await self._prepare(prompt, salt)
            reservation.tokenized(request.num_prompt_tokens)
            if self._stopped is not None:
                raise self._stopped
            part = self._form.prompt_part(prompt, request.token_ids, request.request.prompt_logprobs)
            first = len(self._requests) * self._params.n
            self._requests.append(request)
            self._measured.append(Measurements())
            parsers = self._new_parsers(request.token_ids, self._params.n)
            self._choices.append([Choice(index, part, parser=one) for index, one in enumerate(parsers, start=first)])
        for request in self._requests:
            self._service.llm.start(request)

    async def _prepare(self, prompt: Prompt, salt: str) -> AsyncRequest:
        """Prepares a prompt; raises the error of `stop` if that is called before the end."""
        late = overloaded(f"a prompt and its grammar could not be prepared within {PREPARE_S:g} s")
        preparing = self._service.llm.prepare(
            prompt,
            self._params,
            cache_salt=salt,
            work=self._work,
            retention=self._retention,
            structure=self._structure,
            kv_transfer_params=self._kv_transfer_params,
            adapter=self.adapter,
        )
        self._preparing = asyncio.create_task(preparing)
        timer = asyncio.get_running_loop().call_later(PREPARE_S, self.stop, late)
        try:
            with template_errors(prompt):
                return await self._preparing
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            raise self._stopped from None
        finally:
            timer.cancel()

    async def _stream(self, send: Send) -> None:
        await _together([self._stream_prompt(number, send) for number in range(len(self._requests))])
        end = self._form.closing(self._all_choices, self._usage())
        self._form.ended()
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _stream_prompt(self, number: int, send: Send) -> None:
        choices, form = self._choices[number], self._form
        async for deltas in self._requests[number]:
            pieces = []
            for delta in deltas:
                choice = choices[delta.index]
                if choice.last_s is None:
                    pieces.append(form.opening(choice, self._requests[number].num_cached_tokens))
                self._record(number, choice, delta)
                pieces.append(form.chunk(choice, delta))
            if data := b"".join(pieces):
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _whole(self, send: Send) -> None:
        await _together([self._collect(number) for number in range(len(self._requests))])
        self._form.kv_transfer_params = self._requests[0].request.kv_transfer_params
        arguments = self._all_choices, self._usage()
        if self._params.logprobs is None and self._params.prompt_logprobs is None:
            body = self._form.body(*arguments)
        else:  # thousands of tokens have tens of thousands of named alternatives
            body = await asyncio.to_thread(self._form.body, *arguments)
        self._form.ended()
        self._started = True
        await send_json(send, 200, body)

    async def _collect(self, number: int) -> None:
        choices = self._choices[number]
        async for deltas in self._requests[number]:
            for delta in deltas:
                choice = choices[delta.index]
                choice.deltas.append(delta)
                self._record(number, choice, delta)

    def _record(self, number: int, choice: Choice, delta: Delta) -> None:
        """Counts a delta in metrics and log. Raises the error that ends the request, if there is one."""
        if self._stopped is not None:
            raise self._stopped
        metrics, now, count = self._service.metrics, time.perf_counter(), len(delta.tokens)
        measured = self._measured[number]
        if choice.last_s is None:
            self._reservations[number].begun()
            metrics.first_token.observe(now - self.arrived)
            measured.first_token.observe(now - self.arrived)
            self._first_token_s = self._first_token_s or now - self.arrived
        elif count:
            gap_s = (now - choice.last_s) / count
            metrics.between_tokens.observe(gap_s, count)
            measured.between_tokens.observe(gap_s, count)
        choice.last_s = now
        choice.num_tokens += count
        if delta.finish_reason is None:
            return
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        metrics.finished[delta.finish_reason] += 1
        if delta.finish_reason == "abort":
            raise shutting_down(0)
        if delta.finish_reason == "error":
            raise answer_error(delta.stop_reason)
        metrics.e2e.observe(now - self.arrived)

    @property
    def _all_choices(self) -> list[Choice]:
        return [choice for prompt in self._choices for choice in prompt]

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(request.num_prompt_tokens for request in self._requests),
            completion_tokens=sum(choice.num_tokens for choice in self._all_choices),
            cached_tokens=sum(request.num_cached_tokens for request in self._requests),
            draft_tokens=sum(request.request.num_draft_tokens for request in self._requests),
            accepted_tokens=sum(request.request.num_accepted_tokens for request in self._requests),
            times=max((request.request.metrics for request in self._requests), key=lambda times: times.total_s),
        )

    async def _fail(self, error: ApiError, send: Send) -> None:
        if not self._started:
            raise error
        self._service.metrics.rejected[error.status] += 1
        self._log.failed(error)
        await send({"type": "http.response.body", "body": self._form.failure(error), "more_body": False})

    def _close(self) -> None:
        """Aborts completions that still run, and releases all that the request has reserved."""
        self._stopped = None  # its traceback refers to this object, which would be a reference cycle
        for request in self._requests:
            request.abort()
        for one, choices, measured in zip(self._requests, self._choices, self._measured, strict=True):
            self._count(one.request, choices, measured)
        for reservation in self._reservations:
            reservation.close()
        left = sum(choice.finish_reason is None for choice in self._all_choices)
        self._service.metrics.finished["abort"] += left
        if self._requests:
            total_s = time.perf_counter() - self.arrived
            self._log.answered([one.request for one in self._requests], self._choices, self._first_token_s, total_s)
        self._service.live.discard(self)

    def _count(self, request: Request, choices: Sequence[Choice], measured: Measurements) -> None:
        """Counts a prompt in the metrics at its end.

        Args:
            request: the prompt's request.
            choices: its completions.
            measured: what was measured of them.
        """
        metrics, num_tokens = self._service.metrics, [choice.num_tokens for choice in choices]
        if all(choice.finish_reason in ("stop", "length") for choice in choices):
            metrics.request_done(request, num_tokens)
            measured.complete(request.arrived_at - self.arrived, request.metrics)
        if request.queue_s is not None:
            measured.num_tokens.update(prompt=request.num_prompt_tokens, cached=request.num_cached_tokens)
        measured.num_tokens.update(generation=sum(num_tokens))
        parsers = [choice.parser for choice in choices if choice.parser is not None]
        for parser in parsers:
            metrics.calls_done(parser.outcomes)
        if request.params.structured_outputs is not None:
            own_ends = (None, *self._service.llm.engine.eos_token_ids)
            for choice in choices:
                is_cut = choice.finish_reason == "length" or choice.stop_reason not in own_ends
                metrics.structured_done(choice.finish_reason, is_cut=is_cut)
        may_call = any(parser.may_call for parser in parsers)
        tenant_class = self._service.tenant_classes.get(self._work.tenant)
        adapter = self.adapter_name if self._service.config.has_adapters else None
        values = slice_values(request, may_call=may_call, work=self._work, tenant_class=tenant_class, adapter=adapter)
        metrics.slices.add(values, measured)


async def _together(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all coroutines; the first error cancels the others."""
    if len(parts) == 1:
        await parts[0]
        return
    try:
        async with TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
