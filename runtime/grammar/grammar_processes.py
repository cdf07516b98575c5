"""The processes that compile and walk an engine's grammars (grammar_worker.py), and the thread that controls them.

The state of grammars and processes belongs to the thread; other threads put messages into its inbox and never wait.

A grammar is compiled in the first of two lanes, whose limits fit ordinary grammars. One that exceeds them, then or
later, starts again in the second lane, with larger limits and a low priority. The second lane has at most half of the
memory, so that there is always memory for the first; and while a grammar waits in the second lane, the first one leaves
it memory.

A grammar without walks may be evicted for any other one. A grammar with walks is in use, but its answers may be waiting
for the very sequence whose grammar waits for memory. So walks say if a step uses them: they are active from the first
time that a step takes their mask until their sequence waits again. A grammar in use whose walks are not active may be
evicted for one with an active walk, and is compiled again when a step needs it, with the tokens of its walks. A grammar
with an active walk is evicted only if those in use have grown beyond the memory together, and then the one that began
last: the answers of the others go on, and end some time. So each grammar that a step needs gets its
memory, in turn, and an answer does not begin more compilations than it is admitted or preempted.
"""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Any

import msgspec

from enginewright.errors import EngineDeadError, EngineError, UsageError
from enginewright.runtime.count import format_bytes
from enginewright.runtime.env import worker_environment
from enginewright.runtime.grammar.grammar_protocol import (
    END,
    FORK,
    FORK_MESSAGE,
    KILL,
    LOOK,
    MAX_SECONDS,
    OPEN,
    SLOW_STEP_S,
    TAKE,
    Forked,
    GrammarOrder,
    GrammarReply,
    WalkReply,
    command,
)
from enginewright.runtime.grammar.stats import GrammarStats
from enginewright.runtime.text.worker_protocol import HEAD, framed

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 20  # maximum number of bytes read from a socket at once
MAX_GRAMMARS = 256  # maximum number of grammars with a process
MAX_LARGE = 4096  # maximum number of grammars that are known to exceed the memory of the first lane
HANG_S = MAX_SECONDS + 10  # seconds without a reply, after which a process must have been stopped
NUM_SPARE = 2  # processes kept in reserve, since forking and warming up one takes longer than compiling
CONNECTION_BYTES = 1 << 20  # size of a socket's buffer, if the system allows it


def _closed() -> EngineError:
    return EngineDeadError("the engine is closed")


@dataclass(frozen=True)
class Lane:
    """Limits of the process of a grammar."""

    compile_s: float  # CPU seconds for compiling
    step_s: float  # CPU seconds for a mask
    share: float  # share of --grammar-memory for one grammar
    num_compiled: int  # maximum number of grammars that are compiled at the same time
    niceness: int  # niceness of the process


# Most schemas take 2 to 5 ms and 3 MiB, and a mask 50 us.
FIRST = Lane(compile_s=0.03, step_s=SLOW_STEP_S, share=1 / 16, num_compiled=2, niceness=0)
SECOND = Lane(compile_s=1.0, step_s=1.0, share=1 / 4, num_compiled=4, niceness=10)
SECOND_SHARE = 0.5  # share of --grammar-memory for all grammars of the second lane

_BEYOND_TIME, _BEYOND_MEMORY = signal.SIGPROF, signal.SIGABRT  # signals that end a process at a limit


@dataclass(eq=False)
class WalkHandle:
    """The walk of one answer through a grammar, as the thread knows it."""

    number: int  # number of the walk
    key: str  # key of its grammar
    put: Callable[[WalkReply], None]  # receives the replies
    tokens: list[int] = field(default_factory=list)  # tokens that the walk has taken
    ahead: Sequence[int] = ()  # draft tokens of the latest LOOK
    is_active: bool = False  # True while steps use it, rather than that its sequence waits for blocks or a slot


@dataclass(eq=False)
class Process:
    """A grammar's process, or one that waits for a grammar."""

    connection: socket.socket  # socket to the process
    forked_by: subprocess.Popen[bytes]  # process that has forked it
    grammar: "CompiledGrammar | None" = None  # grammar of the process; None while it waits for one
    pid: int | None = None  # process id; None until it is known
    received: bytearray = field(default_factory=bytearray)  # bytes of an incomplete frame
    unsent: bytearray = field(default_factory=bytearray)  # bytes that are not sent yet
    is_open: bool = True  # True until the connection is closed
    is_dropped: bool = False  # true once it is not needed any more


@dataclass(eq=False)
class CompiledGrammar:
    """A grammar that is compiled, is being compiled, waits to be, or was evicted while its walks were not active."""

    key: str  # key of StructuredOutputsParams
    lane: Lane = FIRST  # lane of its process
    process: Process | None = None  # its process; None while it waits
    is_queued: bool = False  # True while it is in the queue of its lane
    is_ready: bool = False  # True once it is compiled
    num_bytes: int = 0  # bytes measured by its process; until then, its limit
    waiting: list["Future[None]"] = field(default_factory=list)  # futures that end when it is compiled
    walks: dict[int, WalkHandle] = field(default_factory=dict)  # its walks by number
    num_pending: int = 0  # number of replies that are still to come
    heard_at: float = 0.0  # time of the last reply, or of the first command after all were answered, by time.monotonic

    @property
    def is_unused(self) -> bool:
        """True if it is compiled and has no walks."""
        return self.is_ready and not self.walks

    @property
    def is_active(self) -> bool:
        """True if steps use one of its walks."""
        return any(walk.is_active for walk in self.walks.values())

    @property
    def is_wanted(self) -> bool:
        """True if it has a walk, or somebody waits until it is compiled."""
        return bool(self.walks) or not all(future.cancelled() for future in self.waiting)


class GrammarProcesses:
    """Compiles grammars, and makes masks for walks. All methods return at once, in any thread.

    No process runs before the first grammar.

    Args:
        read_tokenizer: reads the engine's tokenizer.json. It is called by the thread, once for each process that forks.
        setup: further settings of the process that forks.
        capacity_bytes: memory that all processes together may have for themselves, in bytes.
    """

    def __init__(self, read_tokenizer: Callable[[], bytes], setup: Mapping[str, Any], capacity_bytes: int) -> None:
        self._read_tokenizer, self._setup, self._capacity_bytes = read_tokenizer, setup, capacity_bytes
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()  # by key, the most recently used last
        # Grammars that wait to be compiled, by lane. Those that steps need are in the urgent queue, and come first.
        self._queues: dict[Lane, deque[CompiledGrammar]] = {FIRST: deque(), SECOND: deque()}
        self._urgent: dict[Lane, deque[CompiledGrammar]] = {FIRST: deque(), SECOND: deque()}
        self._large: OrderedDict[int, None] = OrderedDict()  # hashes of keys that exceeded the memory of the first lane
        self._walks: dict[int, WalkHandle] = {}
        self._numbers = count()
        self._num_evictions = self._num_compilations = 0
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # socket to the process that forks
        self._has_forked = False  # True once the process that forks has forked one
        self._forking: deque[Process] = deque()  # processes without an id yet, in the order of their ids
        self._by_pid: dict[int, Process] = {}  # processes that have not ended
        self._spare: deque[Process] = deque()
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()  # None ends it
        self._is_awake = False  # True once the thread was woken for its inbox
        self._lock = threading.Lock()  # guards the writers of the inbox, and the three attributes below
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)

    # From any thread

    def compile(self, key: str) -> "Future[None]":
        """Compiles a grammar.

        Args:
            key: the key of StructuredOutputsParams.

        Returns:
            A future that ends when the grammar is compiled, or with an error.

        Raises (the future):
            UsageError: it cannot be compiled, or exceeds a limit.
            EngineError: grammars cannot be used with this engine.
        """
        future: Future[None] = Future()
        if not self._post(self._compile, key, future):
            future.set_exception(_closed())
        return future

    def open(self, key: str, put: Callable[[WalkReply], None]) -> int:
        """Starts a walk, and returns its number. The thread passes its replies to `put`."""
        number = next(self._numbers)
        if not self._post(self._open, WalkHandle(number, key, put)):
            put(_failed(number, 0))
        return number

    def need(self, number: int) -> None:
        """Notes that a step waits for the mask of a walk, which is active from now on, as after `take` and `look`."""
        self._post(self._need, number)

    def rest(self, number: int) -> None:
        """Notes that a walk is not active any more, since its sequence waits."""
        self._post(self._rest, number)

    def take(self, number: int, token: int) -> None:
        """Advances a walk by a token; the reply has the next mask."""
        self._post(self._take, number, token)

    def look(self, number: int, tokens: Sequence[int]) -> None:
        """Requests the masks after the first of these tokens, the first two, …"""
        self._post(self._look, number, list(tokens))

    def end(self, number: int) -> None:
        """Ends a walk."""
        self._post(self._end, number)

    def stats(self) -> GrammarStats:
        """Statistics of the grammars."""
        grammars = list(self._grammars.values())
        num_bytes = sum(one.num_bytes for one in grammars)
        return GrammarStats(len(grammars), num_bytes, self._num_evictions, self._num_compilations)

    def close(self) -> None:
        """Ends the processes and the thread."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._inbox.put(None)
            os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        os.close(self._wake)

    def _post(self, act: Callable[..., None], *arguments: Any) -> bool:
        """Passes a call to the thread; returns False if the thread has ended."""
        with self._lock:
            if self._is_closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
            self._inbox.put((act, arguments))
            if not self._is_awake:
                self._is_awake = True
                os.eventfd_write(self._wake, 1)
            return True

    # The thread

    def _run(self) -> None:
        why = _closed()
        try:
            while self._handle_events():
                continue
        except Exception as error:
            logger.exception("the thread of grammars has ended")
            why = EngineError("grammars have failed", str(error) or type(error).__name__, "Start the engine again.")
        with self._lock:
            self._is_closed = True
        while not self._inbox.empty():
            message = self._inbox.get()
            if message is not None and message[0] == self._compile:
                message[1][1].set_exception(why)
        for grammar in list(self._grammars.values()):
            self._fail(grammar, why)
        if self._fork_server is not None:
            self._end_fork_server()

    def _handle_events(self) -> bool:
        """Handles all events; returns False at the end."""
        ready = self._selector.select(1.0 if self._is_waiting else None)
        for key, events in ready:
            if key.fd == self._wake:
                os.eventfd_read(self._wake)
                self._is_awake = False
            elif key.data is None:
                self._read_control()
            elif key.data.is_open:  # else it has just been dropped
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
        while not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            act, arguments = message
            act(*arguments)
        self._end_hanging()
        self._start_waiting()
        return True

    @property
    def _is_waiting(self) -> bool:
        """True while a reply is pending, which may never come."""
        return bool(self._forking) or any(one.num_pending for one in self._grammars.values())

    # Messages of the inbox

    def _compile(self, key: str, future: "Future[None]") -> None:
        grammar = self._find(key)
        if not grammar.is_ready:
            grammar.waiting.append(future)
            self._enqueue(grammar)
        elif future.set_running_or_notify_cancel():
            future.set_result(None)

    def _open(self, walk: WalkHandle) -> None:
        self._walks[walk.number] = walk
        grammar = self._find(walk.key)
        grammar.walks[walk.number] = walk
        if grammar.is_ready:
            self._request(grammar, OPEN, walk.number)

    def _take(self, number: int, token: int) -> None:
        walk = self._walks.get(number)
        if walk is None:  # it has failed
            return
        walk.tokens.append(token)
        walk.ahead = ()
        if self._activate(walk).is_ready:
            self._request(self._grammars[walk.key], TAKE, number, [token])

    def _look(self, number: int, tokens: list[int]) -> None:
        walk = self._walks.get(number)
        if walk is None:
            return
        walk.ahead = tokens
        if self._activate(walk).is_ready:
            self._request(self._grammars[walk.key], LOOK, number, tokens)

    def _need(self, number: int) -> None:
        walk = self._walks.get(number)
        if walk is not None:
            self._activate(walk)

    def _rest(self, number: int) -> None:
        walk = self._walks.get(number)
        if walk is not None:
            walk.is_active = False

    def _activate(self, walk: WalkHandle) -> CompiledGrammar:
        """Notes that steps use a walk, and returns its grammar, which is compiled if it is not."""
        grammar, was_active = self._grammars[walk.key], walk.is_active
        walk.is_active = True
        if grammar.process is None and not was_active:
            self._urgent[grammar.lane].append(grammar)
        return grammar

    def _end(self, number: int) -> None:
        walk = self._walks.pop(number, None)
        if walk is None:
            return
        grammar = self._grammars[walk.key]
        del grammar.walks[number]
        if grammar.is_ready:
            self._send(_process_of(grammar), command(END, number))
        elif grammar.process is None and not grammar.is_wanted:
            del self._grammars[grammar.key]

    def _find(self, key: str) -> CompiledGrammar:
        grammar = self._grammars.get(key)
        if grammar is None:
            grammar = self._grammars[key] = CompiledGrammar(key, SECOND if hash(key) in self._large else FIRST)
            self._enqueue(grammar)
        self._grammars.move_to_end(key)
        return grammar

    def _enqueue(self, grammar: CompiledGrammar) -> None:
        """Queues a grammar without a process in its lane, unless it is queued."""
        if grammar.process is None and not grammar.is_queued:
            grammar.is_queued = True
            self._queues[grammar.lane].append(grammar)

    # Compiling

    def _start_waiting(self) -> None:
        """Starts to compile waiting grammars, as far as the limits allow."""
        for lane, queue in self._queues.items():
            urgent = self._urgent[lane]
            while (grammar := self._first_of(urgent, lane)) is not None and self._can_start(lane, is_urgent=True):
                urgent.popleft()
                self._start(grammar)
            if urgent:
                continue
            while (grammar := self._first_of(queue, lane)) is not None and self._can_start(lane):
                queue.popleft()
                self._start(grammar)

    def _first_of(self, queue: deque[CompiledGrammar], lane: Lane) -> CompiledGrammar | None:
        """First grammar of a queue that has still to be compiled; those before it are removed."""
        while queue:
            grammar, is_urgent = queue[0], queue is self._urgent[lane]
            is_known = self._grammars.get(grammar.key) is grammar
            if is_known and grammar.process is None and not grammar.is_wanted:
                del self._grammars[grammar.key]
            elif is_known and grammar.process is None and grammar.lane is lane and (grammar.is_active or not is_urgent):
                return grammar
            queue.popleft()
            if not is_urgent:
                grammar.is_queued = False
        return None

    def _can_start(self, lane: Lane, *, is_urgent: bool = False) -> bool:
        """True if one more grammar can be compiled now; others are evicted for it.

        Args:
            lane: the lane of the grammar.
            is_urgent: True if it has an active walk; then grammars whose walks are not active are evicted, too.
        """
        compiling = [one for one in self._grammars.values() if one.process is not None and not one.is_ready]
        if sum(one.lane is lane for one in compiling) >= lane.num_compiled:
            return False
        wanted, available = int(lane.share * self._capacity_bytes), self._capacity_bytes
        if lane is SECOND:
            while self._num_bytes(SECOND) + wanted > SECOND_SHARE * self._capacity_bytes:
                if not self._evict_one(SECOND, is_urgent=is_urgent):
                    return False
        elif self._urgent[SECOND] or self._queues[SECOND]:
            reserved = int(SECOND.share * self._capacity_bytes)
            if self._num_bytes(SECOND) + reserved <= SECOND_SHARE * self._capacity_bytes:
                available -= reserved
        while self._num_bytes() + wanted > available or self._num_processes >= MAX_GRAMMARS:
            if not self._evict_one(is_urgent=is_urgent):
                return False
        return True

    @property
    def _num_processes(self) -> int:
        return sum(one.process is not None for one in self._grammars.values())

    def _num_bytes(self, lane: Lane | None = None) -> int:
        """Bytes of the grammars of a lane, or of all."""
        return sum(one.num_bytes for one in self._grammars.values() if lane in (None, one.lane))

    def _evict_one(self, lane: Lane | None = None, *, is_urgent: bool = False) -> bool:
        """Evicts a grammar; returns False if none can be.

        Args:
            lane: the lane of the grammar; None: any.
            is_urgent: False evicts only the least recently used grammar without walks. True evicts, if there is none,
                the one whose walks are not active and began last; it keeps its walks, and waits until a step needs it.
        """
        ready = [one for one in self._grammars.values() if one.is_ready and lane in (None, one.lane)]
        grammar = next((one for one in ready if one.is_unused), None)
        if grammar is None and is_urgent:
            grammar = max((one for one in ready if not one.is_active), key=_first_walk, default=None)
        if grammar is None:
            return False
        self._evict(grammar)
        return True

    def _evict(self, grammar: CompiledGrammar) -> None:
        self._num_evictions += 1
        if grammar.is_unused:
            del self._grammars[grammar.key]
        self._drop_process(grammar)
        if grammar.is_active:
            self._urgent[grammar.lane].append(grammar)

    def _start(self, grammar: CompiledGrammar) -> None:
        grammar.is_queued = False
        try:
            process = self._spare.popleft() if self._spare else self._fork()
        except EngineError as error:
            self._fail(grammar, error)
            return
        lane, grammar.process, process.grammar = grammar.lane, process, grammar
        grammar.num_bytes = int(lane.share * self._capacity_bytes)
        grammar.num_pending, grammar.heard_at = 1, time.monotonic()
        self._num_compilations += 1
        order = GrammarOrder(grammar.key, grammar.num_bytes, lane.compile_s, lane.step_s, lane.niceness)
        self._send(process, msgspec.json.encode(order))
        try:
            while len(self._spare) < NUM_SPARE:
                self._spare.append(self._fork())
        except EngineError as error:
            logger.warning("no process is ready for the next grammar: %s", error)

    def _fork(self) -> Process:
        """Forks a process, which waits for its grammar.

        Raises:
            EngineError: the tokenizer cannot be read, or the system gives no more processes or descriptors.
        """
        try:
            control, fork_server = self._ready_fork_server()
            ours, theirs = socket.socketpair()
        except OSError as error:
            why = error.strerror or str(error)
            raise EngineError(
                "structured_outputs could not be compiled", f"no process can be started: {why}"
            ) from error
        ours.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, option, CONNECTION_BYTES)
            theirs.setsockopt(socket.SOL_SOCKET, option, CONNECTION_BYTES)
        process = Process(ours, fork_server)
        self._selector.register(ours, selectors.EVENT_READ, process)
        self._forking.append(process)
        try:
            socket.send_fds(control, [FORK_MESSAGE.pack(FORK, 0)], [theirs.fileno()])
        except OSError:  # it has ended, which `_read_control` handles next
            return process
        finally:
            theirs.close()
        return process

    def _ready_fork_server(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Starts the process that forks, if it does not run.

        Returns:
            The socket to it, and the process.

        Raises:
            EngineError: the tokenizer cannot be read.
            OSError: the system gives no more processes or descriptors.
        """
        if self._control is not None and self._fork_server is not None:
            return self._control, self._fork_server
        text = self._read_tokenizer()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fork_server: subprocess.Popen[bytes] | None = None
        try:
            with theirs, os.fdopen(os.memfd_create("tokenizer"), "wb+") as file:
                file.write(text)
                file.flush()
                file.seek(0)
                fork_server = subprocess.Popen(
                    # Without site, which may take longer than the rest of the start; worker_environment has the path.
                    [sys.executable, "-S", "-P", "-m", "enginewright.runtime.grammar.grammar_worker"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=worker_environment(),
                    process_group=0,  # so that Ctrl-C in a terminal reaches only the parent
                )
                socket.send_fds(ours, [msgspec.json.encode(self._setup)], [file.fileno()])
        except BaseException:
            ours.close()
            if fork_server is not None:
                fork_server.kill()
                fork_server.wait()
            raise
        self._control, self._fork_server, self._has_forked = ours, fork_server, False
        self._selector.register(ours, selectors.EVENT_READ, None)
        return ours, fork_server

    def _end_fork_server(self) -> None:
        """Ends the process that forks, and with it all processes that it has forked."""
        assert self._fork_server is not None and self._control is not None
        self._selector.unregister(self._control)
        self._control.close()
        if not self._has_forked:
            self._fork_server.kill()  # it may be making the trie; later it ends by itself, after its children
        self._fork_server.wait()
        self._fork_server = self._control = None

    # Messages of processes

    def _read_control(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(1 << 16)
        except ConnectionResetError:  # it has ended before it has read everything
            data = b""
        if not data:
            self._fork_server_ended()
            return
        message = msgspec.json.decode(data, type=Forked)
        if message.failed:
            why = "this engine's tokenizer cannot be used for structured outputs"
            for grammar in [one for one in self._grammars.values() if one.process in self._forking]:
                self._fail(grammar, EngineError(why, message.failed))
        elif message.started:
            process = self._forking.popleft()
            process.pid, self._has_forked = message.started, True
            self._by_pid[message.started] = process
            if process.is_dropped:
                self._kill(process)
        elif message.ended:
            process = self._by_pid.pop(message.ended)
            self._read(process)  # its last replies
            self._process_ended(process, message.status)

    def _fork_server_ended(self) -> None:
        """Handles the end of the process that forks; its children continue, but their exit status stays unknown."""
        assert self._control is not None and self._fork_server is not None
        self._selector.unregister(self._control)
        self._control.close()
        self._fork_server.wait()
        self._fork_server = self._control = None
        processes = [*self._forking, *self._by_pid.values()]
        self._forking.clear()
        self._by_pid.clear()
        for process in processes:
            if process.pid is None or process.grammar is None or not process.is_open:
                self._process_ended(process, None)

    def _read(self, process: Process) -> None:
        """Handles the replies of a grammar's process."""
        try:
            data = process.connection.recv(READ_BYTES) if process.is_open else b""
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._disconnect(process)
            if process.forked_by is not self._fork_server:  # its exit status stays unknown
                self._process_ended(process, None)
            return
        received, grammar = process.received, process.grammar
        received += data
        place = 0
        while len(received) - place >= HEAD.size and grammar is not None and not process.is_dropped:
            (length,) = HEAD.unpack_from(received, place)
            end = place + HEAD.size + length
            if len(received) < end:
                break
            frame = bytes(received[place + HEAD.size : end])
            place = end
            grammar.num_pending -= 1
            grammar.heard_at = time.monotonic()
            if grammar.is_ready:
                self._replied(grammar, WalkReply.decode(memoryview(frame)))
            else:
                self._compiled(grammar, msgspec.json.decode(frame, type=GrammarReply))
        del received[:place]

    def _disconnect(self, process: Process) -> None:
        if process.is_open:
            process.is_open = False
            self._selector.unregister(process.connection)
            process.connection.close()

    def _compiled(self, grammar: CompiledGrammar, reply: GrammarReply) -> None:
        if reply.failed:
            self._fail(grammar, UsageError("structured_outputs cannot be compiled", reply.failed))
            return
        grammar.is_ready = True
        for future in grammar.waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
        grammar.waiting = []
        for walk in grammar.walks.values():
            self._request(grammar, OPEN, walk.number, walk.tokens)
            if walk.ahead:
                self._request(grammar, LOOK, walk.number, walk.ahead)
        self._measured(grammar, reply.num_kib << 10)

    def _replied(self, grammar: CompiledGrammar, reply: WalkReply) -> None:
        walk = grammar.walks.get(reply.walk)
        if walk is not None:
            walk.put(reply)
        if reply.num_kib << 10 != grammar.num_bytes:
            self._measured(grammar, reply.num_kib << 10)

    def _measured(self, grammar: CompiledGrammar, num_bytes: int) -> None:
        """Records the memory of a grammar, and evicts others if it is too much."""
        grammar.num_bytes = num_bytes
        while self._num_bytes() > self._capacity_bytes and self._evict_one(is_urgent=True):
            continue
        while self._num_bytes() > self._capacity_bytes:
            # Steps use all of them. One alone always fits, so the one that began last can wait for memory again.
            ready = [one for one in self._grammars.values() if one.is_ready]
            if not ready:  # the others are being compiled, and are counted with their limits
                return
            self._evict(max(ready, key=_first_walk))

    def _process_ended(self, process: Process, status: int | None) -> None:
        """Starts the grammar of an ended process again in the second lane if it was in the first; else it fails."""
        self._disconnect(process)
        grammar = process.grammar
        if process in self._spare:
            self._spare.remove(process)
        if process.is_dropped or grammar is None:
            return
        lane, is_ready = grammar.lane, grammar.is_ready
        self._drop_process(grammar)
        if lane is FIRST and status != -signal.SIGSEGV:
            if status == -_BEYOND_MEMORY:
                self._large[hash(grammar.key)] = None
                if len(self._large) > MAX_LARGE:
                    self._large.popitem(last=False)
            grammar.lane = SECOND
            self._enqueue(grammar)
            if grammar.is_active:
                self._urgent[SECOND].append(grammar)
            return
        if status == -_BEYOND_TIME:
            why = f"it takes more than {lane.step_s if is_ready else lane.compile_s:g} s of CPU time"
        elif status == -_BEYOND_MEMORY:
            why = self._memory_error(lane)
        elif status == -signal.SIGALRM:
            why = f"it takes more than {MAX_SECONDS:g} s"
        elif status == -signal.SIGSEGV:
            why = "it is nested too deeply"
        else:
            self._fail(grammar, EngineError("structured_outputs could not be compiled", "a process was killed"))
            return
        self._fail(grammar, UsageError("structured_outputs cannot be compiled", why))

    def _memory_error(self, lane: Lane) -> str:
        return f"it takes more than {format_bytes(int(lane.share * self._capacity_bytes))} of memory"

    def _fail(self, grammar: CompiledGrammar, error: EngineError) -> None:
        """Removes a grammar, and passes the error to its futures and walks."""
        if self._grammars.get(grammar.key) is grammar:
            del self._grammars[grammar.key]
        self._drop_process(grammar)
        for future in grammar.waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        for number, walk in grammar.walks.items():
            self._walks.pop(number, None)
            walk.put(_failed(number, len(walk.tokens)))

    def _drop_process(self, grammar: CompiledGrammar) -> None:
        """Kills a grammar's process, if it has one."""
        process, grammar.process = grammar.process, None
        grammar.is_ready, grammar.num_bytes, grammar.num_pending = False, 0, 0
        if process is None:
            return
        process.is_dropped = True
        self._disconnect(process)
        if process.pid is not None:  # else it is killed as soon as its id is known
            self._kill(process)

    def _kill(self, process: Process) -> None:
        """Has a process killed by its parent, which alone knows whether the process id is still valid."""
        if self._control is None or process.pid not in self._by_pid:
            return  # it has ended, or ends itself, since its connection is closed
        try:
            self._control.send(FORK_MESSAGE.pack(KILL, process.pid))
        except OSError:  # the process that forks has ended, which `_read_control` handles next
            return

    # Messages to processes

    def _request(self, grammar: CompiledGrammar, kind: int, walk: int, tokens: Sequence[int] = ()) -> None:
        """Sends a command that has a reply."""
        if grammar.num_pending == 0:
            grammar.heard_at = time.monotonic()
        grammar.num_pending += 1
        self._send(_process_of(grammar), command(kind, walk, tokens))

    def _send(self, process: Process, data: bytes) -> None:
        if process.is_open:
            process.unsent += framed(data)
            self._flush(process)

    def _flush(self, process: Process) -> None:
        """Sends as much as the socket accepts."""
        try:
            sent = process.connection.send(process.unsent) if process.unsent else 0
            del process.unsent[:sent]
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):  # it has ended, which `_read` handles next
            process.unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
        if self._selector.get_key(process.connection).events != events:
            self._selector.modify(process.connection, events, process)

    def _end_hanging(self) -> None:
        """Kills processes without a reply for so long that the kernel must have ended them, unless they are stopped."""
        latest = time.monotonic() - HANG_S
        for grammar in [one for one in self._grammars.values() if one.num_pending and one.heard_at < latest]:
            process = _process_of(grammar)
            if process.pid is None and self._fork_server is not None:
                self._fork_server.kill()  # which `_read_control` handles next
            else:
                self._process_ended(process, -signal.SIGALRM)


def _first_walk(grammar: CompiledGrammar) -> int:
    """Number of the walk of a grammar that began first; walks that began later have larger numbers."""
    return next(iter(grammar.walks))


def _failed(number: int, num_taken: int) -> WalkReply:
    """The last reply of a walk that has failed.

    Args:
        number: number of the walk.
        num_taken: number of tokens that it has taken.
    """
    return WalkReply(number, False, num_taken, True, 0, (), ())


def _process_of(grammar: CompiledGrammar) -> Process:
    """The process of a grammar that is ready, or is being compiled."""
    assert grammar.process is not None
    return grammar.process
