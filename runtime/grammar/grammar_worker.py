"""The processes that compile and walk grammars; untrusted grammars may need any time, memory and depth of the stack.

The first process makes the trie of the vocabulary, and forks a process for each grammar, which shares only the trie. So
the kernel enforces limits of time and memory, the memory of a grammar is what its process has for itself, and a process
that is killed affects no other grammar. grammar_protocol.py defines their messages.
"""

import contextlib
import gc
import json
import os
import re
import resource
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, NoReturn

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from enginewright.runtime.grammar.grammar_protocol import (
    END,
    FORK,
    FORK_MESSAGE,
    LIMITS,
    LOOK,
    MAX_FORCED,
    MAX_SECONDS,
    MAX_WALK_CPU_S,
    OPEN,
    SLOW_STEP_S,
    TAKE,
    Forked,
    GrammarOrder,
    GrammarReply,
    WalkReply,
    read_command,
)
from enginewright.runtime.grammar.json_schema import fault, held_whole
from enginewright.runtime.grammar.number_digits import NumberDigits
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.text.messages.lark import TOOL
from enginewright.runtime.text.worker_protocol import HEAD, framed

_OF_SCHEMA = re.compile(r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: (?P<why>.*)", re.DOTALL)


def reason(text: str) -> str:
    """Shortens an error of llguidance to the text before the source that it quotes."""
    return " ".join(re.split(r"^ *\d+ \|", text, maxsplit=1, flags=re.MULTILINE)[0].split())


def answer(frame: dict[str, Any]) -> dict[str, str]:
    """Converts StructuredOutputsParams to a source for llguidance; {"failed": reason} if that is not possible."""
    try:
        wanted = StructuredOutputsParams(**frame)
        source = _message(wanted, _source(wanted)) if wanted.is_whole else _source(wanted)
    except MemoryError:
        raise
    except Exception as error:  # what reads GBNF raises no narrower class
        return {"failed": reason(str(error))}
    return {"source": source}


def failure(frame: dict[str, Any], source: str, error: str = "") -> str:
    """Error of a source that cannot be compiled, for clients.

    Args:
        frame: the fields of StructuredOutputsParams.
        source: the source.
        error: the error if the source by itself has none.
    """
    text = _why_not(source)
    return _why(StructuredOutputsParams(**frame), text) if text else error


def _why(wanted: StructuredOutputsParams, text: str) -> str:
    """Adds the tool and the position in its schema, or in the schema of the answer, to an error of llguidance."""
    if isinstance(wanted.json, Mapping) and wanted.within is None:
        path = fault(held_whole(wanted.json), text, _why_no_schema)
        return f"{path}: {text}" if path else text
    found = _OF_SCHEMA.match(text)
    lines = (wanted.within or wanted.grammar or "").split("\n")
    if found is None or int(found["line"]) > len(lines):
        return text
    line = lines[int(found["line"]) - 1]
    tool = line.rpartition(TOOL)[2] if TOOL in line else ""
    _, _, written = line.partition("%json ")
    if not tool or not written:
        return text
    path = fault(json.JSONDecoder().raw_decode(written)[0], found["why"], _why_no_schema)
    return ": ".join(filter(None, (f"the tool {tool}", path, found["why"])))


def _why_no_schema(schema: dict[str, Any]) -> str:
    return _why_not(json.dumps({"grammars": [{"json_schema": schema}]}))


def _why_not(source: str) -> str:
    """Error of a source by itself; empty if there is none that shows without a vocabulary."""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=LLParserLimits(**LIMITS))
    return reason(messages[0]) if is_wrong else ""


def _source(wanted: StructuredOutputsParams) -> str:
    if wanted.regex is not None:  # \d, \w and \s match ASCII only
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(wanted.regex, 'dws')}/")
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in wanted.choice))
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(any_to_lark(wanted.grammar))
    schema = held_whole(wanted.json) if isinstance(wanted.json, Mapping) else {"type": "object"}
    options: Any = wanted.json_options  # llguidance names no type that a mapping of options could have
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _message(wanted: StructuredOutputsParams, source: str) -> str:
    """Grammar of a message from the grammar of its answer and those of the parts around it."""
    answer, *others = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    before = [] if wanted.before is None else [{"name": "before", "lark_grammar": wanted.before}]
    message = {"lark_grammar": "start: @before @answer" if wanted.within is None else wanted.within}
    return json.dumps({"grammars": [message, *before, answer | {"name": "answer"}, *others]})


class GrammarWalks:
    """A compiled grammar, and the walks of the answers that follow it.

    Args:
        source: the source for llguidance.
        trie: the vocabulary.
        limits: llguidance's limits, usually LIMITS.
        digits: bound on the digits of its numbers; None: there is none.

    Raises:
        ValueError: it cannot be compiled, or no text follows it.
    """

    def __init__(
        self, source: str, trie: LLTokenizer, limits: Mapping[str, Any], digits: NumberDigits | None = None
    ) -> None:
        self._digits = digits
        self._make = partial(LLMatcher, trie, source, log_level=0, limits=LLParserLimits(**limits))
        self._first = self._make()
        if not self._first.is_error():
            self._first.compute_bitmask()  # fails if no text follows the grammar
        if self._first.is_error():
            error = reason(self._first.get_error())
            raise ValueError("no text follows it" if error.startswith("NoExtension") else error)
        self._walks: dict[int, Walk] = {}

    def answer(self, kind: int, number: int, tokens: list[int]) -> WalkReply | None:
        """The reply to a command; None if it has none."""
        if kind == END:
            self._walks.pop(number, None)
            return None
        if kind == OPEN:
            self._walks[number] = Walk(self._first.deep_copy(), self._make, self._digits)
        walk, began = self._walks[number], time.thread_time()
        if kind == LOOK:
            masks = walk.look(tokens)
        else:
            walk.take(tokens)
            masks, tokens = [walk.mask], walk.forced
        walk.cpu_s += time.thread_time() - began
        failed = walk.failed or walk.cpu_s > MAX_WALK_CPU_S
        return WalkReply(number, kind == LOOK, len(walk.tokens), failed, 0, tokens, masks)


class Walk:
    """The walk of one answer through its grammar.

    Matchers of one grammar share the state of their lexer, and so its limits. A matcher that exceeds them is made again
    from all its tokens, and fails only if that fails, too: so no answer fails because of others.

    Args:
        matcher: a copy of the grammar's first matcher.
        make: makes a matcher that shares nothing.
        digits: bound on the digits of its numbers; None: there is none.
    """

    def __init__(self, matcher: LLMatcher, make: Callable[[], LLMatcher], digits: NumberDigits | None) -> None:
        self._matcher, self._make, self._digits = matcher, make, digits
        self.tokens: list[int] = []  # tokens that the walk has taken
        self.cpu_s = 0.0
        self.mask: int | memoryview = 0  # mask of the next token
        # Forced tokens when they were last computed, and the number of them that have been taken since. llguidance
        # tokenizes all of a long forced text to find them, and would do so again for each mask.
        self._forced: list[int] = []
        self._num_forced_taken = 0
        # Results of the latest `look`: the draft tokens, the mask after each, and a matcher after the last one.
        self._ahead: list[int] = []
        self._masks_ahead: list[int | memoryview] = []
        self._matcher_ahead: LLMatcher | None = None

    @property
    def failed(self) -> bool:
        """True if the grammar has exceeded a limit."""
        return bool(self._matcher.is_error())

    @property
    def forced(self) -> list[int]:
        """Tokens that are the only possible continuation, as far as they are known."""
        return self._forced[self._num_forced_taken : self._num_forced_taken + MAX_FORCED]

    def take(self, tokens: list[int]) -> None:
        """Advances the walk by these tokens, and makes the next mask."""
        self._ahead, self._masks_ahead, self._matcher_ahead = [], [], None
        for token in tokens:
            self._matcher.consume_token(token)
            self.tokens.append(token)
            if self._num_forced_taken < len(self._forced) and token == self._forced[self._num_forced_taken]:
                self._num_forced_taken += 1
            else:
                self._forced, self._num_forced_taken = [], 0
        if self._num_forced_taken < len(self._forced):
            self.mask = self._forced[self._num_forced_taken]
            return
        self._forced, self._num_forced_taken = self._make_mask(), 0
        if self._matcher.is_error():
            self._matcher = self._made_after(self.tokens)
            self._forced = self._make_mask()

    def _make_mask(self) -> list[int]:
        """Makes the next mask, and returns the forced tokens."""
        is_over = self._matcher.is_error() or self._matcher.is_stopped()
        forced = [] if is_over else self._matcher.compute_ff_tokens()  # before the mask, which needs them, too
        bits = self._mask(self._matcher, self.tokens)
        self.mask = forced[0] if forced else bits
        return forced

    def look(self, tokens: list[int]) -> list[int | memoryview]:
        """Masks after the first of these tokens, the first two, …; empty after a token that is not allowed."""
        if self._ahead != tokens[: len(self._ahead)]:
            self._ahead, self._masks_ahead, self._matcher_ahead = [], [], None
        for token in tokens[len(self._ahead) :]:
            self._ahead.append(token)
            self._masks_ahead.append(self._mask_ahead())
        return self._masks_ahead

    def _mask_ahead(self) -> int | memoryview:
        count, forced = len(self._ahead), self._forced[self._num_forced_taken :]
        if count < len(forced) and self._ahead == forced[:count]:
            return forced[count]
        matcher, rest = self._matcher_ahead, self._ahead[-1:]
        if matcher is None:
            matcher, rest = self._matcher.deep_copy(), self._ahead
        self._matcher_ahead = matcher
        if matcher.try_consume_tokens(rest) < len(rest) and not matcher.is_error():
            return _NOTHING
        tokens = [*self.tokens, *self._ahead]
        mask = self._mask(matcher, tokens)
        if matcher.is_error():
            self._matcher_ahead = matcher = self._made_after(tokens)
            mask = self._mask(matcher, tokens)
        return mask

    def _mask(self, matcher: LLMatcher, tokens: Sequence[int]) -> memoryview:
        """Mask of the tokens that may follow these; empty if it exceeds a limit, which is then the matcher's error."""
        bits = matcher.compute_bitmask()
        if matcher.is_error():  # the bits are those of the end
            return _NOTHING
        mask = memoryview(bits)
        return mask if self._digits is None else self._digits.bounded(mask, tokens)

    def _made_after(self, tokens: list[int]) -> LLMatcher:
        """A matcher that shares nothing, after these tokens."""
        matcher = self._make()
        matcher.try_consume_tokens(tokens)
        return matcher


_NOTHING = memoryview(bytes(4))  # a mask that allows no token


# The process of one grammar

LOWEST_PRIORITY = 19  # the highest niceness


@dataclass(frozen=True)
class GrammarCompiler:
    """Compiles grammars with what all of them share."""

    trie: LLTokenizer  # the vocabulary
    limits: Mapping[str, Any]  # llguidance's limits
    digits: NumberDigits  # bound on the digits of numbers

    def compile(self, key: str) -> GrammarWalks | str:
        """Compiles the grammar of a StructuredOutputsParams' key; returns an error's text if that fails."""
        frame = json.loads(key)
        found = answer(frame)
        if "source" not in found:
            return found["failed"] or "it cannot be read"
        try:
            has_json = StructuredOutputsParams(**frame).has_json
            return GrammarWalks(found["source"], self.trie, self.limits, self.digits if has_json else None)
        except ValueError as error:
            return failure(frame, found["source"], str(error))

    def warm_up(self) -> None:
        """Compiles and walks grammars of each kind, so that shared tables, such as Unicode's, are made before forks."""
        schema = {"properties": {"a": {"pattern": r"\w"}, "b": {"enum": ["one", "two"]}}, "required": ["a", "b"]}
        for wanted in ({"json": schema}, {"regex": r"\d+ of \d+"}, {"choice": ["the only text that there is"]}):
            grammar = GrammarWalks(answer(wanted)["source"], self.trie, self.limits, self.digits)
            reply = grammar.answer(OPEN, 0, [])
            assert reply is not None
            for kind in (LOOK, TAKE):
                grammar.answer(kind, 0, list(reply.tokens[:1]))


def _serve(connection: socket.socket, compiler: GrammarCompiler) -> None:
    """Compiles the requested grammar, and walks it until the engine closes the connection."""
    memory = _Memory()
    frames = _frames(connection.makefile("rb"))
    if (frame := next(frames, None)) is None:
        return
    order = msgspec.json.decode(frame, type=GrammarOrder)
    max_bytes = memory.address_bytes() + order.max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    os.nice(order.niceness)
    with _limited(order.compile_s):
        grammar = compiler.compile(order.key)
    if isinstance(grammar, str):
        connection.sendall(framed(msgspec.json.encode(GrammarReply(grammar))))
        return
    connection.sendall(framed(msgspec.json.encode(GrammarReply(num_kib=memory.own_kib))))
    for frame in frames:
        kind, walk, tokens = read_command(frame)
        began = time.process_time()
        # A walk that was moved from another process starts with all its tokens.
        with _limited(order.compile_s + 1e-3 * len(tokens) if kind == OPEN else order.step_s):
            reply = grammar.answer(kind, walk, tokens)
        if time.process_time() - began > SLOW_STEP_S:
            os.nice(LOWEST_PRIORITY)
        if reply is not None:
            connection.sendall(framed(reply._replace(num_kib=memory.own_kib).encode()))


def _frames(stream: IO[bytes]) -> Iterator[bytes]:
    while len(head := stream.read(HEAD.size)) == HEAD.size:
        (length,) = HEAD.unpack(head)
        yield stream.read(length)


@contextlib.contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Lets the kernel end the process if the block takes longer."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    except MemoryError:
        os.abort()  # llguidance does the same
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Memory:
    """Memory of a process since it was forked."""

    def __init__(self) -> None:
        self._statm, self._page_kib = os.open("/proc/self/statm", os.O_RDONLY), resource.getpagesize() >> 10
        self._at_first = self._anonymous_pages()
        try:
            self._smaps: int | None = os.open("/proc/self/smaps_rollup", os.O_RDONLY)
        except FileNotFoundError:  # gVisor has none; the counters are an upper bound
            self._smaps = None
        self._read_kib = 0  # KiB when they were last read exactly
        self._touched_at_read_kib = 0  # and what _touched_kib was then

    @property
    def own_kib(self) -> int:
        """KiB of memory that the process does not share.

        Private_Dirty in /proc/self/smaps_rollup takes 1 to 2 ms to read, so it is read again only when counters that
        the kernel has anyway say that it may have grown by an eighth, or by 1 MiB.
        """
        touched = self._touched_kib()
        if self._smaps is not None and touched - self._touched_at_read_kib > max(1 << 10, self._read_kib >> 3):
            lines = os.pread(self._smaps, 1 << 12, 0).splitlines()
            self._read_kib = next(int(line.split()[1]) for line in lines if line.startswith(b"Private_Dirty:"))
            self._touched_at_read_kib = touched
        return self._read_kib + touched - self._touched_at_read_kib

    def address_bytes(self) -> int:
        return self._pages()[0] * resource.getpagesize()

    def _touched_kib(self) -> int:
        """Upper bound of the growth: each small page of its own was a page fault, and huge pages are new."""
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return max(faults, self._anonymous_pages() - self._at_first) * self._page_kib

    def _anonymous_pages(self) -> int:
        _, resident, of_files, *_ = self._pages()
        return resident - of_files

    def _pages(self) -> list[int]:
        return list(map(int, os.pread(self._statm, 200, 0).split()))


# The process that forks


def main() -> None:
    """Makes the trie, and forks a process for each grammar, until the engine closes the socket; then ends them all."""
    control = socket.socket(fileno=0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data, files, _, _ = socket.recv_fds(control, 1 << 16, 1)
    if not data:
        return
    setup = json.loads(data)
    with open(files[0], "rb") as file:
        text = file.read()
    try:
        trie = LLTokenizer(_whole_texts(text), setup["vocab_size"], setup["eos_token_ids"])
    except ValueError as error:
        control.send(msgspec.json.encode(Forked(failed=str(error))))
        return
    compiler = GrammarCompiler(trie, setup["limits"], NumberDigits(trie))
    compiler.warm_up()  # for all processes together
    ForkServer(control, compiler).run()


class ForkServer:
    """Forks a process for each grammar, and reports to the engine how processes end.

    Args:
        control: the socket to the engine.
        compiler: compiles the grammars.
    """

    def __init__(self, control: socket.socket, compiler: GrammarCompiler) -> None:
        self._control, self._compiler = control, compiler
        self._children: set[int] = set()  # ids of the processes that have not been reaped
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()  # each signal writes a byte to the second one

    def run(self) -> None:
        """Serves until the engine closes the socket, and ends all processes then."""
        gc.collect()
        gc.freeze()  # collections would write to shared pages
        gc.disable()
        self._wake_for_children()
        try:
            while self._handle_events():
                continue
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)
            for pid in self._children:
                os.waitpid(pid, 0)

    def _wake_for_children(self) -> None:
        """Lets the end of a process wake the selector.

        A handler of SIGCHLD would not do: Python runs it between two of its instructions, so a signal that arrives just
        before a call of the kernel is handled only when that call returns, which may be never.
        """
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing would be written to the waker
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)

    def _handle_events(self) -> bool:
        """Waits for messages and ends of processes, and handles them; returns False once the socket is closed."""
        ready = {key.fileobj for key, _ in self._selector.select()}
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(1 << 12)
            self._reap()
        if self._control not in ready:
            return True
        data, sockets, _, _ = socket.recv_fds(self._control, FORK_MESSAGE.size, 1)
        if not data:
            return False
        kind, number = FORK_MESSAGE.unpack(data)
        if kind == FORK:
            self._fork(sockets[0])
        elif number in self._children:  # else it has ended, and the id may belong to another process
            os.kill(number, signal.SIGKILL)
        return True

    def _fork(self, descriptor: int) -> None:
        """Forks the process that serves a grammar over this socket."""
        pid = os.fork()
        if pid == 0:
            self._be_grammar(descriptor)
        self._children.add(pid)
        self._control.send(msgspec.json.encode(Forked(started=pid)))
        os.close(descriptor)

    def _reap(self) -> None:
        """Reports how processes have ended."""
        with contextlib.suppress(ChildProcessError):  # there are no more children
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._children.discard(found[0])
                how = Forked(ended=found[0], status=os.waitstatus_to_exitcode(found[1]))
                self._control.send(msgspec.json.encode(how))

    def _be_grammar(self, descriptor: int) -> NoReturn:
        """Serves one grammar in a forked process."""
        status, errors = 0, os.fdopen(os.dup(2), "w")
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust reports there that memory is exhausted
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._selector, self._woken, self._waker, self._control):
                inherited.close()
            _serve(socket.socket(fileno=descriptor), self._compiler)
        except (BrokenPipeError, ConnectionResetError):
            status = 0  # the engine has closed the connection
        except BaseException:
            traceback.print_exc(file=errors)
            errors.flush()
            status = 1
        finally:
            os._exit(status)


def _whole_texts(tokenizer_json: bytes) -> str:
    """The tokenizer without truncation and padding."""
    parts = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
    null = msgspec.Raw(b"null")
    return msgspec.json.encode({**parts, "truncation": null, "padding": null}).decode()


if __name__ == "__main__":
    main()
