"""The memory plan: the exact bytes of an engine's weights, arena and KV cache, before anything is allocated.

The arena's size follows from the plan and the limits of a step. The KV size of a sequence follows from its length, the
windows of its cache groups, and the longest chunk that a step computes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from enginewright.errors import NotEnoughMemoryError, UsageError
from enginewright.plan import CacheGroup, PagedCache, Plan, StepSizes
from enginewright.runtime.cache.cache import shared_block_size
from enginewright.runtime.cache.paged import blocks_of
from enginewright.runtime.cache.recurrent import slots_of
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.machine import free_memory
from enginewright.runtime.step.dims import StepCounter

FREE_SHARE = 0.5  # share of the memory left by weights and arena that the KV cache gets by default
# Number of rows of logits up to which draft tokens get rows of their own. A step of more tokens is bound by operations
# instead of by reading the weights, so draft tokens save nothing.
MAX_VERIFIED_ROWS = 64


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of what will be allocated. On a CPU, memory of the KV cache is only committed as it is used."""

    max_model_len: int  # maximum number of positions of a sequence
    limits: StepSizes  # sizes of the largest step
    num_blocks: tuple[int, ...]  # number of blocks, or slots of a recurrent state, of each cache group
    arena_bytes: int  # bytes of the arena, which holds activations
    kv_bytes: int  # bytes of all cache groups
    adapter_bytes: int = 0  # bytes of the slots for adapters, on a GPU


@dataclass(frozen=True)
class KvBlocks:
    """The blocks of the cache group that limits how many tokens fit: one without a window, if there is any."""

    block_size: int  # tokens of a block
    count: int  # number of blocks

    @property
    def tokens(self) -> int:
        """Number of tokens that fit."""
        return self.block_size * self.count

    @classmethod
    def of(cls, caches: Sequence[CacheGroup], num_blocks: Sequence[int]) -> "KvBlocks | None":
        """Finds the limiting group. Returns None if no group is paged.

        Args:
            caches: the plan's cache groups.
            num_blocks: number of blocks or slots of each group.
        """
        paged = [
            (bool(group.window), cls(group.block_size, count))
            for group, count in zip(caches, num_blocks, strict=True)
            if isinstance(group, PagedCache)
        ]
        return min(paged, key=lambda one: (one[0], one[1].tokens))[1] if paged else None


def places_of(group: CacheGroup, length: int, chunk: int) -> int:
    """Number of blocks or slots of a group for a sequence of `length` positions, computed `chunk` tokens at a time."""
    return blocks_of(group, length, chunk) if isinstance(group, PagedCache) else slots_of(length)


def place_bytes(group: CacheGroup) -> int:
    """Bytes of a block or slot of a group."""
    return group.block_bytes if isinstance(group, PagedCache) else group.bytes_per_sequence


def sequence_bytes(groups: Sequence[CacheGroup], length: int, chunk: int) -> int:
    """Bytes that a sequence of `length` positions, computed `chunk` tokens at a time, takes in all cache groups."""
    return sum(places_of(group, length, chunk) * place_bytes(group) for group in groups)


def limits_of(plan: Plan, config: RuntimeConfig) -> tuple[int, StepSizes]:
    """Limits of an engine within a config.

    Returns:
        Maximum number of positions of a sequence, and the sizes of the largest step.

    Raises:
        UsageError: a limit is beyond what the engine was built for.
        NoCodeForMachineError: the plan counts something that this release does not know.
    """
    length = config.max_model_len or plan.max_seq_len
    if length > plan.max_seq_len:
        raise UsageError(
            f"--max-model-len {length} is more than the engine was built for",
            f"its limit is {plan.max_seq_len} positions",
            f"Use --max-model-len {plan.max_seq_len} or less.",
        )
    tokens = min(config.max_num_batched_tokens, config.max_num_seqs * length)
    if plan.whole_texts:
        tokens = max(tokens, length)
    verified_rows = min(config.max_num_seqs * (1 + config.max_draft_tokens), MAX_VERIFIED_ROWS)
    rows = max(config.max_logit_rows or verified_rows, config.max_num_seqs)
    counter = StepCounter(plan.dims, plan.caches)
    return length, counter.sizes(max(tokens, config.max_num_seqs), config.max_num_seqs, rows, length)


def plan_memory(
    plan: Plan,
    config: RuntimeConfig,
    weight_bytes: int = 0,
    free: int | None = None,
    share: float = FREE_SHARE,
    adapter_bytes: int = 0,
    *,
    for_running_only: bool = False,
) -> MemoryPlan:
    """Computes the memory plan of an engine within the limits of a config.

    The KV cache gets as many blocks as running sequences can hold. If the config has a size for it, the rest of that
    size is for prefixes that no running sequence uses.

    Args:
        plan: the engine's plan.
        config: limits, and perhaps the size of the KV cache.
        weight_bytes: bytes of the weights to load, for which there must be memory, too.
        free: free bytes of a GPU; None takes the machine's free memory.
        share: share of the memory left by weights, arena and adapters that the KV cache gets if the config has no size
            for it.
        adapter_bytes: bytes of the slots for adapters, on a GPU.
        for_running_only: True if the KV cache gets no blocks but those that running sequences can hold.

    Raises:
        NotEnoughMemoryError: the memory does not hold one sequence of the longest length.
    """
    length, limits = limits_of(plan, config)
    _, arena_bytes = plan.arena_offsets(limits)
    if not config.mmap and free is None and weight_bytes + arena_bytes > free_memory():
        raise NotEnoughMemoryError(
            f"weights and activations take {format_bytes(weight_bytes + arena_bytes)}",
            f"{format_bytes(free_memory())} are free",
            "Leave out --no-mmap: the weights are then mapped, and the system drops pages of them where it has to.",
        )
    budget = config.kv_cache_memory
    if budget is None:
        budget = int(((free_memory() if free is None else free) - weight_bytes - arena_bytes - adapter_bytes) * share)
    one = sequence_bytes(plan.caches, length, limits.tokens)
    if budget < one:
        raise NotEnoughMemoryError(
            f"the KV cache of one sequence of {length} positions takes {format_bytes(one)}",
            f"{format_bytes(max(budget, 0))} are there for it",
            _fewer_bytes(adapter_bytes),
        )
    blocks = _share_out(plan.caches, budget, limits.sequences, length, limits.tokens)
    if config.kv_cache_memory is not None and config.enable_prefix_caching and not for_running_only:
        blocks = _with_cached(plan.caches, blocks, budget, length, limits.tokens)
    kv_bytes = sum(count * place_bytes(group) for count, group in zip(blocks, plan.caches, strict=True))
    return MemoryPlan(length, limits, blocks, arena_bytes, kv_bytes, adapter_bytes)


def _fewer_bytes(adapter_bytes: int) -> str:
    """Says what to do if no sequence of the longest length fits."""
    fix = "Use a smaller --max-model-len or --max-num-batched-tokens, or a larger --kv-cache-memory."
    if not adapter_bytes:
        return fix
    return f"{fix} Adapters take {format_bytes(adapter_bytes)}: --max-loras and --max-lora-rank decide."


def _with_cached(
    groups: Sequence[CacheGroup], blocks: Sequence[int], budget: int, length: int, chunk: int
) -> tuple[int, ...]:
    """Adds blocks for prefixes that no running sequence uses: those of further sequences of the maximum length.

    Args:
        groups: the plan's cache groups.
        blocks: number of blocks or slots of each group for running sequences.
        budget: bytes of the KV cache.
        length: maximum number of positions of a sequence.
        chunk: maximum number of tokens of a sequence that a step computes.

    Returns:
        Number of blocks or slots of each group.
    """
    one = sequence_bytes(groups, length, chunk)
    if one == 0 or shared_block_size(groups) is None:
        return tuple(blocks)
    taken = sum(count * place_bytes(group) for count, group in zip(blocks, groups, strict=True))
    more = (budget - taken) // one
    return tuple(count + more * places_of(group, length, chunk) for count, group in zip(blocks, groups, strict=True))


def _share_out(groups: Sequence[CacheGroup], budget: int, sequences: int, length: int, chunk: int) -> tuple[int, ...]:
    """Divides the KV cache's bytes among the groups.

    The plan is for one sequence of the maximum length, and for all others of the largest common length that then fits.
    A window takes the same for a short sequence as for a long one, so dividing by maximum lengths alone would leave
    many short sequences without blocks of groups with windows.

    Args:
        groups: the plan's cache groups.
        budget: bytes of the KV cache.
        sequences: maximum number of sequences that run at once.
        length: maximum number of positions of a sequence.
        chunk: maximum number of tokens of a sequence that a step computes.

    Returns:
        Number of blocks or slots of each group.
    """

    def places(common: int) -> list[int]:
        return [places_of(group, length, chunk) + (sequences - 1) * places_of(group, common, chunk) for group in groups]

    def bytes_of(counts: Sequence[int]) -> int:
        return sum(count * place_bytes(group) for count, group in zip(counts, groups, strict=True))

    given = places(bisect_right(range(length + 1), budget, key=lambda common: bytes_of(places(common))) - 1)
    left = budget - bytes_of(given)
    for index, (max_places, group) in enumerate(zip(places(length), groups, strict=True)):
        more = min(max_places - given[index], left // place_bytes(group))
        given[index] += more
        left -= more * place_bytes(group)
    return tuple(given)
