"""The command `engine`: the list of its subcommands."""

import click

from enginewright import __version__
from enginewright.cli.bench import bench
from enginewright.cli.build import adapter, build, export, rebuild
from enginewright.cli.engine_files import diff, doctor, inspect, sign, verify
from enginewright.cli.generate import chat, embed, generate
from enginewright.cli.groups import Commands
from enginewright.cli.route import route
from enginewright.cli.run import run
from enginewright.cli.shell import completion, show_help
from enginewright.cli.worker import worker

COMMANDS: tuple[click.Command, ...] = (
    *(build, rebuild, adapter, export),
    *(inspect, verify, sign, doctor, diff),
    *(generate, embed, chat, run, worker, route, bench),
    *(completion, show_help),
)


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 120,
    },
)
@click.version_option(__version__, prog_name="engine")
def main() -> None:
    """Build a language model into one file, the engine, and run that file.

    \b
    engine build HuggingFaceTB/SmolLM2-135M-Instruct --quant int8-wo --output smollm2.engine
    engine generate smollm2.engine --chat "What is the capital of France?"
    engine chat smollm2.engine
    engine run smollm2.engine

    `engine COMMAND --help` lists the options of a command. Options may be written with underscores, numbers as 32k, and
    sizes as 2g, 2GiB or 2GB. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 model not supported, 4 not enough memory,
    5 corrupt engine file, 6 no code for this machine, 7 quality gate failed, 8 not signed by a trusted signer,
    130 ended by Ctrl-C, 143 ended by SIGTERM.
    """


for command in COMMANDS:
    main.add_command(command)
