"""The benchmark's side of exchange.py: it sends one request at a time to an engine in a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class NotMeasured(Exception):
    """An engine that could not be made or has failed; the text is the reason."""


def synthetic_prompts(number: int, length: int, shift: int = 0) -> list[list[int]]:
    """Token ids of every prompt: `(i * 7919) % 40000 + 10`, from a place of its own, so that no two begin alike."""
    return [[((i + 77 * (k + shift)) * 7919) % 40000 + 10 for i in range(length)] for k in range(number)]


def cpu_seconds(session: int) -> float:
    """CPU time of all living processes of a session (a process started with start_new_session leads one)."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # the name may hold spaces
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))  # its own, and of its children that have ended; user and system
    return ticks / CLOCK_TICKS


@dataclass(frozen=True)
class Run:
    """seconds: of the wall. cpu_seconds: of the worker's process. value: what the engine's method gave back."""

    seconds: float
    cpu_seconds: float
    value: Any


class Worker:
    """Starts a worker and waits until it has loaded.

    Args:
        log: where its stderr goes, and what its libraries print.
        env: added to this process's environment.

    Raises:
        NotMeasured: it ended, or said something else than exchange.py has it say.
    """

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | (env or {}),
                start_new_session=True,
            )
        try:
            self.about: dict[str, str] = self._answer()["about"]
        except BaseException:
            self._process.kill()  # it may be loading still
            raise

    def run(self, prompts: list[list[int]], tokens: int) -> Run:
        """All prompts at once, `tokens` new tokens each.

        Raises:
            NotMeasured: it failed, or gave another number of tokens.
        """
        run = self.ask("generate", prompts=prompts, tokens=tokens)
        if run.value is not None and [len(ids) for ids in run.value] != [tokens] * len(prompts):
            raise NotMeasured(
                f"it was to generate {tokens} tokens each, and gave {sorted({len(ids) for ids in run.value})}"
            )
        return run

    def ask(self, do: str, **arguments: Any) -> Run:
        """One request of exchange.py.

        Raises:
            NotMeasured: it cannot do that, or has ended (`ended` tells which).
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._why_ended() from None
        answer = self._answer()
        if "cannot" in answer:
            raise NotMeasured(answer["cannot"])
        return Run(**answer)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            print(f"a worker ended early; see {self._log}", file=sys.stderr)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._why_ended()
        try:
            answer: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise NotMeasured(f"it said {line.strip()!r}") from None
        return answer

    def _why_ended(self) -> NotMeasured:
        code = self._process.wait()
        last = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        return NotMeasured(f"the process ended with {code}: {' '.join(last) or 'it said nothing'} ({self._log.name})")
