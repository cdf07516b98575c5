"""Speculation: no completion depends on it, draft tokens are the expected ones, and it stops where it does not pay."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginewright import LLM, SamplingParams
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.draft import FirstLayers
from enginewright.cli import main
from enginewright.errors import UsageError
from enginewright.runtime.config import MAX_DRAFT_TOKENS, RuntimeConfig
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.core.outputs import to_dicts
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.form import Usage
from enginewright.runtime.server.metrics import Metrics, MetricsPage
from enginewright.runtime.speculation import methods
from enginewright.runtime.speculation.acceptance import Acceptance
from enginewright.runtime.speculation.lookup import BETWEEN, MEMORY_TOKENS, TENANTS, PromptLookup, Text
from enginewright.runtime.speculation.proposer import DraftToken, Proposer
from enginewright.runtime.speculation.runner import CatchUp, DraftRunner
from enginewright.runtime.speculation.speculator import PROBING, Speculator
from enginewright.runtime.speculation.stats import SpeculationStats
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_cost import StepCost
from tests.helpers.engines import folder_of_engines
from tests.helpers.late_executor import LateExecutor
from tests.helpers.mixed_requests import LIMITS, Recorded, answers, check_draft_tokens, check_same
from tests.helpers.tiny import MemoryCheckpoint

REQUESTS = 40


@cache
def engine_of(family: str, draft: str | int | None = None) -> Path:
    """draft: a family, of whose model the engine holds another that is built like the first; or first layers."""
    path = folder_of_engines() / f"speculation-{family}-{draft}.engine"
    draft_model = checkpoint_of(draft) if isinstance(draft, str) else FirstLayers(draft) if draft else None
    build_engine(checkpoint_of(family), BuildConfig(gate=None), path, draft=draft_model)
    return path


@cache
def checkpoint_of(family: str) -> MemoryCheckpoint:
    # Greedy, it repeats itself.
    return MemoryCheckpoint.tiny(family, tie_word_embeddings=True)


DRAFTS: list[tuple[str, str | int]] = [
    *(("llama", "llama"), ("qwen3_5_text", "qwen3_5_text"), ("llama", "gemma3_text")),
    *(("gemma3_text", 2), ("qwen3_5_text", 1), ("qwen3_moe", 1)),
]
SOME_DRAFTS = [DRAFTS[1], DRAFTS[2], DRAFTS[5]]  # the model itself, another one, and first layers


@pytest.mark.usefixtures("speculation_pays")
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_no_answer_depends_on_draft_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, and a state that cannot be rolled back; right and random draft tokens, with preemptions and without."""
    with Engine.open(engine_of(family)) as engine:
        plain, before = answers(engine, REQUESTS)
        assert before.speculation is None
        known = {answer.asked: [token.token for token in answer.tokens] for answer in plain.values()}
        one = sequence_bytes(engine.plan.caches, LIMITS["max_model_len"], LIMITS["max_num_batched_tokens"])
        scarce, after = answers(engine, REQUESTS, speculate="ngram", speculate_tokens=5, kv_cache_memory=one)
        check_same(plain, scarce)
        assert after.num_preemptions > 0 or engine.plan.recurrent_states  # of these, there are no slots left to run in
        monkeypatch.setitem(methods.METHODS, "ngram", lambda *_: Recorded(known))
        drafted, after = answers(engine, REQUESTS, speculate="ngram")
        check_same(plain, drafted)
        assert after.speculation is not None
        accepted, draft_tokens = sum(after.speculation.accepted), sum(after.speculation.drafted)
        assert accepted > 200 and draft_tokens - accepted > 40 and after.num_steps < before.num_steps * 2 / 3


@pytest.mark.usefixtures("speculation_pays")
@pytest.mark.parametrize(("family", "draft"), SOME_DRAFTS)
def test_a_draft_draft_tokens_by_the_same_noise(family: str, draft: str | int) -> None:
    """A draft that is the model itself is always right, whatever the temperature; another one is not, nor first layers,
    be they with a window, without attention, or with experts.
    """
    with Engine.open(engine_of(family, draft)) as engine:
        rate = check_draft_tokens(engine, REQUESTS, 300, speculate="draft" if isinstance(draft, str) else "skip")
    assert rate > 0.97 if family == draft else 0 < rate < 0.9


@pytest.mark.usefixtures("speculation_pays")
def test_first_layers_that_say_all_are_always_right(tmp_path: Path) -> None:
    """Later layers add nothing, so draft tokens and tokens are sampled from the same logits with the same noise."""
    model = checkpoint_of("llama")
    silent = tuple(
        f"layers.{layer}.{name}.weight" for layer in (1, 2) for name in ("self_attn.o_proj", "mlp.down_proj")
    )
    stored = {name: value * 0 if name.endswith(silent) else value for name, value in model.stored.items()}
    path = tmp_path / "skip.engine"
    build_engine(replace(model, stored=stored), BuildConfig(gate=None), path, draft=FirstLayers(1))
    with Engine.open(path) as engine:
        assert check_draft_tokens(engine, 20, 150, speculate="skip") > 0.97


@pytest.mark.usefixtures("speculation_pays")
def test_steps_do_not_run_ahead_of_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for draft tokens even on a device that could run them ahead."""
    monkeypatch.setattr(core, "open_executor", LateExecutor)
    with Engine.open(engine_of("gemma3_text")) as engine:
        plain, _ = answers(engine, 12)
        drafted, after = answers(engine, 12, speculate="ngram")
    check_same(plain, drafted)
    assert after.speculation is not None and sum(after.speculation.accepted) > 0


def sequence(token_ids: Sequence[int], num_prompt_tokens: int = 1, salt: str = "") -> TokenSequence:
    return TokenSequence(list(token_ids), num_prompt_tokens, 1000, cache_salt=salt)


def lookup(proposer: PromptLookup, *sequences: TokenSequence) -> list[tuple[int | None, list[int]]]:
    """The confidence of each sequence and its draft tokens."""
    found: list[tuple[int | None, list[int]]] = []
    for one, level in zip(sequences, proposer.confidences(sequences), strict=True):
        proposer.begin([one])
        made = [
            draft for _ in range(4) for draft in proposer.next_tokens([one]) if draft is not None and level is not None
        ]
        assert all(draft.confidence == level for draft in made)
        found.append((level, [draft.token for draft in made]))
    return found


def test_lookup_takes_the_longest_match_and_the_latest_of_these() -> None:
    text = Text()
    text.extend([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3, 70, 9, 3, 80, 1, 2, 3])
    assert text.find([1, 2, 3])[0] == 3 and text.find([1, 2, 3])[1].tolist()[:2] == [70, 9]
    assert text.find([9, 2, 3])[1][0] == 60 and text.find([5, 5, 3])[1][0] == 80 and text.find([4])[0] == 0
    text.extend([4])
    assert text.find([2, 3, 4]) == (0, pytest.approx([])), "the last token has nothing after it"


def test_lookup_draft_tokens_what_repeats_itself() -> None:
    proposer = PromptLookup(6)
    going = sequence([5, 1, 2, 3, 1, 2, 3])
    assert lookup(proposer, going) == [(0, [1, 2, 3, 1])], "over and over"
    assert [proposer.next_tokens([going]) for _ in range(3)] == [[DraftToken(2, 0)], [DraftToken(3, 0)], [None]], (
        "six at most"
    )
    going.token_ids += [7, 1, 2]
    assert lookup(proposer, going) == [(0, [3, 7, 1, 2])]
    assert proposer.confidences([sequence([1, 2, 3, 4]), sequence([4, 9, 4])]) == [None, None], "one token is no match"
    assert proposer.confidences([sequence([*range(20), *range(5)]), sequence([*range(20), *range(9)])]) == [1, 2]


def test_lookup_remembers_answers_of_the_same_tenant_alone() -> None:
    proposer = PromptLookup(4)
    proposer.end(sequence([1, 2, 3, 4, 5, 6, 7], num_prompt_tokens=2, salt="a"))
    asked = [sequence([9, 3, 4], salt="a"), sequence([9, 3, 4], salt="b"), sequence([1, 2], salt="a")]
    assert lookup(proposer, *asked) == [(0, [5, 6, 7]), (None, []), (None, [])], "prompts are not remembered"
    for number in range(TENANTS):
        proposer.end(sequence([1, 3, 4, 8], salt=str(number)))
    assert proposer.confidences([asked[0]]) == [None], "the tenant that has asked longest ago is forgotten"


def test_lookup_keeps_a_bounded_memory() -> None:
    text = Text(MEMORY_TOKENS)
    for number in range(100):
        text.extend([number] * 999 + [BETWEEN])
    assert MEMORY_TOKENS // 2 < len(text) <= MEMORY_TOKENS and text.find([3, 3])[0] == 0 and text.find([99, 99])[0] == 2
    text.extend(range(3 * MEMORY_TOKENS))
    assert len(text) <= MEMORY_TOKENS and text.find([3 * MEMORY_TOKENS - 3, 3 * MEMORY_TOKENS - 2])[0] == 2


@pytest.fixture
def cost() -> StepCost:
    with Engine.open(engine_of("gemma3_text")) as engine:
        return StepCost.of(engine)


def measured(cost: StepCost, fixed: float, of_token: float) -> None:
    cost.learn(1, fixed + of_token)
    cost.fixed, cost.of_token = fixed, of_token


def test_the_cost_of_steps_is_learned(cost: StepCost) -> None:
    assert 0 < cost.of_token < cost.fixed, "as the plan says"
    for _ in range(100):
        cost.learn(1, 0.011)
    assert cost.seconds(1) == pytest.approx(0.011, rel=0.05)
    for _ in range(50):
        cost.learn(5, 0.015)
        cost.learn(1, 0.011)
    assert (cost.fixed, cost.of_token) == (pytest.approx(0.010, rel=0.05), pytest.approx(0.001, rel=0.1))
    cost.learn(1, 30.0)
    assert cost.seconds(1) < 0.013, "one step that was disturbed says little"


@pytest.mark.parametrize(
    ("of_token", "batch", "expected"),
    [(0.0, 1, 8), (0.05, 1, 8), (0.3, 1, 4), (2.0, 1, 1), (20.0, 1, 0), (0.05, 8, 3), (0.3, 32, 0), (2.0, 32, 0)],
)
def test_draft_tokens_are_made_where_they_pay(cost: StepCost, of_token: float, batch: int, expected: int) -> None:
    """A level of 0.8: of a machine on which a token costs more, and of more sequences, fewer."""
    cost.fixed, cost.of_token = 1.0, of_token
    speculator = Speculator(PromptLookup(8), cost, 8, 512)
    repeating = [sequence([*range(number, 20 + number), *range(number, 9 + number)]) for number in range(batch)]
    draft_tokens = speculator.propose(repeating)
    assert {len(one) for _, one in draft_tokens} == ({expected} if expected else set())


def test_draft_tokens_stay_within_a_step_and_an_answer(cost: StepCost) -> None:
    cost.fixed, cost.of_token = 1.0, 0.0
    repeating = [sequence([*range(20), *range(9)]) for _ in range(3)]
    repeating[0].max_tokens = 32
    draft_tokens = Speculator(PromptLookup(8), cost, 8, 12).propose(repeating)
    assert sum(len(one) for _, one in draft_tokens) == 12 - 3 and len(draft_tokens[0][1]) == 2


class Scripted(Proposer):
    """A proposer that gives a confidence with each draft token, and has a cost."""

    first_rates = (0.8, 0.05, 0.99)
    cost_s = (0.1, 0.02)

    def __init__(self, *levels: int) -> None:
        self.levels, self.made = levels, 0

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [0] * len(sequences)

    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        self.made = 0

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        self.made += 1
        return [DraftToken(self.made, self.levels[self.made - 1]) if self.made <= len(self.levels) else None] * len(
            sequences
        )

    def end(self, sequence: TokenSequence) -> None:
        """Does nothing: it keeps nothing of a sequence."""

    def close(self) -> None:
        """Does nothing: it holds no resources."""


@pytest.mark.parametrize(
    ("levels", "made", "taken"),
    [
        ((2, 2, 2, 2, 2, 2, 2, 2, 2), 8, 8),  # as many as a step may have
        ((2, 2, 1, 2, 2), 3, 2),  # an unsure token ends the draft, and is not verified
        ((1, 2, 2), 1, 0),
        ((2, 2), 3, 2),  # it has no more
    ],
)
def test_a_chain_ends_where_the_proposer_is_not_sure(
    cost: StepCost, levels: Sequence[int], made: int, taken: int
) -> None:
    measured(cost, 1.0, 0.1)
    proposer, going = Scripted(*levels), [sequence([7], 1), sequence([8], 1)]
    speculator = Speculator(proposer, cost, 8, 512)
    draft_tokens = [(one, list(tokens)) for one, tokens in speculator.propose(going)]
    assert draft_tokens == ([(one, [*range(1, taken + 1)]) for one in going] if taken else []) and proposer.made == made


def test_draft_tokens_that_take_time_wait_until_a_step_was_measured(cost: StepCost) -> None:
    """Until a step was measured, its cost has no unit, and cannot be compared with the seconds that drafting takes."""
    going, proposer = sequence([1, 2, 3] * 5), Scripted(2, 2, 2)
    speculator = Speculator(proposer, cost, 8, 512)
    assert not speculator.propose([going]) and proposer.made == 0
    assert Speculator(PromptLookup(8), cost, 8, 512).propose([going]), "which take none"
    speculator.step_took(1, 1.0)
    assert speculator.propose([going])


def test_each_level_learns_from_its_own_draft_tokens(cost: StepCost) -> None:
    measured(cost, 1.0, 0.1)
    speculator, going = Speculator(Scripted(2, 2, 2, 1), cost, 8, 512), sequence([7], 1)
    for _ in range(40):
        ((_, tokens),) = speculator.propose([going])
        speculator.verified(going, len(tokens), 1)  # the second one is always wrong
        if len(tokens) < 3:
            break
    acceptance = speculator._acceptances[going]
    assert acceptance.rate(2) < 0.9 and acceptance.rate(1) == 0.05, "which was never verified"
    assert acceptance.rate(0) < 0.8, "what is expected of a draft is what those that are made promise"


def test_wrong_draft_tokens_are_given_up_and_tried_again(cost: StepCost) -> None:
    cost.fixed, cost.of_token = 1.0, 0.1
    speculator, going, tried = Speculator(PromptLookup(8), cost, 8, 512), sequence([1, 2, 3] * 5), []
    for _ in range(400):
        draft_tokens = dict(speculator.propose([going]))
        tried.append(len(draft_tokens.get(going, ())))
        speculator.verified(going, tried[-1], 0)
    assert tried[0] > 1 and max(tried[100:]) == 1
    assert sum(tried[100:]) == 30, "every tenth step, of which a hundredth takes 0.011, and a draft 0.1"
    stats = speculator.stats()
    assert stats.num_drafts == sum(map(bool, tried)) == stats.drafted[0] and sum(stats.accepted) == 0
    assert stats.mean_length == 1


def test_what_does_not_seem_to_pay_is_tried_now_and_then(cost: StepCost) -> None:
    """A draft that does not seem to pay is tried now and then, because otherwise nothing would show that it does."""
    cost.fixed, cost.of_token = 1.0, 20.0
    speculator, going = Speculator(PromptLookup(8), cost, 8, 512), sequence([1, 2, 3] * 5)
    tried = [sum(len(one) for _, one in speculator.propose([going])) for _ in range(1000)]
    assert max(tried) == 1 and sum(tried) == pytest.approx(PROBING * 1000 * 21 / 20, abs=1), "by the time it takes"
    full = Speculator(PromptLookup(8), cost, 8, 1)
    assert not any(full.propose([going]) for _ in range(1000)), "a step has no room for it"


def test_a_proposer_reads_what_draft_tokens_make_up_for(cost: StepCost, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(cost, 1.0, 0.1)
    monkeypatch.setattr(Scripted, "catch_up_s", lambda _, sequence: 0.5 * sequence.num_prompt_tokens)
    short, long, ending = sequence([7] * 20, 20), sequence([8] * 400, 400), sequence([9] * 20, 20)
    ending.max_tokens = 24
    speculator = Speculator(Scripted(2, 2), cost, 8, 512)
    assert [one for one, _ in speculator.propose([short, long, ending])] == [short]
    assert [one for one, _ in speculator.propose([short, long, ending], num_soon=4)] == [short]
    assert not speculator.propose([short, long, ending], num_soon=64), "draft_tokens do not pay then"
    for _ in range(200):
        speculator.end(sequence([7] * 30, 20))  # answers of ten tokens
    tried = [bool(speculator.propose([short])) for _ in range(2000)]
    assert not tried[0] and 0 < sum(tried) < 4, "reading it takes ten seconds, and a thousand steps eleven hundred"


def test_a_preempted_sequence_frees_its_draft_sequence() -> None:
    """A draft model has rows for as many sequences as may run, so that a preempted one must not keep its row."""
    limits = RuntimeConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=16, threads=1)
    preempted, running = sequence([1, 2, 3]), sequence([4, 5, 6])
    with Engine.open(engine_of("gemma3_text", "llama")) as engine:
        draft = engine.for_role("draft")
        with closing(DraftRunner(CpuExecutor(draft, limits), StepCost.of(draft))) as runner:
            for one in preempted, running:
                one.cache.held = [None]
                (ready,) = runner.catch_up([CatchUp(one, 0, one.token_ids)])
                assert ready.target is one and list(runner.drafts) == [one] and ready.num_computed == 2
                one.cache.held = []


def test_right_draft_tokens_raise_the_rate() -> None:
    rates = Acceptance.of_all([0.3, 0.5])
    one = rates.of_sequence()
    for right in 1.0, 1.0, 1.0, 1.0, 1.0, 0.0:
        one.learn(0, right)
    assert 0.3 < one.rate(0) < 1 and (one.rate(1), rates.rate(0)) == (0.5, 0.3)


@pytest.mark.usefixtures("speculation_pays")
def test_what_is_reported() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(engine_of("gemma3_text"), **LIMITS, speculate="ngram") as llm:
        (output,) = llm.generate([[5, 6, 7] * 4], params)
        stats = llm.stats()
    assert stats.speculation is not None
    assert output.num_draft_tokens == sum(stats.speculation.drafted) > output.num_accepted_tokens - 1 > 0
    (shown,) = to_dicts(output)
    assert shown["num_accepted_tokens"] == sum(stats.speculation.accepted)
    usage = Usage(3, 9, 0, draft_tokens=7, accepted_tokens=5).to_dict()
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    assert "completion_tokens_details" not in Usage(3, 9, 0).to_dict()
    counted = Stats(speculation=SpeculationStats(3, (3, 2), (2, 1)))
    metrics = Metrics(lambda: counted, "tiny", "0", 100)
    text = MetricsPage(lambda: [(metrics, True)], Counter()).render("")[0].decode()
    for line in (
        'spec_decode_num_drafts_total{model_name="tiny"} 3.0',
        'spec_decode_num_draft_tokens_total{model_name="tiny"} 5.0',
        'spec_decode_num_accepted_tokens_total{model_name="tiny"} 3.0',
        'spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="1"} 1.0',
    ):
        assert f"enginewright_{line}" in text


def test_options_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match=r"speculate is 'trees'.*one of off, ngram, draft, skip, mtp"):
        RuntimeConfig(speculate="trees")
    with pytest.raises(
        UsageError, match=rf"speculate_tokens is {MAX_DRAFT_TOKENS + 1}.*must be {MAX_DRAFT_TOKENS} or less"
    ):
        RuntimeConfig(speculate="ngram", speculate_tokens=MAX_DRAFT_TOKENS + 1)
    with pytest.raises(UsageError, match=r"speculate_tokens is 0.*at least 1"):
        RuntimeConfig(speculate_tokens=0)
    path = engine_of("gemma3_text")
    for role, memory in ("draft", None), ("draft", "8m"), ("skip", None), ("mtp", None):
        with pytest.raises(UsageError, match=rf"has no {role} model.*only one model"):
            LLM(path, **LIMITS, speculate=role, kv_cache_memory=memory)
    said = CliRunner().invoke(
        main, ["generate", str(path), "-p", "a", "--speculate", "ngram", "--speculate-tokens", "99"]
    )
    assert said.exit_code == UsageError.exit_code and "speculate_tokens is 99" in said.output
