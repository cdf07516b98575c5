"""The command `engine route`: a proxy for a few replicas."""

from typing import Any

import click

from enginewright.cli.help import SectionCommand, section
from enginewright.cli.options import LOG_OPTIONS, hosting_options
from enginewright.cli.values import CountType

prefill = section("Prefill and decode apart")


@click.command(cls=SectionCommand)
@click.argument("replicas", nargs=-1, required=True, metavar="URL...")
@hosting_options(port=8080)
@prefill(
    "--prefill",
    multiple=True,
    metavar="URL",
    show_default="none",
    help="A server with --kv-role prefill or both. It computes long prompts for those that answer, which need "
    "--kv-role decode or both. The option may be given several times.",
)
@prefill(
    "--min-prefill-bytes",
    type=CountType(0),
    default=2048,
    help="A prompt is long if this many bytes of it are new to the server that answers.",
)
@section("Overload")(
    "--max-lead",
    type=CountType(0),
    default=8,
    help="Maximum number of requests that a replica may run beyond the least busy one because it has computed most of "
    "their prompts. 0 sends each request to the least busy replica.",
)
@LOG_OPTIONS
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
