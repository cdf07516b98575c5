"""Commands that measure speed: `engine bench offline`, `profile` and `serve`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from enginewright.cli.groups import BenchCommands
from enginewright.cli.help import JSON_OPTION, section
from enginewright.cli.options import LIMIT_OPTIONS, THREADS_OPTION, WORKLOAD, WORKLOAD_OPTIONS, pop_options
from enginewright.cli.printing import show_report
from enginewright.cli.values import CountType, EnginePathType

server, load, measurement = section("Server"), section("Load"), section("Measurement")
PLOT_OPTION = section("Output")(
    "--plot",
    type=click.Path(path_type=Path),
    show_default="no plot",
    help="Plot the measured latencies and throughput in this file, .svg or .png.",
)


@click.group(cls=BenchCommands)
def bench() -> None:
    """Measure the speed of an engine or a server."""


@bench.command("offline")
@click.argument("engine", type=EnginePathType())
@WORKLOAD_OPTIONS
@measurement(
    "--rounds",
    type=int,
    default=3,
    help="Number of times that the requests are run. Rates are medians over the rounds.",
)
@measurement("--warm-up", type=int, default=1, help="Number of rounds that are run first and are not counted.")
@measurement(
    "--compare",
    is_flag=True,
    help="Run each round a second time without speculation, and say how much faster --speculate is and how many "
    "answers are the same.",
)
@LIMIT_OPTIONS
@PLOT_OPTION
@JSON_OPTION
def bench_offline(
    engine: Path, rounds: int, warm_up: int, compare: bool, plot: Path | None, as_json: bool, **options: Any
) -> None:
    """Measure the throughput of an engine that has all requests at once."""
    from enginewright_bench.commands import measure_offline
    from enginewright_bench.offline import OfflineConfig
    from enginewright_bench.report import describe_offline
    from enginewright_bench.workload import workload_config

    workload = workload_config(**pop_options(options, WORKLOAD))
    config = OfflineConfig(workload, warm_up, rounds, compare)
    print_report = partial(show_report, describe=None if as_json else describe_offline)
    measure_offline(engine, config, print_report, plot, **options)


@bench.command("profile")
@click.argument("engine", type=EnginePathType())
@section("Steps")(
    "--prefill",
    type=CountType(),
    multiple=True,
    show_default="512",
    help="Profile a step that reads a prompt of this many tokens. The option may be given several times.",
)
@section("Steps")(
    "--batch",
    type=CountType(),
    multiple=True,
    show_default="1",
    help="Profile a step in which this many sequences decode one token each. The option may be given several times.",
)
@section("Steps")(
    "--depth",
    type=CountType(minimum=0),
    multiple=True,
    show_default="512",
    help="Number of tokens that each of these sequences already has in the KV cache. The option may be given several "
    "times.",
)
@measurement("--rounds", type=int, default=5, help="Number of rounds. Each measures the roofline, and then every step.")
@section("Machine")(
    "--tensor-parallel-size",
    "-tp",
    type=CountType(),
    default=1,
    help="Number of processes that compute the model together. Kernels are those of the first one.",
)
@THREADS_OPTION
@JSON_OPTION
def bench_profile(
    engine: Path,
    prefill: tuple[int, ...],
    batch: tuple[int, ...],
    depth: tuple[int, ...],
    rounds: int,
    tensor_parallel_size: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Show how long each kernel of a step takes, and compare it with the machine's roofline.

    With --prefill alone only prompts are profiled, with --batch or --depth alone only decoding. Every --batch is
    profiled at every --depth.
    """
    from enginewright_bench.profile import profile_config, run_profile
    from enginewright_bench.report import describe_profile

    report = run_profile(engine, profile_config(prefill, batch, depth, rounds), threads, tensor_parallel_size)
    show_report(report, None if as_json else describe_profile, err=True)


@bench.command("serve")
@server("--base-url", default="http://127.0.0.1:8000", help="Address of a server with OpenAI's API: ours or another.")
@server(
    "--endpoint",
    type=click.Choice(("completions", "chat")),
    default="completions",
    help="Which API to use. completions sends token ids, so that prompts have exactly the requested length.",
)
@server("--model", show_default="the first one that the server lists", help="Name of the model on the server.")
@server("--api-key", show_default="none", help="API key of the server.")
@load(
    "--request-rate",
    type=float,
    default="inf",
    help="Requests per second on average, sent at random times (a Poisson process); inf sends all at once.",
)
@load(
    "--max-concurrency",
    type=CountType(),
    show_default="no limit",
    help="Maximum number of requests that are in flight at the same time.",
)
@WORKLOAD_OPTIONS
@section("Requests")(
    "--vocab-size", type=CountType(), default=10000, help="Random prompts use token ids below this number."
)
@measurement("--warm-up", type=int, default=1, help="Number of requests that are sent first and are not counted.")
@measurement(
    "--goodput",
    show_default="not counted",
    help="Count the requests that stay within limits in milliseconds: ttft (time to first token), tpot (time per "
    "output token), e2e (whole answer). Example: ttft=500,tpot=50.",
)
@measurement(
    "--server-pid",
    type=int,
    show_default="not measured",
    help="Also measure the CPU time of the server, the process with this id on this machine.",
)
@measurement("--timeout", "timeout_s", type=float, default=600, help="Seconds after which a request counts as failed.")
@PLOT_OPTION
@JSON_OPTION
def bench_serve(
    endpoint: str, vocab_size: int, goodput: str | None, plot: Path | None, as_json: bool, **options: Any
) -> None:
    """Send requests to a server, and measure how fast it answers."""
    from enginewright_bench.commands import measure_server
    from enginewright_bench.figures import Goodput
    from enginewright_bench.report import describe_serve
    from enginewright_bench.serving import Chat, Completions, ServeConfig
    from enginewright_bench.workload import workload_config

    config = ServeConfig(
        workload=workload_config(**pop_options(options, WORKLOAD)),
        endpoint=Chat() if endpoint == "chat" else Completions(vocab_size),
        goodput=Goodput.parse(goodput) if goodput is not None else None,
        **options,
    )
    measure_server(config, partial(show_report, describe=None if as_json else describe_serve), plot)
