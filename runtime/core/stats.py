"""Statistics of an engine."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from enginewright.runtime.device.memory_plan import MemoryPlan
from enginewright.runtime.grammar.stats import GrammarStats
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.speculation.stats import SpeculationStats

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # upper bounds of step_sizes


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Statistics of the prefix cache on disk."""

    num_bytes: int  # bytes on disk
    num_failures: int  # files that could not be written or read, or were damaged, since the start


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Statistics of the prefix cache that servers share, since the start."""

    num_sent_bytes: int  # bytes of encrypted blocks that were written
    num_received_bytes: int  # bytes of encrypted blocks that were read
    num_searches: int  # prompts that were searched for
    num_found: int  # prompts of which blocks were found
    failures: Mapping[str, int]  # failures of searches, reads and writes, by cause
    shared_bytes: int  # bytes that are kept in this server's memory for others, now


@dataclass(frozen=True, slots=True)
class KvTransferStats:
    """Totals of the KV blocks that have moved since the start, and the present leases."""

    num_sent_bytes: int = 0  # bytes of blocks that other servers have fetched
    num_received_bytes: int = 0  # bytes of blocks that were fetched from other servers
    num_failures: int = 0  # prompts whose blocks could not be fetched, and were computed
    num_expired: int = 0  # leases that nobody has fetched
    leased_bytes: int = 0  # bytes of blocks that wait to be fetched


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of an engine: its present state, and totals since the start."""

    # Present state.
    num_running: int = 0  # running sequences
    num_waiting: int = 0  # waiting sequences
    num_waiting_tokens: int = 0  # tokens of the waiting sequences
    num_retained: int = 0  # blocks and slots of the prefix cache that a hint keeps, of those that no sequence holds
    # Share of the KV blocks that sequences hold, from 0 to 1, in the fullest cache group. Blocks that only the prefix
    # cache keeps count as free.
    kv_usage: float = 0.0

    # Totals since the start.
    num_steps: int = 0  # steps that have ended
    # Steps by their number of tokens: for each bound of STEP_TOKENS, those up to it and above the bound before; last,
    # those above all bounds.
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    num_preemptions: int = 0  # preemptions of sequences
    num_evictions: int = 0  # blocks and slots of the prefix cache that were reused for other content
    num_early_evictions: int = 0  # number of these that a hint should have kept longer
    computed_tokens: int = 0  # tokens that went through the model, again after a preemption
    prompt_tokens: int = 0  # prompt tokens of the admitted sequences, counted once for all answers to a prompt
    cached_prompt_tokens: int = 0  # number of these that were in the prefix cache
    # Tokens whose blocks were read from a store or fetched from another server, again after a preemption.
    restored_tokens: int = 0
    generated_tokens: int = 0  # tokens of answers
    busy_s: float = 0.0  # seconds in which a step was under way
    speculation: SpeculationStats | None = None  # statistics of draft tokens; None: no speculative decoding

    # Statistics of parts of the engine.
    disk: DiskStats | None = None  # statistics of the prefix cache on disk; None: it is not kept on disk
    remote: RemoteStats | None = None  # statistics of the prefix cache that servers share; None: nothing is shared
    transfer: KvTransferStats | None = None  # statistics of KV blocks that move between servers; None: none move
    grammars: GrammarStats = field(default_factory=GrammarStats)  # statistics of the grammars

    def after(self, before: "Stats") -> "Stats":
        """Adds the totals of an earlier run of the engine.

        Args:
            before: statistics of the earlier run.

        Returns:
            The present state of this run, and the totals of both.
        """
        totals = {name: getattr(self, name) + getattr(before, name) for name in TOTALS}
        step_sizes = tuple(now + then for now, then in zip(self.step_sizes, before.step_sizes, strict=True))
        speculation = self.speculation
        if speculation is not None and before.speculation is not None:
            speculation = speculation.after(before.speculation)
        return replace(self, step_sizes=step_sizes, speculation=speculation or before.speculation, **totals)


TOTALS = (
    "num_steps",
    "num_preemptions",
    "num_evictions",
    "num_early_evictions",
    "computed_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "restored_tokens",
    "generated_tokens",
    "busy_s",
)


class StepCounts:
    """Counts the steps of a core, and combines the counts with those of its scheduler.

    Args:
        scheduler: the core's scheduler.
        memory_plan: holds the number of KV blocks.
    """

    def __init__(self, scheduler: Scheduler, memory_plan: MemoryPlan) -> None:
        self._scheduler, self._memory_plan = scheduler, memory_plan
        self._steps = self._tokens = 0
        self._busy_s = 0.0
        self._sizes = [0] * (len(STEP_TOKENS) + 1)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Counts a step that has ended.

        Args:
            num_tokens: number of its tokens.
            seconds: time that it took.
        """
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
        remote: RemoteStats | None = None,
        grammars: GrammarStats | None = None,
        transfer: KvTransferStats | None = None,
    ) -> Stats:
        """Creates the statistics; the numbers may be one step apart from each other if another thread runs the steps.

        Args:
            generated_tokens: number of tokens of answers since the start.
            speculation: statistics of draft tokens.
            disk: statistics of the prefix cache on disk.
            remote: statistics of the prefix cache that servers share.
            grammars: statistics of the grammars.
            transfer: statistics of KV blocks that move between servers.
        """
        scheduler = self._scheduler
        blocks = zip(scheduler.num_free_blocks, self._memory_plan.num_blocks, strict=True)
        return Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_retained=scheduler.num_retained,
            kv_usage=max(1 - free / count for free, count in blocks),
            num_steps=self._steps,
            step_sizes=tuple(self._sizes),
            num_preemptions=scheduler.num_preemptions,
            num_evictions=scheduler.num_evictions,
            num_early_evictions=scheduler.num_early_evictions,
            computed_tokens=self._tokens,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_prompt_tokens=scheduler.num_cached_prompt_tokens,
            restored_tokens=scheduler.num_restored_tokens,
            generated_tokens=generated_tokens,
            busy_s=self._busy_s,
            speculation=speculation,
            disk=disk,
            remote=remote,
            transfer=transfer,
            grammars=grammars or GrammarStats(),
        )
