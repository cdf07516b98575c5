"""Grammars that answers follow, compiled and walked by llguidance (https://github.com/guidance-ai/llguidance).

llguidance runs in processes (grammar_processes.py). A walk sends the sampled tokens to its process, and keeps the masks
that come back, so that the thread of the engine never waits longer than it chooses to.
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
    """Grammars of one engine. All methods may be called from any thread, and return at once.

    Args:
        read_tokenizer: reads the engine's tokenizer.json.
        vocab_size: the width of the logits.
        eos_token_ids: the tokens that end an answer.
        capacity_bytes: memory for compiled grammars, in bytes.
    """

    def __init__(
        self, read_tokenizer: Callable[[], bytes], vocab_size: int, eos_token_ids: Sequence[int], capacity_bytes: int
    ) -> None:
        self._has_ends = bool(eos_token_ids)
        setup = {"vocab_size": vocab_size, "eos_token_ids": list(eos_token_ids), "limits": dict(LIMITS)}
        self._processes = GrammarProcesses(read_tokenizer, setup, capacity_bytes)

    def compile(self, wanted: StructuredOutputsParams) -> "Future[None]":
        """Compiles a grammar.

        Returns:
            A future that ends when the grammar is compiled, or with a UsageError if it cannot be, or exceeds a limit.
        """
        if not self._has_ends:
            future: Future[None] = Future()
            why = "this one has no such token"
            future.set_exception(UsageError("structured_outputs need a model that ends its answers", why))
            return future
        return self._processes.compile(wanted.key)

    def walks(self, wanted: StructuredOutputsParams, num_walks: int) -> list["GrammarWalk"]:
        """Creates a walk for each of some answers."""
        key = wanted.key
        return [GrammarWalk(self._processes, key) for _ in range(num_walks)]

    def stats(self) -> GrammarStats:
        """Statistics of the grammars."""
        return self._processes.stats()

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()


class GrammarWalk:
    """The walk of one answer through its grammar: a Grammar (token_mask.py)."""

    def __init__(self, processes: GrammarProcesses, key: str) -> None:
        self._processes, self._key = processes, key
        self._number: int | None = None  # None before the start and after the end
        self._num_taken = 0  # number of the answer's tokens
        self._is_active = False  # True while steps use it; see GrammarProcesses
        self._replies: SimpleQueue[WalkReply] = SimpleQueue()
        self._next: WalkReply | None = None  # mask of the next token; None until it is known
        self._ahead: WalkReply | None = None  # masks after draft tokens; None until they are known
        self.forced: Sequence[int] = ()
        self.failed = False

    def begin(self) -> None:
        """Starts the walk."""
        self._number = self._processes.open(self._key, self._replies.put)

    def end(self) -> None:
        """Ends the walk."""
        if self._number is not None:
            self._processes.end(self._number)
            self._number = None

    def take(self, token: int) -> None:
        """Advances the walk by a token, and requests the next mask."""
        self.forced = self.forced[1:] if self.forced and self.forced[0] == token else ()
        self._num_taken += 1
        self._next = self._ahead = None
        if self._number is not None:
            self._is_active = True
            self._processes.take(self._number, token)

    def look(self, tokens: Sequence[int]) -> None:
        """Requests the masks after draft tokens."""
        if self._number is not None:
            self._is_active = True
            self._processes.look(self._number, tokens)

    def rest(self) -> None:
        """Notes that its sequence waits, so that its grammar may be evicted for one that a step needs."""
        if self._number is not None and self._is_active:
            self._is_active = False
            self._processes.rest(self._number)

    def wait(self, seconds: float, after: Sequence[int] = ()) -> bool:
        """Waits for a mask.

        Args:
            seconds: the maximum time.
            after: draft tokens before the mask.

        Returns:
            True if the mask is known.
        """
        until = time.perf_counter() + seconds
        while not self._is_known(after):
            if self._replies.empty():
                self._need()
            try:
                self._receive(self._replies.get(timeout=max(until - time.perf_counter(), 0)))
            except Empty:
                return False
        return True

    def _need(self) -> None:
        """Asks for the mask that a step waits for, if its grammar may have been evicted."""
        if self._number is not None and not self._is_active:
            self._is_active = True
            self._processes.need(self._number)

    def allow(self, mask: Mask, after: Sequence[int] = ()) -> None:
        """Writes a known mask; the mask stays as it is if the walk has failed.

        Args:
            mask: the words to write.
            after: draft tokens before the mask.
        """
        assert self._is_known(after), "`wait` has not returned True for it"
        if self.failed:
            return
        reply, index = (self._ahead, len(after) - 1) if after else (self._next, 0)
        assert reply is not None
        allowed = reply.masks[index]
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
        self.failed = self.failed or reply.failed
        if reply.position != self._num_taken:  # it belongs to an earlier token
            return
        if reply.is_look:
            self._ahead = reply
        else:
            self._next, self.forced = reply, reply.tokens
