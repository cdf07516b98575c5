"""`engine run` in a process of its own, as operators start it."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.serving import wait_until

OPTIONS = {"max_tokens": 24, "temperature": 0, "logprobs": 2, "ignore_eos": True}
ADDRESS = re.compile(rb"http://127\.0\.0\.1:(\d+)")


class Process:
    """The process.

    Args:
        engine: the engine file.
        log: a file for its log.
        options: further options.
        environment: further variables.

    Attributes:
        key: the API key of requests that name none.
    """

    key = "none"

    def __init__(self, engine: Path, log: Path, *options: str, environment: Mapping[str, str] = {}) -> None:
        self._log = log
        command = [sys.executable, "-m", "enginewright.cli", "run", str(engine), "--port", "0", "--threads", "1"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--kv-cache-memory", "256m", *options],
                stdout=out,
                stderr=out,
                env={**os.environ, **environment},
            )
        wait_until(lambda: ADDRESS.search(log.read_bytes()) is not None)
        found = ADDRESS.search(log.read_bytes())
        assert found is not None
        self.port = int(found[1])

    @property
    def log(self) -> str:
        return self._log.read_text()

    def complete(self, prompt: list[int], *, key: str | None = None, **options: Any) -> Any:
        """Requests a completion. key: the API key."""
        body = json.dumps({"prompt": prompt, **OPTIONS, **options}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.key}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def lease(self, prompt: list[int]) -> Any:
        """The parameters with which another server fetches the prompt's blocks."""
        return self.complete(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, that with these labels if it has several."""
        page = f"http://127.0.0.1:{self.port}/metrics"
        request = urllib.request.Request(page, headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            lines = response.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if re.match(rf"enginewright_{name}[ {{]", line)]
        (line,) = (line for line in found if all(one in line for one in wanted))
        return float(line.rpartition(" ")[2])

    def end(self, how: int = signal.SIGTERM) -> None:
        """Ends the process by a signal."""
        self.process.send_signal(how)
        self.process.wait(60)
