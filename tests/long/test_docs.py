"""Commands and scripts of the README and the documentation, run as they stand there.

Those of a page run in its order, in one folder. A command that starts a server goes on in the background until the next
one or the end of the page. What is marked with a reason is not run (tests/helpers/documents.py).
"""

import faulthandler
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import SMOLLM2
from tests.helpers.documents import PAGES, ROOT, Block, blocks
from tests.helpers.serving import free_port

ENGINE = ROOT / ".cache/SmolLM2-135M-Instruct-int8-wo.engine"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SERVER = re.compile(r"(?:\w+=(?:\"[^\"]*\"|\S+) )*engine run ")
START_S, COMMAND_S = 600, 1200


@pytest.fixture(scope="module")
def environment(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Caches of their own. The hub is not reached: the model that pages build is in its cache."""
    home = tmp_path_factory.mktemp("home")
    repository = home / "hf/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    shutil.copytree(smollm2_folder, repository / "snapshots" / COMMIT)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    mine = {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(home / "cache"), "PATH": path}
    return {**os.environ, **mine, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that pages name."""
    assert ENGINE.is_file(), "run `make test-long`, which builds it"
    for name in ("smollm2.engine", "other.engine"):  # no links: a page may build another one in its place
        shutil.copyfile(ENGINE, tmp_path / name)
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines/smollm2.engine").symlink_to(ENGINE)
    (tmp_path / Path(SMOLLM2).name).symlink_to(ROOT / SMOLLM2)
    return tmp_path


class Page:
    """A page's folder, and the server that runs for it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment, self._port = folder, environment, free_port()
        self._server: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> None:
        """Runs a block, which must succeed. Addresses and servers have a port of this test's."""
        if block.language == "python":
            interpreter = ROOT / ".cache" / block.environment / "bin/python" if block.environment else sys.executable
            self._run([str(interpreter), "-c", self._at_port(block.text)], block)
        elif SERVER.match(block.text):
            (command,) = block.commands
            self._start(SERVER.sub(lambda found: f"{found[0]}--port {self._port} ", command), block)
        else:
            self._run(["bash", "-euo", "pipefail", "-c", self._at_port(block.text)], block)

    def _at_port(self, text: str) -> str:
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{self._port}")

    def _run(self, command: list[str], block: Block) -> None:
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        printed = f"{block.place}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert done.returncode == 0 and '"error"' not in done.stdout, printed
        print(printed)

    def _start(self, command: str, block: Block) -> None:
        self.stop()
        log = self._folder / "server.log"
        with log.open("w") as output:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"], cwd=self._folder, env=self._environment, stderr=output, text=True
            )
        end = time.monotonic() + START_S
        while f"127.0.0.1:{self._port}" not in log.read_text():
            assert self._server.poll() is None and time.monotonic() < end, f"{block.place}:\n{log.read_text()}"
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends the server, which must end well."""
        if self._server is not None:
            self._server.terminate()
            assert self._server.wait(60) == 0, (self._folder / "server.log").read_text()
            self._server = None


@contextmanager
def opened(folder: Path, environment: Mapping[str, str]) -> Iterator[Page]:
    page = Page(folder, environment)
    try:
        yield page
    finally:
        page.stop()


def runnable(path: Path) -> list[Block]:
    return [block for block in blocks(path, "sh", "python") if not block.not_run]


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if runnable(path) and path.name not in ("CONTRIBUTING.md", "engine-file.md")],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_a_page_runs(path: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """The examples of CONTRIBUTING.md and engine-file.md are run by tests of their own."""
    faulthandler.cancel_dump_traceback_later()  # pages take minutes, and each command has a limit of its own
    with opened(folder, environment) as page:
        for block in runnable(path):
            page.run(block)
