"""Groups of ranks in real processes: those of one machine, and `engine worker` in place of another machine."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.helpers.serving import free_port, wait_until

RANK_PROCESS = "enginewright.runtime.device.ranks.worker"
# In the environment of all ranks of this process and of those that it starts, since other tests run meanwhile: a path
# of modules, which processes pass on.
MARK = f"/ranks-of-process-{os.getpid()}"
sys.path.append(MARK)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), MARK)))
TINY: Mapping[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": 16 << 20, "threads": 1}


def rank_processes(parent: int | None = None) -> list[int]:
    """The processes of ranks that a process has started, in the order of their ranks.

    Args:
        parent: id of the process; None is this one.
    """
    children: list[int] = []
    for task in Path(f"/proc/{parent or os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            children += map(int, (task / "children").read_text().split())
    return sorted((pid for pid in children if is_rank(pid)), key=_started)


def all_ranks() -> set[int]:
    """All processes of ranks that run and come from this process, also if what has started them has ended."""
    return {int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal() and is_rank(int(one.name))}


def is_rank(pid: int) -> bool:
    """True if a process is that of a rank, comes from this process, and has not ended."""
    process = Path(f"/proc/{pid}")
    try:
        if RANK_PROCESS.encode() not in (process / "cmdline").read_bytes() or state_of(pid) == "Z":
            return False
        return MARK.encode() in (process / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def state_of(pid: int) -> str:
    """State of a process, such as Z for one that has ended and that its parent has not waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _started(pid: int) -> int:
    """Time at which a process was started, also of one that has ended meanwhile and that nobody has waited for."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


class WorkerNode:
    """`engine worker` in a process of its own.

    Args:
        engine: the engine file.
        folder: folder for its log.
        limits: those of the group, from `Machines.limits`.
        node: its number.
        options: further options; a later option replaces an earlier one.
    """

    def __init__(self, engine: Path, folder: Path, limits: Mapping[str, Any], node: int = 1, *options: str) -> None:
        self._log = folder / f"node{node}-{secrets.token_hex(4)}.log"
        address = ("--master-addr", limits["master_addr"], "--master-port", str(limits["master_port"]))
        command = [sys.executable, "-m", "enginewright.cli", "worker", str(engine), "--node-rank", str(node)]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *address, "--secret-file", limits["secret_file"], *options], stdout=out, stderr=out
            )

    @property
    def log(self) -> str:
        """The output so far."""
        return self._log.read_text()

    @property
    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return rank_processes(self.process.pid)

    def end(self, how: int = signal.SIGTERM) -> int:
        """Ends it, and returns its exit code."""
        self.process.send_signal(how)
        return self.process.wait(20)


def group_limits(folder: Path, nnodes: int, size: int, **limits: Any) -> dict[str, Any]:
    """Limits of an engine with ranks on several machines, on a free port and with a new secret.

    Args:
        folder: folder for the secret.
        nnodes: number of machines.
        size: number of ranks.
        limits: further limits.
    """
    base = {**TINY, "tensor_parallel_size": size, **limits}
    if nnodes == 1:
        return base
    secret = folder / f"secret-{secrets.token_hex(4)}"
    secret.write_text(secrets.token_hex(32))
    address = {"master_addr": "127.0.0.1", "master_port": free_port()}
    return {**base, "nnodes": nnodes, **address, "secret_file": str(secret)}


@contextmanager
def workers(engine: Path, folder: Path, limits: Mapping[str, Any]) -> Iterator[list[WorkerNode]]:
    """Runs the other machines of a group; none for a group on one machine."""
    nodes = [WorkerNode(engine, folder, limits, node) for node in range(1, limits.get("nnodes", 1))]
    try:
        yield nodes
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.end()
            else:
                node.process.wait()


def pids_of_ranks(nodes: list[WorkerNode]) -> dict[int, int]:
    """Processes of all ranks but rank 0 of a group in this process, by rank."""
    pids = rank_processes()
    for node in nodes:
        pids += node.ranks
    return dict(enumerate(pids, 1))


def wait_until_none_is_left(before: set[int]) -> None:
    """Waits until all ranks have ended that were not there before."""
    wait_until(lambda: not all_ranks() - before, 20)
