"""Decides how many draft tokens each sequence gets, and learns from what was accepted.

A step of n tokens takes t(n) = fixed + n · of_token seconds (step_cost.py). Let N sequences decode. Each draft token
takes d seconds to propose, and each round that proposes one more token for some of them r seconds. A draft token counts
if it and all before it in its draft run are accepted, which has the probability p. So a step with a set D of draft
tokens, proposed in R rounds, has an expected throughput of

    (N + Σ p) / (t(N + |D|) + R · r + |D| · d)  tokens per second,

where the sum goes over D. Speculation pays if some D exceeds N / t(N), the throughput without draft tokens. The highest
throughput says what a token is worth: w = 1 / throughput seconds. A draft token pays if p · w > of_token + d, and a
round if the gains p · w - of_token - d of its tokens add up to more than r. In a full batch few draft tokens pay off,
or none.
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
ANSWER_WEIGHT = 0.05  # weight of an answer in the estimated length of answers
FIRST_ANSWER_TOKENS = 256.0  # estimated length of an answer before any has ended, in tokens


@dataclass(eq=False, slots=True)
class DraftRun:
    """Consecutive draft tokens of a sequence."""

    sequence: TokenSequence  # the model's sequence
    acceptance: Acceptance  # acceptance rates of the sequence
    confidence: int  # expected level of confidence in the next draft token
    max_draft_tokens: int  # maximum number of draft tokens
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
        max_draft_tokens: maximum number of draft tokens of a sequence in a step.
        max_step_tokens: maximum number of tokens, each with a row of logits, in a step.
    """

    def __init__(self, proposer: Proposer, cost: StepCost, max_draft_tokens: int, max_step_tokens: int) -> None:
        self.proposer = proposer
        self._cost = cost
        self._max_draft_tokens, self._max_step_tokens = max_draft_tokens, max_step_tokens
        self._acceptance = Acceptance.of_all(proposer.first_rates)  # of all sequences together
        self._acceptances: dict[TokenSequence, Acceptance] = {}  # of each sequence
        self._runs: dict[TokenSequence, DraftRun] = {}  # draft runs that are not verified yet
        self._idle_s = 0.0  # seconds of steps since the last draft token, where one could have been proposed
        self._answer_tokens = FIRST_ANSWER_TOKENS  # estimated length of an answer, in tokens
        self._num_drafts = 0
        self._drafted, self._accepted = [0] * max_draft_tokens, [0] * max_draft_tokens

    def stats(self) -> SpeculationStats:
        """Totals since the start."""
        return SpeculationStats(self._num_drafts, tuple(self._drafted), tuple(self._accepted))

    def propose(self, sequences: Sequence[TokenSequence], num_soon: int = 0) -> Proposals:
        """Proposes draft tokens that pay off.

        Args:
            sequences: all sequences that decode in the next step; none of their tokens is in flight.
            num_soon: number of sequences that will decode once their prompts are read. The proposer reads no prompt if
                draft tokens will not pay off then.

        Returns:
            The sequences that get draft tokens, each with its draft tokens.
        """
        self._runs = {}
        num_decodes = len(sequences)
        runs, budget = self._empty_runs(sequences), self._max_step_tokens - num_decodes
        if not runs or budget <= 0:
            return []
        worth = self._worth(runs, num_decodes)
        self._idle_s += self._cost.seconds(num_decodes)
        if worth is not None:
            saved = self._cost.seconds(num_decodes) / num_decodes - worth
            if num_soon > num_decodes:
                later = self._worth(runs, num_soon)
                saved = 0.0 if later is None else min(saved, self._cost.seconds(num_soon) / num_soon - later)
            self._draft([one for one in runs if self._catch_up_pays(one.sequence, saved)], budget, worth)
        self._probe(runs)
        self._runs = {one.sequence: one for one in runs if one.draft_tokens}
        return [(sequence, [draft.token for draft in one.draft_tokens]) for sequence, one in self._runs.items()]

    def verified(self, sequence: TokenSequence, num_verified: int, num_accepted: int) -> None:
        """Learns from a verified draft run. Draft tokens from elsewhere, such as a grammar, do not count.

        Args:
            sequence: the sequence whose draft tokens were verified.
            num_verified: number of its draft tokens that the step verified.
            num_accepted: number of them that were accepted.
        """
        run = self._runs.get(sequence)
        if run is None or not num_verified:
            return
        sequence.num_verified += num_verified
        sequence.num_accepted += num_accepted
        self._num_drafts += 1
        for position, draft in enumerate(run.draft_tokens[:num_verified]):
            self._drafted[position] += 1
            self._accepted[position] += position < num_accepted
            if position <= num_accepted:  # those after a rejected one tell nothing
                self._learn(run, draft.confidence, float(position < num_accepted))

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """Passes a finished step on to the proposer.

        Args:
            plan: the plan of the step.
            outputs: its outputs, valid until the next step runs.
        """
        self.proposer.observe(plan, outputs)

    def step_took(self, tokens: int, seconds: float) -> None:
        """Learns the time of a step with a row of logits for each of its tokens.

        Args:
            tokens: number of tokens of the step.
            seconds: time that it took.
        """
        self._cost.learn(tokens, seconds)

    def end(self, sequence: TokenSequence) -> None:
        """Drops what is kept for a sequence that has ended, and learns the length of its answer."""
        answer_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
        self._answer_tokens += ANSWER_WEIGHT * (answer_tokens - self._answer_tokens)
        self._acceptances.pop(sequence, None)
        self.proposer.end(sequence)

    def close(self) -> None:
        """Closes the proposer."""
        self.proposer.close()

    def _empty_runs(self, sequences: Sequence[TokenSequence]) -> list[DraftRun]:
        """Draft runs of the sequences that may get draft tokens."""
        runs = []
        for sequence, confidence in zip(sequences, self.proposer.confidences(sequences), strict=True):
            count = min(self._max_draft_tokens, sequence.max_tokens - len(sequence.token_ids) - 1)
            if confidence is not None and count > 0:
                if sequence not in self._acceptances:
                    self._acceptances[sequence] = self._acceptance.of_sequence()
                runs.append(DraftRun(sequence, self._acceptances[sequence], confidence, count))
        return runs

    def _worth(self, runs: Sequence[DraftRun], num_decodes: int) -> float | None:
        """Seconds that a token is worth: the time per token of the step with the highest expected throughput.

        It is estimated before draft tokens are proposed, from the expected confidence in each.

        Args:
            runs: empty draft runs.
            num_decodes: number of tokens of a step without draft tokens.

        Returns:
            The seconds. None if this step has no draft tokens, or if draft tokens take time to propose and no step was
            measured yet, so that there is nothing to compare this time with.
        """
        of_round, of_draft_token = self.proposer.cost_s
        if (of_round or of_draft_token) and not self._cost.is_measured:
            return None
        limits = [(one.next_chance, one.max_draft_tokens) for one in runs]
        chances = [(rate**number, -number) for rate, count in limits for number in range(1, count + 1)]
        chances.sort(reverse=True)
        expected, rounds = float(num_decodes), 0
        best = alone = expected / self._cost.seconds(num_decodes)
        for size, (chance, number) in enumerate(chances[: self._max_step_tokens - num_decodes], start=1):
            expected, rounds = expected + chance, max(rounds, -number)
            seconds = self._cost.seconds(num_decodes + size) + rounds * of_round + size * of_draft_token
            best = max(best, expected / seconds)
        return 1 / best if best > alone else None

    def _catch_up_pays(self, sequence: TokenSequence, saved: float) -> bool:
        """True if draft tokens save more time than the proposer takes to read the sequence before the first one.

        Args:
            sequence: the sequence.
            saved: seconds that draft tokens save for each token of the answer.
        """
        left = min(self._answer_tokens, sequence.max_tokens - len(sequence.token_ids))
        return self.proposer.catch_up_s(sequence) <= saved * left

    def _draft(self, runs: Sequence[DraftRun], budget: int, worth: float) -> None:
        """Extends draft runs of all sequences together, one draft token at a time, as long as that pays off.

        Draft tokens at the end that turn out to be less probable than it takes to pay off are removed again.

        Args:
            runs: empty draft runs.
            budget: maximum number of draft tokens of all runs together.
            worth: seconds that a token is worth.
        """
        of_round, of_draft_token = self.proposer.cost_s
        growing = list(runs)
        while growing:
            gains = [(one.next_chance * worth - self._cost.of_token - of_draft_token, one) for one in growing]
            paying = [(gain, one) for gain, one in gains if gain > 0 and len(one.draft_tokens) < one.max_draft_tokens]
            paying = sorted(paying, key=itemgetter(0), reverse=True)[:budget]
            if sum(gain for gain, _ in paying) <= of_round:
                break
            growing = self._extend([one for _, one in paying])
            budget -= len(growing)
        for one in runs:
            while one.draft_tokens and one.chance * worth <= self._cost.of_token:
                one.draft_tokens.pop()
                one.chances.pop()

    def _probe(self, runs: Sequence[DraftRun]) -> None:
        """Proposes one draft token, although it does not seem to pay off, where it takes a small share of idle time."""
        nearest = min(runs, key=lambda one: (self.proposer.catch_up_s(one.sequence), one.sequence.num_verified))
        cost_s = self._cost.of_token + sum(self.proposer.cost_s) + self.proposer.catch_up_s(nearest.sequence)
        if PROBING * self._idle_s > cost_s:
            self._extend([nearest])

    def _extend(self, runs: Sequence[DraftRun]) -> list[DraftRun]:
        """Proposes one more draft token for each draft run; returns the runs that have got one."""
        self._idle_s = 0.0
        sequences = [one.sequence for one in runs]
        if not runs[0].draft_tokens:  # all runs have the same length, so it is the first token of each
            self.proposer.begin(sequences)
        longer = []
        for one, draft in zip(runs, self.proposer.next_tokens(sequences), strict=True):
            if draft is not None:
                if draft.confidence != one.confidence:  # the expected level learns from the level that it turned out as
                    self._learn(one, one.confidence, one.acceptance.rate(draft.confidence))
                one.chances.append(one.chance * one.acceptance.rate(draft.confidence))
                one.draft_tokens.append(draft)
                longer.append(one)
        return longer

    def _learn(self, run: DraftRun, confidence: int, accepted: float) -> None:
        """Updates the acceptance rates of a sequence and of all sequences with one draft token.

        Args:
            run: draft run of the draft token.
            confidence: its level of confidence.
            accepted: 1 if it was accepted, 0 if it was rejected, or the probability that it will be accepted.
        """
        for acceptance in (self._acceptance, run.acceptance):
            acceptance.learn(confidence, accepted)
