"""rclone's S3 server: another project's, which checks signatures. `make test-long` installs it (object_store.txt)."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from tests.helpers.serving import free_port, wait_until

PROGRAM = Path(__file__).parents[2] / ".cache/object_store/bin/rclone"
BUCKET = "prefixes"
KEY = {"AWS_ACCESS_KEY_ID": "key-of-the-test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}


@dataclass
class ObjectStore:
    """A server with one bucket, whose objects are files of a folder."""

    port: int  # TCP port
    folder: Path  # folder of the bucket
    process: subprocess.Popen[bytes]  # the server

    @property
    def url(self) -> str:
        """The bucket, in the form of --kv-cache-remote."""
        return f"s3://{BUCKET}/some/prefix?endpoint=http://127.0.0.1:{self.port}"

    @property
    def objects(self) -> list[Path]:
        """Files of the objects."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Lets the server accept connections, and answer none."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def object_store(folder: Path, program: Path | None = None) -> Iterator[ObjectStore]:
    """Runs the server.

    Args:
        folder: for its buckets.
        program: rclone; None is the one that `make test-long` installs.
    """
    program = program or PROGRAM
    assert program.is_file(), "run `make test-long`, which installs it"
    port, bucket = free_port(), folder / BUCKET
    bucket.mkdir(parents=True)
    key = ",".join(KEY.values())
    command = [str(program), "--config", os.devnull, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", key]
    with subprocess.Popen([*command, str(folder)], stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: _answers(port))
            yield ObjectStore(port, bucket, server)
        finally:
            server.send_signal(signal.SIGCONT)
            server.terminate()


def _answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        return bool(connection.getresponse().status)
    except OSError:
        return False
    finally:
        connection.close()
