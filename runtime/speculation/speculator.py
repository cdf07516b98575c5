"""How many tokens of which sequence are worth guessing, and what became of the guesses.

A step of several tokens takes longer than one of a single token, and how much longer depends on the machine, the model
and how many sequences run (step_cost.py). A guess pays if the time that a token is worth, times its chance to be right,
is more than it takes to guess and to verify it. In a full batch few do, or none.
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

# Of the time that goes by without a guess, what is spent on one that does not seem to pay. It shows whether that still
# holds: the text may have changed, and a draft's steps are timed when it guesses, perhaps on a machine that was busy.
PROBING = 0.01
BY_ANSWER = 0.05  # how far an answer moves what is believed of their length


@dataclass(eq=False, slots=True)
class DraftRun:
    """Guesses for a sequence, each behind the one before."""

    sequence: TokenSequence
    confidence: int  # of the next guess, as long as it is not made
    max_draft_tokens: int
    acceptance: Acceptance
    draft_tokens: list[DraftToken] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # of each, that it and those before it are right

    @property
    def chance(self) -> float:
        """That all guesses are right."""
        return self.chances[-1] if self.chances else 1.0

    @property
    def next_chance(self) -> float:
        """That one more is right, too."""
        return self.chance * self.acceptance.rate(self.confidence)


class Speculator:
    """What an engine's core asks for guesses.

    Args:
        proposer: guesses tokens.
        cost: of the steps that verify them.
        most: guesses of a sequence in a step.
        room: tokens, and rows of logits, of a step.
    """

    def __init__(self, proposer: Proposer, cost: StepCost, most: int, room: int) -> None:
        self._proposer, self._cost, self._most, self._room = proposer, cost, most, room
        self._all = Acceptance.of_all(proposer.first_rates)
        self._each: dict[TokenSequence, Acceptance] = {}
        self._runs: dict[TokenSequence, DraftRun] = {}  # of the guesses that are not verified yet
        self._idle = 0.0  # seconds of steps without a guess since the last one, where there was something to guess
        self._length = 256.0  # tokens of an answer
        self._num_drafts, self._guessed, self._accepted = 0, [0] * most, [0] * most

    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._num_drafts, tuple(self._guessed), tuple(self._accepted))

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """As a proposer has it."""
        self._proposer.observe(plan, outputs)

    def propose(self, sequences: Sequence[TokenSequence], soon: int = 0) -> Proposals:
        """Guesses that pay.

        Args:
            sequences: all that decode in the next step; none of their tokens is in flight.
            soon: how many will, once prompts are read. Where guesses do not pay then, no prompt is read for them now.
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
        nearest = min(runs, key=lambda one: (self._proposer.catch_up_s(one.sequence), one.sequence.num_guessed))
        takes = self._cost.of_token + sum(self._proposer.cost_s) + self._proposer.catch_up_s(nearest.sequence)
        if PROBING * self._idle > takes:
            self._extend([nearest])
        self._runs = {one.sequence: one for one in runs if one.draft_tokens}
        return [(sequence, [guess.token for guess in one.draft_tokens]) for sequence, one in self._runs.items()]

    def verified(self, sequence: TokenSequence, num_guesses: int, num_right: int) -> None:
        """Of a sequence's guesses so many were right. Those that came from elsewhere do not count."""
        run = self._runs.get(sequence)
        if run is None or not num_guesses:
            return
        sequence.num_guessed += num_guesses
        sequence.num_accepted += num_right
        self._num_drafts += 1
        for place in range(num_guesses):
            self._guessed[place] += 1
            self._accepted[place] += place < num_right
        for place in range(min(num_guesses, num_right + 1)):  # what is behind a wrong one says nothing
            self._learn(run, run.draft_tokens[place].confidence, float(place < num_right))

    def step_took(self, tokens: int, seconds: float) -> None:
        """A step with a row of logits for each of its tokens."""
        self._cost.learn(tokens, seconds)

    def end(self, sequence: TokenSequence) -> None:
        self._length += BY_ANSWER * (len(sequence.token_ids) - sequence.num_prompt_tokens - self._length)
        self._each.pop(sequence, None)
        self._proposer.end(sequence)

    def close(self) -> None:
        self._proposer.close()

    def _of(self, sequence: TokenSequence) -> Acceptance:
        if sequence not in self._each:
            self._each[sequence] = self._all.of_sequence()
        return self._each[sequence]

    def _is_read_for(self, sequence: TokenSequence, saved: float) -> bool:
        """Whether guesses make up for what the proposer has to read before.

        Args:
            saved: seconds that guesses save with each token.
        """
        left = min(self._length, sequence.max_tokens - len(sequence.token_ids))
        return self._proposer.catch_up_s(sequence) <= saved * left

    def _learn(self, run: DraftRun, confidence: int, right: float) -> None:
        for acceptance in (self._all, run.acceptance):
            acceptance.learn(confidence, right)

    def _worth(self, runs: Sequence[DraftRun], plain: int) -> float | None:
        """Seconds that a token is worth: what one takes in the step that makes the most tokens a second, as far as that
        is known before guesses are made. None where that is a step without any, and before any step was measured where
        guesses take time: there is nothing to compare it with.

        Args:
            plain: tokens of that one.
        """
        if any(self._proposer.cost_s) and not self._cost.is_measured:
            return None
        chances: list[tuple[float, int]] = []  # that a guess is right, and its place behind the first
        for one in runs:
            rate, chance = one.acceptance.rate(one.confidence), 1.0
            for place in range(one.max_draft_tokens):
                chance *= rate
                chances.append((chance, -place))
        chances.sort(reverse=True)
        of_round, of_guess = self._proposer.cost_s
        expected, rounds = float(plain), 0
        best = alone = expected / self._cost.seconds(plain)
        for number, (chance, place) in enumerate(chances[: self._room - plain], start=1):
            expected, rounds = expected + chance, max(rounds, 1 - place)
            seconds = self._cost.seconds(plain + number) + rounds * of_round + number * of_guess
            best = max(best, expected / seconds)
        return 1 / best if best > alone else None

    def _make(self, runs: Sequence[DraftRun], room: int, worth: float) -> None:
        """Guess by guess, for all sequences together, as long as it pays; what is less sure than it had to be goes."""
        of_round, of_guess = self._proposer.cost_s
        verifying, going = self._cost.of_token, list(runs)
        while going:
            gains = [(one.next_chance * worth - verifying - of_guess, one) for one in going]
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
        """One guess more of each; those that have got it."""
        sequences, self._idle = [one.sequence for one in runs], 0.0
        if not runs[0].draft_tokens:  # they all go on together, so it is the first of each
            self._proposer.begin(sequences)
        longer = []
        for one, guess in zip(runs, self._proposer.next_tokens(sequences), strict=True):
            if guess is not None:
                if guess.confidence != one.confidence:
                    self._learn(one, one.confidence, one.acceptance.rate(guess.confidence))
                one.chances.append(one.chance * one.acceptance.rate(guess.confidence))
                one.draft_tokens.append(guess)
                longer.append(one)
        return longer
