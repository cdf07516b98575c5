"""Runs an ASGI application on a bound socket, from the first connection to the end of a drain."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from enginewright.errors import EngineError
from enginewright.runtime.env import notify_socket
from enginewright.runtime.server.connections import ACCEPTS_AT_ONCE, ConnectionLimit
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.hosting_config import HostingConfig
from enginewright.runtime.server.hosts import HostCheck
from enginewright.runtime.server.tls import Tls
from enginewright.runtime.server.wire import LimitedHttp

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the system queues until they are accepted
LAST_WORDS_S = 2.0  # seconds for errors to reach clients whose responses were cut off


class Work(Protocol):
    """The requests of an application, as far as its host starts and ends them."""

    def watch(self) -> None:
        """Checks what must be checked several times per second."""

    def reject(self, status: int, name: str | None) -> None:
        """Counts a request that got an error.

        Args:
            status: the HTTP status.
            name: the name of its model, if known.
        """

    def refuse_bytes(self, error: ApiError) -> None:
        """Counts and logs a client whose bytes are no HTTP request."""

    def drain(self) -> None:
        """Stops taking new requests."""

    async def until_idle(self) -> None:
        """Waits until no request runs or waits."""

    def end_all(self) -> None:
        """Ends all requests with an error."""


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


def tls_of(config: HostingConfig) -> Tls | None:
    """The certificate that the settings name, if any. Raises UsageError if the files are no certificate and its key."""
    return None if config.ssl_certfile is None else Tls(config.ssl_certfile, config.ssl_keyfile)


def host_check(listener: socket.socket, config: HostingConfig) -> HostCheck:
    """The check of Host headers for a server that listens at a socket."""
    return HostCheck(listener.getsockname()[0], config.host, config.allowed_hosts)


def api_url(listener: socket.socket, tls: Tls | None) -> str:
    """The URL of the API at a bound socket, for people and for clients' settings."""
    host, port = listener.getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}/v1"


def listen_for_signals(shutdown: Shutdown, tls: Tls | None) -> None:
    """Makes SIGTERM and SIGINT request the shutdown, and SIGHUP read the certificate again."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, shutdown, loop)
    if tls is not None:
        loop.add_signal_handler(signal.SIGHUP, tls.reload)


def _on_signal(shutdown: Shutdown, loop: asyncio.AbstractEventLoop) -> None:
    shutdown.request()
    if shutdown.at_once.is_set():  # a third signal kills the process
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def host_app(
    app: ASGIApp,
    work: Work,
    listener: socket.socket,
    shutdown: Shutdown,
    ready: Callable[[], None],
    tls: Tls | None,
    config: HostingConfig,
    *,
    release: Callable[[], Awaitable[None]],
) -> None:
    """Serves requests on a bound socket, until the shutdown is requested and running requests have ended.

    Args:
        app: the application.
        work: its requests.
        listener: the bound socket.
        shutdown: the request to end.
        ready: called once connections are accepted, before systemd is notified.
        tls: the certificate; None serves plain text.
        config: the settings; its address is not read.
        release: called if requests have not ended even though their connections are closed.

    Raises:
        EngineError: another program uses the address, or the limit of open files is too low.
    """
    address = listener.getsockname()
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _no_address(address[0], address[1], error) from error
    limit = ConnectionLimit(config.max_connections, lambda status: work.reject(status, None))
    server = _Server(
        uvicorn.Config(
            app,
            http=partial(LimitedHttp, limit=limit, on_refusal=work.refuse_bytes),  # type: ignore[arg-type]
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
        work,
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    requested = asyncio.create_task(shutdown.requested.wait())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if server.started:
            listener.listen(BACKLOG)  # asyncio has set it to ACCEPTS_AT_ONCE
            ready()
            notify_systemd("READY=1")
        await asyncio.wait((serving, requested), return_when=asyncio.FIRST_COMPLETED)
        work.drain()
        notify_systemd("STOPPING=1")
        await _drain(work, shutdown, config.drain_seconds)
    finally:
        requested.cancel()
        server.should_exit = True
        await asyncio.wait((serving,), timeout=LAST_WORDS_S)
        for connection in list(
            server.server_state.connections
        ):  # of clients that do not read, or have sent no request yet
            connection.transport.abort()
        await asyncio.wait((serving,), timeout=LAST_WORDS_S)
        if not serving.done():
            await release()
        await serving


async def _drain(work: Work, shutdown: Shutdown, drain_seconds: float) -> None:
    """Lets running requests go on for a while, and ends the remaining ones with an error."""
    idle = asyncio.create_task(work.until_idle())
    at_once = asyncio.create_task(shutdown.at_once.wait())
    await asyncio.wait((idle, at_once), timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
    at_once.cancel()
    work.end_all()
    await asyncio.wait((idle,), timeout=LAST_WORDS_S)
    idle.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server, which also checks connections and requests.

    Its own reaction to a signal is to stop listening first, so that /health could not report the shutdown.
    """

    def __init__(self, config: uvicorn.Config, work: Work) -> None:
        super().__init__(config)
        self._work = work

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Checks requests and connections; uvicorn calls it ten times a second."""
        self._work.watch()
        now = asyncio.get_running_loop().time()
        for connection in self.server_state.connections:
            if isinstance(connection, LimitedHttp) and connection.deadline < now:
                connection.expire()
        return await super().on_tick(counter)


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
