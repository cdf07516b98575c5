"""Sampling on CUDA, in emulation: against the CPU's, and against the reference in float64."""

import faulthandler
import itertools
import math
import os
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.plan import Launch, linear
from enginewright.plugins.kernel import Matrix, Specialization
from enginewright.plugins.sampling_cuda import SAMPLING_SOURCES, THREADS, sampling_launch
from enginewright.runtime.device.cuda.device import Bytes
from enginewright.runtime.device.cuda.sampling import SAMPLED_ROW, TOPS, DeviceSampler, SamplerLimits
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.request import SamplingRequest
from enginewright.runtime.sampling.sampler import Entries, Fields, SampledToken, Sampler, _Batch
from enginewright.runtime.sampling.token_mask import Mask, num_words
from tests.emulator.device import EmulatedDevice
from tests.emulator.kernels import SCHEDULES, EmulationError, Kernels
from tests.helpers.sampling_reference import (
    FILTERS,
    check_draw,
    chi_square,
    logits_of,
    masked_rows,
    noise,
    probabilities,
    request,
    same_draws,
)
from tests.tolerances import LOGPROB

# Vocabularies and threads: lists of what is likeliest hold 256, 2048 and 64 tokens.
SMALL, LARGE, TINY = (1003, 128), (5003, THREADS), (37, 32)


def _launch(vocab: int, threads: int) -> Launch:
    return sampling_launch(Matrix("f32", linear(logit_rows=1), vocab, _stride(vocab), vocab), threads)


def _stride(vocab: int) -> int:
    return -(-vocab // 64) * 64 + 64


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels([(SAMPLING_SOURCES["sample_rows"], _launch(*size).kernel) for size in (SMALL, LARGE, TINY)])


class Draws:
    """`draw` is what _cpu.sample is. schedules are taken in turn."""

    def __init__(self, kernels: Kernels, size: tuple[int, int]) -> None:
        self.kernels, self.launch, self.vocab = kernels, _launch(*size), size[0]
        self.schedules = itertools.cycle(SCHEDULES)
        self.newest: list[int] | None = None  # a row's token that the host does not know, if some do not

    def raw(
        self,
        logits: NDArray[np.float32],
        rows: Entries,
        history: Entries,
        biases: Entries,
        allowed: Mask | None,
        schedule: str,
    ) -> tuple[Entries, Entries]:
        """What the kernel writes; logits are afterwards what they were, and a row more stays poison."""
        count = len(rows)
        arena = np.full((count, _stride(self.vocab)), np.nan, np.float32)
        arena[:, : self.vocab] = logits
        before = arena.copy()
        order = np.random.default_rng(count).permutation(count)
        known = np.full(count, -7, np.int32)
        known[order] = self.newest if self.newest is not None else -7
        entries = np.concatenate([history.view(np.int64), biases.view(np.int64), np.zeros(1, np.int64)])
        sampled, tops = np.full(count + 1, -7, np.int32).repeat(3), np.full((count + 1) * 40, -7, np.int32)
        operands = {
            "rows": rows.copy(),
            "entries": entries,
            "saved": np.full(len(entries), np.nan, np.float32),
            "allowed": allowed,
            "known": known,
            "logit_rows": order.astype(np.int32),
            "logits": arena,
            "sampled": sampled,
            "tops": tops,
        }
        arguments = [operands[role] for role in self.launch.arguments]
        sizes, launch = np.array([count, count, count, 1, 1], np.int32), self.launch
        self.kernels.launch(
            launch.kernel, [count + 1], launch.threads, launch.shared_bytes, sizes, *arguments, schedule=schedule
        )
        np.testing.assert_array_equal(arena, before)
        assert (sampled[3 * count :] == -7).all() and (tops[40 * count :] == -7).all()
        return sampled.view(SAMPLED_ROW)[:count], tops.view(TOPS)[:count]

    def draw(self, logits: Any, rows: Entries, history: Entries, biases: Entries, allowed: Mask | None) -> list[Fields]:
        sampled, tops = self.raw(logits, rows, history, biases, allowed, next(self.schedules))
        fields: list[Fields] = []
        for row, one, top in zip(rows, sampled, tops, strict=True):
            named = int(row["top_logprobs"])
            if one["status"]:
                fields.append((0, None, (), True))
                continue
            pairs = tuple(zip(top["tokens"][:named].tolist(), top["logprobs"][:named].tolist(), strict=True))
            assert (top["tokens"][named:] == -7).all()
            fields.append((int(one["token"]), float(one["logprob"]) if row["logprobs"] else None, pairs, False))
        return fields


def both(draws: Draws, logits: NDArray[np.float32], params: list[SamplingParams], **more: Any) -> list[Any]:
    """[(what the kernel gives, what the CPU gives)], after a history of some tokens."""

    def requests() -> list[SamplingRequest]:
        made = []
        for index, one in enumerate(params):
            prompt = [token % draws.vocab for token in (3, 1, 4, 1, 5, index)]
            made.append(request(one, draws.vocab, prompt, choice=index, **more))
            for token in (2, 7, 1, 8, 2, 8):
                made[-1].begin()
                made[-1].end(token % draws.vocab)
        return made

    return list(zip(Sampler(draws.draw).sample(logits, requests()), Sampler().sample(logits, requests()), strict=True))


EXTRA: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 80},  # by the bound of threads: 88 of SMALL
    {"top_k": 150},  # by digits, into the list
    {"top_k": 600, "top_p": 0.7},  # more than the list holds
    {"top_k": 3, "min_p": 0.2, "presence_penalty": 1.5, "frequency_penalty": 0.25, "repetition_penalty": 1.2},
    {"top_p": 0.8, "logit_bias": {9: 1.5, 2: -5.0, 36: -100.0, 1: 5.0}, "repetition_penalty": 0.8},
    {"temperature": 0.0, "logit_bias": {11: 30.0, 12: 30.0}, "frequency_penalty": -2.0},
]


@pytest.mark.parametrize("size", [SMALL, TINY], ids=["small", "tiny"])
@pytest.mark.parametrize("ties", [False, True])
def test_tokens_are_the_cpus(kernels: Kernels, size: tuple[int, int], ties: bool) -> None:
    """Tokens agree, but top-p may keep one more or one fewer if its sum is within 1e-7: one of 1000 would be many.
    With ties, greedy, top-k and top-p have many equals to choose from.
    """
    draws, different, count = Draws(kernels, size), 0, 0
    for spread, filters in itertools.product([0.2, 1.0, 5.0], [*FILTERS, *EXTRA]):
        logits = logits_of(size[0], 8, spread=spread)
        logits = np.round(logits) if ties else logits
        for mine, cpus in both(draws, logits, [SamplingParams(seed=1, **filters)] * 8):
            assert mine == cpus or "top_p" in filters
            different += mine != cpus
            count += 1
    assert different <= count // 1000, f"{different} of {count} draws"


def test_logits_of_equal_weights_are_equals_in_top_p(kernels: Kernels) -> None:
    """Logits differ by units in the last place, and weights at a high temperature by less: some 25 have the same."""
    rng, params = np.random.default_rng(6), []
    units = np.stack([rng.permutation(SMALL[0]) for _ in range(16)])
    for share in range(16):
        params.append(SamplingParams(seed=3, temperature=50.0, top_p=0.06 + 0.01 * share if share > 0 else 1e-6))
    results = both(Draws(kernels, SMALL), (1 + units * 2.0**-23).astype(np.float32), params)
    assert [mine.token for mine, _ in results] == [cpus.token for _, cpus in results]


@pytest.mark.parametrize("filters", [{"top_k": 12, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.001}], ids=str)
def test_draws_are_those_of_the_reference(kernels: Kernels, filters: dict[str, Any]) -> None:
    """A thousand threads sample the reference's tokens."""
    params, vocab = SamplingParams(seed=9, temperature=0.9, **filters), LARGE[0]
    logits = logits_of(vocab, 4, spread=3.0)
    requests = [request(params, vocab, [0] * (row + 1)) for row in range(4)]
    for row, sampled in enumerate(Sampler(Draws(kernels, LARGE).draw).sample(logits, requests)):
        chances = probabilities(logits[row].astype(np.float64), params)
        check_draw(sampled.token, chances, noise(9, 0, row + 1, vocab))


@pytest.mark.parametrize("filters", [{"temperature": 0.7}, {"top_k": 9, "min_p": 0.02}, {"top_p": 0.95}], ids=str)
def test_draws_have_the_right_distribution(kernels: Kernels, filters: dict[str, Any]) -> None:
    draw, logits = Draws(kernels, TINY).draw, logits_of(TINY[0], spread=1.0)[0]
    statistic, freedom = chi_square(SamplingParams(**filters), logits, 1500, draw)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # 4 deviations; the seeds are fixed


def test_a_share_that_is_a_whole_number_of_tokens_has_no_token_more(kernels: Kernels) -> None:
    logits = np.full((200, TINY[0]), -np.inf, np.float32)
    logits[:, 3:11] = 2.0
    requests = [request(SamplingParams(top_p=0.375, seed=seed), TINY[0]) for seed in range(200)]
    assert {one.token for one in Sampler(Draws(kernels, TINY).draw).sample(logits, requests)} == {3, 4, 5}


@pytest.mark.parametrize("spread", [0.0, 3.0])  # all alike: more than the list holds
@pytest.mark.parametrize("changed", [{}, {"logit_bias": {0: 8.0, 2: -1.0}, "presence_penalty": 2.0}], ids=str)
def test_logprobs_are_the_models_own(kernels: Kernels, spread: float, changed: dict[str, Any]) -> None:
    draws = Draws(kernels, SMALL)
    params = [SamplingParams(logprobs=named, seed=1, top_p=0.9, **changed) for named in (0, 1, 5, 20)]
    for mine, cpus in both(draws, np.round(logits_of(SMALL[0], 4, spread=spread), 1), params):
        assert mine.token == cpus.token and abs(mine.logprob - cpus.logprob) < LOGPROB
        assert [token for token, _ in mine.top_logprobs] == [token for token, _ in cpus.top_logprobs]
        for (_, value), (_, expected) in zip(mine.top_logprobs, cpus.top_logprobs, strict=True):
            assert abs(value - expected) < LOGPROB


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "logprobs": 2}], ids=str)
@pytest.mark.parametrize("size", [SMALL, TINY], ids=["small", "tiny"])
def test_masks_leave_the_tokens_that_the_cpu_has_left(
    kernels: Kernels, size: tuple[int, int], filters: dict[str, Any]
) -> None:
    logits, given = masked_rows(size[0], SamplingParams(seed=2, repetition_penalty=1.3, **filters))
    mine, cpus = Draws(kernels, size).draw(logits, *given), _cpu.sample(logits, *given)
    same_draws(mine, cpus)
    assert [is_nan for *_, is_nan in mine] == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.0}, {"top_k": 3}, {"logprobs": 2, "repetition_penalty": 0.01}], ids=str
)
@pytest.mark.parametrize("size", [SMALL, TINY], ids=["small", "tiny"])
def test_nan_fails_its_row_alone(kernels: Kernels, size: tuple[int, int], filters: dict[str, Any]) -> None:
    clean = logits_of(size[0], 6)
    bad = clean.copy()
    bad[1, size[0] // 2], bad[2, -1], bad[3], bad[4, 1] = np.nan, np.inf, -np.inf, 3e38
    results = both(Draws(kernels, size), bad, [SamplingParams(seed=1, **filters)] * 6)
    overflows = "repetition_penalty" in filters  # 3e38 / 0.01
    assert [mine.is_nan for mine, _ in results] == [False, True, True, True, overflows, False]
    assert all(mine == cpus for mine, cpus in results if "logprobs" not in filters)
    assert results[1][0] == SampledToken(0, is_nan=True)
    unharmed = both(Draws(kernels, size), clean, [SamplingParams(seed=1, **filters)] * 6)
    assert [results[row][0] for row in (0, 5)] == [unharmed[row][0] for row in (0, 5)]


MIXTURE = [
    *({"seed": 5, **filters} for filters in [*FILTERS, *EXTRA]),
    {"temperature": 0.0, "repetition_penalty": 5.0},
    {"logprobs": 20, "presence_penalty": 1.0, "logit_bias": {2: 2.0, 1: 80.0}},
    {"seed": 5, "top_p": 0.5},
    {"seed": 5, "top_p": 0.5},
]
TIES = {-2: 600, -1: 200}  # of the last rows: equals, of which top-p takes some; more than the list holds, and fewer


Given = tuple[Entries, Entries, Entries, Mask | None]


def _mixture() -> tuple[NDArray[np.float32], Given]:
    """Rows of all kinds, and what `draw` is given for them."""
    given: list[Given] = []

    def keep(_: Any, rows: Entries, history: Entries, biases: Entries, allowed: Mask | None) -> list[Fields]:
        given.append((rows.copy(), history.copy(), biases.copy(), allowed))
        return [(0, None, (), True)] * len(rows)

    logits = np.round(logits_of(SMALL[0], len(MIXTURE), spread=1.5), 1)
    for row, equals in TIES.items():
        logits[row] = np.where(np.random.default_rng(equals).permutation(SMALL[0]) < equals, 1.0, -30.0)
    likeliest = logits.argmax(-1).tolist()
    requests = [
        request(SamplingParams(**one), SMALL[0], [1, 2, token]) for one, token in zip(MIXTURE, likeliest, strict=True)
    ]
    Sampler(keep).sample(logits, requests)
    return logits, given[0]


def test_neither_company_nor_schedule_matters_and_each_barrier_does(kernels: Kernels) -> None:
    draws, (logits, given) = Draws(kernels, SMALL), _mixture()
    rows, history, biases, _ = given

    def run(schedule: str) -> bytes:
        sampled, tops = draws.raw(logits, *given, schedule=schedule)
        return sampled.tobytes() + tops.tobytes()

    expected = run("forward")
    assert run("reverse") == run("random") == expected
    for row in (3, 12, len(rows) - 1):
        own = rows[row : row + 1].copy()
        begins = [int(rows[row - 1][name]) for name in ("history_end", "bias_end")]
        entries = history[begins[0] : rows[row]["history_end"]], biases[begins[1] : rows[row]["bias_end"]]
        own["history_end"], own["bias_end"] = len(entries[0]), len(entries[1])
        sampled, tops = draws.raw(logits[row : row + 1], own, *entries, None, "forward")
        assert sampled.tobytes() == expected[SAMPLED_ROW.itemsize * row :][: SAMPLED_ROW.itemsize]
        assert tops.tobytes() == expected[SAMPLED_ROW.itemsize * len(rows) + TOPS.itemsize * row :][: TOPS.itemsize]
    assert not kernels.sites or len(kernels.sites) > 10

    def noticed() -> bool:
        """True if a schedule has another result, in a process of its own: without a barrier, writes may go anywhere."""
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            try:
                same = all(run(schedule) == expected for schedule in SCHEDULES)
            except (EmulationError, AssertionError):
                same = False
            os._exit(0 if same else 1)
        return os.waitpid(child, 0)[1] != 0

    for site in kernels.sites:
        with kernels.without(site):
            assert noticed(), f"nothing is missed without the barrier at {site}"


class CountingDevice(EmulatedDevice):
    def __init__(self, kernel: Specialization) -> None:
        super().__init__({"sample": kernel})
        self.copied_bytes: list[int] = []

    def upload(self, address: int, data: Bytes) -> None:
        super().upload(address, data)
        self.copied_bytes.append(data.nbytes)

    def download(self, data: Bytes, address: int) -> None:
        super().download(data, address)
        self.copied_bytes.append(-data.nbytes)


def test_one_copy_goes_there_and_one_comes_back() -> None:
    """Each copy has a few bytes a row; memory for the longest histories and most biases is allocated at the start."""
    vocab, threads = SMALL
    launch = _launch(vocab, threads)
    device = CountingDevice(Specialization(SAMPLING_SOURCES["sample_rows"], launch.kernel))
    max_rows = len(MIXTURE) + 2
    logits_there, sizes_there = device.allocate(max_rows * _stride(vocab) * 4), device.allocate(32)
    known_there = device.allocate(max_rows * 4)  # zeros: also the places of the rows among the tokens
    named = msgspec.structs.replace(launch, kernel="sample")
    places = {"sizes": sizes_there, "logits": logits_there, "known": known_there, "logit_rows": known_there}
    limits = SamplerLimits.of(max_rows, length=2 * vocab, vocab=vocab, num_ends=2)
    sampler = DeviceSampler(named, limits, places, device)
    taken = len(device._memory)

    def draw(logits: Any, rows: Entries, history: Entries, biases: Entries, allowed: Mask | None) -> list[Fields]:
        arena = np.full((len(rows), _stride(vocab)), np.nan, np.float32)
        arena[:, :vocab] = logits
        device.upload(logits_there, arena.reshape(-1).view(np.uint8))
        device.upload(sizes_there, np.array([len(rows)] * 5, np.int32).view(np.uint8))
        device.copied_bytes.clear()
        return list(sampler.draw(rows, history, biases, allowed))

    logits, given = _mixture()
    same_draws(draw(logits, *given), _cpu.sample(logits, *given))
    assert len(device.copied_bytes) == 2

    plain = [request(SamplingParams(seed=seed), vocab) for seed in range(4)]
    broken = logits[:4].copy()
    broken[2, 5] = np.nan
    assert [one.is_nan for one in Sampler(draw).sample(broken, plain)] == [False, False, True, False]
    assert device.copied_bytes == [4 * _cpu.SAMPLING_ROW.itemsize, -4 * SAMPLED_ROW.itemsize]

    masked, given = masked_rows(vocab, SamplingParams(seed=2, top_p=0.9))
    same_draws(draw(masked, *given), _cpu.sample(masked, *given))
    rows = len(masked)
    assert device.copied_bytes == [
        rows * _cpu.SAMPLING_ROW.itemsize,
        rows * num_words(vocab) * 4,
        -rows * SAMPLED_ROW.itemsize,
    ]
    assert draw(masked[:4], *_Batch(plain).arguments()) == _cpu.sample(masked[:4], *_Batch(plain).arguments())

    biases = dict.fromkeys(range(1, vocab), 0.25)
    params = SamplingParams(seed=1, repetition_penalty=1.4, temperature=0.3, logprobs=0, logit_bias=biases)
    logits = np.concatenate([logits] * 2)[:max_rows]
    long = [[request(params, vocab, list(range(vocab))) for _ in range(max_rows)] for _ in range(2)]
    assert sum(len(one.history) + len(one.biases) for one in long[0]) >= limits.entries - 2 * max_rows
    for one, other in zip(Sampler(draw).sample(logits, long[0]), Sampler().sample(logits, long[1]), strict=True):
        assert one.token == other.token
    assert len(device._memory) == taken


def test_a_token_that_is_being_drawn_counts(kernels: Kernels) -> None:
    """A token that is still being sampled counts, in the history or not: the next one is as if it were known."""
    params = [
        SamplingParams(seed=4, temperature=2.0, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=-0.5),
        SamplingParams(temperature=0.0, frequency_penalty=-2.0, logprobs=2),
        SamplingParams(seed=4, top_k=5, presence_penalty=2.0, logit_bias={3: 4.0}),
    ] * 3
    draws, logits = Draws(kernels, TINY), logits_of(TINY[0], len(params), spread=0.5)
    draws.newest = [1, 7, 9, 20, 36, 3, 0, 9, 2]
    asked = [[request(one, TINY[0], [1, 7, 3]) for one in params] for _ in range(2)]
    for late, known, newest in zip(*asked, draws.newest, strict=True):
        for asked_for, tokens in ((late, [9]), (known, [9, newest])):
            for token in tokens:
                asked_for.begin()
                asked_for.end(token)
        late.begin()
    with_name = Sampler().sample(logits, asked[1])
    late = list(draws.draw(logits, *_Batch(asked[0]).arguments()))
    assert [one.token for one in with_name] == [one[0] for one in late]
    for one, other in zip(with_name, late, strict=True):
        assert [token for token, _ in one.top_logprobs] == [token for token, _ in other[2]]
    draws.newest = [2] * 9
    assert [one.token for one in with_name] != [one[0] for one in draws.draw(logits, *_Batch(asked[0]).arguments())]
