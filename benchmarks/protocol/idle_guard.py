"""Detection of other work on the machine. A run waits for it to end, or reports it, because it makes figures noise."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.worker import CLOCK_TICKS, NotMeasured, Worker

IDLE_CORES = 0.10  # of other work, at most, when a measurement begins
DISTURBED_CORES = 0.05  # over one round; with more, the round is measured again
SAMPLE_S = 1.0
NAMED = 3  # busiest processes that a complaint names


@dataclass(frozen=True)
class Snapshot:
    """Times at one moment, in seconds."""

    wall: float  # of the clock
    busy: float  # of all processors together, without idle time
    own: float  # of this process and its workers

    def elsewhere(self, before: "Snapshot") -> float:
        """Cores that others (or the host: steal) have taken since."""
        return max(0.0, (self.busy - before.busy) - (self.own - before.own)) / (self.wall - before.wall)


def snapshot(workers: Sequence[Worker] = ()) -> Snapshot:
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    own = sum(os.times()[:4]) + sum(worker.cpu_seconds() for worker in workers)
    return Snapshot(time.perf_counter(), (user + nice + system + irq + softirq + steal) / CLOCK_TICKS, own)


class IdleGuard:
    """Waits until the machine is idle.

    Args:
        noisy: measure whatever happens, and only say so.
        wait_s: how long to wait for other processes to end.
    """

    def __init__(self, *, noisy: bool, wait_s: float) -> None:
        self.noisy, self.wait_s = noisy, wait_s

    def wait(self, workers: Sequence[Worker] = ()) -> float:
        """Until nothing else runs, while ours are idle. Returns the cores that others take.

        Raises:
            NotMeasured: others go on.
        """
        until, said = time.monotonic() + self.wait_s, False
        while True:
            before, processes = snapshot(workers), _cpu_of_processes()
            time.sleep(SAMPLE_S)
            cores = snapshot(workers).elsewhere(before)
            if cores <= IDLE_CORES or self.noisy:
                return cores
            names = _busiest(processes, _cpu_of_processes())
            if time.monotonic() > until:
                raise NotMeasured(
                    f"others take {cores:.2f} cores of this machine ({names}); "
                    "measure when nothing else runs, or with --noisy for figures that mean little"
                )
            if not said:
                print(f"waiting: others take {cores:.2f} cores ({names})", file=sys.stderr, flush=True)
                said = True

    def disturbed(self, cores: float) -> bool:
        return cores > DISTURBED_CORES and not self.noisy


def _cpu_of_processes() -> dict[str, tuple[str, int]]:
    """Process id → name, clock ticks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        fields = tail.split()
        found[path.parent.name] = head.partition("(")[2], int(fields[11]) + int(fields[12])
    return found


def _busiest(before: dict[str, tuple[str, int]], after: dict[str, tuple[str, int]]) -> str:
    spent = {pid: ticks - before.get(pid, (name, 0))[1] for pid, (name, ticks) in after.items()}
    busiest = sorted((pid for pid in spent if spent[pid] > 0), key=lambda pid: -spent[pid])[:NAMED]
    return ", ".join(f"{after[pid][0]} {pid}" for pid in busiest) or "none that lasts"
