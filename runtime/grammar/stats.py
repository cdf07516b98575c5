"""Figures of the grammars of an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """Compiled grammars that are kept, those that are being compiled among them."""

    num_grammars: int = 0
    num_bytes: int = 0  # of memory
    num_evictions: int = 0  # of grammars that nobody used, for others, since the start
