"""Two hundred mixed requests with each kind of draft, on every instruction set: the completions are the same bits."""

import pytest

from enginewright import _cpu
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.runtime.speculation import methods
from tests.helpers.breadth import others, repeated
from tests.helpers.mixed_requests import LIMITS, Recorded, answers, check_same
from tests.speculation import test_speculation as short
from tests.speculation.test_heads import HEADS, head_of
from tests.speculation.test_heads import engine_of as engine_with_head
from tests.speculation.test_speculation import engine_of

REQUESTS = 200

test_a_draft_draft_tokens_by_the_same_noise = repeated(
    short.test_a_draft_draft_tokens_by_the_same_noise, ("family", "draft"), others(short.DRAFTS, short.SOME_DRAFTS)
)


@pytest.mark.parametrize("isa", _cpu.isa_names())
@pytest.mark.parametrize(
    ("family", "draft"),
    [
        *(("gemma3_text", "llama"), ("qwen3_5_text", "lfm2"), ("qwen3_moe", "qwen3")),
        *(("gemma3_text", 2), ("qwen3_5_text", 2), ("qwen3_moe", 1), ("gemma4_text", 1)),
    ],
)
@pytest.mark.usefixtures("speculation_pays")
def test_no_answer_depends_on_draft_tokens(
    family: str, draft: str | int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(engine_of(family, draft)) as engine:
        plain, _ = answers(engine, REQUESTS, isa=isa)
        known = {answer.asked: [token.token for token in answer.tokens] for answer in plain.values()}
        one = sequence_bytes(engine.plan.caches, LIMITS["max_model_len"], LIMITS["max_num_batched_tokens"])
        own = "draft" if isinstance(draft, str) else "skip"
        for method in ("ngram", "draft", "recorded") if own == "draft" else ("skip",):
            if method == "recorded":
                monkeypatch.setitem(methods.METHODS, "ngram", lambda *_: Recorded(known))
            for limits in {}, {"kv_cache_memory": 4 * one, "enable_prefix_caching": False}:
                speculate = own if method == own else "ngram"
                drafted, stats = answers(engine, REQUESTS, isa=isa, speculate=speculate, **limits)
                check_same(plain, drafted)
                assert stats.speculation is not None and (limits or sum(stats.speculation.drafted) > 0)


@pytest.mark.parametrize("isa", _cpu.isa_names())
@pytest.mark.parametrize("case", HEADS)
@pytest.mark.usefixtures("speculation_pays")
def test_no_answer_depends_on_heads(case: str, isa: str) -> None:
    """MTP layers, EAGLE-3 and Medusa, of dense models, hybrids and mixtures."""
    role = head_of(case).role
    with Engine.open(engine_with_head(case)) as engine:
        plain, _ = answers(engine, REQUESTS, isa=isa, speculate="off")
        one = sequence_bytes(engine.plan.caches, LIMITS["max_model_len"], LIMITS["max_num_batched_tokens"])
        for limits in {}, {"kv_cache_memory": 8 * one, "enable_prefix_caching": False}:
            drafted, stats = answers(engine, REQUESTS, isa=isa, speculate=role, **limits)
            check_same(plain, drafted)
            assert stats.speculation is not None and (limits or sum(stats.speculation.drafted) > 0)
