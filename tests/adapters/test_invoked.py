"""Adapters that tokens invoke (activated LoRA): what comes before is the base's, and shares its KV cache."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from enginewright import LLM, LoRARequest, SamplingParams
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.errors import EngineError, UsageError
from enginewright.runtime.core.outputs import RequestOutput
from tests.helpers.adapters import logits, prepared, trained
from tests.helpers.engines import folder_of_engines
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model
from tests.tolerances import ADAPTED_LOGPROBS

LIMITS: dict[str, Any] = {"kv_cache_memory": 64 << 20, "threads": 1, "max_num_batched_tokens": 23, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
INVOCATION = [7, 8, 9]
CHOICES: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"], "task_type": "CAUSAL_LM"}


@cache
def invoked() -> tuple[Path, LoRARequest, Any]:
    """An engine, an adapter of it, and PEFT's model with the adapter."""
    folder, config = folder_of_engines() / "invoked", tiny_config("llama")
    folder.mkdir()
    model, engine = tiny_model(config), folder / "tiny.engine"
    build_engine(MemoryCheckpoint.of(model, config), BuildConfig(gate=None), engine)
    adapted = trained(model, folder / "judge", alora_invocation_tokens=INVOCATION, **CHOICES)
    return engine, LoRARequest("judge", 1, str(prepared(engine, folder / "judge"))), adapted


def text(seed: int, count: int) -> list[int]:
    return [20 + (seed * 31 + index * 7) % 90 for index in range(count)]


def answer(output: RequestOutput) -> list[tuple[int, float]]:
    (one,) = output.outputs
    assert one.logprobs is not None
    return [(token, row[token].logprob) for token, row in zip(one.token_ids, one.logprobs, strict=True)]


def open_llm(**limits: Any) -> LLM:
    return LLM(invoked()[0], enable_lora=True, **{**LIMITS, **limits})


@pytest.mark.parametrize("around", [(20, 14, 9), (0, 0, 5), (31, 16, 0)])
def test_tokens_before_the_last_invocation_are_the_base_s(around: tuple[int, int, int]) -> None:
    _, request, adapted = invoked()
    first, between, after = (text(seed, count) for seed, count in enumerate(around))
    ids = [*first, *INVOCATION, *between, *INVOCATION, *after]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with open_llm() as llm:
        own, base = (scores(llm.generate([ids], scored, lora_request=one)[0]) for one in (request, None))
    expected = torch.log_softmax(logits(adapted, torch.tensor([ids]))[0].double(), 1)
    right = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert float((own - right).abs().max()) < ADAPTED_LOGPROBS["bf16"]
    begin = len(first) + len(INVOCATION) + len(between)
    assert torch.equal(own[:begin], base[:begin]), "the same bits"
    assert float((own[begin:] - base[begin:]).abs().max()) > 2 * ADAPTED_LOGPROBS["bf16"]


def scores(output: RequestOutput) -> torch.Tensor:
    assert output.prompt_logprobs is not None
    rows = [next(iter(row.values())).logprob for row in output.prompt_logprobs if row is not None]
    return torch.tensor(rows, dtype=torch.float64)


def test_a_conversation_is_cached_for_the_base_and_its_adapter() -> None:
    conversation, request = text(1, 70), invoked()[1]
    prompts: Sequence[tuple[list[int], LoRARequest | None]] = [
        (conversation, None),
        ([*conversation, *INVOCATION, *text(2, 40)], request),
        ([*conversation, *INVOCATION, *text(2, 40)], None),
        ([*conversation, *INVOCATION, *text(2, 40)], request),
        ([*conversation, *text(3, 40)], None),
    ]
    with open_llm(enable_prefix_caching=False) as llm:
        right = [answer(llm.generate([ids], GREEDY, lora_request=one)[0]) for ids, one in prompts]
        (block_size,) = {getattr(group, "block_size", None) for group in llm.engine.plan.caches}
    assert block_size and right[1] != right[2]
    shared, whole = 70 // block_size * block_size, 112 // block_size * block_size
    cases = (range(5), (0, shared, shared, whole, shared)), ((1, 2, 0, 4, 3), (0, shared, shared, shared, whole))
    for order, cached in cases:
        with open_llm() as llm:
            outputs = [llm.generate([prompts[index][0]], GREEDY, lora_request=prompts[index][1])[0] for index in order]
        assert [output.num_cached_tokens for output in outputs] == list(cached)
        assert [answer(output) for output in outputs] == [right[index] for index in order]


def test_a_block_in_which_it_begins_at_two_positions_is_not_shared() -> None:
    """The first block is the same, but what follows it says where in it the adapter begins."""
    request = invoked()[1]
    with open_llm(enable_prefix_caching=False) as llm:
        (block_size,) = {getattr(group, "block_size", None) for group in llm.engine.plan.caches}
        assert block_size
        block = [*text(1, block_size - 7), *INVOCATION, 50, 51, *INVOCATION[:2]]
        assert len(block) == block_size
        prompts = [[*block, 60, *text(2, 20)], [*block, INVOCATION[2], *text(2, 20)]]
        right = [answer(llm.generate([ids], GREEDY, lora_request=request)[0]) for ids in prompts]
    with open_llm() as llm:
        outputs = [llm.generate([ids], GREEDY, lora_request=request)[0] for ids in (*prompts, prompts[0])]
    assert [answer(output) for output in outputs] == [*right, right[0]]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, block_size]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(n=2, seed=3, max_tokens=5), SamplingParams(n=2, use_beam_search=True, temperature=0, max_tokens=5)],
    ids=["n", "beams"],
)
def test_several_answers(params: SamplingParams) -> None:
    ids, request = [*text(4, 40), *INVOCATION, 30], invoked()[1]
    with open_llm(enable_prefix_caching=False) as llm:
        alone, base = (llm.generate([ids], params, lora_request=one)[0] for one in (request, None))
    with open_llm() as llm:
        together = llm.generate([ids, ids, ids], params, lora_request=[None, request, request])
    tokens = [[one.token_ids for one in output.outputs] for output in (base, alone, alone)]
    assert [[one.token_ids for one in output.outputs] for output in together] == tokens


def test_what_cannot_be_invoked_is_refused(tmp_path: Path) -> None:
    engine, request, _ = invoked()
    with open_llm() as llm:
        for ids in (text(1, 20), [*text(1, 20), *INVOCATION[:2]], INVOCATION[1:]):
            with pytest.raises(UsageError, match=r"judge is not invoked.*invocation tokens 7, 8, 9"):
                llm.generate([ids], GREEDY, lora_request=request)
    for tokens, why in ([5, 100_000], "the invocation token 100000 is none of"), ([5] * 300, "300 tokens invoke it"):
        folder = tmp_path / str(len(tokens))
        trained(tiny_model(tiny_config("llama")), folder, alora_invocation_tokens=tokens, **CHOICES)
        with pytest.raises(EngineError, match=why):
            prepared(engine, folder)
