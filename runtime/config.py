"""Limits that the runtime chooses when it opens an engine."""

from dataclasses import dataclass
from typing import Any

from enginewright.errors import UsageError, shorten
from enginewright.manifest import NGRAM, ROLES
from enginewright.runtime.count import format_bytes

TEXTS = ("isa", "device", "speculate", "kv_events", "kv_events_replay", "kv_events_topic", "kv_cache_dir")
BYTES = ("kv_cache_memory", "kv_cache_disk", "grammar_memory")
FLAGS = ("enable_prefix_caching", "mmap")  # limits that are no numbers
SPECULATE = ("off", NGRAM, *ROLES)
MIN_GRAMMAR_MEMORY = 64 << 20  # a compiled grammar takes 4 MiB as a rule, and may take a sixteenth
MAX_GUESSES = 32  # of a sequence in a step


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
