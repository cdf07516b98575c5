"""Sampling against a reference in numpy and float64, its distributions, and its requests."""

import itertools
import math
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from enginewright import _cpu
from enginewright.errors import UsageError
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.request import IN_FLIGHT, SamplingRequest
from enginewright.runtime.sampling.sampler import SampledToken, Sampler
from tests.helpers.breadth import every_third
from tests.helpers.ladder import Ladder
from tests.helpers.sampling_reference import (
    FILTERS,
    adjusted,
    check_draw,
    chi_square,
    logits_of,
    masked_rows,
    noise,
    philox,
    probabilities,
    request,
)
from tests.tolerances import LOGPROB

VOCABULARIES = [1, 2, 15, 16, 63, 64, 65, 1000, 20011]


EACH = [(filters, vocab) for filters in FILTERS for vocab in VOCABULARIES]
SOME = every_third(FILTERS, VOCABULARIES)


@pytest.mark.parametrize(("filters", "vocab"), SOME, ids=str)
@pytest.mark.parametrize("spread", [0.2, 5.0])
def test_draws_are_those_of_the_reference(filters: dict[str, Any], vocab: int, spread: float) -> None:
    seed = vocab << 40 | vocab
    params = SamplingParams(seed=seed, **filters)
    rows = 5 if vocab > 1000 else 40
    logits = logits_of(vocab, rows, spread=spread)
    requests = [request(params, vocab, [0] * (row + 1), choice=row % 3) for row in range(rows)]
    for row, sampled in enumerate(Sampler().sample(logits, requests)):
        chances = probabilities(logits[row].astype(np.float64), params)
        check_draw(sampled.token, chances, noise(seed, row % 3, row + 1, vocab))


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.95}], ids=str
)
def test_draws_have_the_right_distribution(filters: dict[str, Any]) -> None:
    statistic, freedom = chi_square(SamplingParams(**filters), logits_of(40, spread=1.0)[0], draws=10000)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # 4 deviations; the seeds are fixed


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_groups_of_noise_and_their_tokens_are_as_likely_as_others(spread: float) -> None:
    """Three groups of 64 and a part of one."""
    statistic, freedom = chi_square(SamplingParams(), logits_of(200, spread=spread)[0], draws=20000)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("distance", "draws"), [(0.3, 6000), (3.0, 6000)])  # tests/long has more of them
def test_rows_draw_the_same_token_as_often_as_gumbel_noise_makes_them(distance: float, draws: int) -> None:
    """1 / Σ_y max(p_y / p_x, q_y / q_x) of each token x, which holds if all tokens' numbers are independent."""
    one = logits_of(150, spread=1.5)[0]
    other = one + logits_of(150, seed=1, spread=distance)[0]
    p, q = (probabilities(row.astype(np.float64), SamplingParams()) for row in (one, other))
    expected = (1 / np.maximum(p / p[:, None], q / q[:, None]).sum(axis=1)).sum()
    requests = [request(SamplingParams(seed=seed), 150) for seed in range(draws) for _ in range(2)]
    tokens = [entry.token for entry in Sampler().sample(np.tile([one, other], (draws, 1)), requests)]
    same = np.equal(tokens[::2], tokens[1::2]).mean()
    assert abs(same - expected) < 4 * math.sqrt(expected * (1 - expected) / draws)


def test_choices_and_positions_are_independent() -> None:
    """Pairs of samples, of two choices or two positions, over four equal tokens: all sixteen are equally likely."""
    params, logits, draws = SamplingParams(), np.zeros((1, 4), np.float32), 4000
    for other in ({"choice": 1}, {"prompt": [0, 0]}):
        requests = [request(params, 4, seed=seed, **more) for seed in range(draws) for more in ({}, other)]  # type: ignore[arg-type]
        tokens = [entry.token for entry in Sampler().sample(np.broadcast_to(logits, (2 * draws, 4)), requests)]
        counts = np.array(list(Counter(zip(tokens[::2], tokens[1::2], strict=True)).values()))
        assert len(counts) == 16
        assert ((counts - draws / 16) ** 2 / (draws / 16)).sum() < 15 + 4 * math.sqrt(30)


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of Random123, the authors' library."""
    low = 2**32 - 1
    assert _cpu.philox4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _cpu.philox4x32([low] * 4, [low] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert _cpu.philox4x32(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert philox(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.5}, {"top_k": 1}], ids=str)
def test_greedy_takes_the_first_of_equals(vocab: int, filters: dict[str, Any]) -> None:
    logits = np.round(logits_of(vocab, 30, spread=0.8))
    sampled = Sampler().sample(logits, [request(SamplingParams(**filters), vocab) for _ in logits])
    assert [entry.token for entry in sampled] == logits.argmax(axis=1).tolist()


def test_top_k_keeps_the_first_of_equals() -> None:
    logits = np.zeros((500, 200), np.float32)
    logits[:, 150] = 1.0
    sampled = Sampler().sample(logits, [request(SamplingParams(top_k=5, seed=seed), 200) for seed in range(500)])
    assert {entry.token for entry in sampled} == {0, 1, 2, 3, 150}


def test_top_p_keeps_the_first_of_equals() -> None:
    logits = np.zeros((500, 8), np.float32)
    sampled = Sampler().sample(logits, [request(SamplingParams(top_p=0.375, seed=seed), 8) for seed in range(500)])
    assert {entry.token for entry in sampled} == {0, 1, 2}


def test_top_p_keeps_the_first_of_equal_weights_though_a_logit_is_larger() -> None:
    logits = np.tile(np.array([0.0, 1.0, 1.0 + 2.0**-23], np.float32), (20, 1))
    params = [SamplingParams(top_p=1e-6, temperature=50.0, seed=seed) for seed in range(20)]
    assert {entry.token for entry in Sampler().sample(logits, [request(one, 3) for one in params])} == {1}


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.1},
        {"frequency_penalty": -0.6},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.9,
            "logit_bias": {1: 2.0, 0: -3.0},
        },
        {"logit_bias": {2: 100.0, 0: -100.0}},
    ],
    ids=str,
)
def test_penalties_and_biases(penalties: dict[str, Any]) -> None:
    """A text of forty tokens, each sampled with the history of all before it."""
    params, vocab, prompt = SamplingParams(seed=3, **penalties), 6, [0, 0, 4]
    entry, output = request(params, vocab, prompt), list[int]()
    for step in range(40):
        logits = logits_of(vocab, seed=step, spread=1.0)
        chances = probabilities(adjusted(logits[0], params, prompt, output), params)
        token = Sampler().sample(logits, [entry])[0].token
        check_draw(token, chances, noise(3, 0, len(prompt) + step, vocab))
        output.append(token)
    assert len(set(output)) > 1 or "logit_bias" in penalties


def test_history_grows_with_the_text() -> None:
    entry = request(SamplingParams(frequency_penalty=1.0), 1000, [7, 3, 7])
    for token in [*range(100, 200), 7, 150, 7]:
        entry.begin()
        assert entry.history[-1].tolist() == (IN_FLIGHT, 1)
        entry.end(token)
    counts = {int(token): int(count) for token, count in entry.history}
    assert counts == {3: 0, 7: 2, **{token: 1 + (token == 150) for token in range(100, 200)}}


def test_min_tokens_holds_back_what_would_end_the_text() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(1,), temperature=0.0)
    logits = np.array([[9.0, 8.0, 7.0, 6.0]], np.float32)
    entry, ignoring = (
        request(p, 4, eos_token_ids=[0]) for p in (params, SamplingParams(**(asdict(params) | {"ignore_eos": True})))
    )
    assert [Sampler().sample(logits, [entry])[0].token for _ in range(5)] == [2, 2, 2, 0, 0]
    assert [Sampler().sample(logits, [ignoring])[0].token for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("filters", [*FILTERS, {"logit_bias": {0: 3.0}, "repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("vocab", [2, 32, 33, 1000])
def test_no_token_is_drawn_that_is_not_allowed(vocab: int, filters: dict[str, Any]) -> None:
    logits, random = logits_of(vocab, 20, spread=2.0), np.random.default_rng(vocab)
    for row in range(20):
        ids = random.permutation(vocab)[: random.integers(1, vocab)].tolist()
        params = SamplingParams(seed=7, allowed_token_ids=ids, **filters)
        left = np.full(vocab, -np.inf)
        left[ids] = adjusted(logits[row], params, [0], [])[ids]
        token = Sampler().sample(logits[row : row + 1], [request(params, vocab)])[0].token
        check_draw(token, probabilities(left, params), noise(7, 0, 1, vocab))


def test_masks_change_neither_logprobs_nor_other_rows() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2)
    logits = np.array([[3.0, 2.0, 1.0, 0.0]] * 3, np.float32)
    asked = [params, replace(params, allowed_token_ids=[2]), params]
    free, held, last = Sampler().sample(logits, [request(one, 4) for one in asked])
    assert [free.token, held.token, last.token] == [0, 2, 0] and free == last
    assert held.top_logprobs == free.top_logprobs and held.logprob == pytest.approx(free.logprob - 2.0)


def test_rows_without_a_token_and_rows_with_nan_fail_alone() -> None:
    logits, given = masked_rows(1003, SamplingParams(seed=2))
    assert [is_nan for *_, is_nan in _cpu.sample(logits, *given)] == [False] * 4 + [True] * 2


def test_a_grammar_is_asked_before_each_token_and_told_each() -> None:
    vocab, grammars = 70, [Ladder(70, seed) for seed in range(3)]
    requests = [request(SamplingParams(seed=seed), vocab, grammar=one) for seed, one in enumerate(grammars)]
    sampler, free = Sampler(), request(SamplingParams(temperature=0.0), vocab)
    for step in range(40):
        logits = logits_of(vocab, 4, seed=step)
        tokens = [one.token for one in sampler.sample(logits, [*requests, free])]
        assert tokens[:3] == [one.taken[-1] for one in grammars] and tokens[3] == logits[3].argmax()
    assert all(len(one.taken) == 40 and len(set(one.taken)) > 20 for one in grammars)


def test_a_grammar_and_a_list_leave_what_both_allow() -> None:
    ids = list(range(0, 70, 3))
    entry = request(SamplingParams(seed=1, allowed_token_ids=ids), 70, grammar=Ladder(70, 0))
    tokens = [Sampler().sample(logits_of(70, seed=step), [entry])[0].token for step in range(30)]
    assert all(token % 3 == 0 for token in tokens) and len(set(tokens)) > 10


def test_allowed_tokens_that_only_end_the_answer_contradict_min_tokens() -> None:
    held = SamplingParams(min_tokens=2, stop_token_ids=(1,), allowed_token_ids=(0, 1))
    with pytest.raises(UsageError, match="allowed_token_ids must hold tokens that do not end the answer"):
        request(held, 4, eos_token_ids=[0])
    request(held, 4)  # 0 is a token like others
    request(replace(held, min_tokens=0), 4, eos_token_ids=[0])


@pytest.mark.parametrize("vocab", [1, 16, 65, 20011])
@pytest.mark.parametrize("logprobs", [0, 1, 5, 20])
def test_logprobs_are_the_models_own(vocab: int, logprobs: int) -> None:
    params = SamplingParams(logprobs=logprobs, temperature=0.5, presence_penalty=2.0, logit_bias={0: 5.0}, seed=1)
    logits = np.round(logits_of(vocab, 9), 1)  # with equals
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    entries = [request(params, vocab, [row % vocab]) for row in range(9)]
    for row, sampled in enumerate(Sampler().sample(logits, entries)):
        order = sorted(range(vocab), key=lambda token: (-exact[row, token], token))[:logprobs]
        assert [token for token, _ in sampled.top_logprobs] == order
        named = [(sampled.token, sampled.logprob), *sampled.top_logprobs]
        assert all(value is not None and abs(value - exact[row, token]) < LOGPROB for token, value in named)


def test_what_a_row_gets_does_not_depend_on_the_others() -> None:
    vocab, filters = 1003, [*FILTERS, {"temperature": 0.0}, {"logprobs": 3}, {"presence_penalty": 1.0, "logprobs": 1}]
    logits = logits_of(vocab, len(filters))

    def entries() -> list[SamplingRequest]:
        return [request(SamplingParams(seed=5, **entry), vocab, [1, 2, row]) for row, entry in enumerate(filters)]

    together = Sampler().sample(logits, entries())
    alone = [Sampler().sample(logits[row : row + 1], [entry])[0] for row, entry in enumerate(entries())]
    assert together == alone
    assert Sampler().sample(logits[::-1].copy(), entries()[::-1])[::-1] == together
    padded = np.full((len(filters), 1024), np.nan, np.float32)
    padded[:, :vocab] = logits
    assert Sampler().sample(padded[:, :vocab], entries()) == together
    for threads in (1, 2, 5):
        executor = _cpu.Executor("portable", threads, (1, 1, 1, 0, 0), [], 0)
        assert Sampler(executor.sample).sample(logits, entries()) == together


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"logprobs": 2}], ids=str)
@pytest.mark.parametrize("vocab", [1, 15, 16, 100, 129])
def test_nan_fails_its_row_alone(filters: dict[str, Any], vocab: int) -> None:
    clean = logits_of(vocab, 5)
    bad = clean.copy()
    bad[1, vocab // 2], bad[2, -1], bad[3] = np.nan, np.inf, -np.inf
    entries, siblings = ([request(SamplingParams(seed=1, **filters), vocab) for _ in range(5)] for _ in range(2))
    result, expected = Sampler().sample(bad, entries), Sampler().sample(clean, siblings)
    assert [entry.is_nan for entry in result] == [False, True, True, True, False]
    assert [result[0], result[4]] == [expected[0], expected[4]]
    assert [entry.position - entry.num_prompt_tokens for entry in entries] == [1, 0, 0, 0, 1]
    assert result[1] == SampledToken(0, is_nan=True)


def test_tokens_at_minus_infinity_are_never_drawn() -> None:
    logits = np.full((200, 70), -np.inf, np.float32)
    logits[:, [3, 69]] = 0.0
    for filters in FILTERS:
        sampled = Sampler().sample(logits, [request(SamplingParams(seed=s, **filters), 70) for s in range(200)])
        assert {entry.token for entry in sampled} <= {3, 69}
        assert not any(entry.is_nan for entry in sampled)


def test_penalties_may_make_a_row_impossible() -> None:
    """A finite row that overflows: its request fails, not the process."""
    logits = np.full((1, 2), 3e38, np.float32)
    entry = request(SamplingParams(repetition_penalty=0.01, seed=1), 2, [0, 1])
    assert Sampler().sample(logits, [entry])[0].is_nan


def test_a_seed_is_drawn_where_none_is_named() -> None:
    logits = np.zeros((1, 1 << 16), np.float32)
    tokens = {Sampler().sample(logits, [request(SamplingParams(), 1 << 16)])[0].token for _ in range(8)}
    assert len(tokens) > 4
    same = {Sampler().sample(logits, [request(SamplingParams(seed=-7), 1 << 16)])[0].token for _ in range(8)}
    assert len(same) == 1


def test_no_requests_no_tokens() -> None:
    assert Sampler().sample(np.zeros((0, 5), np.float32), []) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(["n", "max_tokens"], [-1, 1.5, True, "1"]),
        ("n", 0),
        ("n", 129),
        *itertools.product(["temperature", "min_p"], [-0.1, math.nan, math.inf, "0", None]),
        *itertools.product(["top_p"], [0, 0.0, 1.01, -1, math.nan]),
        *itertools.product(["top_k"], [-2, 0.5, 2**31]),
        *itertools.product(["presence_penalty", "frequency_penalty"], [-2.1, 2.1, math.nan]),
        *itertools.product(["repetition_penalty"], [0, -1.0, math.inf]),
        ("temperature", 10**400),
        pytest.param("seed", 10**5000, id="seed-of-5001-digits"),
        ("seed", 2**64),
        ("seed", 0.5),
        ("stop", 5),
        ("stop", {"text"}),
        ("stop", ("",)),
        ("stop", ("x",) * 65),
        ("stop", ("x" * 2048, "y" * 2049)),
        ("stop_token_ids", 1),
        ("stop_token_ids", (-1,)),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("logit_bias", [1]),
        *itertools.product(["allowed_token_ids"], [(), [], 5, (-1,), (1.0,), (True,), ("1",)]),
        *itertools.product(["ignore_eos", "skip_special_tokens", "include_stop_str_in_output"], [0, "no", None]),
        *itertools.product(["output_kind"], [1, "DELTA", None]),
        *itertools.product(["best_of"], [0, -1, 129, 1.5, True]),
        *itertools.product(["use_beam_search"], [1, None, "yes"]),
        *itertools.product(["length_penalty"], [2.0, math.nan, "1"]),
        *itertools.product(["early_stopping"], [True, "never", "maybe", None, 0]),
        ("temprature", 1),
    ],
)
def test_parameters_that_cannot_be_meant_are_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 17}, "n must be at most 16 with use_beam_search"),
        ({"best_of": 17}, "best_of must be at most 16 with use_beam_search"),
        ({"temperature": 0.5}, "temperature must be 0 with use_beam_search"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 with use_beam_search"),
        ({"length_penalty": 11}, "length_penalty must be between"),
        ({"early_stopping": "always"}, 'early_stopping must be True, False or "never"'),
        *(
            ({name: value}, f"{name} cannot be combined with use_beam_search")
            for name, value in {
                "allowed_token_ids": [1],
                "frequency_penalty": 1,
                "logit_bias": {1: 1},
                "min_tokens": 1,
                "presence_penalty": 1,
                "prompt_logprobs": 0,
                "repetition_penalty": 2,
                "stop": "x",
                "structured_outputs": {"regex": "a"},
            }.items()
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_go_with_beams_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**{"use_beam_search": True, "n": 4, "temperature": 0} | options)


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 2.0}, allowed_token_ids=[1, 2], n=3)
    copy, before = params.clone(), repr(params)
    assert copy == params and repr(copy) == before and copy is not params
    copy.logit_bias[2] = 1.0  # type: ignore[index]
    copy.n = 2
    assert repr(params) == before and copy != params
    params.stop, params.logit_bias = "end", None  # type: ignore[assignment]
    assert (params.clone().stop, params.clone().logit_bias) == (("end",), {}), "as new ones are"
    with pytest.raises(UsageError, match="did you mean temperature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "allowed_token_ids"])
def test_tokens_outside_of_the_vocabulary_are_refused(name: str) -> None:
    params = SamplingParams(**{name: {9: 1.0, 10: 1.0} if name == "logit_bias" else (9, 10, 3)})
    request(params, 11)
    with pytest.raises(UsageError, match="names token 10, and the vocabulary has 10"):
        request(params, 10)


def arguments(**change: Any) -> dict[str, Any]:
    """Arguments of _cpu.sample for two rows; `change` sets fields of the second row, or whole arguments."""
    rows = np.frombuffer(bytearray(request(SamplingParams(), 10).row * 2), _cpu.SAMPLING_ROW)
    result = {
        "logits": np.zeros((2, 10), np.float32),
        "rows": rows,
        "history": np.zeros(4, _cpu.TOKEN_COUNT),
        "biases": np.zeros(4, _cpu.TOKEN_BIAS),
        "allowed": np.ones((2, 1), np.uint32),
    }
    for name, value in change.items():
        if name in result:
            result[name] = value
        else:
            rows[name][1] = value
    return result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros((3, 10), np.float32)}, "differ in their number"),
        ({"logits": np.zeros((2, 0), np.float32)}, "no size"),
        ({"logits": np.zeros((10, 2), np.float32).T}, "contiguous"),
        ({"logits": np.zeros(10, np.float32)}, "two dimensions"),
        ({"history_end": 5}, "row 1: its entries end"),
        ({"history_end": -1}, "row 1: its entries end"),
        ({"bias_end": 5}, "row 1: its entries end"),
        ({"history": np.full(1, 10, _cpu.TOKEN_COUNT), "history_end": 1}, "row 1: a token is outside"),
        ({"biases": np.full(1, -1, _cpu.TOKEN_BIAS), "bias_end": 1}, "row 1: a token is outside"),
        ({"allowed": np.zeros((2, 2), np.uint32)}, "1 words a row"),
        ({"allowed": np.zeros((3, 1), np.uint32)}, "1 words a row"),
        ({"allowed": np.zeros(2, np.uint32)}, "1 words a row"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": np.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": np.nan}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": np.inf}, "penalties"),
        ({"logprobs": 1, "top_logprobs": 11}, "top_logprobs"),
        ({"logprobs": 1, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 0, "top_logprobs": 1}, "without logprobs"),
    ],
    ids=str,
)
def test_malformed_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _cpu.sample(**arguments(**change))


def test_arguments_of_other_types_are_refused() -> None:
    assert [is_nan for *_, is_nan in _cpu.sample(**arguments())] == [False, False]
    wrong = {"logits": np.zeros((2, 10)), "rows": np.zeros(2), "history": np.zeros(4), "allowed": np.ones((2, 1))}
    for name, value in wrong.items():
        with pytest.raises(TypeError):
            _cpu.sample(**arguments(**{name: value}))
