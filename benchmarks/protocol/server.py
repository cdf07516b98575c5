"""`engine run` in a process of its own."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from peers.worker import NotMeasured

START_S = 60.0  # for the server to answer


class Server:
    """A server that answers; `models` are the names of its engines.

    Args:
        engine: a file, or a folder of files.
        options: of `engine run`, further ones.
        log: a file for what it prints.

    Raises:
        NotMeasured: it ended, or does not answer.
    """

    def __init__(self, engine: Path, options: Sequence[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "enginewright.cli", "run", str(engine)]
        command += ["--host", "127.0.0.1", "--port", str(port), *options]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            self._wait(log)
            with urllib.request.urlopen(f"{self.url}/v1/models") as response:
                self.models: list[str] = [card["id"] for card in json.load(response)["data"]]
        except BaseException:
            self.close()
            raise

    def _wait(self, log: Path) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise NotMeasured(f"the server ended with {self.process.returncode}: {log.read_text().strip()[-400:]}")
            try:
                urllib.request.urlopen(f"{self.url}/health").close()
                return
            except urllib.error.URLError:
                time.sleep(0.1)
        raise NotMeasured(f"the server does not answer after {START_S:.0f} s")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
