"""One sequence of tokens in the making."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginewright.runtime.kv_cache import BlockKeys, BlockTable
from enginewright.runtime.sampling import SamplingRequest


@dataclass(eq=False, slots=True)
class TokenSequence:
    """A prompt and what was drawn after it.

    token_ids: prompt, then output; those below 0, at its end, are still being drawn: -1 - n is the n-th of a step's.
    max_tokens: of the whole. stop_token_ids: tokens that end it. request: how its tokens are drawn; None draws none,
    and the sequence ends with its prompt. every_logit: a step gives logits for each position, not for the last alone
    (and once more after a preemption). cache_salt: it shares KV blocks with sequences of the same salt only. twin_of:
    another answer to the same prompt, added before this one; both share what the prompt takes. announced: keys of
    blocks that others wait for, since this one writes them soon.

    num_known_tokens: all but those that are being drawn, one before another step is planned, and then two.
    num_computed_tokens: those whose keys and values are in the KV cache, once the steps planned so far are done.
    num_cached_tokens: prompt tokens that were there when it was first admitted. admitted_at: when that was, by
    time.perf_counter. row: its place among those that run.
    finish_reason: "stop", "length", "error" or "abort".
    """

    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    request: SamplingRequest | None = None
    every_logit: bool = False
    cache_salt: str = ""
    twin_of: "TokenSequence | None" = None
    num_known_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    admitted_at: float | None = None
    num_preemptions: int = 0
    tables: list[BlockTable] = field(default_factory=list)
    row: int = -1
    keys: BlockKeys | None = None
    announced: Sequence[bytes] = ()
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.num_known_tokens = len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_drawing_its_last(self) -> bool:
        """Whatever token is being drawn, the sequence ends with it."""
        return len(self.token_ids) >= self.max_tokens and self.token_ids[-1] < 0

    @property
    def is_running(self) -> bool:
        """Admitted, and neither preempted nor ended."""
        return bool(self.tables)
