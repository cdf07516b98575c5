"""`engine run`: opens engine files, serves them, and shuts down."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.device.memory_plan import places_of
from enginewright.runtime.engine import Engine
from enginewright.runtime.env import notify_socket
from enginewright.runtime.server.app import App
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.connections import ACCEPTS_AT_ONCE, ConnectionLimit
from enginewright.runtime.server.engine_files import files_of, names_alone
from enginewright.runtime.server.engines import Engines
from enginewright.runtime.server.hosts import HostCheck
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.tls import Tls
from enginewright.runtime.server.wire import LimitedHttp

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the system queues until they are accepted
# After a step, the engine's thread waits this long for the thread that holds Python's lock, which usually renders a
# chat. With Python's default of 5 ms, streams that ran at the same time got a fifth fewer tokens per second (median of
# six rounds, with a model that takes less than a millisecond per step; large models show no difference).
SWITCH_INTERVAL_S = 0.0005
LAST_WORDS_S = 2.0  # seconds for errors to reach clients whose responses were cut off
CLOSE_S = 10.0  # seconds for the engine's step and the tokenizer to end; then the process ends anyway


Model = str | Path | Engine | Sequence[str | Path]  # one engine, or several files and folders of them


class Shutdown:
    """A request to end a server, in good order or at once. It belongs to the server's event loop."""

    def __init__(self) -> None:
        self.requested, self.at_once = asyncio.Event(), asyncio.Event()

    def request(self) -> None:
        """The first call requests a shutdown in good order, the second one a shutdown at once."""
        (self.at_once if self.requested.is_set() else self.requested).set()


def notify_systemd(state: str) -> None:
    """Reports a state to systemd, if it started this process as a service of Type=notify. Source: sd_notify(3).

    Args:
        state: the assignment to send, such as READY=1.
    """
    address = notify_socket()
    if address is None:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("systemd did not receive %s: %s", state, error)


def print_ready(line: str) -> None:
    """Prints the line with the server's address to stderr."""
    print(line, file=sys.stderr, flush=True)


def serve(
    model: Model,
    config: ServerConfig,
    *,
    announce: Callable[[str], None] = print_ready,
    verify: bool = False,
    **limits: Any,
) -> None:
    """Serves engines until SIGTERM or SIGINT and a drain; a second signal ends the drain, too.

    Memory that a running step uses cannot be freed: if a step does not end, the process ends with exit code 1.

    Args:
        model: an engine file, or an open engine (which stays open). Several files or folders of them, or one with a
            config
            that limits its memory or idle time, are opened at their first request.
        config: the server's settings.
        announce: called with one line for people once connections are accepted.
        verify: whether to check the hashes of an engine's weights each time that it is opened.
        limits: fields of RuntimeConfig.

    Raises:
        UsageError: the files of the certificate are wrong.
        EngineError: the server cannot listen at the address, or the engine cannot be opened (errors.py).
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        tls = tls_of(config)
        with bind(config.host, config.port) as listener:
            asyncio.run(_serve(model, config, listener, announce, limits, tls, verify=verify))
    finally:
        sys.setswitchinterval(before)


async def _serve(
    model: Model,
    config: ServerConfig,
    listener: socket.socket,
    announce: Callable[[str], None],
    limits: dict[str, Any],
    tls: Tls | None,
    *,
    verify: bool,
) -> None:
    engines = await _engines(model, config, limits, verify=verify)
    try:
        shutdown, loop = Shutdown(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _on_signal, shutdown, loop)
        if tls is not None:
            loop.add_signal_handler(signal.SIGHUP, tls.reload)
        gc.collect()
        gc.freeze()  # these objects stay, so later collections, which delay a step, skip them

        def ready() -> None:
            announce(_ready(engines, listener))
            notify_systemd("READY=1")

        await host(engines, listener, shutdown, ready, tls)
    finally:
        await _close(engines)


async def _engines(model: Model, config: ServerConfig, limits: dict[str, Any], *, verify: bool) -> Engines:
    """Opens one engine now, or prepares those that are opened at their first request."""
    if isinstance(model, Engine):
        if config.on_demand:
            raise UsageError(
                "an open engine cannot be closed by the server", "memory and idle_seconds are for engine files"
            )
        return Engines.of(Service(AsyncLLM(model, **limits), config))
    runtime = runtime_config(**limits)
    files = files_of([model] if isinstance(model, str | Path) else model)
    if len(files) > 1 and runtime.kv_events is not None:
        raise UsageError("kv_events is for one engine", f"{len(files)} cannot share an address")
    if len(files) > 1 and runtime.kv_listen is not None:
        fix = "Leave it out: each engine then listens on a free port, and its leases name it."
        raise UsageError("kv_listen is for one engine", f"{len(files)} cannot share an address", fix)
    if len(files) > 1 or config.on_demand:
        return Engines.of_files(files, config, runtime, verify=verify)
    engine = open_engine(files[0], runtime.device, verify=verify)
    try:
        names = names_alone(engine.manifest.name, files[0], config)
        return Engines.of(Service(await AsyncLLM.open(engine, runtime), config, names))
    except BaseException:
        engine.close()
        raise


async def _close(engines: Engines) -> None:
    """Closes all engines, or ends the process if that takes too long."""
    closing = asyncio.create_task(engines.close())
    await asyncio.wait((closing,), timeout=CLOSE_S)
    if not closing.done():
        step_s = max((service.llm.step_s for service in engines.services), default=0.0)
        what = f"a step of the engine has lasted {step_s:.0f} s" if step_s else "a prompt is being tokenized"
        print(f"engine: the server ends by force: {what} and does not end", file=sys.stderr, flush=True)
        os._exit(EngineError.exit_code)
    await closing


def _on_signal(shutdown: Shutdown, loop: asyncio.AbstractEventLoop) -> None:
    shutdown.request()
    if shutdown.at_once.is_set():  # a third signal kills the process
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def host(
    engines: Engines,
    listener: socket.socket,
    shutdown: Shutdown,
    ready: Callable[[], None],
    tls: Tls | None = None,
) -> None:
    """Serves requests on a bound socket, until the shutdown is requested.

    Args:
        engines: the engines.
        listener: the bound socket.
        shutdown: the request to end the server.
        ready: called once connections are accepted.
        tls: the certificate; None serves plain text.

    Raises:
        EngineError: another program uses the address, or the limit of open files is too low.
    """
    address = listener.getsockname()
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _no_address(address[0], address[1], error) from error
    limit = ConnectionLimit(engines.config.max_connections, lambda status: engines.reject(status, None))
    hosts = HostCheck(address[0], engines.config.host, engines.config.allowed_hosts)
    app = App(engines, hosts)
    server = _Server(
        uvicorn.Config(
            app,
            http=partial(LimitedHttp, limit=limit, on_refusal=engines.refuse_bytes),  # type: ignore[arg-type]
            backlog=ACCEPTS_AT_ONCE,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ssl_context_factory=None if tls is None else lambda *_: tls.context,
        ),
        engines,
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    requested = asyncio.create_task(shutdown.requested.wait())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if server.started:
            listener.listen(BACKLOG)  # asyncio has set it to ACCEPTS_AT_ONCE
            ready()
        await asyncio.wait((serving, requested), return_when=asyncio.FIRST_COMPLETED)
        engines.drain()
        notify_systemd("STOPPING=1")
        await _drain(engines, shutdown)
    finally:
        requested.cancel()
        server.should_exit = True
        await asyncio.wait((serving,), timeout=LAST_WORDS_S)
        for connection in list(
            server.server_state.connections
        ):  # of clients that do not read, or have sent no request yet
            connection.transport.abort()
        await asyncio.wait((serving,), timeout=LAST_WORDS_S)
        if not serving.done():  # requests wait for a step of the engine, or for the tokenizer
            await _close(engines)
        await serving
        await asyncio.to_thread(app.close)


async def _drain(engines: Engines, shutdown: Shutdown) -> None:
    """Lets running requests go on for a while, and ends the remaining ones with an error."""
    idle = asyncio.create_task(engines.until_idle())
    at_once = asyncio.create_task(shutdown.at_once.wait())
    timeout = engines.config.drain_seconds
    await asyncio.wait((idle, at_once), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    at_once.cancel()
    engines.end_all()
    await asyncio.wait((idle,), timeout=LAST_WORDS_S)
    idle.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server, which also checks connections and engines.

    Its own reaction to a signal is to stop listening first, so that /health could not report the shutdown.
    """

    def __init__(self, config: uvicorn.Config, engines: Engines) -> None:
        super().__init__(config)
        self._engines = engines

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Checks engines and connections; uvicorn calls it ten times a second."""
        self._engines.watch()
        now = asyncio.get_running_loop().time()
        for connection in self.server_state.connections:
            if isinstance(connection, LimitedHttp) and connection.deadline < now:
                connection.expire()
        return await super().on_tick(counter)


def tls_of(config: ServerConfig) -> Tls | None:
    """The certificate that the config names, if any. Raises UsageError if the files are no certificate and its key."""
    return None if config.ssl_certfile is None else Tls(config.ssl_certfile, config.ssl_keyfile)


def bind(host: str, port: int) -> socket.socket:
    """Binds a socket to an address; nobody can connect to it yet.

    Args:
        host: a host name or address.
        port: a TCP port; 0 chooses a free one.

    Raises:
        EngineError: the address is in use, or does not belong to this machine.
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


def _ready(engines: Engines, listener: socket.socket) -> str:
    """The line with the server's address, and the number of requests that fit at once."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if engines.config.ssl_certfile is None else "https"
    address = f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"
    if not engines.services:
        at_once = f"open on demand, in {format_bytes(engines.memory)} together"
        return f"serving {', '.join(engines.names)} at {address} ({at_once})"
    (service,) = engines.services
    memory_plan, plan = service.llm.memory_plan, service.llm.engine.plan
    length, chunk = memory_plan.max_model_len, memory_plan.limits.tokens
    places = zip(memory_plan.num_blocks, plan.caches, strict=True)
    full_length = min(count // places_of(group, length, chunk) for count, group in places)
    max_seqs = memory_plan.limits.sequences
    fit = f"{max_seqs} completions at a time, {min(full_length, max_seqs)} of them may have all {length} positions"
    return f"serving {service.models[0]} at {address} ({fit})"
