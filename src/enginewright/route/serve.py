"""`engine route`: runs the proxy until a signal, and then a drain."""

import asyncio
import socket
from collections.abc import Callable

from enginewright.route.app import RouteApp
from enginewright.route.config import RouteConfig
from enginewright.route.fleet import Fleet
from enginewright.runtime.server.hosting import (
    Shutdown,
    bind,
    host_app,
    listen_for_signals,
    notify_systemd,
    print_ready,
)
from enginewright.runtime.server.hosts import HostCheck
from enginewright.runtime.server.tls import Tls


def route(config: RouteConfig, *, announce: Callable[[str], None] = print_ready) -> None:
    """Runs the proxy until SIGTERM or SIGINT and a drain; a second signal ends the drain, too.

    Args:
        config: the settings.
        announce: called with one line for people once connections are accepted.

    Raises:
        UsageError: the files of the certificate are wrong.
        EngineError: the proxy cannot listen at the address.
    """
    tls = None if config.ssl_certfile is None else Tls(config.ssl_certfile, config.ssl_keyfile)
    with bind(config.host, config.port) as listener:
        asyncio.run(_route(config, listener, announce, tls))


async def _route(
    config: RouteConfig, listener: socket.socket, announce: Callable[[str], None], tls: Tls | None
) -> None:
    fleet, shutdown = Fleet(config), Shutdown()
    listen_for_signals(shutdown, tls)

    def ready() -> None:
        announce(_ready(fleet, listener, tls))
        notify_systemd("READY=1")

    await host_fleet(fleet, listener, shutdown, ready, tls)


async def host_fleet(
    fleet: Fleet,
    listener: socket.socket,
    shutdown: Shutdown,
    ready: Callable[[], None],
    tls: Tls | None = None,
) -> None:
    """Routes requests from a bound socket to replicas, until the shutdown is requested.

    Args:
        fleet: the replicas.
        listener: the bound socket.
        shutdown: the request to end.
        ready: called once connections are accepted.
        tls: the certificate; None serves plain text.

    Raises:
        EngineError: another program uses the address, or the limit of open files is too low.
    """
    config = fleet.config
    app = RouteApp(fleet, HostCheck(listener.getsockname()[0], config.host, config.allowed_hosts))
    try:
        await fleet.start()
        await host_app(
            app,
            fleet,
            listener,
            shutdown,
            ready,
            tls,
            max_connections=config.max_connections,
            drain_seconds=config.drain_seconds,
            release=fleet.close,
        )
    finally:
        await fleet.close()


def _ready(fleet: Fleet, listener: socket.socket, tls: Tls | None) -> str:
    """The line with the proxy's address, and the state of the replicas."""
    host, port = listener.getsockname()[:2]
    address = f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}/v1"
    return f"routing at {address} to {len(fleet.healthy)} of {len(fleet.replicas)} replicas that take requests"
