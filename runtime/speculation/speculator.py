"""Decides how many draft tokens each sequence gets, and learns from what was accepted.

A step of several tokens takes longer than one of a single token. How much longer depends on the machine, the model and
the number of running sequences (step_cost.py). A draft token pays off if the time that a token is worth, times its
probability of acceptance, exceeds the time to propose and to verify it. In a full batch few draft tokens pay off, or
none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from enginewright.runtime.speculation.acceptance import Acceptance
from enginewright.runtime.speculation.proposer import DraftToken, Proposer
from enginewright.runtime.speculation.stats import SpeculationStats
from enginewright.runtime.step.inputs import StepOutputs
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_cost import StepCost
from enginewright.runtime.step.step_plan import StepPlan

Proposals = list[tuple[TokenSequence, Sequence[int]]]

# Share of the time without draft tokens that is spent on a draft token which does not seem to pay off. It updates the
# estimates: the text may have changed, and the steps of a draft model may have been timed while the machine was busy.
PROBING = 0.01
BY_ANSWER = 0.05  # weight of an answer in the estimated length of answers


@dataclass(eq=False, slots=True)
class DraftRun:
    """Consecutive draft tokens of a sequence."""

    sequence: TokenSequence  # the model's sequence
    confidence: int  # expected level of confidence in the next draft token
    max_draft_tokens: int  # maximum number of draft tokens
    acceptance: Acceptance  # acceptance rates of the sequence
    draft_tokens: list[DraftToken] = field(default_factory=list)  # draft tokens so far
    chances: list[float] = field(default_factory=list)  # for each, probability that it and all before it are accepted

    @property
    def chance(self) -> float:
        """Probability that all draft tokens are accepted."""
        return self.chances[-1] if self.chances else 1.0

    @property
    def next_chance(self) -> float:
        """Probability that all draft tokens and another one are accepted."""
        return self.chance * self.acceptance.rate(self.confidence)


class Speculator:
    """Decides how many draft tokens each sequence gets, and learns from what was accepted.

    Args:
        proposer: proposes the draft tokens.
        cost: time of the steps that verify them.
        most: maximum number of draft tokens of a sequence in a step.
        room: maximum number of tokens, each with a row of logits, in a step.
    """

    def __init__(self, proposer: Proposer, cost: StepCost, most: int, room: int) -> None:
        self._proposer, self._cost, self._most, self._room = proposer, cost, most, room
        self._all = Acceptance.of_all(proposer.first_rates)
        self._each: dict[TokenSequence, Acceptance] = {}
        self._runs: dict[TokenSequence, DraftRun] = {}  # draft runs that are not verified yet
        self._idle = 0.0  # seconds of steps since the last draft token, where one could have been proposed
        self._length = 256.0  # estimated tokens of an answer
        self._num_drafts, self._drafted, self._accepted = 0, [0] * most, [0] * most

    def stats(self) -> SpeculationStats:
        """Totals since the start."""
        return SpeculationStats(self._num_drafts, tuple(self._drafted), tuple(self._accepted))

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """Passes a finished step on to the proposer.

        Args:
            plan: the plan of the step.
            outputs: its outputs, valid until the next step runs.
        """
        self._proposer.observe(plan, outputs)

    def propose(self, sequences: Sequence[TokenSequence], soon: int = 0) -> Proposals:
        """Proposes draft tokens that pay off.

        Args:
            sequences: all sequences that decode in the next step; none of their tokens is in flight.
            soon: number of sequences that will decode once their prompts are read. The proposer reads no prompt if
                draft tokens will not pay off then.

        Returns:
            The sequences that get draft tokens, each with its draft tokens.
        """
        self._runs = {}
        runs = [
            DraftRun(one, confidence, min(self._most, one.max_tokens - len(one.token_ids) - 1), self._of(one))
            for one, confidence in zip(sequences, self._proposer.confidences(sequences), strict=True)
            if confidence is not None
        ]
        runs, room = [one for one in runs if one.max_draft_tokens > 0], self._room - len(sequences)
        if not runs or room <= 0:
            return []
        alone, worth = self._cost.seconds(len(sequences)), self._worth(runs, len(sequences))
        self._idle += alone
        if worth is not None:
            saved = alone / len(sequences) - worth
            if soon > len(sequences):
                later = self._worth(runs, soon)
                saved = 0.0 if later is None else min(saved, self._cost.seconds(soon) / soon - later)
            self._make([one for one in runs if self._is_read_for(one.sequence, saved)], room, worth)
        nearest = min(runs, key=lambda one: (self._proposer.catch_up_s(one.sequence), one.sequence.num_verified))
        takes = self._cost.of_token + sum(self._proposer.cost_s) + self._proposer.catch_up_s(nearest.sequence)
        if PROBING * self._idle > takes:
            self._extend([nearest])
        self._runs = {one.sequence: one for one in runs if one.draft_tokens}
        return [(sequence, [draft.token for draft in one.draft_tokens]) for sequence, one in self._runs.items()]

    def verified(self, sequence: TokenSequence, num_verified: int, num_right: int) -> None:
        """Learns from a verified draft run. Draft tokens from elsewhere, such as a grammar, do not count.

        Args:
            sequence: the sequence whose draft tokens were verified.
            num_verified: number of its draft tokens that the step verified.
            num_right: number of them that were accepted.
        """
        run = self._runs.get(sequence)
        if run is None or not num_verified:
            return
        sequence.num_verified += num_verified
        sequence.num_accepted += num_right
        self._num_drafts += 1
        for place in range(num_verified):
            self._drafted[place] += 1
            self._accepted[place] += place < num_right
        for place in range(min(num_verified, num_right + 1)):  # those after a rejected one tell nothing
            self._learn(run, run.draft_tokens[place].confidence, float(place < num_right))

    def step_took(self, tokens: int, seconds: float) -> None:
        """Learns the time of a step with a row of logits for each of its tokens.

        Args:
            tokens: number of tokens of the step.
            seconds: time that it took.
        """
        self._cost.learn(tokens, seconds)

    def end(self, sequence: TokenSequence) -> None:
        """Drops what is kept for a sequence that has ended, and learns the length of its answer."""
        self._length += BY_ANSWER * (len(sequence.token_ids) - sequence.num_prompt_tokens - self._length)
        self._each.pop(sequence, None)
        self._proposer.end(sequence)

    def close(self) -> None:
        """Closes the proposer."""
        self._proposer.close()

    def _of(self, sequence: TokenSequence) -> Acceptance:
        if sequence not in self._each:
            self._each[sequence] = self._all.of_sequence()
        return self._each[sequence]

    def _is_read_for(self, sequence: TokenSequence, saved: float) -> bool:
        """True if draft tokens save more time than the proposer takes to read the sequence before the first one.

        Args:
            sequence: the sequence.
            saved: seconds that draft tokens save for each token of the answer.
        """
        left = min(self._length, sequence.max_tokens - len(sequence.token_ids))
        return self._proposer.catch_up_s(sequence) <= saved * left

    def _learn(self, run: DraftRun, confidence: int, right: float) -> None:
        for acceptance in (self._all, run.acceptance):
            acceptance.learn(confidence, right)

    def _worth(self, runs: Sequence[DraftRun], plain: int) -> float | None:
        """Seconds that a token is worth: the time per token of the step with the highest expected throughput.

        It is estimated before draft tokens are proposed, from the expected confidence in each.

        Args:
            runs: empty draft runs.
            plain: number of tokens of a step without draft tokens.

        Returns:
            The seconds. None if this step has no draft tokens, or if draft tokens take time to propose and no step was
            measured yet, so that there is nothing to compare this time with.
        """
        if any(self._proposer.cost_s) and not self._cost.is_measured:
            return None
        chances: list[tuple[float, int]] = []  # of acceptance, and the negative position in the run
        for one in runs:
            rate, chance = one.acceptance.rate(one.confidence), 1.0
            for place in range(one.max_draft_tokens):
                chance *= rate
                chances.append((chance, -place))
        chances.sort(reverse=True)
        of_round, of_draft_token = self._proposer.cost_s
        expected, rounds = float(plain), 0
        best = alone = expected / self._cost.seconds(plain)
        for number, (chance, place) in enumerate(chances[: self._room - plain], start=1):
            expected, rounds = expected + chance, max(rounds, 1 - place)
            seconds = self._cost.seconds(plain + number) + rounds * of_round + number * of_draft_token
            best = max(best, expected / seconds)
        return 1 / best if best > alone else None

    def _make(self, runs: Sequence[DraftRun], room: int, worth: float) -> None:
        """Extends draft runs of all sequences together, one draft token at a time, as long as that pays off.

        Draft tokens at the end that turn out to be less probable than it takes to pay off are removed again.

        Args:
            runs: empty draft runs.
            room: maximum number of draft tokens of all runs together.
            worth: seconds that a token is worth.
        """
        of_round, of_draft_token = self._proposer.cost_s
        verifying, going = self._cost.of_token, list(runs)
        while going:
            gains = [(one.next_chance * worth - verifying - of_draft_token, one) for one in going]
            paying = [(gain, one) for gain, one in gains if gain > 0 and len(one.draft_tokens) < one.max_draft_tokens]
            paying = sorted(paying, key=itemgetter(0), reverse=True)[:room]
            if sum(gain for gain, _ in paying) <= of_round:
                break
            going = self._extend([one for _, one in paying])
            room -= len(going)
        for one in runs:
            while one.draft_tokens and one.chance * worth <= verifying:
                one.draft_tokens.pop()
                one.chances.pop()

    def _extend(self, runs: Sequence[DraftRun]) -> list[DraftRun]:
        """Proposes one more draft token for each draft run; returns the runs that have got one."""
        sequences, self._idle = [one.sequence for one in runs], 0.0
        if not runs[0].draft_tokens:  # all runs have the same length, so it is the first token of each
            self._proposer.begin(sequences)
        longer = []
        for one, draft in zip(runs, self._proposer.next_tokens(sequences), strict=True):
            if draft is not None:
                if draft.confidence != one.confidence:
                    self._learn(one, one.confidence, one.acceptance.rate(draft.confidence))
                one.chances.append(one.chance * one.acceptance.rate(draft.confidence))
                one.draft_tokens.append(draft)
                longer.append(one)
        return longer
