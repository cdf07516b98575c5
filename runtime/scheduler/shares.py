"""Tokens computed for each tenant: virtual token counters (Sheng et al. 2024, https://arxiv.org/abs/2401.00588)."""

from collections import Counter
from collections.abc import Iterable

from enginewright.runtime.step.sequence import TokenSequence


class TenantShares:
    """Counts the tokens that were computed for each tenant with unfinished work.

    A tenant that returns starts at the smallest count of the others, if its own is smaller. So no tenant saves up
    credit while it is away, and none pays for tokens computed while no other tenant had work. Tokens that are computed
    again after a preemption count once.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._unfinished: Counter[str] = Counter()

    def begin(self, tenant: str) -> None:
        """Notes that a sequence of this tenant has arrived."""
        if not self._unfinished[tenant]:
            min_tokens = min((self._tokens[other] for other, count in self._unfinished.items() if count), default=0)
            self._tokens[tenant] = max(self._tokens.get(tenant, 0), min_tokens)
        self._unfinished[tenant] += 1

    def end(self, tenant: str) -> None:
        """Notes that a sequence of this tenant has ended."""
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
        if not self._unfinished:
            self._tokens.clear()  # no tenant has work, so none has a claim on the next steps

    def charge(self, sequences: Iterable[TokenSequence]) -> None:
        """Counts the tokens that were computed of these sequences since they were last counted."""
        for sequence in sequences:
            new = sequence.state.num_computed_tokens - sequence.state.num_charged_tokens
            if new > 0:
                self._tokens[sequence.work.tenant] += new
                sequence.state.num_charged_tokens += new

    def tokens(self, tenant: str) -> float:
        """Number of tokens that count as computed for a tenant."""
        return self._tokens[tenant]
