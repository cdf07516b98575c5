"""`engine run`: from an engine file to a server, and to its end."""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from enginewright.errors import EngineError
from enginewright.runtime.async_llm import AsyncLLM
from enginewright.runtime.engine import Engine
from enginewright.runtime.memory_plan import places_of
from enginewright.runtime.server.app import App
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.connections import ACCEPTS_AT_ONCE, ConnectionLimit
from enginewright.runtime.server.hosts import HostCheck
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.wire import LimitedHttp

BACKLOG = 2048  # connections that the system holds until they are taken
# Back from a step, the engine's thread waits this long for whoever runs Python: a chat being rendered, mostly. With
# Python's own 5 ms, streams beside such chats got a fifth fewer tokens a second (median of six rounds, a model that
# takes less than a millisecond per step; large ones don't care).
SWITCH_INTERVAL_S = 0.0005
LAST_WORDS_S = 2.0  # for errors to reach clients whose responses were cut off
CLOSE_S = 10.0  # for the engine to end its step and the tokenizer its text; then the process ends all the same


class Shutdown:
    """A request to end a server: in good order, or at once. It belongs to the event loop of the server."""

    def __init__(self) -> None:
        self.requested, self.at_once = asyncio.Event(), asyncio.Event()

    def request(self) -> None:
        """The first call asks for an end in good order, the second for an end at once."""
        (self.at_once if self.requested.is_set() else self.requested).set()


def print_ready(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(
    model: str | Path | Engine, config: ServerConfig, *, announce: Callable[[str], None] = print_ready, **limits: Any
) -> None:
    """Serve an engine until SIGTERM or SIGINT, and its drain; a second signal ends that, too.

    Memory that a step uses cannot be given back: if one does not end, the process does, with exit code 1.

    Args:
        model: an engine file, or an open engine (which stays open).
        announce: called with one line for people once connections are taken.
        limits: fields of RuntimeConfig.

    Raises:
        EngineError: the address cannot be had, or the engine cannot be opened (errors.py).
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with bind(config.host, config.port) as listener:
            asyncio.run(_serve(model, config, listener, announce, limits))
    finally:
        sys.setswitchinterval(before)


async def _serve(
    model: str | Path | Engine,
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[str], None],
    limits: dict[str, Any],
) -> None:
    llm = AsyncLLM(model, **limits)
    try:
        shutdown, loop = Shutdown(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal, shutdown, loop)
        service = Service(llm, config)
        gc.collect()
        gc.freeze()  # what is there now stays: later collections, which hold up a step, need not look at it
        await host(service, listener, shutdown, lambda: announce(_ready(service, listener)))
    finally:
        await _close(llm)


async def _close(llm: AsyncLLM) -> None:
    """Close an engine, or end the process where that takes too long."""
    closing = asyncio.create_task(llm.close())
    await asyncio.wait((closing,), timeout=CLOSE_S)
    if not closing.done():
        what = f"a step of the engine has lasted {llm.step_s:.0f} s" if llm.step_s else "a prompt is being tokenized"
        print(f"engine: the server ends by force: {what} and does not end", file=sys.stderr, flush=True)
        os._exit(EngineError.exit_code)
    await closing


def _on_signal(shutdown: Shutdown, loop: asyncio.AbstractEventLoop) -> None:
    shutdown.request()
    if shutdown.at_once.is_set():  # a third one kills
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def host(service: Service, listener: socket.socket, shutdown: Shutdown, ready: Callable[[], None]) -> None:
    """Answer what comes to a bound socket, until the shutdown is requested.

    Args:
        ready: called when connections are taken.

    Raises:
        EngineError: another program has taken the address, or the limit of open files is too low.
    """
    address = listener.getsockname()
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _no_address(address[0], address[1], error) from error
    limit = ConnectionLimit(service.config.max_connections, service.metrics.rejected)
    hosts = HostCheck(address[0], service.config.host, service.config.allowed_hosts)
    server = _Server(
        uvicorn.Config(
            App(service, hosts),
            http=partial(LimitedHttp, limit=limit, on_refusal=service.refuse_bytes),  # type: ignore[arg-type]
            backlog=ACCEPTS_AT_ONCE,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
        ),
        service,
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    requested = asyncio.create_task(shutdown.requested.wait())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if server.started:
            listener.listen(BACKLOG)  # asyncio has set it to what it takes at once
            ready()
        await asyncio.wait((serving, requested), return_when=asyncio.FIRST_COMPLETED)
        service.draining = True
        await _drain(service, shutdown)
    finally:
        requested.cancel()
        server.should_exit = True
        await asyncio.wait((serving,), timeout=LAST_WORDS_S)
        for connection in list(server.server_state.connections):  # of those who don't read, or have not asked yet
            connection.transport.abort()
        await asyncio.wait((serving,), timeout=LAST_WORDS_S)
        if not serving.done():  # requests wait for a step of the engine, or for the tokenizer
            await _close(service.llm)
        await serving


async def _drain(service: Service, shutdown: Shutdown) -> None:
    """Let running requests go on for a while, and end those that are left with an error."""
    idle = asyncio.create_task(service.until_idle())
    at_once = asyncio.create_task(shutdown.at_once.wait())
    timeout = service.config.drain_seconds
    await asyncio.wait((idle, at_once), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    at_once.cancel()
    service.end_all()
    await asyncio.wait((idle,), timeout=LAST_WORDS_S)
    idle.cancel()


class _Server(uvicorn.Server):
    """uvicorn's, with an eye on connections and on the engine.

    Its own answer to a signal is to close the door first: /health could not say why.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls it ten times a second."""
        self._service.watch()
        now = asyncio.get_running_loop().time()
        for connection in self.server_state.connections:
            if isinstance(connection, LimitedHttp) and connection.deadline < now:
                connection.expire()
        return await super().on_tick(counter)


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address, which nobody can connect to yet.

    Raises:
        EngineError: it is taken, or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:  # getaddrinfo's, too
        raise _no_address(host, port, error) from error
    return listener


def _no_address(host: str, port: int, error: OSError) -> EngineError:
    why = error.strerror or str(error)
    return EngineError(
        f"cannot listen at {host}, port {port}", why.lower(), "Choose another with --port or --host; 0 is a free port."
    )


def _ready(service: Service, listener: socket.socket) -> str:
    """The line that says where the server is, and how much it can do at once."""
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    memory_plan, plan = service.llm.memory_plan, service.llm.engine.plan
    length, chunk = memory_plan.max_model_len, memory_plan.limits.tokens
    places = zip(memory_plan.num_blocks, plan.caches, strict=True)
    whole = min(count // places_of(group, length, chunk) for count, group in places)
    most = memory_plan.limits.sequences
    fit = f"{most} completions at a time, {min(whole, most)} of them may have all {length} positions"
    return f"serving {service.models[0]} at http://{address}:{port}/v1 ({fit})"
