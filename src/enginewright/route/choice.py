"""Chooses the replica for a prompt. It knows neither connections nor time, so simulations use it as it is."""

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from enginewright.route.prefixes import CHUNK_BYTES, PrefixMemory

# Bytes of prompt, about 32 tokens, whose computation weighs as much as one more running request. With 512, short
# conversations moved too often: in benchmarks/route.py, 294,000 prompt tokens were computed, and 204,000 with 128.
REQUEST_BYTES = 128


class Candidate(Protocol):
    """A replica, as far as the choice needs it."""

    @property
    def is_healthy(self) -> bool:
        """True if it takes requests."""

    @property
    def num_running(self) -> int:
        """Number of its running requests."""

    @property
    def num_sent(self) -> int:
        """Number of requests that were sent to it, and have ended."""

    @property
    def prefixes(self) -> PrefixMemory:
        """The prompts that it has answered."""


C = TypeVar("C", bound=Candidate)


def choose(keys: Sequence[bytes], among: Collection[C], max_lead: int, last: C | None = None) -> C | None:
    """The replica of a session, unless it is busy; else the one that has least to do for a prompt.

    That is the rest of the prompt, and its running requests.

    Args:
        keys: the keys of the prompt.
        among: the replicas to choose from; those that are not healthy are left out.
        max_lead: the number of requests that a replica may run beyond the least busy one.
        last: the replica that answered the prompt's session last; None: it has no session, or that is not known.

    Returns:
        The replica; None if none is healthy.
    """
    healthy = [replica for replica in among if replica.is_healthy]
    limit = min((one.num_running for one in healthy), default=0) + max_lead

    def rank(replica: C) -> tuple[bool, bool, int, int]:
        load = replica.num_running
        cost = new_bytes(keys, replica) + load * REQUEST_BYTES
        return load > limit, replica is not last, cost, replica.num_sent

    return min(healthy, key=rank, default=None)


def is_computed_apart(keys: Sequence[bytes], answering: Candidate, min_bytes: int) -> bool:
    """True if so much of a prompt is new to the replica that would answer that another one computes it first.

    Args:
        keys: the keys of the prompt.
        answering: the replica that would answer.
        min_bytes: the bytes that have to be new.
    """
    new = new_bytes(keys, answering)
    return new > 0 and new >= min_bytes


def new_bytes(keys: Sequence[bytes], replica: Candidate) -> int:
    """Bytes of a prompt that a replica has not answered before."""
    return (len(keys) - replica.prefixes.match(keys)) * CHUNK_BYTES
