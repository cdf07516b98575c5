"""How many tokens each tenant has had: virtual token counters (Sheng et al. 2024, https://arxiv.org/abs/2401.00588)."""

from collections import Counter
from collections.abc import Iterable

from enginewright.runtime.step.sequence import TokenSequence


class TenantShares:
    """Positions that were computed for each tenant that has work.

    A tenant that comes back begins with what the one has had that has had the least: nobody saves up, and nobody pays
    for what was computed while nobody else wanted it. What is computed anew after a preemption counts once.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._unfinished: Counter[str] = Counter()

    def begin(self, tenant: str) -> None:
        """A sequence of this tenant has arrived."""
        if not self._unfinished[tenant]:
            least = min((self._tokens[other] for other, count in self._unfinished.items() if count), default=0)
            self._tokens[tenant] = max(self._tokens.get(tenant, 0), least)
        self._unfinished[tenant] += 1

    def end(self, tenant: str) -> None:
        """One of its sequences has ended."""
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
        if not self._unfinished:
            self._tokens.clear()  # nobody waits, so nobody is owed anything

    def charge(self, sequences: Iterable[TokenSequence]) -> None:
        """Count what was computed of these since they were last counted."""
        for sequence in sequences:
            new = sequence.num_computed_tokens - sequence.num_charged_tokens
            if new > 0:
                self._tokens[sequence.work.tenant] += new
                sequence.num_charged_tokens += new

    def tokens(self, tenant: str) -> float:
        return self._tokens[tenant]
