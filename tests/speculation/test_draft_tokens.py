"""Several tokens in a step: draft tokens, right and wrong ones, change no bit of a completion."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.core.completion import Completion
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.outputs import Delta, merge
from enginewright.runtime.core.request import Request
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken
from tests.helpers.engines import built_tiny

LIMITS: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 4, "max_num_batched_tokens": 32, "threads": 1}
NEVER, VOCAB = 306, 307
ASKED = [
    SamplingParams(seed=1, max_tokens=60, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=45, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(seed=2, n=2, max_tokens=40, min_tokens=30, stop_token_ids=list(range(0, VOCAB, 5))),
    # Queued after the others. With this seed it ends before the first request does, where none is preempted, so that
    # the first one decides how many steps there are.
    SamplingParams(seed=4, max_tokens=50, stop=["e", "t", "a"], min_tokens=9, allowed_token_ids=list(range(3, 300))),
]


@pytest.fixture(scope="module", params=["gemma3_text", "qwen3_5_text"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with windows, and one with a state that cannot be rolled back."""
    with Engine.open(built_tiny(request.param, tie_word_embeddings=False)) as opened:
        yield opened


def answers(engine: Engine, draft: Any = None, **limits: Any) -> tuple[list[tuple[str, list[SampledToken], Any]], int]:
    """Generates completions; gives text, tokens and end of each, and the number of steps that they took.

    Args:
        engine: the engine that generates.
        draft: draft tokens by a completion's number and its tokens so far; None: no draft tokens.
        limits: keys of the configuration that differ from LIMITS.
    """
    core = EngineCore(engine, runtime_config(**{**LIMITS, **limits}))
    prompts = torch.randint(3, 300, (len(ASKED), 21), generator=torch.Generator().manual_seed(5)).tolist()
    deltas: dict[tuple[int, int], list[Delta]] = {}
    requests: list[Request] = []
    going: list[tuple[int, Completion]] = []
    for number, (prompt, params) in enumerate(zip(prompts, ASKED, strict=True)):
        request = core.request(prompt, params, lambda _: None)
        going += [(number, completion) for completion in request.completions]
        core.add(request)
        requests.append(request)
    steps = 0
    while core.has_work:
        steps += 1
        for request, delta in core.step():
            deltas.setdefault((requests.index(request), delta.index), []).append(delta)
        for number, completion in going:
            sequence = completion.sequence
            if draft is not None and not completion.finished and len(sequence.token_ids) > sequence.num_prompt_tokens:
                written = sequence.token_ids[sequence.num_prompt_tokens :]
                core.propose(completion, draft((number, completion.index), written))
    core.close()
    wholes = [merge(deltas[key])[0] for key in sorted(deltas)]
    return [(whole.text, list(whole.tokens), (whole.finish_reason, whole.stop_reason)) for whole in wholes], steps


@pytest.mark.parametrize("limits", [{}, {"kv_cache_memory": 200_000}], ids=["whole", "preempted"])
def test_draft_tokens_change_nothing(engine: Engine, limits: dict[str, Any]) -> None:
    plain, plain_steps = answers(engine, **limits)
    keys = [(number, index) for number, params in enumerate(ASKED) for index in range(params.n)]
    known = {key: [one.token for one in tokens] for key, (_, tokens, _) in zip(keys, plain, strict=True)}
    ends = {reason for _, _, (reason, _) in plain}
    assert ends == {"length", "stop"}

    def partly_right(key: tuple[int, int], written: list[int]) -> list[int]:
        """Up to five, and every third time a wrong one among them."""
        rest = known[key][len(written) : len(written) + len(written) % 6]
        if rest and len(written) % 3 == 0:
            rest[len(written) % len(rest)] = NEVER
        return rest

    drafted, steps = answers(engine, partly_right, **limits)
    assert drafted == plain
    assert steps < plain_steps
    wrong, wrong_steps = answers(engine, lambda *_: [NEVER, NEVER], **limits)
    assert wrong == plain and wrong_steps == plain_steps
