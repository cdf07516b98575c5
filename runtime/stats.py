"""What an engine is doing and has done."""

from dataclasses import dataclass

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # bounds of step_sizes


@dataclass(frozen=True, slots=True)
class Stats:
    """num_waiting_tokens: of the sequences that wait. kv_usage: share of the KV blocks that sequences hold, in the
    fullest group; what only the prefix cache keeps counts as free.

    Totals since the start: computed_tokens (positions that went through the model, again after a preemption),
    prompt_tokens (of sequences that were admitted), cached_prompt_tokens (of these, what the prefix cache spared),
    step_sizes (steps by their number of tokens: up to each bound of STEP_TOKENS from the one before, and above them).
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
    generated_tokens: int = 0
