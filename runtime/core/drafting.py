"""Draft tokens of decoding sequences: proposes them, and compares them with the sampled tokens."""

from itertools import islice

from enginewright.runtime.sampling.sampler import SampledToken, Sampler
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.speculation.speculator import Speculator
from enginewright.runtime.step.inputs import StepOutputs
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import LogitRows, StepPlan


class Drafting:
    """Proposes draft tokens to the scheduler, and compares them with the sampled tokens.

    Where a grammar allows only one token, this token is a draft token that is always accepted, and takes no step of its
    own. The other draft tokens come from a speculator.

    Args:
        scheduler: lets the next step verify the draft tokens.
        sampler: samples the model's own tokens.
        speculator: None where only grammars give draft tokens.
        max_sequences: maximum number of running sequences.
    """

    def __init__(
        self, scheduler: Scheduler, sampler: Sampler, speculator: Speculator | None, max_sequences: int
    ) -> None:
        self._scheduler, self._sampler, self._speculator = scheduler, sampler, speculator
        self._max_sequences = max_sequences

    @staticmethod
    def prepare_masks(rows: LogitRows) -> None:
        """Requests the masks after draft tokens from grammars, which compute them while the layers of the step run."""
        for sequence, draft_tokens in zip(rows.sequences, rows.draft_tokens, strict=False):
            if draft_tokens and sequence.grammar is not None:
                sequence.grammar.look(draft_tokens)

    def verify(self, rows: LogitRows, sampled: list[SampledToken]) -> list[tuple[SampledToken, ...]]:
        """Compares draft tokens with the sampled tokens.

        Args:
            rows: rows of logits of a step.
            sampled: tokens of all rows that give tokens, in the order of the rows.

        Returns:
            The tokens of each of `rows.sequences`: its accepted draft tokens, and the token sampled after them.
        """
        if not rows.draft_tokens:
            return list(zip(sampled, strict=True))
        accepted, remaining = [], iter(sampled)
        for sequence, draft_tokens in zip(rows.sequences, rows.draft_tokens, strict=True):
            own = tuple(islice(remaining, 1 + len(draft_tokens)))
            count = 1
            for token, draft_token in zip(own, draft_tokens, strict=False):
                if token.is_nan or token.token != draft_token or draft_token in sequence.stop_token_ids:
                    break
                count += 1
            for token in own[1:count]:
                if not token.is_nan and sequence.request is not None:
                    sequence.request.accept(token.token)
            if self._speculator is not None and sequence.finish_reason is None:
                self._speculator.verified(sequence, len(draft_tokens), count - 1)
            accepted.append(own[:count])
        return accepted

    def propose(self, plan: StepPlan, outputs: StepOutputs, step_s: float) -> None:
        """Proposes draft tokens after a step that is committed.

        Args:
            plan: the plan of the step.
            outputs: its outputs.
            step_s: seconds that the step took.
        """
        free = [one for one in plan.rows.sequences if one.is_running and not self.propose_forced(one)]
        if self._speculator is None:
            return
        sizes = plan.inputs.sizes
        if sizes.tokens == sizes.logit_rows:
            self._speculator.step_took(sizes.tokens, step_s)
        self._speculator.observe(plan, outputs)
        self._sampler.settle()  # draft models sample by the state of the requests after this step
        num_soon = min(self._scheduler.num_unfinished, self._max_sequences)  # that decode once all prompts are computed
        for sequence, draft_tokens in self._speculator.propose(free, num_soon):
            self._scheduler.propose(sequence, draft_tokens)

    def propose_forced(self, sequence: TokenSequence) -> bool:
        """Proposes the next tokens if the grammar of a sequence allows only these; returns true if there are any."""
        grammar = sequence.grammar
        if grammar is None or not grammar.forced or not sequence.is_running:
            return False
        self._scheduler.propose(sequence, grammar.forced)
        return True
