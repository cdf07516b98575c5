"""Beam search: the algorithm against transformers', and engines against a search without shared caches."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright import LLM, SamplingParams
from enginewright.runtime.core.beam_scorer import BeamScorer, EarlyStopping
from enginewright.runtime.sampling.sampler import SampledToken
from tests import tolerances
from tests.helpers.engines import built_tiny
from tests.helpers.late_executor import LateExecutor
from tests.helpers.tiny import tiny_config, tiny_model

PROMPT = [5, 77, 31, 200, 9]
NEW = 12
After = Callable[[Sequence[int], int], SampledToken]  # next token after some tokens, with that many of the likeliest


@cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(tiny_config(family))


def search(
    after: After, width: int, length_penalty: float, early_stopping: EarlyStopping, ends: Sequence[int]
) -> list[tuple[list[int], float]]:
    """Searches with `after`, which sees the whole text at each step; gives token ids of results, and their scores."""
    found = BeamScorer(width, NEW, length_penalty, early_stopping, ends)
    while found.advance(
        [after([*PROMPT, *(token.token for token in beam.tokens)], found.num_candidates) for beam in found.beams]
    ):
        pass
    return [
        ([token.token for token in beam.tokens], beam.score(len(beam.tokens), length_penalty))
        for beam, _ in found.answers()
    ]


def by_transformers(tokens: Sequence[int], count: int) -> SampledToken:
    with torch.inference_mode():
        logits = model_of("llama")(torch.tensor([list(tokens)])).logits[0, -1]
    values, ids = torch.log_softmax(logits, -1).topk(count)
    return SampledToken(int(ids[0]), float(values[0]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


@cache
def frequent() -> list[int]:
    """Tokens of the likeliest answers: where they are ends, searches end at all lengths."""
    tokens = [token for answer, _ in search(by_transformers, 6, 1.0, False, []) for token in answer]
    return sorted(set(tokens), key=lambda token: (-tokens.count(token), token))


@pytest.mark.parametrize("num_ends", [0, 2])
@pytest.mark.parametrize("length_penalty", [1.0, -1.3, 2.5])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width", [4])
def test_answers_are_those_of_transformers(
    width: int, early_stopping: EarlyStopping, length_penalty: float, num_ends: int
) -> None:
    ends = frequent()[1 : 1 + num_ends]
    generated = model_of("llama").generate(  # type: ignore[operator]
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=NEW,
        do_sample=False,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=ends or None,
        pad_token_id=306,
        return_dict_in_generate=True,
        output_scores=True,
    )
    expected = []
    for row in generated.sequences[:, len(PROMPT) :].tolist():
        length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        expected.append(row[:length])
    found = search(by_transformers, width, length_penalty, early_stopping, ends)
    assert [answer for answer, _ in found] == expected
    assert np.allclose([score for _, score in found], generated.sequences_scores.tolist(), rtol=1e-5)


def beams(width: int = 4, **options: Any) -> SamplingParams:
    return SamplingParams(
        n=width, use_beam_search=True, temperature=0, **{"max_tokens": NEW, "logprobs": 0, "ignore_eos": True} | options
    )


def asked(llm: LLM, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], float]]:
    (output,) = llm.generate([prompt], params)
    assert [one.finish_reason for one in output.outputs].count("error") == 0
    return [(one.token_ids, one.cumulative_logprob or 0.0) for one in output.outputs]


def step_by_step(llm: LLM, width: int, ends: Sequence[int]) -> list[tuple[list[int], float]]:
    """Runs the search with a request of its own for every step."""

    def after(tokens: Sequence[int], count: int) -> SampledToken:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=count, ignore_eos=True)
        (output,) = llm.generate([list(tokens)], params)
        (named,) = output.outputs[0].logprobs or ()
        ranked = sorted((entry.rank, token, entry.logprob) for token, entry in named.items() if entry.rank is not None)
        return SampledToken(ranked[0][1], ranked[0][2], tuple((token, logprob) for _, token, logprob in ranked))

    return search(after, width, 0.0, False, ends)


LIMITS: dict[str, Any] = {"threads": 1, "max_model_len": 64, "kv_cache_memory": 4 << 20}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "qwen3_next"])
def test_forked_caches_change_no_bit(family: str) -> None:
    """Beams that share pages, windows and recurrent states equal single texts without a cache."""
    with LLM(built_tiny(family), **LIMITS, max_num_seqs=8, enable_prefix_caching=False) as llm:
        plain = step_by_step(llm, 4, ())
        ends = [sorted({token for tokens, _ in plain for token in tokens[3:]})[1]]
        expected = step_by_step(llm, 4, ends)
        assert asked(llm, PROMPT, beams(length_penalty=0.0)) == plain
        assert asked(llm, PROMPT, beams(length_penalty=0.0, stop_token_ids=ends)) == expected != plain
        assert llm.stats().kv_usage == 0 and llm.stats().num_running == 0


def test_beams_share_what_is_computed() -> None:
    with LLM(built_tiny("llama"), **LIMITS, max_num_seqs=8) as llm:
        asked(llm, PROMPT, beams(4))
        assert llm.stats().computed_tokens == len(PROMPT) + 4 * (NEW - 1)
        assert llm.stats().num_preemptions == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"max_num_seqs": 16, "kv_cache_memory": 72 << 10}], ids=str)
def test_beams_without_room_take_turns(limits: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of 6 and 3 beams and a completion share two slots, or few KV blocks, and give the same tokens."""
    if ahead:
        monkeypatch.setattr("enginewright.runtime.device.devices.CpuExecutor", LateExecutor)
    path, greedy = built_tiny("llama"), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts, params = [PROMPT, [8, 9], [1, 2, 3]], [beams(6), beams(3), greedy]
    with LLM(path, **LIMITS, max_num_seqs=16) as llm:
        expected = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)]
        assert llm.stats().num_preemptions == 0
    with LLM(path, **LIMITS | limits) as llm:
        found = [[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)]
        assert llm.stats().num_preemptions > 10 and llm.stats().kv_usage == 0
    assert found == expected


def test_beams_next_to_draft_tokens_are_the_same() -> None:
    prompts, params = [PROMPT, [8, 9] * 8], [beams(4), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)]
    found = []
    for speculate in ("off", "ngram"):
        with LLM(built_tiny("llama"), **LIMITS, max_num_seqs=8, speculate=speculate) as llm:
            found.append([[one.token_ids for one in output.outputs] for output in llm.generate(prompts, params)])
    assert found[0] == found[1]


def test_answers_of_an_engine_are_those_of_transformers() -> None:
    """Scores of complete beams are close to those of transformers where weights alone are rounded, and so are beams."""
    generated = model_of("llama").generate(  # type: ignore[operator]
        torch.tensor([PROMPT]),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    with LLM(built_tiny("llama"), **LIMITS, max_num_seqs=8) as llm:
        found = asked(llm, PROMPT, beams(4))
    assert [tokens for tokens, _ in found] == generated.sequences[:, len(PROMPT) :].tolist()
    scores = [logprob / NEW for _, logprob in found]
    assert np.allclose(scores, generated.sequences_scores.tolist(), atol=tolerances.BEAM_SCORE)
