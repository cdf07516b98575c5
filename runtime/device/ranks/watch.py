"""Watches everything that the ranks of a group depend on: processes of this machine, and other machines."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec

from enginewright.runtime.cache.channel import TransferError
from enginewright.runtime.device.ranks.member import RankLostError
from enginewright.runtime.device.ranks.messages import (
    MAX_BYTES,
    Failed,
    Frames,
    Ping,
    Pong,
    Ready,
    Reply,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

PING_S = 1.0  # seconds between two pings
MAX_UNANSWERED = 6  # pings in a row that a member may leave unanswered
# The same for a process that has not opened its part of the engine: it may still read the code of Python and ours.
MAX_UNANSWERED_AT_START = 60
BETTER_REASON_S = 1.0  # seconds in which the reason may come why a connection between two ranks has ended
OPEN_TIMEOUT_S = 900.0  # maximum seconds until a rank has opened its part of the engine
POLL_S = 0.5  # seconds between two looks if waiting is over
RESTART = "Start it again."


class Member(Protocol):
    """A process with a rank, or another machine with several."""

    name: str  # its name in messages
    rank: int  # its first rank
    answers_at_start: bool  # True if it answers pings before it is ready

    @property
    def frames(self) -> Frames:
        """The connection to it."""
        ...

    def why_ended(self) -> str:
        """Says why its connection has ended."""
        ...

    def kill(self) -> None:
        """Ends it at once, if that can be done from here."""
        ...

    def close(self) -> None:
        """Waits until it has ended, and frees what it has here. Its connection has been shut down."""
        ...


class Watch:
    """Sends messages to the members of a group, and finds out if one of them is lost, by which the group fails.

    Args:
        members: the members. The watch closes them.
        exchange: calls RankLostError if the exchange of a rank in this process has failed.
        failed: called once, from a thread of the watch, when the group has failed.
    """

    def __init__(
        self,
        members: Sequence[Member],
        exchange: Callable[[], None],
        failed: Callable[[Member | None, Failed], None],
    ) -> None:
        self._members, self._exchange, self._failed = [_Watched(member) for member in members], exchange, failed
        self._events = SimpleQueue[tuple[_Watched | None, Failed | None] | None]()  # None ends the thread
        self._changed = threading.Condition()  # of all that follows, and of `is_ready`
        self._why: Failed | None = None  # reason why the group has failed
        self._threads = [
            threading.Thread(target=self._read, args=(one,), name=one.member.name, daemon=True) for one in self._members
        ]
        self._threads.append(threading.Thread(target=self._watch, name="ranks", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> RankLostError | None:
        """A new error that says why the group has failed; None if it has not."""
        return None if self._why is None else error_of(self._why)

    def wait_until_ready(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Waits until all members have opened their parts of the engine.

        Args:
            is_over: returns True if nobody needs them any more, by which the waiting ends.

        Raises:
            RankLostError: one of them cannot, or has not in time.
        """
        until = time.monotonic() + OPEN_TIMEOUT_S
        with self._changed:
            while self._why is None and (slow := self._slow()):
                if is_over():
                    raise RankLostError("the group has ended before its ranks were ready")
                if time.monotonic() > until:
                    raise RankLostError(f"{', '.join(slow)} cannot start", f"not ready within {OPEN_TIMEOUT_S:g} s")
                self._changed.wait(POLL_S)
        self._check()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message to all members.

        Raises:
            RankLostError: the group has failed.
        """
        self.forward(encode(message))

    def forward(self, content: bytes) -> None:
        """Sends a message that is encoded to all members; see `send`."""
        for one in self._members:
            if not one.send(content):
                self._events.put((one, None))
        self._check()

    def reason(self, error: RankLostError) -> RankLostError:
        """Finds out why the exchange of a rank in this process has failed, and fails the group.

        Args:
            error: the exchange's own reason.
        """
        self._events.put((None, _lost(error)))
        with self._changed:
            self._changed.wait_for(lambda: self._why is not None, 2 * BETTER_REASON_S)
        return self.failure or error

    def close(self) -> None:
        """Ends all members."""
        self._events.put(None)
        self._threads[-1].join()
        for one in self._members:
            one.member.frames.shutdown()
        for thread in self._threads:
            thread.join()
        for one in self._members:
            one.member.close()

    def _check(self) -> None:
        failure = self.failure
        if failure is not None:
            raise failure

    def _slow(self) -> list[str]:
        return [one.member.name for one in self._members if not one.is_ready]

    def _read(self, one: "_Watched") -> None:
        """Receives what a member says, until its connection ends."""
        decoder = msgspec.msgpack.Decoder(Reply)
        try:
            while True:
                message = decode(one.member.frames.receive(MAX_BYTES), decoder)
                one.unanswered = 0
                match message:
                    case Ready():
                        with self._changed:
                            one.is_ready = True
                            self._changed.notify_all()
                    case Failed():
                        one.has_failed = True
                        self._events.put((one, message))
                    case Pong():
                        pass
        except (OSError, TransferError):
            self._events.put((one, None))

    def _watch(self) -> None:
        """Decides if the group has failed, and why."""
        next_ping, lost, decided_at = time.monotonic() + PING_S, None, float("inf")
        while True:
            try:
                event = self._events.get(timeout=max(min(next_ping, decided_at) - time.monotonic(), 0))
            except Empty:
                if lost is not None and time.monotonic() >= decided_at:
                    return self._fail(None, lost)
                if time.monotonic() >= next_ping:
                    next_ping = time.monotonic() + PING_S  # without those that were missed while this process stood
                    self._ping()
                continue
            if event is None:
                return None
            one, failed = event
            if one is not None and failed is None and one.has_failed:
                continue  # it has said why before its connection ended
            if failed is None:
                assert one is not None, "an event has one of the two"
                return self._fail(one, Failed(one.member.name, one.member.why_ended(), fix=RESTART))
            if not failed.is_lost:
                return self._fail(one, failed)
            if lost is None:
                lost, decided_at = failed, time.monotonic() + BETTER_REASON_S

    def _ping(self) -> None:
        try:
            self._exchange()
        except RankLostError as error:
            self._events.put((None, _lost(error)))
        for one in self._members:
            if not one.is_ready and not one.member.answers_at_start:
                continue
            one.unanswered += 1
            limit = MAX_UNANSWERED if one.is_ready else MAX_UNANSWERED_AT_START
            if one.unanswered > limit:
                one.has_failed = True
                one.member.kill()
                why = f"it has not answered for {limit * PING_S:g} s"
                self._events.put((one, Failed(one.member.name, why, fix=RESTART)))
            elif not one.ping():
                self._events.put((one, None))

    def _fail(self, one: "_Watched | None", failed: Failed) -> None:
        logger.error("%s", error_of(failed))
        self._failed(None if one is None else one.member, failed)
        with self._changed:
            self._why = failed
            self._changed.notify_all()
        for other in self._members:
            other.member.frames.shutdown()  # by which processes end, and other machines are free for another group


class _Watched:
    """A member, and what is known of it."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.is_ready = False
        self.has_failed = False  # True once the reason is known
        self.unanswered = 0  # pings since it has said something
        self._sending = threading.Lock()

    def send(self, content: bytes) -> bool:
        """Sends a message. Returns False if the connection has ended."""
        with self._sending:
            return self._send(content)

    def ping(self) -> bool:
        """Sends a ping, unless something else is being sent. Returns False if the connection has ended."""
        if not self._sending.acquire(blocking=False):
            return True
        try:
            return self._send(encode(Ping()))
        finally:
            self._sending.release()

    def _send(self, content: bytes) -> bool:
        try:
            self.member.frames.send(content)
        except OSError:
            return False
        return True


def _lost(error: RankLostError) -> Failed:
    return Failed("", error.what, error.why, error.fix, error.exit_code, True)


def error_of(failed: Failed) -> RankLostError:
    """The error for people by which a group ends.

    Args:
        failed: what the member has said, or what is known of it.
    """
    what = failed.what if failed.is_lost else f"{failed.who}: {failed.what}"
    error = RankLostError(what, failed.why, failed.fix)
    error.exit_code = failed.exit_code
    return error
