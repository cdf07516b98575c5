"""The memory plan: what an engine takes, exactly, before anything is allocated.

weights + arena + KV. The arena follows from the plan and the limits; the KV of a sequence from its length, its groups'
windows and the longest chunk that is computed at once.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from enginewright.errors import NotEnoughMemoryError, UsageError, shorten
from enginewright.manifest import NGRAM, ROLES
from enginewright.plan import CacheGroup, PagedCache, Plan, StepSizes
from enginewright.runtime.cache.paged import blocks_of
from enginewright.runtime.cache.recurrent import slots_of
from enginewright.runtime.count import format_bytes, parse_bytes, parse_count
from enginewright.runtime.dims import StepCounter
from enginewright.runtime.machine import free_memory
from enginewright.runtime.vllm_options import without_engine_options

FREE_SHARE = 0.5  # of the memory that weights and arena leave, for the KV cache where nobody says how much
TEXTS = ("isa", "device", "speculate", "kv_events", "kv_events_replay", "kv_events_topic", "kv_cache_dir")
BYTES = ("kv_cache_memory", "kv_cache_disk", "grammar_memory")
FLAGS = ("enable_prefix_caching", "mmap")  # limits that are no numbers
SPECULATE = ("off", NGRAM, *ROLES)
MIN_GRAMMAR_MEMORY = 64 << 20  # a compiled grammar takes 4 MiB as a rule, and may take a sixteenth
MAX_GUESSES = 32  # of a sequence in a step
GUESSED_ROWS = 64  # of logits, where guesses need more than sequences: a step of more tokens is bound by operations


@dataclass(frozen=True)
class RuntimeConfig:
    """Limits that the runtime chooses; None is a default that depends on the engine or the machine.

    max_model_len: positions of a sequence. max_num_seqs: sequences in a step. max_num_batched_tokens: tokens in a
    step, at least max_num_seqs. max_logit_rows: rows of logits in a step, at least max_num_seqs. kv_cache_memory:
    bytes. enable_prefix_caching: prompts that begin alike share what is computed of them. prefill_chunk_size:
    prompt tokens in a step that also decodes, deeper ones counting for more (prompt_cost.py), so that those who are
    being written to keep their pace; None is all that max_num_batched_tokens leaves. itl_slo_ms: milliseconds of a step
    that also decodes; once steps were measured, prompts get what it leaves, whatever prefill_chunk_size. device: as
    `open_engine` has it. mmap: False reads the weights into memory, so that nothing that is done to their file later
    matters. speculate: how tokens are guessed that a step then verifies, one of SPECULATE; None is what the engine's
    manifest names. speculate_tokens: guesses of a sequence in a step. kv_events: ZeroMQ address where others learn what
    the prefix cache has (kv_events.py), and kv_events_replay, where they ask again for what they missed;
    kv_events_topic begins each message. kv_cache_disk: bytes of files that keep what the prefix cache has had, and
    kv_cache_dir, the folder that they are in; None is one in the folder of caches. grammar_memory: bytes of compiled
    grammars that structured outputs follow, MIN_GRAMMAR_MEMORY at least.

    Raises:
        UsageError: a limit is of the wrong type or unknown, a number is not positive, or there are too many guesses.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_logit_rows: int | None = None
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    prefill_chunk_size: int | None = None
    itl_slo_ms: int | None = None
    threads: int | None = None
    isa: str | None = None
    device: str = "auto"
    mmap: bool = True  # a GPU's weights are read in any case
    speculate: str | None = None
    speculate_tokens: int = 8
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = ""
    kv_cache_disk: int | None = None
    kv_cache_dir: str | None = None
    grammar_memory: int = 256 << 20

    def __post_init__(self) -> None:
        for name, field in RuntimeConfig.__dataclass_fields__.items():
            value = getattr(self, name)
            if value is not None or field.default is not None:
                _check_limit(name, value)
        if self.speculate not in (None, *SPECULATE):
            raise UsageError(f"speculate is {shorten(self.speculate)}", f"it must be one of {', '.join(SPECULATE)}")
        if self.speculate_tokens > MAX_GUESSES:
            raise UsageError(f"speculate_tokens is {self.speculate_tokens}", f"it must be {MAX_GUESSES} or less")
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise UsageError("kv_events_replay and kv_events_topic go with kv_events", "no events are sent without it")
        if self.grammar_memory < MIN_GRAMMAR_MEMORY:
            why = f"it must be {format_bytes(MIN_GRAMMAR_MEMORY)} or more"
            raise UsageError(f"grammar_memory is {format_bytes(self.grammar_memory)}", why)
        if self.kv_cache_disk is None and self.kv_cache_dir is not None:
            raise UsageError("kv_cache_dir goes with kv_cache_disk", "nothing is kept on disk without it")

    @property
    def guesses(self) -> int:
        """Of a sequence in a step, at most."""
        return 0 if self.speculate in (None, "off") else self.speculate_tokens


def _check_limit(name: str, value: Any) -> None:
    if name in TEXTS:
        holds, rule = isinstance(value, str), "it must be a text"
    elif name in FLAGS:
        holds, rule = isinstance(value, bool), "it must be True or False"
    else:
        holds = isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63
        rule = "it must be a whole number of at least 1"
    if not holds:
        raise UsageError(f"{name} is {shorten(value)}", rule)


def runtime_config(**limits: Any) -> RuntimeConfig:
    """RuntimeConfig of keyword arguments that somebody wrote: a number may be a text such as "1g", None is the default.

    Options of vLLM that have no effect here may be among them (vllm_options.py).

    Raises:
        UsageError: a name is none, or a value makes no sense.
    """
    options = without_engine_options(limits, RuntimeConfig.__dataclass_fields__)
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name in TEXTS or name in FLAGS:
            continue
        if isinstance(value, str):
            given[name] = _number(name, value)
        elif isinstance(value, Integral) and not isinstance(value, bool):
            given[name] = int(value)  # numpy's, too
    return RuntimeConfig(**given)


def _number(name: str, text: str) -> int:
    try:
        return parse_bytes(text) if name in BYTES else parse_count(text)
    except UsageError as error:
        raise UsageError(name, str(error)) from error


@dataclass(frozen=True)
class MemoryPlan:
    """All bytes are what will be allocated (KV as it is touched)."""

    max_model_len: int
    limits: StepSizes  # of a step
    num_blocks: tuple[int, ...]  # a group; of a recurrent state, slots
    arena_bytes: int
    kv_bytes: int  # of all groups


@dataclass(frozen=True)
class KvBlocks:
    """The KV blocks that bound how many tokens fit: of the layers that keep all positions, if some do."""

    block_size: int  # tokens
    count: int

    @property
    def tokens(self) -> int:
        return self.block_size * self.count

    @classmethod
    def of(cls, caches: Sequence[CacheGroup], num_blocks: Sequence[int]) -> "KvBlocks | None":
        """None: the engine keeps nothing by blocks."""
        paged = [
            (bool(group.window), cls(group.block_size, count))
            for group, count in zip(caches, num_blocks, strict=True)
            if isinstance(group, PagedCache)
        ]
        return min(paged, key=lambda one: (one[0], one[1].tokens))[1] if paged else None


def places_of(group: CacheGroup, length: int, chunk: int) -> int:
    """Blocks or slots of a group for a sequence of `length` positions, computed `chunk` tokens at a time."""
    return blocks_of(group, length, chunk) if isinstance(group, PagedCache) else slots_of(length)


def place_bytes(group: CacheGroup) -> int:
    """Of a block or a slot."""
    return group.block_bytes if isinstance(group, PagedCache) else group.bytes_per_sequence


def sequence_bytes(groups: Sequence[CacheGroup], length: int, chunk: int) -> int:
    """What one sequence takes of the caches."""
    return sum(places_of(group, length, chunk) * place_bytes(group) for group in groups)


def limits_of(plan: Plan, config: RuntimeConfig) -> tuple[int, StepSizes]:
    """The longest sequence, and the sizes of the largest step.

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
    guessed_rows = min(config.max_num_seqs * (1 + config.guesses), GUESSED_ROWS)
    rows = max(config.max_logit_rows or guessed_rows, config.max_num_seqs)
    counter = StepCounter(plan.dims, plan.caches)
    return length, counter.sizes(max(tokens, config.max_num_seqs), config.max_num_seqs, rows, length)


def plan_memory(
    plan: Plan, config: RuntimeConfig, weight_bytes: int = 0, free: int | None = None, share: float = FREE_SHARE
) -> MemoryPlan:
    """What to allocate for these limits.

    Args:
        weight_bytes: of the engine; what is free must hold them, too.
        free: bytes, of a GPU; None is what is free on the machine.
        share: of what weights and arena leave, for the KV cache where the config does not say how much.

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
        budget = int(((free_memory() if free is None else free) - weight_bytes - arena_bytes) * share)
    one = sequence_bytes(plan.caches, length, limits.tokens)
    if budget < one:
        raise NotEnoughMemoryError(
            f"the KV cache of one sequence of {length} positions takes {format_bytes(one)}",
            f"{format_bytes(max(budget, 0))} are there for it",
            "Use a smaller --max-model-len or --max-num-batched-tokens, or a larger --kv-cache-memory.",
        )
    blocks = _share_out(plan.caches, budget, limits.sequences, length, limits.tokens)
    kv_bytes = sum(count * place_bytes(group) for count, group in zip(blocks, plan.caches, strict=True))
    return MemoryPlan(length, limits, blocks, arena_bytes, kv_bytes)


def _share_out(groups: Sequence[CacheGroup], budget: int, sequences: int, length: int, chunk: int) -> tuple[int, ...]:
    """Blocks or slots of each group: for one sequence of `length` positions, and for others of the most that then fits.

    Windows take the same for a short sequence as for a long one, so to share by full lengths alone would leave many
    short sequences without window blocks.
    """

    def places(common: int) -> list[int]:
        return [places_of(group, length, chunk) + (sequences - 1) * places_of(group, common, chunk) for group in groups]

    def bytes_of(counts: Sequence[int]) -> int:
        return sum(count * place_bytes(group) for count, group in zip(counts, groups, strict=True))

    given = places(bisect_right(range(length + 1), budget, key=lambda common: bytes_of(places(common))) - 1)
    left = budget - bytes_of(given)
    for index, (most, group) in enumerate(zip(places(length), groups, strict=True)):
        more = min(most - given[index], left // place_bytes(group))
        given[index] += more
        left -= more * place_bytes(group)
    return tuple(given)
