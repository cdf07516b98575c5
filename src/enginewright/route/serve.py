"""`engine route`: runs the proxy until a signal, and then a drain."""

import asyncio
import socket
from collections.abc import Callable

from enginewright.route.app import RouteApp
from enginewright.route.config import RouteConfig
from enginewright.route.fleet import Fleet
from enginewright.runtime.server.hosting import (
    Shutdown,
    api_url,
    bind,
    host_app,
    host_check,
    listen_for_signals,
    print_ready,
    tls_of,
)
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
    tls = tls_of(config)
    with bind(config.host, config.port) as listener:
        asyncio.run(_route(config, listener, announce, tls))


async def _route(
    config: RouteConfig, listener: socket.socket, announce: Callable[[str], None], tls: Tls | None
) -> None:
    fleet, shutdown = Fleet(config), Shutdown()
    listen_for_signals(shutdown, tls)
    await host_fleet(fleet, listener, shutdown, lambda: announce(_ready(fleet, listener, tls)), tls)


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
    app = RouteApp(fleet, host_check(listener, fleet.config))
    try:
        await fleet.start()
        await host_app(app, fleet, listener, shutdown, ready, tls, fleet.config, release=fleet.close)
    finally:
        await fleet.close()


def _ready(fleet: Fleet, listener: socket.socket, tls: Tls | None) -> str:
    """The line with the proxy's address, and the state of the replicas."""
    healthy = f"{len(fleet.healthy)} of {len(fleet.replicas)} replicas that take requests"
    if fleet.prefills:
        num_healthy = sum(replica.is_healthy for replica in fleet.prefills)
        healthy += f", and {num_healthy} of {len(fleet.prefills)} that compute prompts"
    return f"routing at {api_url(listener, tls)} to {healthy}"
