"""Grammars that answers follow, compiled and walked by llguidance (https://github.com/guidance-ai/llguidance).

All of that is done by processes (grammar_processes.py). A walk tells its process what has come, and keeps what it says
may come next, so that the thread of the engine waits for no longer than it wants to.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

import numpy as np

from enginewright.errors import UsageError
from enginewright.runtime.grammar.grammar_processes import GrammarProcesses
from enginewright.runtime.grammar.grammar_protocol import LIMITS, WalkReply
from enginewright.runtime.grammar.stats import GrammarStats
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.sampling.token_mask import WORD_BITS, Mask


class Grammars:
    """Grammars of one engine. All methods may be called from any thread, and none waits.

    Args:
        read_tokenizer: the engine's tokenizer.json.
        vocab_size: width of the logits.
        eos_token_ids: tokens that end an answer.
        capacity_bytes: of the memory for compiled grammars.
    """

    def __init__(
        self, read_tokenizer: Callable[[], bytes], vocab_size: int, eos_token_ids: Sequence[int], capacity_bytes: int
    ) -> None:
        self._has_ends = bool(eos_token_ids)
        setup = {"vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids), "limits": dict(LIMITS)}
        self._processes = GrammarProcesses(read_tokenizer, setup, capacity_bytes)

    def compile(self, wanted: StructuredOutputsParams) -> "Future[None]":
        """Ends when the grammar is compiled, with a UsageError where it cannot be, or takes too much."""
        if not self._has_ends:
            future: Future[None] = Future()
            why = "this one has no such token"
            future.set_exception(UsageError("structured_outputs need a model that ends its answers", why))
            return future
        return self._processes.compile(wanted.key)

    def walks(self, wanted: StructuredOutputsParams, num_walks: int) -> list["GrammarWalk"]:
        """A walk for each of some answers."""
        key = wanted.key
        return [GrammarWalk(self._processes, key) for _ in range(num_walks)]

    def stats(self) -> GrammarStats:
        return self._processes.stats()

    def close(self) -> None:
        self._processes.close()


class GrammarWalk:
    """One answer's way through its grammar: a Grammar (token_mask.py)."""

    def __init__(self, processes: GrammarProcesses, key: str) -> None:
        self._processes, self._key = processes, key
        self._number: int | None = None  # None: it has not begun, or has ended
        self._num_taken = 0  # tokens of the answer
        self._replies: SimpleQueue[WalkReply] = SimpleQueue()
        self._next: WalkReply | None = None  # what may come next; None: it is not known yet
        self._ahead: WalkReply | None = None  # masks after draft tokens; None: not known yet
        self.forced: Sequence[int] = ()
        self.failed = False

    def begin(self) -> None:
        self._number = self._processes.open(self._key, self._replies.put)

    def end(self) -> None:
        if self._number is not None:
            self._processes.end(self._number)
            self._number = None

    def take(self, token: int) -> None:
        self.forced = self.forced[1:] if self.forced and self.forced[0] == token else ()
        self._num_taken += 1
        self._next = self._ahead = None
        if self._number is not None:
            self._processes.take(self._number, token)

    def look(self, tokens: Sequence[int]) -> None:
        if self._number is not None:
            self._processes.look(self._number, tokens)

    def wait(self, seconds: float, after: Sequence[int] = ()) -> bool:
        until = time.perf_counter() + seconds
        while not self._is_known(after):
            try:
                self._receive(self._replies.get(timeout=max(until - time.perf_counter(), 0)))
            except Empty:
                return False
        return True

    def allow(self, mask: Mask, after: Sequence[int] = ()) -> None:
        assert self._is_known(after), "`wait` has not said that it is known"
        if self.failed:
            return
        reply, place = (self._ahead, len(after) - 1) if after else (self._next, 0)
        assert reply is not None
        allowed = reply.masks[place]
        if isinstance(allowed, int):
            mask[allowed // WORD_BITS] = 1 << allowed % WORD_BITS
        else:
            words = np.frombuffer(allowed, np.uint32)[: len(mask)]
            mask[: len(words)] = words

    def _is_known(self, after: Sequence[int]) -> bool:
        if self.failed:
            return True
        if not after:
            return self._next is not None
        return self._ahead is not None and list(self._ahead.tokens[: len(after)]) == list(after)

    def _receive(self, reply: WalkReply) -> None:
        if reply.position != self._num_taken:  # it is of a token before
            return
        self.failed = self.failed or reply.failed
        if reply.is_look:
            self._ahead = reply
        else:
            self._next, self.forced = reply, reply.tokens
