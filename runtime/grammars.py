"""Grammars that answers follow, compiled and walked by llguidance (https://github.com/guidance-ai/llguidance).

A grammar is compiled in a process that may be stopped (grammar_worker.py), and where that went well, once more here. An
answer's grammar is walked by a thread of its own, beside the layers of the step that needs its mask: llguidance lets go
of Python's lock for all that takes time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
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
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the latest last
        self._tasks: Tasks = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def compile(self, wanted: StructuredOutputsParams, count: int) -> list["GrammarWalk"]:
        """A grammar for each of `count` answers, whose first masks are being made.

        Raises:
            UsageError: it cannot be compiled, or takes too much.
        """
        matcher = self._compile(wanted)
        return [GrammarWalk(matcher.deep_copy(), self._vocab_size, self._tasks) for _ in range(count)]

    def close(self) -> None:
        self._worker.close()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _compile(self, wanted: StructuredOutputsParams) -> "LLMatcher":
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
        made: SimpleQueue[LLMatcher] = SimpleQueue()
        self._tasks.put(lambda: made.put(_matcher(trie, reply["source"])))
        matcher = made.get()
        if matcher.is_error():
            raise UsageError("structured_outputs cannot be compiled", matcher.get_error().partition("\n")[0])
        with self._lock:
            self._compiled[key] = matcher
            if len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return matcher

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
    from llguidance import LLMatcher

    from enginewright.runtime.grammar_worker import limits

    return LLMatcher(trie, source, log_level=0, limits=limits())


class GrammarWalk:
    """One answer's way through its grammar: a Grammar (token_mask.py)."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, tasks: Tasks) -> None:
        self._matcher, self._num_words, self._tasks = matcher, num_words(vocab_size), tasks
        self._lock = threading.Lock()  # of the matcher, while `_go_on` has it
        self._taken: SimpleQueue[int] = SimpleQueue()  # tokens that the matcher has yet to hear of
        self._done: SimpleQueue[tuple[Mask, Sequence[int]] | None] = SimpleQueue()  # an entry for each `_go_on`
        self._num_under_way = 1  # of these, as `allow` knows it
        self._mask: Mask = np.zeros(0, np.uint32)  # of the token that comes next
        self.forced: Sequence[int] = ()
        self.failed = False
        tasks.put(self._go_on)

    def allow(self, mask: Mask, behind: Sequence[int] = ()) -> None:
        while self._num_under_way:
            self._num_under_way -= 1
            latest = self._done.get()
            if latest is not None:
                self._mask, self.forced = latest
        if not behind:
            mask[:] = self._mask
            return
        taken = self._matcher.try_consume_tokens(list(behind))
        if taken == len(behind):
            mask[:] = self._next_mask()
        self._matcher.rollback(taken)

    def take(self, token: int) -> None:
        self.forced = self.forced[1:] if self.forced and self.forced[0] == token else ()
        self._num_under_way += 1
        self._taken.put(token)
        self._tasks.put(self._go_on)

    def _go_on(self) -> None:
        """Take up one token, and make the mask behind it if it is the last; in any thread, but in the tokens' order."""
        with self._lock:
            matcher = self._matcher
            if not self._taken.empty():  # else it is the first mask
                matcher.consume_token(self._taken.get())
            if not self._taken.empty():
                self._done.put(None)
                return
            mask = self._next_mask()
            forced = [] if matcher.is_error() or matcher.is_stopped() else matcher.compute_ff_tokens()
            self.failed = matcher.is_error()
            self._done.put((mask, forced))

    def _next_mask(self) -> Mask:
        mask = np.zeros(self._num_words, np.uint32)
        if not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            mask[: len(bits)] = bits[: len(mask)]
        return mask


def _work(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
