"""The processes of the ranks on one machine."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from enginewright.errors import EngineError
from enginewright.runtime.device.machine import cpus_of_ranks, num_cores
from enginewright.runtime.device.ranks.carriers import Carriers
from enginewright.runtime.device.ranks.messages import Pipe, Settings, Start, encode
from enginewright.runtime.env import gpu_worker_environment, worker_environment

WORKER = "enginewright.runtime.device.ranks.worker"
END_TIMEOUT_S = 2.0  # maximum seconds until a process has ended by itself


class RankProcess:
    """The process of a rank.

    Args:
        name: its name in messages.
        start: its first message.
    """

    answers_at_start = True

    def __init__(self, name: str, start: Start) -> None:
        self.name, self.rank = name, start.rank
        mine, theirs = socket.socketpair()
        ends = [end for carrier in start.carriers for end in (carrier.memory, *carrier.sockets)]
        descriptors = [one for one in ends if one is not None and one >= 0]
        try:
            with theirs:
                # Without site, as worker_process.py does; but nccl4py finds NCCL by the folders that site knows.
                flags = ["-S", "-P"] if start.gpu is None else ["-P"]
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-m", WORKER, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=worker_environment() if start.gpu is None else gpu_worker_environment(),
                    pass_fds=(theirs.fileno(), *descriptors),
                    process_group=0,  # so that Ctrl-C in a terminal does not reach it
                )
        except BaseException:
            mine.close()
            raise
        self.frames = Pipe(mine)
        with suppress(OSError):  # it has ended already, which its watch finds out
            self.frames.send(encode(start))

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def why_ended(self) -> str:
        """Says how the process has ended, which has closed its connection."""
        try:
            status = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"process {self.pid} has closed its connection"
        names = {int(one): one.name for one in signal.Signals}
        how = f"signal {names.get(-status, -status)}" if status < 0 else f"exit code {status}"
        return f"process {self.pid} was ended by {how}"

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()

    def close(self) -> None:
        """Waits until the process has ended, and ends it if it does not by itself."""
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it is stopped, or waits for a disk
            self._process.wait()
        self.frames.close()


def start_processes(
    settings: Settings,
    path: str,
    ranks: range,
    carriers: Carriers,
    suffix: str = "",
    first_gpu: int | None = None,
    group: bytes = b"",
) -> list[RankProcess]:
    """Starts the ranks of this machine.

    Args:
        settings: the same for all ranks of the group.
        path: path of the engine file.
        ranks: the ranks of this machine. Rank 0 is not started: it is the process with the scheduler.
        carriers: the carriers of `ranks`.
        suffix: end of their names.
        first_gpu: number of the GPU of rank 0, which those of the others follow; None: they compute on CPUs.
        group: name by which GPUs find each other.

    Raises:
        EngineError: the system gives no more processes or descriptors.
    """
    cpus = cpus_of_ranks(len(ranks))
    threads = settings.threads or threads_of_rank(len(ranks))
    started: list[RankProcess] = []
    try:
        for index, rank in enumerate(ranks):
            if rank == 0:
                continue
            gpu, own_cpus = (None, cpus[index]) if first_gpu is None else (first_gpu + rank, ())
            own = carriers.of_rank(rank)
            start = Start(settings, os.path.abspath(path), rank, threads, own_cpus, own, gpu, group)
            started.append(RankProcess(f"rank {rank}{suffix}", start))
    except OSError as error:
        end_processes(started)
        raise EngineError("the processes of ranks cannot be started", error.strerror or str(error)) from error
    except BaseException:
        end_processes(started)
        raise
    return started


def end_processes(processes: Sequence[RankProcess]) -> None:
    """Ends processes that no watch has."""
    for process in processes:
        process.frames.shutdown()
    for process in processes:
        process.close()


def threads_of_rank(count: int) -> int:
    """Number of threads of each rank if `count` of them share this machine."""
    return max(num_cores() // count, 1)
