"""How many tokens of which sequence are worth guessing, and what became of the guesses.

A step of several tokens takes longer than one of a single token, and how much longer depends on the machine, the model
and how many sequences run (step_cost.py). So the guesses of all sequences are put in the order of their chances, and as
many are taken as make the most tokens a second. In a full batch that is few of them, or none.
"""

from collections.abc import Sequence

from enginewright.runtime.sequence import TokenSequence
from enginewright.runtime.speculation.acceptance import Acceptance
from enginewright.runtime.speculation.proposer import Proposer
from enginewright.runtime.stats import SpeculationStats
from enginewright.runtime.step_cost import StepCost
from enginewright.runtime.step_plan import StepOutputs, StepPlan

Guesses = list[tuple[TokenSequence, Sequence[int]]]

# Steps without a guess after which one is made though it does not seem to pay. It shows whether that still holds: a
# draft's steps are timed when it guesses, and a machine may have been busy with something else the last time.
PROBE = 64


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
        self._levels: dict[TokenSequence, int] = {}  # of the guesses that are not verified yet
        self._idle = 0  # steps since a guess was made, in which there was something to guess
        self._num_drafts, self._guessed, self._accepted = 0, [0] * most, [0] * most

    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._num_drafts, tuple(self._guessed), tuple(self._accepted))

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """As a proposer has it."""
        self._proposer.observe(plan, outputs)

    def guess(self, sequences: Sequence[TokenSequence]) -> Guesses:
        """Guesses that pay.

        Args:
            sequences: all that decode in the next step; none of their tokens is in flight.
        """
        self._levels = {}
        if not sequences:
            return []
        levels = self._proposer.look(sequences)
        counts = self._counts(sequences, levels)
        chosen = [index for index, count in enumerate(counts) if count]
        for index, level in enumerate(levels):
            if level is not None and not counts[index]:
                self._of(sequences[index]).forget(level)
        if not chosen:
            return []
        wanted = [sequences[index] for index in chosen]
        guesses = self._proposer.propose(wanted, [counts[index] for index in chosen])
        self._levels = {sequences[index]: levels[index] or 0 for index in chosen}
        return list(zip(wanted, guesses, strict=True))

    def verified(self, sequence: TokenSequence, num_guesses: int, num_right: int) -> None:
        """Of a sequence's guesses so many were right. Those that came from elsewhere do not count."""
        level = self._levels.get(sequence)
        if level is None or not num_guesses:
            return
        sequence.num_guessed += num_guesses
        sequence.num_accepted += num_right
        self._num_drafts += 1
        for place in range(num_guesses):
            self._guessed[place] += 1
            self._accepted[place] += place < num_right
        for acceptance in (self._all, self._of(sequence)):
            acceptance.learn(level, num_right, num_right < num_guesses)

    def step_took(self, tokens: int, seconds: float) -> None:
        """A step with a row of logits for each of its tokens."""
        self._cost.learn(tokens, seconds)

    def end(self, sequence: TokenSequence) -> None:
        self._each.pop(sequence, None)
        self._proposer.end(sequence)

    def close(self) -> None:
        self._proposer.close()

    def _of(self, sequence: TokenSequence) -> Acceptance:
        if sequence not in self._each:
            self._each[sequence] = self._all.of_sequence()
        return self._each[sequence]

    def _counts(self, sequences: Sequence[TokenSequence], levels: Sequence[int | None]) -> list[int]:
        """How many tokens of each to guess."""
        chances: list[tuple[float, int, int]] = []  # that a guess is right, its place behind the first, whose it is
        for index, (sequence, level) in enumerate(zip(sequences, levels, strict=True)):
            if level is not None:
                rate, chance = self._of(sequence).rate(level), 1.0
                for place in range(min(self._most, sequence.max_tokens - len(sequence.token_ids) - 1)):
                    chance *= rate
                    chances.append((chance, -place, index))
        chances.sort(reverse=True)
        del chances[max(self._room - len(sequences), 0) :]
        plain, expected, rounds, taken = len(sequences), float(len(sequences)), 0, 0
        best = expected / self._cost.seconds(plain)
        for number, (chance, place, _) in enumerate(chances, start=1):
            expected, rounds = expected + chance, max(rounds, 1 - place)
            seconds = self._cost.seconds(plain + number) + self._proposer.seconds(rounds, number)
            if expected / seconds > best:
                best, taken = expected / seconds, number
        self._idle = 0 if taken or not chances else self._idle + 1
        if self._idle == PROBE:
            self._idle, taken = 0, 1
        counts = [0] * plain
        for _, _, index in chances[:taken]:
            counts[index] += 1
        return counts
