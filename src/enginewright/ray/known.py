"""Replicas as a request router knows them: the prompts that each has answered, and its running requests."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from enginewright.route.choice import choose
from enginewright.route.prefixes import PrefixMemory


@dataclass(frozen=True)
class Hints:
    """Facts of a request that decide its replica."""

    keys: Sequence[bytes] = ()  # chained keys of its prompt
    replica: str | None = None  # id of the replica that keeps the response which is continued
    avoid: Sequence[str] = ()  # ids of replicas that could not answer it


@dataclass
class _Known:
    """A replica."""

    prefixes: PrefixMemory = field(default_factory=PrefixMemory)  # prompts that were sent to it
    num_running: int = 0  # number of requests that run there, from this router
    num_sent: int = 0  # number of requests that were sent to it, and have ended


@dataclass(frozen=True)
class _Candidate:
    """A replica that could answer a request."""

    id: str  # id
    known: _Known  # what the router knows
    is_healthy: bool  # True unless it could not answer this request before

    @property
    def num_running(self) -> int:
        return self.known.num_running

    @property
    def num_sent(self) -> int:
        return self.known.num_sent

    @property
    def prefixes(self) -> PrefixMemory:
        return self.known.prefixes


class KnownReplicas:
    """All replicas by their ids.

    Args:
        max_lead: the number of requests that a replica may run beyond the least busy one.
    """

    def __init__(self, max_lead: int) -> None:
        self.max_lead = max_lead
        self._known: dict[str, _Known] = {}

    def keep(self, ids: Collection[str]) -> None:
        """Forgets all replicas but these."""
        self._known = {id: known for id, known in self._known.items() if id in ids}

    def ranks(self, hints: Hints, ids: Collection[str]) -> list[list[str]]:
        """The replicas in the order in which they are tried, those of a rank equally.

        Args:
            hints: of the request.
            ids: ids of the replicas that run.
        """
        best = hints.replica
        if best not in ids:
            candidates = [_Candidate(id, self._of(id), id not in hints.avoid) for id in ids]
            chosen = choose(hints.keys, candidates, self.max_lead)
            best = None if chosen is None else chosen.id
        if best is None:
            return [list(ids)]
        others = [id for id in ids if id != best]
        return [[best], others] if others else [[best]]

    def begun(self, id: str) -> None:
        """Counts a request that is sent to a replica."""
        self._of(id).num_running += 1

    def ended(self, id: str) -> None:
        """Counts a request that has ended, however it did; Ray reports some that were never sent."""
        known = self._of(id)
        known.num_running = max(known.num_running - 1, 0)
        known.num_sent += 1

    def takes(self, id: str, keys: Sequence[bytes]) -> None:
        """Remembers a prompt that a replica has begun to answer."""
        self._of(id).prefixes.remember(keys)

    def _of(self, id: str) -> _Known:
        return self._known.setdefault(id, _Known())
