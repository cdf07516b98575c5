"""The simulation of a fleet: arrivals, the router's choice, transfers between replicas, a store of prefixes, and steps.

The router is that of `engine route`: its keys, its memory of each replica, and its choice are the code itself.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
from fleet.costs import StepCosts
from fleet.gaps import Gaps
from fleet.replica import Limits, Replica, Request, Work

from enginewright.route.choice import choose, is_computed_apart


@dataclass(frozen=True)
class Link:
    """A connection that moves KV blocks, one transfer after the other."""

    bytes_per_s: float  # bandwidth
    latency_s: float  # seconds of a transfer of nothing


@dataclass(frozen=True)
class FleetConfig:
    """A fleet, and how it is used."""

    policy: str  # "round robin", "least requests" or "prefixes"
    replicas: int = 64  # all replicas
    prefills: int = 0  # replicas of these that only compute prompts
    link: Link = Link(1.25e9, 0.001)  # connection of each replica that computes prompts to the others
    store: Link | None = None  # connection of all replicas to a store of prefixes; None is no store
    max_lead: int = 8  # as of `engine route`
    min_prefill_bytes: int = 2048  # as of `engine route`
    limits: Limits = field(default_factory=Limits)  # capacity of each replica
    kv_bytes_per_token: int = 12_000  # bytes that are moved


@dataclass(frozen=True)
class Outcome:
    """Results of a simulated run."""

    first_token_s: tuple[float, float, float]  # p50, p95 and p99 of the time to the first token, in seconds
    gap_p99_s: float  # p99 of the time between two tokens of an answer, in seconds
    prompt_tokens: int  # tokens of prompts
    computed_tokens: int  # tokens of prompts that were computed
    moved_bytes: int  # bytes that moved between replicas
    stored_bytes: int  # bytes that came from the store
    requests_per_s: float  # requests that ended, by the time that this took
    busy: float  # share of the time in which replicas computed

    @property
    def computed_share(self) -> float:
        """Share of the prompt tokens that was computed."""
        return self.computed_tokens / self.prompt_tokens


class Pipe:
    """A link, as it is used.

    Args:
        link: its bandwidth and latency.
    """

    def __init__(self, link: Link) -> None:
        self._link, self._free_s, self.num_bytes = link, 0.0, 0

    def until(self, num_bytes: int, now_s: float) -> float:
        """The time at which a transfer that is asked for now would end.

        Args:
            num_bytes: its size.
            now_s: the time.
        """
        return max(now_s, self._free_s) + num_bytes / self._link.bytes_per_s + self._link.latency_s

    def move(self, num_bytes: int, now_s: float) -> float:
        """Begins a transfer; its end. Arguments as of `until`."""
        end_s = self.until(num_bytes, now_s)
        self._free_s, self.num_bytes = end_s - self._link.latency_s, self.num_bytes + num_bytes
        return end_s


class Simulation:
    """One run.

    Args:
        config: the fleet.
        costs: the time of steps.
        requests: the requests, sorted by their arrival. They are changed.
        in_flight: the number of requests at a time, each of which begins when another one ends; None: they arrive when
            they say.
    """

    def __init__(
        self, config: FleetConfig, costs: StepCosts, requests: Sequence[Request], *, in_flight: int | None = None
    ) -> None:
        self._config, self._costs, self._requests, self._in_flight = config, costs, requests, in_flight
        self._gaps = Gaps()
        new = partial(Replica, costs, config.limits)
        self._answering = [new(self._gaps) for _ in range(config.replicas - config.prefills)]
        self._prefills = [new(None) for _ in range(config.prefills)]
        self._links = {replica: Pipe(config.link) for replica in self._prefills}
        self._store = None if config.store is None else Pipe(config.store)
        self._stored: set[bytes] = set()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order, self._next, self._turn = count(), 0, count()

    def run(self) -> Outcome:
        """Runs until all requests have ended."""
        if self._in_flight is None:
            self._at(self._requests[0].arrived_s, self._arrive)
        else:
            for _ in range(self._in_flight):
                self._begin_next(0.0)
        now_s = 0.0
        while self._events:
            now_s, _, event = heapq.heappop(self._events)
            event(now_s)
        return self._outcome(now_s)

    def _at(self, time_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _arrive(self, now_s: float) -> None:
        """The next request arrives at the time that it says."""
        request = self._requests[self._next]
        self._next += 1
        if self._next < len(self._requests):
            self._at(self._requests[self._next].arrived_s, self._arrive)
        self._route(request, now_s)

    def _begin_next(self, now_s: float) -> None:
        """The next request arrives since another one has ended."""
        if self._next < len(self._requests):
            request = self._requests[self._next]
            self._next, request.arrived_s = self._next + 1, now_s
            self._route(request, now_s)

    def _choose(self, request: Request, among: Sequence[Replica]) -> Replica:
        match self._config.policy:
            case "round robin":
                return among[next(self._turn) % len(among)]
            case "least requests":
                chosen = choose((), among, self._config.max_lead)
            case _:
                chosen = choose(request.keys, among, self._config.max_lead)
        assert chosen is not None, "all are healthy"
        return chosen

    def _route(self, request: Request, now_s: float) -> None:
        if self._prefills:
            answering = self._choose(request, self._answering)
            if is_computed_apart(request.keys, answering, self._config.min_prefill_bytes):
                helper = self._choose(request, self._prefills)
                self._send(Work(request, 1), helper, now_s)
                return
        self._send(Work(request, request.answer_tokens), self._choose(request, self._answering), now_s)

    def _send(self, work: Work, replica: Replica, now_s: float) -> None:
        """Sends a request to a replica, which first fetches what is faster to fetch than to compute."""
        replica.num_running += 1
        keys, limits = work.request.keys, self._config.limits
        if self._store is not None:
            known = replica.cache.match(keys)
            stored = next((number for number, key in enumerate(keys) if key not in self._stored), len(keys))
            if stored > known:
                tokens = (stored - known) * limits.key_tokens
                num_bytes = tokens * self._config.kv_bytes_per_token
                compute_s = self._costs.prompt(stored * limits.key_tokens, limits.max_tokens, known * limits.key_tokens)
                if self._store.until(num_bytes, now_s) < now_s + compute_s:
                    self._at(self._store.move(num_bytes, now_s), partial(self._fetched, work, replica, keys[:stored]))
                    return
        self._add(work, replica, now_s)

    def _fetched(self, work: Work, replica: Replica, keys: Sequence[bytes], now_s: float) -> None:
        replica.cache.remember(keys)
        self._add(work, replica, now_s)

    def _add(self, work: Work, replica: Replica, now_s: float) -> None:
        self._plan(replica, replica.add(work, now_s))

    def _plan(self, replica: Replica, end_s: float | None) -> None:
        if end_s is not None:
            self._at(end_s, partial(self._finish, replica, replica.version))

    def _finish(self, replica: Replica, version: int, now_s: float) -> None:
        """Steps of a replica end."""
        if version != replica.version:
            return
        ended, end_s = replica.finish(now_s)
        self._plan(replica, end_s)
        for work in ended:
            replica.num_running -= 1
            replica.num_sent += 1
            if self._config.policy == "prefixes":
                replica.prefixes.remember(work.request.keys)
            if self._store is not None:
                self._stored.update(work.request.keys)
            if replica in self._links:
                self._hand_over(work.request, replica, now_s)
            else:
                work.request.ended_s = now_s
                if self._in_flight is not None:
                    self._begin_next(now_s)

    def _hand_over(self, request: Request, helper: Replica, now_s: float) -> None:
        """A computed prompt moves to the replica that answers."""
        answering = self._choose(request, self._answering)
        missing = len(request.keys) - answering.cache.match(request.keys)
        num_bytes = missing * self._config.limits.key_tokens * self._config.kv_bytes_per_token
        answering.num_running += 1
        work = Work(request, request.answer_tokens)
        end_s = self._links[helper].move(num_bytes, now_s)
        self._at(end_s, partial(self._fetched, work, answering, request.keys))

    def _outcome(self, now_s: float) -> Outcome:
        first = np.array([one.first_token_s - one.arrived_s for one in self._requests])
        p50, p95, p99 = np.percentile(first, (50, 95, 99)).tolist()
        replicas = self._answering + self._prefills
        return Outcome(
            first_token_s=(p50, p95, p99),
            gap_p99_s=self._gaps.percentile(99),
            prompt_tokens=sum(one.counts.prompt_tokens for one in self._answering),
            computed_tokens=sum(one.counts.computed_tokens for one in replicas),
            moved_bytes=sum(pipe.num_bytes for pipe in self._links.values()),
            stored_bytes=0 if self._store is None else self._store.num_bytes,
            requests_per_s=len(self._requests) / (now_s - self._requests[0].arrived_s),
            busy=sum(one.counts.busy_s for one in replicas) / (len(replicas) * now_s),
        )
