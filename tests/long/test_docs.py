"""Commands and scripts of the README and the documentation, run as they stand there.

Those of a page run in its order, in one folder. A block that starts servers has no other commands; they go on in the
background until the next such block or the end of the page. What is marked with a reason is not run
(tests/helpers/documents.py).
"""

import faulthandler
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import SMOLLM2
from tests.helpers.documents import PAGES, ROOT, SERVER, Block, blocks
from tests.helpers.serving import free_port

ENGINE = ROOT / ".cache/SmolLM2-135M-Instruct-int8-wo.engine"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PORT = re.compile(r"(127\.0\.0\.1:|--port )(\d+)")
DEFAULT_PORT = "8000"
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
    """A page's folder, and the servers that run for it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._ports: defaultdict[str, int] = defaultdict(free_port)  # by the ports that stand in the page
        self._servers: list[subprocess.Popen[str]] = []

    def run(self, block: Block) -> None:
        """Runs a block, which must succeed. Ports of this machine are replaced by free ones."""
        if block.language == "python":
            interpreter = ROOT / ".cache" / block.environment / "bin/python" if block.environment else sys.executable
            self._run([str(interpreter), "-c", self._at_free_ports(block.text)], block)
        elif any(map(SERVER.match, block.commands)):
            self.stop()
            for command in block.commands:
                self._start(command, block)
        else:
            self._run(["bash", "-euo", "pipefail", "-c", self._at_free_ports(block.text)], block)

    def _at_free_ports(self, text: str) -> str:
        return PORT.sub(lambda found: f"{found[1]}{self._ports[found[2]]}", text)

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
        if "--port " not in command:
            command = SERVER.sub(lambda found: f"{found[0]}--port {DEFAULT_PORT} ", command)
        (port,) = {found[2] for found in PORT.finditer(command) if found[1] == "--port "}
        log = self._log(len(self._servers))
        with log.open("w") as output:
            server = subprocess.Popen(
                ["bash", "-c", f"exec env {self._at_free_ports(command)}"],
                cwd=self._folder,
                env=self._environment,
                stderr=output,
                text=True,
            )
        self._servers.append(server)
        end = time.monotonic() + START_S
        while f"at http://127.0.0.1:{self._ports[port]}/" not in log.read_text():
            assert server.poll() is None and time.monotonic() < end, f"{block.place}:\n{log.read_text()}"
            time.sleep(0.1)

    def _log(self, number: int) -> Path:
        return self._folder / f"server-{number}.log"

    def stop(self) -> None:
        """Ends the servers, which must end well."""
        while self._servers:
            server = self._servers.pop()
            server.terminate()
            assert server.wait(60) == 0, self._log(len(self._servers)).read_text()


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
