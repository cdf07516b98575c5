"""The memory envelope: what an engine takes, exactly, before anything is allocated.

weights + arena + KV. The arena follows from the plan and the limits; the KV of a sequence from its length, its groups'
windows and the longest chunk that is computed at once.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginewright.errors import NotEnoughMemoryError, UsageError
from enginewright.plan import KvGroup, Plan, Sizes

SPLIT_TOKENS = 256  # positions of one partial result of attention (DESIGN §7)
FREE_SHARE = 0.5  # of free memory, for the KV cache where nobody says how much


@dataclass(frozen=True)
class RuntimeConfig:
    """Limits that the runtime chooses; None is a default that depends on the engine or the machine.

    max_model_len: positions of a sequence. max_num_seqs: sequences in a step. max_num_batched_tokens: tokens in a
    step. max_logit_rows: rows of logits in a step, at least max_num_seqs. kv_cache_memory: bytes.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_logit_rows: int | None = None
    kv_cache_memory: int | None = None
    threads: int | None = None
    isa: str | None = None


@dataclass(frozen=True)
class Envelope:
    """limits: of a step. num_blocks: KV blocks, a group. All bytes are what will be allocated (KV as it is touched)."""

    max_model_len: int
    limits: Sizes
    num_blocks: tuple[int, ...]
    arena_bytes: int
    kv_bytes: int


def blocks_of(group: KvGroup, length: int, chunk: int) -> int:
    """Blocks of a group that a sequence of `length` positions holds at most, computed `chunk` tokens at a time."""
    whole = -(-length // group.block_size)
    if not group.window:
        return whole
    # A chunk sees the window before its first token; neither end need fall on a block's edge.
    return min(whole, -(-(group.window + chunk - 1) // group.block_size) + 1)


def block_bytes(group: KvGroup) -> int:
    return group.block_size * group.bytes_per_token


def sequence_bytes(groups: Sequence[KvGroup], length: int, chunk: int) -> int:
    """KV bytes of one sequence."""
    return sum(blocks_of(group, length, chunk) * block_bytes(group) for group in groups)


def limits_of(plan: Plan, config: RuntimeConfig) -> tuple[int, Sizes]:
    """The longest sequence, and the sizes of the largest step.

    Raises:
        UsageError: a limit is beyond what the engine was built for.
    """
    length = config.max_model_len or plan.max_seq_len
    if length > plan.max_seq_len:
        raise UsageError(
            f"--max-model-len {length} is more than the engine was built for",
            f"its limit is {plan.max_seq_len} positions",
            f"Use --max-model-len {plan.max_seq_len} or less.",
        )
    block = max(group.block_size for group in plan.kv_groups)
    tokens = min(config.max_num_batched_tokens, config.max_num_seqs * length)
    rows = max(config.max_logit_rows or 0, config.max_num_seqs)
    return length, Sizes(
        tokens=max(tokens, config.max_num_seqs),
        sequences=config.max_num_seqs,
        logit_rows=rows,
        kv_blocks=-(-length // block),
        kv_splits=-(-length // SPLIT_TOKENS),
    )


def envelope(plan: Plan, config: RuntimeConfig, memory: int | None = None) -> Envelope:
    """What to allocate for these limits.

    Args:
        memory: bytes for the KV cache where the config does not say; None asks the machine.

    Raises:
        NotEnoughMemoryError: the memory does not hold one sequence of the longest length.
    """
    length, limits = limits_of(plan, config)
    _, arena_bytes = plan.arena_offsets(limits)
    given = config.kv_cache_memory or memory
    budget = given if given is not None else int(free_memory() * FREE_SHARE) - arena_bytes
    one = sequence_bytes(plan.kv_groups, length, limits.tokens)
    if budget < one:
        raise NotEnoughMemoryError(
            f"the KV cache of one sequence of {length} positions takes {one / 1e6:.0f} MB",
            f"{max(budget, 0) / 1e6:.0f} MB are there for it",
            "Use a smaller --max-model-len, or a larger --kv-cache-memory.",
        )
    share = min(budget / one, limits.sequences)
    blocks = tuple(int(blocks_of(group, length, limits.tokens) * share) for group in plan.kv_groups)
    kv_bytes = sum(count * block_bytes(group) for count, group in zip(blocks, plan.kv_groups, strict=True))
    return Envelope(length, limits, blocks, arena_bytes, kv_bytes)


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, and of its control group."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    fields = dict(line.split(":", 1) for line in lines)
    if "MemAvailable" in fields:
        free = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdecimal():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)
