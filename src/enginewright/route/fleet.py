"""The replicas together: which one takes a request, who is healthy, and what runs until the proxy ends."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from enginewright.route.choice import choose
from enginewright.route.config import RouteConfig, origins
from enginewright.route.replica import HEALTH_S, Replica
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.histogram import Histogram
from enginewright.runtime.server.log import log_refused_bytes
from enginewright.runtime.server.metrics import FIRST_TOKEN_S

if TYPE_CHECKING:
    from enginewright.route.forward import Forward

MAX_SESSIONS = 1 << 16  # sessions whose replica is remembered


class SessionMemory:
    """The replicas that answered the most recent sessions last.

    Args:
        max_sessions: the maximum number of sessions.
    """

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._replicas: OrderedDict[bytes, Replica] = OrderedDict()
        self.num_moves = 0  # sessions that went on at another replica

    def replica_of(self, session: bytes | None) -> Replica | None:
        """The replica that answered a session last; None if that is not known."""
        return None if session is None else self._replicas.get(session)

    def remember(self, session: bytes | None, replica: Replica) -> None:
        """Remembers the replica of a session.

        Args:
            session: the key of the session; None does nothing.
            replica: the replica that has answered.
        """
        if session is None:
            return
        self.num_moves += self._replicas.get(session, replica) is not replica
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._max_sessions:
            self._replicas.popitem(last=False)


class Fleet:
    """All replicas, and the requests under way.

    Attributes:
        config: the settings.
        replicas: the replicas that answer.
        prefills: the replicas that only compute prompts.
        sessions: the replicas of sessions.
        live: the requests under way.
        draining: True once no new requests are taken.
        answers: number of answers, by route and status.
        first_byte: seconds from a request's arrival to the first byte of its answer.

    Args:
        config: the settings.
    """

    def __init__(self, config: RouteConfig) -> None:
        self.config = config
        self.replicas = [Replica(url) for url in origins(config.replicas)]
        self.prefills = [Replica(url) for url in origins(config.prefill)]
        self.sessions = SessionMemory()
        self.live: set[Forward] = set()
        self.draining = False
        self.answers: Counter[tuple[str, str]] = Counter()
        self.first_byte = Histogram(FIRST_TOKEN_S)
        self._checks: list[asyncio.Task[None]] = []
        self._passed = asyncio.Event()  # set, and replaced, whenever a replica that answers passes its check

    async def start(self) -> None:
        """Checks all replicas once, and then for ever."""
        await asyncio.gather(*(replica.check() for replica in self.all))
        self._checks = [asyncio.create_task(self._check(replica)) for replica in self.all]

    async def _check(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(HEALTH_S)
            if await replica.check() and replica not in self.prefills:
                self._passed.set()
                self._passed = asyncio.Event()

    async def until_passed(self, seconds: float) -> bool:
        """Waits for a replica to pass its health check.

        Args:
            seconds: the maximum wait.

        Returns:
            True if one has passed it.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._passed.wait()
        except TimeoutError:
            return False

    @property
    def all(self) -> list[Replica]:
        """All replicas."""
        return self.replicas + self.prefills

    @property
    def healthy(self) -> list[Replica]:
        """Replicas that take requests, and answer."""
        return [replica for replica in self.replicas if replica.is_healthy]

    def choose(self, keys: Sequence[bytes], among: Collection[Replica], session: bytes | None = None) -> Replica | None:
        """The replica of a session, unless it is busy; else the one that has least to do for a prompt.

        That is the rest of the prompt, and its running requests.

        Args:
            keys: the keys of the prompt.
            among: the replicas to choose from; those that are not healthy are left out.
            session: the key of the prompt's session; None: it has none.

        Returns:
            The replica; None if none is healthy.
        """
        return choose(keys, among, self.config.max_lead, self.sessions.replica_of(session))

    def watch(self) -> None:
        """Does nothing: health checks have their own tasks."""

    def reject(self, status: int, name: str | None) -> None:
        """Counts a request that reached no route.

        Args:
            status: the HTTP status.
            name: unused; the proxy does not know models.
        """
        self.answers["", str(status)] += 1

    def refuse_bytes(self, error: ApiError) -> None:
        """Counts and logs a client whose bytes are no HTTP request."""
        self.reject(error.status, None)
        log_refused_bytes(error)

    def drain(self) -> None:
        """Stops taking new requests."""
        self.draining = True

    async def until_idle(self) -> None:
        """Waits until no request is under way."""
        while self.live:
            await asyncio.sleep(0.02)

    def end_all(self) -> None:
        """Ends all requests with an error."""
        for forward in self.live:
            forward.stop()

    async def close(self) -> None:
        """Ends all requests and health checks, and closes the connections."""
        self.end_all()
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        for replica in self.all:
            await replica.close()
