"""Requests of all kinds at once, run with and without draft tokens: the completions have to be the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.outputs import Delta, merge
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.speculation.proposer import DraftToken, Proposer
from enginewright.runtime.step.sequence import TokenSequence

LIMITS: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 6, "max_num_batched_tokens": 48, "threads": 1}
KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 0, "ignore_eos": True},
    {"logprobs": 3},
    {"top_p": 0.8, "temperature": 0.7, "prompt_logprobs": 1},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "temperature": 0},
    {"frequency_penalty": 0.3, "top_k": 20, "logprobs": 0},
    {"stop": ["e", " a", "t"], "min_tokens": 5},
    {"n": 3, "temperature": 1.2},
    {"stop_token_ids": list(range(0, 300, 9)), "min_p": 0.01, "logit_bias": {5: 4.0}},
    {"temperature": 0, "structured_outputs": {"regex": "(abc|xyz){3,9}[0-9]{8}"}},
)


@dataclass(frozen=True)
class Answer:
    """One choice of a request, whole or as far as it came before it was aborted."""

    text: str
    tokens: tuple[SampledToken, ...]
    end: tuple[str | None, int | str | None]  # finish_reason and stop_reason
    scored: tuple[SampledToken | None, ...]  # the prompt's tokens, if they were asked for
    asked: bytes  # parameters, seed and choice, which no other has


def requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams, int | None]]:
    """Prompts that repeat themselves, parameters, and after how many tokens the request is aborted, if so."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        piece = random.integers(3, 300, random.integers(2, 12)).tolist()
        prompt = (piece * int(random.integers(1, 8)))[: int(random.integers(1, 60))]
        kind = KINDS[number % len(KINDS)]
        params = SamplingParams(seed=number, max_tokens=int(random.integers(8, 50)), **kind)
        made.append((prompt, params, int(random.integers(1, 20)) if random.random() < 0.15 else None))
    return made


def answers(engine: Engine, count: int, seed: int = 0, **limits: Any) -> tuple[dict[tuple[int, int], Answer], Stats]:
    """Generates completions of `count` mixed requests, which arrive two at a time.

    Returns:
        The completions by numbers of request and choice, and the engine's statistics.
    """
    core = EngineCore(engine, runtime_config(**{**LIMITS, **limits}))
    todo = list(enumerate(requests(count, seed)))[::-1]
    deltas: dict[tuple[int, int], list[Delta]] = {}
    numbers, abort_after, asked = {}, {}, {}
    while todo or core.has_work:
        for number, (prompt, params, after) in [todo.pop() for _ in range(min(2, len(todo)))]:
            request = core.request(prompt, params, lambda _: None, cache_salt=str(number % 3))
            numbers[id(request)], abort_after[number], asked[number] = number, after, request
            core.add(request)
        for request, delta in core.step():
            number = numbers[id(request)]
            deltas.setdefault((number, delta.index), []).append(delta)
            written = sum(len(one.tokens) for one in deltas[number, delta.index])
            after = abort_after[number]
            if after is not None and written >= after:
                for _, last in core.abort(request):
                    deltas.setdefault((number, last.index), []).append(last)
    stats = core.stats()
    core.close()
    wholes = {key: merge(each)[0] for key, each in deltas.items()}
    return {
        key: Answer(
            whole.text,
            whole.tokens,
            (whole.finish_reason, whole.stop_reason),
            tuple(asked[key[0]].prompt_logprobs) if key[1] == 0 else (),
            asked_by(asked[key[0]].completions[key[1]].sequence),
        )
        for key, whole in wholes.items()
    }, stats


def asked_by(sequence: TokenSequence) -> bytes:
    assert sequence.request is not None
    return sequence.request.row


class Recorded(Proposer):
    """Drafts the tokens of known completions; about every eighth draft token is random.

    Args:
        known: tokens of completions by `Answer.asked`.
    """

    first_rates = (1.0,)

    def __init__(self, known: dict[bytes, list[int]]) -> None:
        self._known = known
        self._random = np.random.default_rng(0)
        self._made: dict[TokenSequence, int] = {}

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [0] * len(sequences)

    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        self._made = dict.fromkeys(sequences, 0)

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        return [self._draft(sequence) for sequence in sequences]

    def end(self, sequence: TokenSequence) -> None:
        """Does nothing: it keeps nothing of a sequence but a counter."""

    def close(self) -> None:
        """Does nothing: it holds no resources."""

    def _draft(self, sequence: TokenSequence) -> DraftToken | None:
        place = len(sequence.token_ids) - sequence.num_prompt_tokens + self._made[sequence]
        answer = self._known.get(asked_by(sequence), [])
        self._made[sequence] += 1
        if self._random.random() < 1 / 8:
            return DraftToken(int(self._random.integers(0, 307)), 0)
        return DraftToken(answer[place], 0) if place < len(answer) else None


def check_draft_tokens(engine: Engine, count: int, more_than: int, **limits: Any) -> float:
    """Checks that no completion depends on draft tokens.

    Args:
        engine: the engine that answers.
        count: number of requests.
        more_than: the number that draft tokens have to exceed.
        limits: further keys of the configuration with speculation.

    Returns:
        The share of draft tokens that were accepted.
    """
    plain, _ = answers(engine, count, speculate="off")
    drafted, after = answers(engine, count, speculate_tokens=4, **limits)
    check_same(plain, drafted)
    assert after.speculation is not None and sum(after.speculation.drafted) > more_than
    return sum(after.speculation.accepted) / sum(after.speculation.drafted)


def check_same(plain: dict[tuple[int, int], Answer], drafted: dict[tuple[int, int], Answer]) -> None:
    """Checks that all completions are the same bits, and aborted ones as far as both go."""
    aborted = {number for (number, _), answer in (*plain.items(), *drafted.items()) if answer.end[0] == "abort"}
    assert {key for key in plain if key[0] not in aborted} == {key for key in drafted if key[0] not in aborted}
    for key in plain.keys() & drafted.keys():
        one, other = plain[key], drafted[key]
        if key[0] in aborted:
            both = min(len(one.tokens), len(other.tokens))
            assert one.tokens[:both] == other.tokens[:both], key
        else:
            assert one == other, key
