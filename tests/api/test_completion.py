"""Completion by a real shell, of the script that `engine completion` prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginewright.cli import main

COMPLETE = """
eval "$(cat script)"
COMP_WORDS=({words}) COMP_CWORD={place}
_engine_completion engine
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [("engine do", ["doctor"]), ("engine run --metrics", ["--metrics-compat"]), ("engine xyz", [""])],
)
def test_bash_completes(tmp_path: Path, words: str, found: list[str]) -> None:
    (tmp_path / "script").write_text(CliRunner().invoke(main, ["completion", "bash"]).stdout)
    program = tmp_path / "engine"
    program.write_text(f"#!{sys.executable}\nfrom enginewright.cli import main\nmain(prog_name='engine')\n")
    program.chmod(0o755)
    script = COMPLETE.format(words=words, place=len(words.split()) - 1)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == found, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0 and f"_ENGINE_COMPLETE={shell}_complete" in result.stdout


def test_other_shells_are_refused() -> None:
    result = CliRunner().invoke(main, ["completion", "cmd"])
    assert result.exit_code == 2 and "'cmd' is not one of 'bash', 'zsh', 'fish'" in result.stderr
