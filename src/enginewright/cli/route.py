"""The command `engine route`: a proxy for a few replicas."""

from pathlib import Path
from typing import Any

import click

from enginewright.cli.help import SectionCommand, section
from enginewright.cli.values import CountType

address, overload = section("Address"), section("Overload")


@click.command(cls=SectionCommand)
@click.argument("replicas", nargs=-1, required=True, metavar="URL...")
@address("--host", default="127.0.0.1", help="Address to listen on. 0.0.0.0 accepts connections from other machines.")
@address("--port", type=click.IntRange(0, 65535), default=8080, help="Port to listen on; 0 takes any free one.")
@address(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    show_default="on a loopback address its own names, otherwise any",
    help="A name that requests may have in their Host header. The option may be given several times.",
)
@address(
    "--ssl-certfile",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="no TLS",
    help="Serve HTTPS with this PEM file of the certificate and its chain. SIGHUP makes the proxy read it again.",
)
@address(
    "--ssl-keyfile",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default="in --ssl-certfile",
    help="The certificate's private key, a PEM file without a password.",
)
@overload(
    "--max-lead",
    type=CountType(0),
    default=8,
    help="Maximum number of requests that a replica may run beyond the least busy one because it has computed most of "
    "their prompts. 0 sends each request to the least busy replica.",
)
@overload(
    "--max-connections",
    type=CountType(),
    show_default="what the limit of open files allows, up to 4096",
    help="Maximum number of open connections of clients. More are refused with status 503.",
)
@overload(
    "--drain-seconds",
    type=float,
    default=30.0,
    help="Seconds that running requests may take to finish after SIGTERM or Ctrl-C.",
)
@section("Log")(
    "--log-level",
    type=click.Choice(("error", "warning", "info", "debug")),
    default="info",
    help="Lowest level that is logged on stderr; info has a line for each request.",
)
@section("Log")(
    "--log-format", type=click.Choice(("text", "json")), default="text", help="Form of each line of the log."
)
def route(log_level: str, log_format: str, **options: Any) -> None:
    """Spread requests over replicas of a server.

    URL is a server that `engine run` has started, such as http://10.0.0.5:8000; all should serve the same engines. A
    request goes to the replica that has computed most of its prompt, unless another has much less to do. It is sent to
    another one if its replica fails before the first byte of the answer. Clients' API keys are passed on.
    """
    from enginewright.route.config import RouteConfig
    from enginewright.route.serve import route as run_proxy
    from enginewright.runtime.server.log import STDERR, log_to

    config = RouteConfig(**options)
    with log_to(STDERR, log_level, log_format) as announce:
        run_proxy(config, announce=announce)
