"""The library's answers and state, as tests compare them."""

from collections.abc import Iterable

from enginewright.runtime.api.llm import LLM
from enginewright.runtime.core.outputs import RequestOutput


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """The tokens of all completions."""
    return [choice.token_ids for output in outputs for choice in output.outputs]


def is_idle(llm: LLM) -> bool:
    """True if nothing runs, nothing waits, and every block is free."""
    stats = llm.stats()
    return (stats.num_running, stats.num_waiting, stats.num_waiting_tokens, stats.kv_usage) == (0, 0, 0, 0.0)
