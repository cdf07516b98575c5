"""The command `engine`, run in this process."""

from click.testing import CliRunner, Result

from enginewright.cli import main


def run_engine(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])
