"""Stages of a pipeline: their parts of a plan, and steps that are under way at the same time."""

import os
import signal
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from enginewright import LLM, SamplingParams
from enginewright.errors import EngineDeadError, EngineError, UsageError
from enginewright.plan import PagedCache
from enginewright.rank_layout import NEXT, RESULTS, RankLayout
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.device.ranks.member import weight_sizes
from enginewright.runtime.device.ranks.shares import rank_shares
from enginewright.runtime.engine import Engine
from enginewright.stage_plan import RECEIVE, SEND, plan_of_stage
from tests.helpers.engines import built_tiny
from tests.helpers.machines import all_ranks, group_limits, rank_processes, wait_until_none_is_left, workers
from tests.helpers.serving import tiny_engine
from tests.ranks.test_faults import LONG, PROMPT, answer

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "kv_cache_memory": 16 << 20, "threads": 1}


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_each_call_belongs_to_one_stage(family: str, stages: int) -> None:
    with Engine.open(built_tiny(family)) as engine:
        sizes = weight_sizes(engine)
        plans = [plan_of_stage(engine.plan, stage, stages, sizes.nbytes) for stage in range(stages)]
        kept = [call for plan in plans for call in plan.calls if call.kernel not in (SEND, RECEIVE)]
        repeated = [call for call in engine.plan.calls if call.kernel == "rope_table@1"]
        assert [call for call in kept if call not in repeated] == [
            call for call in engine.plan.calls if call not in repeated
        ]
        for before, after in pairwise(plans):
            sent = [call.operands["x"] for call in before.calls if call.kernel == SEND]
            assert sent == [call.operands["out"] for call in after.calls if call.kernel == RECEIVE] != []
        for group, *parts in zip(engine.plan.caches, *(plan.caches for plan in plans), strict=True):
            layers = [layer for part in parts for layer in part.layers]
            assert set(layers) == set(group.layers) and len(layers) < len(group.layers) + stages


def test_layers_that_share_a_cache_are_in_one_stage() -> None:
    with Engine.open(built_tiny("gemma4_text")) as engine:
        written = {group.layers for group in engine.plan.caches if isinstance(group, PagedCache)}
        assert any(len(layers) < 3 for layers in written)  # a layer reads the cache of another one
        for stage in range(2):
            plan = plan_of_stage(engine.plan, stage, 2, weight_sizes(engine).nbytes)
            plan.check()


def test_stages_of_equal_weights() -> None:
    with Engine.open(tiny_engine()) as engine:
        shares = rank_shares(engine.plan, lambda name: engine.weight(name)[1], RankLayout(1, 2))
        assert max(share.weight_bytes for share in shares) < 0.75 * engine.weight_bytes
        assert [share.exchanges for share in shares] == [3, 3]  # two buffers, and the logits
        assert shares[0].received_bytes_per_token == 0 < shares[1].received_bytes_per_token
        assert shares[0].received_bytes_per_logits == 4 * engine.plan.vocab_size
        assert shares[1].received_bytes_per_logits == 0


def test_more_stages_than_layers_allow() -> None:
    with Engine.open(tiny_engine()) as engine, pytest.raises(UsageError, match="cannot be divided into 60 stages"):
        plan_of_stage(engine.plan, 0, 60, weight_sizes(engine).nbytes)


def test_channels_of_a_layout() -> None:
    channels = RankLayout(2, 3).channels()
    assert [channel.ranks for channel in channels if channel.purpose == NEXT] == [(2, 0), (3, 1), (4, 2), (5, 3)]
    assert [channel.ranks for channel in channels if channel.purpose == RESULTS] == [(0, 4)]
    assert [channel.ranks for channel in channels if len(channel.ranks) == 2 and channel.purpose == "gather"] == [
        (0, 1),
        (2, 3),
        (4, 5),
    ]
    assert RankLayout().channels() == []


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"pipeline_parallel_size": 65}, "pipeline_parallel_size is 65"),
        ({"pipeline_parallel_size": 16, "tensor_parallel_size": 16}, "is 256"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0"),
        ({"pipeline_parallel_size": 3, "nnodes": 2}, "cannot be divided among 2 machines"),
    ],
)
def test_sizes_that_are_refused(limits: dict[str, int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        RuntimeConfig(**limits)


def test_what_does_not_work_with_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--pipeline-parallel-size does not work with --kv-cache-disk yet"):
        LLM(tiny_engine(), pipeline_parallel_size=2, kv_cache_disk=1 << 20, kv_cache_dir=str(tmp_path), **LIMITS)


def test_as_many_steps_are_under_way_as_there_are_stages() -> None:
    """Each has sequences of its own, and its share of a long prompt."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with Engine.open(tiny_engine()) as engine:
        core = EngineCore(engine, RuntimeConfig(**LIMITS, pipeline_parallel_size=2))
        try:
            for number in range(6):
                core.add(core.request([5 + number] * 3, params, lambda delta: None))
            core.add(core.request(list(range(3, 60)), params, lambda delta: None))
            most = 0
            while core.has_work:
                core.step()
                under_way = [step.plan for step in core._in_flight]
                most = max(most, len(under_way))
                for plan in under_way:
                    assert plan.inputs.sizes.tokens <= 17 and len(plan.rows.sequences) <= 4
                sequences = [one for plan in under_way for one in plan.rows.sequences]
                assert len(sequences) == len(set(sequences))
            assert most == 1  # a step ends before the next call of `step`, and one is under way between calls
        finally:
            core.close()


@pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_stage_that_is_lost_in_a_step(rank: int, how: signal.Signals) -> None:
    before = all_ranks()
    with LLM(tiny_engine(), pipeline_parallel_size=3, **LIMITS) as llm:
        with closing(llm.stream(PROMPT, LONG)) as stream:
            next(stream)
            os.kill(rank_processes()[rank - 1], how)
            with pytest.raises(EngineDeadError) as caught:
                for _ in stream:
                    pass
        reason = "was ended by signal SIGKILL" if how == signal.SIGKILL else "it has not answered for 6 s"
        assert f"rank {rank}" in str(caught.value) and reason in str(caught.value)
    wait_until_none_is_left(before)


def test_stages_of_two_machines(tmp_path: Path) -> None:
    """Ranks of a stage are on one machine and share memory, and stages exchange over sockets."""
    before = all_ranks()
    with LLM(tiny_engine(), **LIMITS) as llm:
        expected = answer(llm)
    limits = group_limits(tmp_path, 2, 2, pipeline_parallel_size=2)
    with workers(tiny_engine(), tmp_path, limits) as nodes:
        for _ in range(2):
            with LLM(tiny_engine(), **limits) as llm:
                assert answer(llm) == expected
                assert [len(node.ranks) for node in nodes] == [2]
        with pytest.raises(EngineError, match=r"rank [23]"), LLM(tiny_engine(), **limits) as llm:
            os.kill(nodes[0].ranks[1], signal.SIGKILL)
            llm.generate([PROMPT] * 9, LONG)
    wait_until_none_is_left(before)
