"""Commands end cleanly by signals, and where the shell has closed a standard stream."""

import json
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from enginewright.cli.groups import Commands
from tests.helpers.serving import tiny_engine


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_with_its_code_and_without_its_temporary_files(
    number: signal.Signals, tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGTERM)

    @click.group(cls=Commands)
    def group() -> None:
        pass

    @group.command()
    def work() -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(number)
            pytest.fail("the signal did nothing")

    done = CliRunner().invoke(group, ["work"])
    assert (done.exit_code, done.output) == (128 + number, "")
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(
    ("options", "redirection", "code"),
    [("--json", ">&-", 1), ("", "<&- >&-", 1), ("--json", "<&- 2>&-", 0)],
)
def test_closed_standard_streams(options: str, redirection: str, code: int) -> None:
    """A closed stdout ends the command quietly, and messages for stderr never go elsewhere."""
    engine = [sys.executable, "-m", "enginewright.cli", "generate", str(tiny_engine()), "--prompt", "a"]
    script = f"{shlex.join(engine)} {options} --max-tokens 2 --ignore-eos {redirection}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (code, "")
    assert code or len(json.loads(done.stdout)["token_ids"]) == 2
