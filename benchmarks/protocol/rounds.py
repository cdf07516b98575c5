"""Rounds: each measures the roofline and then every engine, so that changes of the machine affect all engines alike."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.worker import NotMeasured, Run, Worker, synthetic_prompts
from protocol.engines import CLASSES, NATIVE, EngineUnderTest, PeerEnvironment, Ready
from protocol.idle_guard import IdleGuard, snapshot
from protocol.models import Model
from protocol.points import Point

from enginewright import _cpu
from enginewright_bench.roofline import Roofline, measure_roofline, read_buffer

SETTLE_S = 0.3  # before each run: threads of the engine before it stop spinning


@dataclass
class Entry:
    """An engine that takes part."""

    engine: EngineUnderTest
    ready: Ready | None = None  # None until it is made
    worker: Worker | None = None  # None while it does not run
    cannot: str | None = None  # why it was not made, or did not start
    log: Path | None = None  # of the worker

    def start(self) -> None:
        """Its worker, unless it runs or has failed to start."""
        if self.ready is None or self.cannot is not None or self.worker is not None:
            return
        try:
            assert self.log is not None
            self.worker = self.ready.start(self.log)
        except NotMeasured as reason:
            self.cannot = str(reason)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


@dataclass
class Figures:
    """Measurements of one engine at one point."""

    seconds: list[float] = field(default_factory=list)  # of each round
    cpu_seconds: list[float] = field(default_factory=list)  # of each round
    idle_cpu_s: float = 0.0  # CPU time that it took while other engines ran
    idle_s: float = 0.0  # how long they did
    not_measured: str | None = None  # why it was not, if so

    def to_dict(self, entry: Entry) -> dict[str, Any]:
        found: dict[str, Any] = {"precision": entry.engine.precision, "peer": entry.engine.peer}
        found |= {"name": entry.engine.name, "setting": entry.engine.setting}
        if self.not_measured is not None:
            return found | {"not_measured": self.not_measured}
        assert entry.ready is not None
        return found | {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "idle_share_of_a_core": self.idle_cpu_s / self.idle_s if self.idle_s else 0.0,
            "weight_bytes": entry.ready.weight_bytes,
            "kv_bytes_per_position": entry.ready.kv_bytes,
            "about": entry.worker.about if entry.worker is not None else {},
        }


def prepare(engines: Sequence[EngineUnderTest], model: Model, environment: PeerEnvironment) -> list[Entry]:
    """Makes what everybody needs: environments, files, engines."""
    found = []
    for one in engines:
        entry = Entry(one, log=environment.envs / f"{one.label.replace(' ', '-').replace(',', '')}.log")
        print(f"preparing {one.label} for {model.name}", file=sys.stderr, flush=True)
        try:
            entry.ready = one.prepare(model, environment)
        except NotMeasured as reason:
            entry.cannot = str(reason)
        found.append(entry)
    return found


class Measurement:
    """One point, on one model, for the engines of one class."""

    def __init__(
        self, entries: Sequence[Entry], model: Model, point: Point, rounds: int, threads: int, idle_guard: IdleGuard
    ) -> None:
        self.entries, self.model, self.point, self.rounds = entries, model, point, rounds
        self.threads, self.idle_guard = threads, idle_guard
        self.figures = [Figures(not_measured=entry.cannot) for entry in entries]
        self.rooflines: list[Roofline] = []
        self.elsewhere: list[float] = []  # cores that others took, of each round
        self.disturbed = 0  # rounds that were measured again

    def run(self) -> dict[str, Any]:
        """A round to warm up, then rounds that count; disturbed ones are measured again, up to the number of rounds.

        Raises:
            NotMeasured: something else runs on the machine, and goes on.
        """
        first = self.entries[0].engine
        isa = _cpu.isa_names()[0] if first.isa == NATIVE else first.isa
        sizes = [entry.ready.weight_bytes for entry in self.entries if entry.ready is not None]
        self._memory = read_buffer(int(min(sizes)))  # at the size of the weights: caches hold as much of it
        self.idle_guard.wait(self._workers())
        self._each(self._open)
        self._round(isa, count=False)
        while len(self.rooflines) < self.rounds:
            before = snapshot(self._workers())
            self._round(isa, count=True)
            elsewhere = snapshot(self._workers()).elsewhere(before)
            if self.idle_guard.disturbed(elsewhere) and self.disturbed < self.rounds:
                self.disturbed += 1
                self._forget()
                self.idle_guard.wait(self._workers())
            else:
                self.elsewhere.append(elsewhere)
        self._each(self._close)
        return self._report(isa)

    def _workers(self) -> list[Worker]:
        return [entry.worker for entry in self.entries if entry.worker is not None]

    def _each(self, do: Any, *arguments: Any) -> None:
        """For every engine that still takes part; one that fails is out of this point."""
        for entry, figures in zip(self.entries, self.figures, strict=True):
            if figures.not_measured is not None or entry.worker is None:
                continue
            try:
                do(entry.worker, figures, *arguments)
            except NotMeasured as reason:
                figures.not_measured = str(reason)
                if entry.worker.ended:
                    entry.close()
                elif self.point.kind == "decode":
                    entry.worker.ask("close")

    def _prompts(self) -> list[list[int]]:
        return synthetic_prompts(self.point.prompts, self.point.length)

    def _open(self, worker: Worker, figures: Figures) -> None:
        if self.point.kind == "decode":
            worker.ask("open", prompts=self._prompts(), room=self.point.room(2 * self.rounds))

    def _close(self, worker: Worker, figures: Figures) -> None:
        if self.point.kind == "decode":
            worker.ask("close")

    def _round(self, isa: str, *, count: bool) -> None:
        roofline = measure_roofline(isa, self.threads, [self._memory])
        if count:
            self.rooflines.append(roofline)
        self._each(self._turn, count)

    def _turn(self, worker: Worker, figures: Figures, count: bool) -> None:
        time.sleep(SETTLE_S)
        others = [
            (other, theirs)
            for other, theirs in zip(self.entries, self.figures, strict=True)
            if other.worker is not None and other.worker is not worker
        ]
        before, start = [other.worker.cpu_seconds() for other, _ in others if other.worker], time.perf_counter()
        runs = [self._run(worker) for _ in range(self.point.repeats)]
        passed = time.perf_counter() - start
        for (other, theirs), cpu in zip(others, before, strict=True):
            assert other.worker is not None
            theirs.idle_cpu_s += other.worker.cpu_seconds() - cpu
            theirs.idle_s += passed
        if count:
            figures.seconds.append(sum(run.seconds for run in runs))
            figures.cpu_seconds.append(sum(run.cpu_seconds for run in runs))

    def _run(self, worker: Worker) -> Run:
        if self.point.kind == "decode":
            return worker.ask("step", tokens=self.point.tokens)
        if self.point.kind == "in-flight":
            return worker.run(self._prompts(), self.point.tokens)
        run = worker.ask("open", prompts=self._prompts(), room=1)
        worker.ask("close")
        return run

    def _forget(self) -> None:
        """The last round."""
        self.rooflines.pop()
        for figures in self.figures:
            if figures.not_measured is None:
                figures.seconds.pop()
                figures.cpu_seconds.pop()

    def _report(self, isa: str) -> dict[str, Any]:
        operands = CLASSES[self.entries[0].engine.kind]
        found = []
        for entry, figures in zip(self.entries, self.figures, strict=True):
            row = figures.to_dict(entry)
            if figures.not_measured is None:
                assert entry.ready is not None
                weights, kv = entry.ready.weight_bytes, entry.ready.kv_bytes
                row["roofline_seconds"] = [
                    self.point.roofline_seconds(self.model, roofline, operands, weights, kv)
                    for roofline in self.rooflines
                ]
            found.append(row)
        return {
            "tokens": self.point.counted,
            "rooflines": [roofline.to_dict() for roofline in self.rooflines],
            "cores_taken_by_others": self.elsewhere,
            "rounds_measured_again": self.disturbed,
            "contestants": found,
        }
