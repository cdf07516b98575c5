"""The command `engine worker`: a machine that computes with the one that serves."""

from pathlib import Path

import click

from enginewright.cli.help import SectionCommand, section
from enginewright.cli.options import LOG_OPTIONS, MASTER_PORT_OPTION, SECRET_FILE_OPTION, nodes_section
from enginewright.cli.values import CountType, EnginePathType
from enginewright.errors import UsageError


@click.command(cls=SectionCommand)
@click.argument("engine", type=EnginePathType())
@nodes_section(
    "--master-addr",
    metavar="HOST",
    required=True,
    help="Address of node 0, the machine of `engine run`, as given there.",
)
@MASTER_PORT_OPTION
@nodes_section(
    "--node-rank",
    type=CountType(),
    required=True,
    help="Number of this machine, from 1 to --nnodes minus 1.",
)
@SECRET_FILE_OPTION
@section("Machine")(
    "--threads",
    type=CountType(),
    show_default="ENGINEWRIGHT_NUM_THREADS, --threads of node 0, or the cores here divided by the processes here",
    help="Number of CPU threads of each process on this machine.",
)
@LOG_OPTIONS
def worker(
    engine: Path,
    master_addr: str,
    master_port: int,
    node_rank: int,
    secret_file: str | None,
    threads: int | None,
    log_level: str,
    log_format: str,
) -> None:
    """Compute on this machine a part of an engine that another machine serves.

    ENGINE is the same engine file as there, where `engine run` or another command has --tensor-parallel-size, --nnodes,
    --master-addr and --secret-file. All other settings come from there. The worker waits for that command, and when it
    has ended, for the next one, until SIGTERM or Ctrl-C.
    """
    from enginewright.runtime.cache.channel import read_secret
    from enginewright.runtime.device.ranks.node import work
    from enginewright.runtime.server.log import STDERR, log_to

    if secret_file is None:
        fix = "Copy the file of node 0."
        raise UsageError(
            "engine worker needs --secret-file", "only machines that know one secret compute together", fix
        )
    with log_to(STDERR, log_level, log_format) as announce:
        secret = read_secret("--secret-file", secret_file)
        work(engine, master_addr, master_port, node_rank, secret, threads, announce)
