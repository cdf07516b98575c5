"""What an engine is doing and has done."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from enginewright.runtime.device.memory_plan import MemoryPlan
from enginewright.runtime.grammar.stats import GrammarStats
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.speculation.stats import SpeculationStats

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # bounds of step_sizes


@dataclass(frozen=True, slots=True)
class DiskStats:
    """What is kept on disk of the prefix cache."""

    num_bytes: int
    num_failures: int  # files that could not be written, or not be read, or were damaged, since the start


@dataclass(frozen=True, slots=True)
class Stats:
    """num_waiting_tokens: of the sequences that wait. kv_usage: share of the KV blocks that sequences hold, in the
    fullest group; what only the prefix cache keeps counts as free.

    Totals since the start: computed_tokens (positions that went through the model, again after a preemption),
    prompt_tokens (of sequences that were admitted), cached_prompt_tokens (of these, what the prefix cache spared),
    restored_tokens (that were read from disk instead of computed, again after a preemption),
    busy_s (seconds in which a step was under way), step_sizes (steps by their number of tokens: up to each bound of
    STEP_TOKENS from the one before, and above them).
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_usage: float = 0.0
    num_steps: int = 0
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    num_preemptions: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    restored_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    speculation: SpeculationStats | None = None  # None: nothing is guessed
    disk: DiskStats | None = None  # None: nothing is kept there
    grammars: GrammarStats = field(default_factory=GrammarStats)

    def after(self, before: "Stats") -> "Stats":
        """The same, with totals that go on from those of an earlier run."""
        totals = {name: getattr(self, name) + getattr(before, name) for name in TOTALS}
        step_sizes = tuple(now + then for now, then in zip(self.step_sizes, before.step_sizes, strict=True))
        speculation = self.speculation
        if speculation is not None and before.speculation is not None:
            speculation = speculation.after(before.speculation)
        return replace(self, step_sizes=step_sizes, speculation=speculation or before.speculation, **totals)


TOTALS = (
    "num_steps",
    "num_preemptions",
    "computed_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "restored_tokens",
    "generated_tokens",
    "busy_s",
)


class StepCounts:
    """The steps that a core has run, and what its scheduler knows beside them."""

    def __init__(self, scheduler: Scheduler, memory_plan: MemoryPlan) -> None:
        self._scheduler, self._memory_plan = scheduler, memory_plan
        self._steps = self._tokens = 0
        self._busy_s = 0.0
        self._sizes = [0] * (len(STEP_TOKENS) + 1)

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens has ended, which took so long."""
        self._steps += 1
        self._tokens += num_tokens
        self._busy_s += seconds
        self._sizes[bisect_left(STEP_TOKENS, num_tokens)] += 1

    def stats(
        self,
        *,
        generated_tokens: int = 0,
        speculation: SpeculationStats | None = None,
        disk: DiskStats | None = None,
        grammars: GrammarStats | None = None,
    ) -> Stats:
        """Its numbers may be a step apart from each other, where another thread runs the steps."""
        scheduler = self._scheduler
        blocks = zip(scheduler.num_free_blocks, self._memory_plan.num_blocks, strict=True)
        return Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            kv_usage=max(1 - free / count for free, count in blocks),
            num_steps=self._steps,
            step_sizes=tuple(self._sizes),
            num_preemptions=scheduler.num_preemptions,
            computed_tokens=self._tokens,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_prompt_tokens=scheduler.num_cached_prompt_tokens,
            restored_tokens=scheduler.num_restored_tokens,
            generated_tokens=generated_tokens,
            busy_s=self._busy_s,
            speculation=speculation,
            disk=disk,
            grammars=grammars or GrammarStats(),
        )
