"""Grammars that answers follow, compiled and walked by llguidance (https://github.com/guidance-ai/llguidance).

A grammar is compiled in a process that may be stopped (grammar_worker.py), and where that went well, once more here. An
answer's grammar is walked by a thread of its own, beside the layers of the step that needs its mask: llguidance lets go
of Python's lock for all that takes time.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.structured_outputs import StructuredOutputsParams
from enginewright.runtime.token_mask import Mask, num_words
from enginewright.runtime.tokenizer import Tokenizer
from enginewright.runtime.worker_process import WorkerProcess

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

THREADS = 4  # so many grammars that take long hold up no other
# Of a thread: to compile descends once for each rule of a chain. What the worker compiles has eight times as much here.
STACK_BYTES = 64 << 20
CACHED = 256  # compiled grammars that are kept

Tasks = SimpleQueue[Callable[[], None] | None]  # None: the end of a thread


class Grammars:
    """What grammars of one engine share: its vocabulary as a trie, those that were compiled, and threads.

    Nothing of it is made before the first request asks. `compile` may be called from any thread.

    Args:
        tokenizer: of the engine.
        vocab_size: width of the logits.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, eos_token_ids
        self._worker = WorkerProcess("enginewright.runtime.grammar_worker")
        self._lock = threading.Lock()  # of all that follows
        self._trie: LLTokenizer | None = None
        self._compiled: OrderedDict[str, tuple[LLMatcher, Callable[[], LLMatcher]]] = OrderedDict()  # the latest last
        self._tasks: Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def compile(self, wanted: StructuredOutputsParams, count: int) -> list["GrammarWalk"]:
        """A grammar for each of `count` answers, whose first masks are being made.

        Raises:
            UsageError: it cannot be compiled, or takes too much.
        """
        matcher, make = self._compile(wanted)
        return [GrammarWalk(matcher.deep_copy(), make, self._vocab_size, self._tasks) for _ in range(count)]

    def close(self) -> None:
        self._worker.close()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _compile(self, wanted: StructuredOutputsParams) -> tuple["LLMatcher", Callable[[], "LLMatcher"]]:
        """A matcher, and what makes another that shares nothing with it."""
        if not self._ends:
            raise UsageError("structured_outputs need a model that ends its answers", "this one has no such token")
        key = wanted.key
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            trie = self._ready_trie()
        reply = self._worker.ask(key.encode())
        if "source" not in reply:
            raise UsageError("structured_outputs cannot be compiled", *reply.values())
        make = partial(_matcher, trie, reply["source"])
        made: SimpleQueue[LLMatcher] = SimpleQueue()
        self._tasks.put(lambda: made.put(make()))
        matcher = made.get()
        if matcher.is_error():
            error = matcher.get_error().partition("\n")[0]
            why = "no text follows it" if error.startswith("NoExtension") else error
            raise UsageError("structured_outputs cannot be compiled", why)
        with self._lock:
            self._compiled[key] = matcher, make
            if len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return matcher, make

    def _ready_trie(self) -> "LLTokenizer":
        from llguidance import LLTokenizer  # takes 0.1 s

        if self._trie is None:
            try:
                self._trie = LLTokenizer(self._tokenizer.to_json(), self._vocab_size, list(self._ends))
            except ValueError as error:
                raise EngineError(
                    "this engine's tokenizer cannot be used for structured outputs", str(error)
                ) from error
            before = threading.stack_size(STACK_BYTES)
            for number in range(THREADS):
                thread = threading.Thread(target=_work, args=(self._tasks,), name=f"grammar-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
            threading.stack_size(before)
        return self._trie


def _matcher(trie: "LLTokenizer", source: str) -> "LLMatcher":
    """A matcher that has made its first mask: then it knows whether any text follows its grammar."""
    from llguidance import LLMatcher

    from enginewright.runtime.grammar_worker import limits

    matcher = LLMatcher(trie, source, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


class GrammarWalk:
    """One answer's way through its grammar: a Grammar (token_mask.py).

    Matchers of one grammar share what their lexers have learned, and so its limits. One that is beyond them is made
    anew from all its tokens, and fails only if that fails, too: whether an answer fails does not depend on others.

    Args:
        make: a matcher that shares nothing.
    """

    def __init__(self, matcher: "LLMatcher", make: Callable[[], "LLMatcher"], vocab_size: int, tasks: Tasks) -> None:
        self._matcher, self._make, self._num_words, self._tasks = matcher, make, num_words(vocab_size), tasks
        self._tokens: list[int] = []  # those that the matcher knows
        self._lock = threading.Lock()  # of both, while `_go_on` has them
        self._taken: SimpleQueue[int] = SimpleQueue()  # tokens that the matcher has yet to hear of
        self._done: SimpleQueue[tuple[Mask, Sequence[int]] | None] = SimpleQueue()  # an entry for each `_go_on`
        self._num_under_way = 1  # of these, as `wait` knows it
        self._mask: Mask = np.zeros(0, np.uint32)  # of the token that comes next
        self.forced: Sequence[int] = ()
        self.failed = False
        tasks.put(self._go_on)

    def wait(self, seconds: float) -> bool:
        until = time.perf_counter() + seconds
        while self._num_under_way:
            try:
                self._end(self._done.get(timeout=max(until - time.perf_counter(), 0)))
            except Empty:
                return False
        return True

    def allow(self, mask: Mask, behind: Sequence[int] = ()) -> None:
        while self._num_under_way:
            self._end(self._done.get())
        if not behind:
            mask[:] = self._mask
            return
        matcher = self._matcher.deep_copy()
        if matcher.try_consume_tokens(list(behind)) == len(behind):
            self._fill(mask, matcher)
        if matcher.is_error():  # to make another takes a thread's stack
            made: SimpleQueue[LLMatcher] = SimpleQueue()
            self._tasks.put(lambda: made.put(self._make_behind([*self._tokens, *behind], mask)))
            made.get()

    def take(self, token: int) -> None:
        self.forced = self.forced[1:] if self.forced and self.forced[0] == token else ()
        self._num_under_way += 1
        self._taken.put(token)
        self._tasks.put(self._go_on)

    def _end(self, latest: tuple[Mask, Sequence[int]] | None) -> None:
        self._num_under_way -= 1
        if latest is not None:
            self._mask, self.forced = latest

    def _go_on(self) -> None:
        """Take up one token, and make the mask behind it if it is the last; in any thread, but in the tokens' order."""
        with self._lock:
            if not self._taken.empty():  # else it is the first mask
                self._tokens.append(self._taken.get())
                self._matcher.consume_token(self._tokens[-1])
            if not self._taken.empty():
                self._done.put(None)
                return
            mask = np.zeros(self._num_words, np.uint32)
            self._fill(mask, self._matcher)
            if self._matcher.is_error():
                self._matcher = self._make_behind(self._tokens, mask)
            self.failed = self._matcher.is_error()
            is_over = self.failed or self._matcher.is_stopped()
            self._done.put((mask, () if is_over else self._matcher.compute_ff_tokens()))

    def _make_behind(self, tokens: Sequence[int], mask: Mask) -> "LLMatcher":
        """A matcher that shares nothing, behind these tokens; and its mask."""
        matcher = self._make()
        if matcher.try_consume_tokens(list(tokens)) == len(tokens):
            self._fill(mask, matcher)
        return matcher

    @staticmethod
    def _fill(mask: Mask, matcher: "LLMatcher") -> None:
        """Set the bits of what may come next; none of them where that is beyond a limit, the matcher's error then."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        if not matcher.is_error():  # else they are those of the end
            mask[: len(bits)] = bits[: len(mask)]


def _work(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
