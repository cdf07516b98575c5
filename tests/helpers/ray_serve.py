"""A deployment of Ray Serve on this machine, in a Python environment of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.helpers.serving import Answer, free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".cache/ray/bin/python"  # `make test-long` installs it
ENGINE = ROOT / ".cache/SmolLM2-135M-Instruct-int8-wo.engine"
# A machine that does much else at the same time starts Ray's processes slowly.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "src"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
REPLICA = b"ray::ServeReplica:default:Replica"  # title of a replica's process
# A line of stdin has the arguments of a deployment, and is answered by a line.
PROGRAM = """
import json, sys
import ray
from ray import serve
from enginewright.ray.app import build
port, folder = int(sys.argv[1]), sys.argv[2]
ray.init(num_cpus=4, include_dashboard=False, _temp_dir=folder, object_store_memory=100 << 20)
serve.start(http_options={"host": "127.0.0.1", "port": port})
for line in sys.stdin:
    serve.run(build(json.loads(line)))
    print("deployed", flush=True)
serve.shutdown()
ray.shutdown()
"""


class Deployment:
    """A deployment. port: of Ray's proxy.

    Args:
        opened: the process that runs PROGRAM.
        port: the port.
    """

    def __init__(self, opened: "subprocess.Popen[str]", port: int) -> None:
        self._opened, self.port = opened, port

    def deploy(self, **arguments: Any) -> None:
        """Deploys replicas, or replaces them one by one; it returns once all are new.

        Args:
            arguments: settings of the deployment.
        """
        assert self._opened.stdin is not None and self._opened.stdout is not None
        self._opened.stdin.write(json.dumps(arguments) + "\n")
        self._opened.stdin.flush()
        while (line := self._opened.stdout.readline()) != "deployed\n":  # Ray reports lost workers there, too
            assert line, "the process has ended"

    def replicas(self) -> list[int]:
        """Process ids of the replicas."""
        return [pid for pid, title in _processes_below(self._opened.pid) if title.startswith(REPLICA)]

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = {}) -> Answer:
        """Sends a request and reads the answer.

        Args:
            method: the HTTP method.
            path: the path.
            body: a value that is sent as JSON.
            headers: further headers.
        """
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()

    def metric(self, name: str) -> dict[str, float]:
        """The values of a counter or gauge by replica, those of all engines together."""
        page = self.ask("GET", "/metrics").body.decode()
        values: dict[str, float] = {}
        for labels, value in re.findall(rf"^enginewright_{name}{{(.*)}} (\S+)$", page, re.MULTILINE):
            (replica,) = re.findall(r'replica="([^"]*)"', labels)
            values[replica] = values.get(replica, 0.0) + float(value)
        return values

    def wait_for_replicas(self, count: int) -> None:
        """Waits until a number of replicas answer."""
        wait_until(lambda: len(self.metric("engine_open")) == count, 600)


@contextmanager
def ray_serve() -> Iterator[Deployment]:
    """Runs Ray, without a deployment."""
    assert PYTHON.is_file(), "run `make test-long`, which installs Ray"
    folder, port = mkdtemp(prefix="ray-"), free_port()  # short: Ray's sockets are in the folder
    command = [str(PYTHON), "-c", PROGRAM, str(port), folder]
    with subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as opened:
        try:
            yield Deployment(opened, port)
            assert opened.stdin is not None
            opened.stdin.close()
            assert opened.wait(120) == 0
        finally:
            below = [pid for pid, _ in _processes_below(opened.pid)]
            opened.kill()
            for pid in below:
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def _processes_below(root: int) -> Iterator[tuple[int, bytes]]:
    """The descendants of a process, with their titles."""
    parents, titles = dict[int, int](), dict[int, bytes]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            titles[int(folder.name)] = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    for pid in titles:
        above = parents[pid]
        while above not in (0, root):
            above = parents.get(above, 0)
        if above == root:
            yield pid, titles[pid]
