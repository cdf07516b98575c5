"""Drives a scheduler without any executor, and checks each of its steps.

In place of keys and values, a slot of the KV pools here holds a number that stands for the tokens up to its position:
two sequences may share it exactly if they have the same tokens so far, and the same salt. A recurrent state is such a
number, too, of all tokens that it has seen.

A step is computed, and its tokens are sampled, as soon as it is planned; the scheduler may learn of them a step later.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from enginewright.plan import CacheGroup, PagedCache, Plane, RecurrentState, StateTensor, StepSizes
from enginewright.runtime.cache.paged import blocks_of
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.request import DroppedRow, PromptToken, RowAfterDraft, RowRequest, SamplingRequest
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.step.dims import SPLIT_TOKENS
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import RowPurpose, StepPlan
from enginewright.runtime.step.work_class import BEST_EFFORT, DEFAULT_WORK, WorkClass

BLOCK, LONGEST, VOCAB, STOP = 4, 40, 50, 49
BLANK = -1


PLANES = (Plane("key", 1, 8, "bf16", 16), Plane("value", 1, 8, "bf16", 16))


def group(window: int, block_size: int = BLOCK, kept_tokens: int = 0) -> PagedCache:
    return PagedCache((0,), PLANES, block_size, window, kept_tokens)


def recurrent(snapshot_tokens: int = 2 * BLOCK) -> RecurrentState:
    return RecurrentState((0,), (StateTensor("state", (4,), "f32"),), snapshot_tokens)


def what_for(row: RowRequest) -> tuple[RowRequest, list[int]]:
    """The request that a row of logits is for, and the draft tokens that come before it."""
    return (row.request, list(row.draft_tokens)) if isinstance(row, RowAfterDraft) else (row, [])


def sequence_of(
    prompt: Sequence[int],
    length: int = LONGEST,
    *,
    drawing: bool = True,
    needs_prompt_logits: bool = False,
    salt: str = "",
    sibling_of: TokenSequence | None = None,
    work: WorkClass = DEFAULT_WORK,
    is_beam: bool = False,
) -> TokenSequence:
    """A sequence that grows to `length` tokens at most; one that samples none has the length of its prompt."""
    request = SamplingRequest(SamplingParams(temperature=0), prompt, VOCAB) if drawing else None
    return TokenSequence(
        list(prompt),
        len(prompt),
        max(length, len(prompt) + 1) if drawing else len(prompt),
        frozenset({STOP}),
        request,
        needs_prompt_logits,
        salt,
        sibling_of,
        work=work,
        is_beam=is_beam,
    )


def cost_at(position: int) -> float:
    """The cost of a prompt's token: twice as much at position 8 as at 0."""
    return 1 + position / 8


class Watch:
    """Runs a scheduler without a model, and checks its plans and its caches' content at each step.

    poisoned: sequences all of whose logits are NaN; nobody may read what they have written. draw: samples the next
    token of a sequence with these tokens. ahead: steps that may be planned and not committed when another is planned.
    stages: more than one if these steps have different sequences, and each of them its share.
    defers: there are beams or deferred sequences, so that a sequence may stand still.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        limits: StepSizes,
        num_blocks: Sequence[int],
        *,
        prefix_caching: bool = False,
        chunk: int | None = None,
        ahead: int = 0,
        stages: int = 1,
    ) -> None:
        self.now = 0.0  # by the scheduler's clock
        self.draw: Callable[[Sequence[int]], int] = lambda _: 3
        self.ahead, self.stages = ahead, stages
        self.under_way: deque[tuple[StepPlan, list[list[SampledToken]], list[int]]] = deque()
        self.tokens: dict[TokenSequence, list[int]] = {}  # the prompt, and all tokens sampled after it
        self.groups, self.limits, self.num_blocks = tuple(groups), limits, tuple(num_blocks)
        self.chunk = chunk
        self.scheduler = Scheduler(
            groups,
            limits,
            self.num_blocks,
            prefix_caching=prefix_caching,
            chunk=chunk,
            cost=cost_at,
            num_under_way=stages,
            clock=lambda: self.now,
        )
        self.pools = [
            np.full(count * (kv.block_size if isinstance(kv, PagedCache) else 1), BLANK)
            for count, kv in zip(num_blocks, groups, strict=True)
        ]
        self.defers = False
        self.deferred: dict[TokenSequence, list[SampledToken]] = {}  # and the tokens that `resume` will give them
        self.searched: dict[TokenSequence, list[SampledToken]] = {}  # those of beams whose step is not committed
        self.num_deferred = self.num_forked = 0
        self.alive: dict[TokenSequence, float] = {}  # and the step by which each must have ended
        self.poisoned: set[TokenSequence] = set()
        self.contents: dict[TokenSequence, list[int]] = {}
        self.rows: dict[TokenSequence, set[int]] = {}  # positions that have given logits
        self.scored: dict[TokenSequence, set[int]] = {}  # positions of prompts whose tokens have been scored
        self.num_steps = self.num_computed = self.num_shared = self.num_wasted = 0
        self.num_verified = self.num_right = self.num_again = 0

    def add(self, sequence: TokenSequence) -> None:
        bound = sum(one.max_tokens for one in self.alive) + sequence.max_tokens
        self.alive[sequence] = math.inf if self.defers else self.num_steps + (1 + self.ahead) * bound
        self.tokens[sequence] = list(sequence.token_ids)
        self.scheduler.add(sequence)

    def finish(self, sequence: TokenSequence) -> None:
        self.scheduler.finish(sequence, "abort")
        self.alive.pop(sequence, None)

    def step(self) -> StepPlan | None:
        """Plans a step, and commits the one that is due."""
        plan = self.schedule()
        if self.under_way and (plan is None or len(self.under_way) > self.ahead):
            self.commit()
        return plan

    def schedule(self) -> StepPlan | None:
        """Plans the next step, checks it, and computes it."""
        alike = not self.defers and all(sequence.work == DEFAULT_WORK for sequence in self.alive)
        oldest = next(iter(self.alive), None) if alike else None
        if oldest is not None and (
            (oldest.state.num_tokens >= oldest.max_tokens and oldest.num_in_flight_tokens)
            or oldest.state.num_computed_tokens == oldest.state.num_tokens
        ):
            oldest = None  # it ends with the step before
        if oldest is not None and oldest.state.draft_tokens and oldest.num_in_flight_tokens:
            oldest = None  # it waits for that step
        if oldest is not None and self.stages > 1 and oldest.num_in_flight_tokens:
            oldest = None  # the same
        computing_again = {sequence for sequence in self.alive if sequence.state.recomputing}
        before = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        if plan is None:
            assert oldest is None, "a sequence was left behind"
            assert self.under_way or self.deferred or not self.alive, "all sequences were left behind"
            return None
        if self.stages > 1:
            self._check_share(plan, self.scheduler.num_running + self.scheduler.num_preemptions - before)
        self.num_steps += 1
        self.num_computed += plan.inputs.sizes.tokens
        late = [sequence for sequence, bound in self.alive.items() if self.num_steps > bound]
        assert not (late and alike), "a sequence was starved"
        parts = {part.sequence for part in plan.scheduled}
        assert parts and (oldest is None or oldest in parts), "the oldest stands still"
        paced = any(part.sequence.state.effective_priority < BEST_EFFORT for part in plan.scheduled[: plan.num_decodes])
        if self.chunk is not None and paced:
            others = plan.scheduled[plan.num_decodes :]
            prompts = [
                part for part in others if not (part.sequence.state.draft_tokens or part.sequence in computing_again)
            ]
            cost = sum(part.num_tokens * cost_at(part.first) for part in prompts)
            assert cost <= self.chunk or sum(part.num_tokens for part in prompts) == 1
        self._check_tokens(plan)
        for index in range(len(self.groups)):
            self._check_blocks(plan, index)
        accepted = [self._sample(sequence) for sequence in plan.rows.sequences]
        scored = {place for place, row in enumerate(plan.rows.rows) if row.purpose is RowPurpose.SCORE_PROMPT}
        beams = {place for place, row in enumerate(plan.rows.rows) if row.purpose is RowPurpose.SEARCH}
        assert beams.issubset(plan.rows.other) and plan.rows.has_rows_without_token == bool(scored | beams)
        assert [row.request for row in plan.rows.rows] == list(plan.rows.requests)
        sampled_rows = [row for row in range(len(plan.rows.requests)) if row not in scored | beams]
        rows_of = [
            (one.request, one.state.draft_tokens[:count])
            for one in plan.rows.sequences
            for count in range(1 + len(one.state.draft_tokens))
        ]
        assert [what_for(plan.rows.requests[row]) for row in sampled_rows] == rows_of
        drafts = [tuple(sequence.state.draft_tokens) for sequence in plan.rows.sequences]
        assert list(plan.rows.draft_tokens) == (drafts if any(drafts) else [])
        owners = [part.sequence.request for part in plan.scheduled for _ in range(part.num_logit_rows)]
        rows = [row for row, owner in zip(plan.inputs.arrays["logit_rows"], owners, strict=True) if owner is not None]
        assert len(rows) == len(plan.rows.requests)
        for row in scored:
            request, sequence = plan.rows.requests[row], plan.rows.rows[row].sequence
            position = plan.rows.rows[row].index
            assert isinstance(request, PromptToken) and request.token == self.tokens[sequence][position]
            assert plan.inputs.arrays["positions"][rows[row]] == position - 1
            self.scored.setdefault(sequence, set()).add(position)
        ends = [
            part.end - len(part.sequence.state.draft_tokens)
            for part in plan.scheduled
            if part.sequence in plan.rows.sequences
        ]
        self.under_way.append((plan, accepted, ends))
        for row in beams:
            beam = plan.rows.other[row].sequence
            self.searched[beam] = self._sample(beam)
        return plan

    def _check_share(self, plan: StepPlan, num_running: int) -> None:
        """Checks that a step of several under way leaves something for the others, and knows all of its tokens."""
        tokens, _, rows = plan.inputs.sizes.counts[:3]
        num_prompts = 1  # one more than the share, so that a prompt advances
        assert tokens <= -(-self.limits.tokens // self.stages) + num_prompts
        assert rows <= -(-self.limits.logit_rows // self.stages) + num_prompts
        assert plan.num_decodes <= -(-num_running // self.stages)
        assert min(plan.inputs.arrays["tokens"]) >= 0, "a stage cannot wait for the last one"

    def defer(self, sequences: Sequence[TokenSequence]) -> None:
        """Takes sequences out of the newest step, as if the masks of their grammars were late."""
        plan, accepted, ends = self.under_way.pop()
        kept = [place for place, one in enumerate(plan.rows.sequences) if one not in sequences]
        for sequence, tokens in zip(plan.rows.sequences, accepted, strict=True):
            if sequence in sequences:
                self.deferred[sequence] = tokens
                self.scheduler.defer(sequence)
        self.num_deferred += len(sequences)
        plan = msgspec.structs.replace(plan, rows=plan.rows.without(sequences, DroppedRow(VOCAB)))
        self.under_way.append((plan, [accepted[place] for place in kept], [ends[place] for place in kept]))

    def resume(self, sequence: TokenSequence) -> None:
        """Gives a deferred sequence its tokens."""
        tokens, over, end = self.deferred.pop(sequence), sequence.finish_reason, len(sequence.token_ids)
        draft_tokens = list(sequence.state.draft_tokens)
        self.scheduler.resume(sequence, tokens)
        self._check_committed(sequence, tokens, over, end, draft_tokens)
        self._check_ended([sequence] if over is None and sequence.finish_reason is not None else [])

    def fork(self, parent: TokenSequence) -> None:
        """Branches a beam that waits for its token."""
        child = sequence_of(parent.token_ids, parent.max_tokens, salt=parent.cache_salt, is_beam=True)
        child.num_prompt_tokens = parent.num_prompt_tokens
        self.scheduler.fork(parent, child)
        self.alive[child] = math.inf
        self.deferred[child] = [SampledToken(self.draw(parent.token_ids))]
        self.tokens[child] = [*parent.token_ids, self.deferred[child][0].token]
        self.num_forked += 1
        for index in range(len(self.groups)):
            self._check_holders(index)

    def _sample(self, sequence: TokenSequence) -> list[SampledToken]:
        """Samples a token, and one more for each draft token that was right."""
        failed, tokens, accepted = sequence in self.poisoned, self.tokens[sequence], list[SampledToken]()
        assert len(tokens) == sequence.state.num_computed_tokens - len(sequence.state.draft_tokens)
        for draft in (*sequence.state.draft_tokens, None):
            accepted.append(SampledToken(0 if failed else self.draw(tokens), is_nan=failed))
            tokens.append(accepted[-1].token)
            if failed or accepted[-1].token != draft:
                break
        self.num_verified += len(sequence.state.draft_tokens)
        self.num_right += len(accepted) - 1
        return accepted

    def commit(self) -> None:
        """Commits the oldest step that is under way."""
        plan, accepted, ends = self.under_way.popleft()
        for sequence in plan.rows.sequences:
            if sequence in self.scored:
                assert self.scored[sequence] >= set(range(1, sequence.num_prompt_tokens)), "before its first token"
        over = {part.sequence: part.sequence.finish_reason for part in plan.scheduled}
        self.num_wasted += sum(reason is not None for reason in over.values())
        self.scheduler.commit(plan, accepted)
        drafts = plan.rows.draft_tokens or [()] * len(accepted)
        for sequence, tokens, end, draft in zip(plan.rows.sequences, accepted, ends, drafts, strict=True):
            self._check_committed(sequence, tokens, over[sequence], end, draft)
        for row in plan.rows.other.values():
            if row.purpose is RowPurpose.SEARCH:
                tokens = self.searched.pop(row.sequence)
                if row.sequence.finish_reason is None:
                    assert row.sequence.is_parked and row.sequence.token_ids == self.tokens[row.sequence][:-1]
                    self.deferred[row.sequence] = tokens
        self._check_ended(
            [
                part.sequence
                for part in plan.scheduled
                if over[part.sequence] is None and part.sequence.finish_reason is not None
            ]
        )

    def _check_committed(
        self,
        sequence: TokenSequence,
        tokens: Sequence[SampledToken],
        over: str | None,
        end: int,
        draft_tokens: Sequence[int],
    ) -> None:
        """Checks a sequence that has just got tokens.

        Args:
            over: its finish_reason before.
            end: number of its tokens before.
        """
        whole, known = self.tokens[sequence], sequence.token_ids
        if over:
            assert sequence.finish_reason == over and known == whole[: len(known)] and len(known) <= end
        elif tokens[-1].is_nan:
            assert known == whole[:end] and sequence.finish_reason == "error"
        else:
            ids = [token.token for token in tokens]
            if STOP in ids:
                del ids[ids.index(STOP) + 1 :]
            full = len(known) == sequence.max_tokens
            assert known == whole[: end + len(ids)] and known[-len(ids) :] == ids
            assert sequence.finish_reason == ("stop" if ids[-1] == STOP else "length" if full else None)
            if draft_tokens and sequence.is_running:
                self._check_taken_back(sequence)

    def _check_ended(self, ended: Sequence[TokenSequence]) -> None:
        """Checks the sequences that a commit has ended, and the blocks of all others."""
        for sequence in ended:
            assert not sequence.cache.held
            if sequence.request is None and sequence.finish_reason == "length":
                positions = range(len(sequence.token_ids))
                assert self.rows[sequence] == set(positions if sequence.state.needs_prompt_logits else positions[-1:])
            self.alive.pop(sequence, None)
            self.contents.pop(sequence, None)
        for index in range(len(self.groups)):
            self._check_holders(index)

    def all_back(self) -> bool:
        return self.scheduler.num_free_blocks == self.num_blocks and self.scheduler.num_unfinished == 0

    def content(self, sequence: TokenSequence, length: int) -> list[int]:
        """One hash for each of the first positions of a sequence, draft tokens that are being computed included."""
        tokens, known = self.tokens[sequence], self.contents.setdefault(sequence, [])
        contents = list(known)
        for token in (*tokens, *sequence.state.draft_tokens)[len(known) : length]:
            before = contents[-1] if contents else (sequence.cache_salt, id(sequence) * (sequence in self.poisoned))
            contents.append(hash((before, token)) & 0x7FFFFFFF)
        known += contents[len(known) : len(tokens)]
        return contents[:length]

    def _check_taken_back(self, sequence: TokenSequence) -> None:
        computed = sequence.state.num_computed_tokens
        again = len(sequence.token_ids) - 1 - computed
        assert (
            (again > 0) == sequence.state.recomputing
            and not sequence.state.draft_tokens
            and not sequence.num_in_flight_tokens
        )
        assert not again or any(isinstance(kv, RecurrentState) for kv in self.groups)
        self.num_again += again
        for kv, held in zip(self.groups, sequence.cache.held, strict=True):
            if isinstance(kv, PagedCache):
                assert len(held.blocks) == -(-computed // kv.block_size), "a block of wrong draft tokens is still held"
            else:
                assert held.checkpoint is None, "a copy of a state from before draft tokens is still held"

    def _check_tokens(self, plan: StepPlan) -> None:
        sizes, inputs = plan.inputs.sizes, plan.inputs.arrays
        assert sizes.dims == self.limits.dims
        for name, count, limit in zip(sizes.dims, sizes.counts, self.limits.counts, strict=True):
            assert 0 <= count <= limit, name
        assert sizes.tokens == sum(part.num_tokens for part in plan.scheduled) == len(inputs["tokens"])
        assert sizes.sequences == len(plan.scheduled) == len({part.sequence for part in plan.scheduled})
        assert all(part.num_tokens > 0 for part in plan.scheduled)
        ends = [part.end for part in plan.scheduled]
        draft_tokens = [len(part.sequence.state.draft_tokens) for part in plan.scheduled]
        sampled = {*plan.rows.sequences, *(row.sequence for row in plan.rows.rows if row.purpose is RowPurpose.SEARCH)}
        lengths = [  # before it
            part.sequence.state.num_tokens - (1 + count) * (part.sequence in sampled)
            for part, count in zip(plan.scheduled, draft_tokens, strict=True)
        ]
        decoding = [
            part.first + 1 == length and not count
            for part, length, count in zip(plan.scheduled, lengths, draft_tokens, strict=True)
        ]
        assert decoding == sorted(decoding, reverse=True), "decodes go first"
        assert plan.num_decodes == sum(decoding)
        starts = inputs["query_start"].tolist()
        assert starts[0] == 0 and np.diff(starts).tolist() == [part.num_tokens for part in plan.scheduled]
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in inputs.values())
        rows: list[int] = []
        for part, length, start, end in zip(plan.scheduled, lengths, starts, starts[1:], strict=False):
            sequence, first, last = part.sequence, part.first, part.end
            assert sequence.finish_reason is None and last == sequence.state.num_computed_tokens
            assert inputs["positions"][start:end].tolist() == list(range(first, last))
            tokens = [self._resolved(token, sequence) for token in inputs["tokens"][start:end].tolist()]
            assert tokens == (self.tokens[sequence] + sequence.state.draft_tokens)[first:last]
            wanted = (
                part.num_tokens
                if sequence.state.needs_prompt_logits
                else int(last - len(sequence.state.draft_tokens) == length)
            )
            wanted += len(sequence.state.draft_tokens)
            assert part.num_logit_rows == wanted
            rows += range(end - wanted, end)
            self.rows.setdefault(sequence, set()).update(range(last - wanted, last))
        assert inputs["logit_rows"].tolist() == rows and sizes.logit_rows == len(rows)
        assert inputs["kv_len"].tolist() == ends and sizes["kv_splits"] == -(-max(ends) // SPLIT_TOKENS)

    def _resolved(self, token: int, sequence: TokenSequence) -> int:
        """An input token, also if it was sampled by the last step and is not yet known."""
        if token >= 0:
            return token
        plan, accepted, _ = self.under_way[-1]
        assert plan.rows.requests[-1 - token] is sequence.request
        (sampled,) = accepted[plan.rows.sequences.index(sequence)]
        return sampled.token

    def _check_states(self, plan: StepPlan, index: int) -> None:
        pool, slots = self.pools[index], plan.inputs.arrays[f"state_slots.{index}"].tolist()
        holders = self._check_holders(index)
        for source, target in plan.inputs.copies[index]:
            pool[target] = pool[source]
        pool[plan.inputs.new_blocks[index]] = 0
        assert len(slots) == len(plan.scheduled) == len(set(slots))
        for part, slot in zip(plan.scheduled, slots, strict=True):
            expected = [0, *self.content(part.sequence, part.end)]
            assert holders[slot] == {part.sequence}
            assert pool[slot] == expected[part.first] or part.sequence in self.poisoned, "a state of other tokens"
            pool[slot] = expected[part.end]

    def _check_blocks(self, plan: StepPlan, index: int) -> None:
        kv, pool, inputs = self.groups[index], self.pools[index], plan.inputs.arrays
        if not isinstance(kv, PagedCache):
            return self._check_states(plan, index)
        holders = self._check_holders(index)
        for source, target in plan.inputs.copies[index]:
            pool[target * kv.block_size :][: kv.block_size] = pool[source * kv.block_size :][: kv.block_size]
        for block in plan.inputs.new_blocks[index]:
            pool[block * kv.block_size :][: kv.block_size] = BLANK
        slots, table = inputs[f"slots.{index}"], inputs[f"block_table.{index}"]
        assert len(set(slots.tolist())) == len(slots) and slots.min() >= 0 and slots.max() < len(pool)
        assert table.shape == (len(plan.scheduled), plan.inputs.sizes["kv_blocks"])
        starts = inputs["query_start"].tolist()
        for part, start, end in zip(plan.scheduled, starts, starts[1:], strict=False):
            sequence, here = part.sequence, slots[start:end]
            written = set((here // kv.block_size).tolist())
            assert all(holders[block] == {sequence} for block in written), "a block of others is written into"
            pool[here] = self.content(sequence, part.end)[part.first :]
        for row, part in enumerate(plan.scheduled):
            first, end = part.first, part.end
            lowest = max(0, first - kv.window + 1) if kv.window else 0
            seen = np.array([*range(min(kv.kept_tokens, lowest)), *range(lowest, end)])
            read = pool[table[row, seen // kv.block_size] * kv.block_size + seen % kv.block_size]
            expected = self.content(part.sequence, end)
            right = read.tolist() == [expected[n] for n in seen]
            assert right or part.sequence in self.poisoned, "what is read is not what was written"

    def _check_holders(self, index: int) -> dict[int, set[TokenSequence]]:
        """Checks that no block is lost; gives the sequences that hold each block."""
        holders: dict[int, set[TokenSequence]] = {}
        running = [sequence for sequence in self.alive if sequence.is_running]
        for sequence in running:
            held = self._places(sequence, index)
            assert len(held) == len(set(held))
            for block in held:
                holders.setdefault(block, set()).add(sequence)
        self.num_shared += sum(len(owners) > 1 for owners in holders.values())
        assert len(holders) + self.scheduler.num_free_blocks[index] == self.num_blocks[index], "a block was lost"
        assert len(running) == self.scheduler.num_running <= self.limits.sequences
        return holders

    def _places(self, sequence: TokenSequence, index: int) -> list[int]:
        """Blocks or slots that a sequence holds."""
        kv, mine = self.groups[index], sequence.cache.held[index]
        if not isinstance(kv, PagedCache):
            kept = [*mine.pending, *([mine.checkpoint] if mine.checkpoint is not None else [])]
            return [mine.slot, *(snapshot.slot for snapshot in kept)]
        assert not any(mine.blocks[mine.num_kept : mine.dropped])
        assert len(mine.held) <= blocks_of(kv, sequence.max_tokens, self.limits.tokens)
        return list(mine.held)
