"""Statistics of the grammars of an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """Statistics of compiled grammars, including those that are being compiled."""

    num_grammars: int = 0  # number of grammars that are kept
    num_bytes: int = 0  # bytes of their memory
    num_evictions: int = 0  # number of grammars that were evicted for others, since the start
    num_compilations: int = 0  # number of times that a process began to compile a grammar, since the start
