"""Answers of several processes are those of one, whatever a request asks for and however sequences are scheduled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright import LLM, SamplingParams
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.draft import FirstLayers
from enginewright.runtime.core.outputs import RequestOutput
from tests.helpers.tiny import MemoryCheckpoint

SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 1.1, "top_p": 0.9, "seed": 3, "n": 3},
    {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.4},
    {"temperature": 0.0, "structured_outputs": {"regex": "[a-e]{4,9}"}},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny engine, with its first layer for drafts."""
    path = tmp_path_factory.mktemp("ranks") / "tiny.engine"
    build_engine(
        MemoryCheckpoint.tiny("qwen3", **SIZES, head_dim=32), BuildConfig(gate=None), path, draft=FirstLayers(1)
    )
    return path


def answers(engine: Path, **limits: Any) -> list[RequestOutput]:
    """Answers to prompts of which some share a prefix, in two rounds, so that the second finds them in the cache."""
    random = np.random.default_rng(2)
    shared = random.integers(3, 300, 70).tolist()
    prompts = [[*shared[: 20 * (index % 4)], *random.integers(3, 300, 5 + 11 * index).tolist()] for index in range(8)]
    with LLM(engine, threads=1, max_model_len=256, max_num_seqs=6, max_num_batched_tokens=48, **limits) as llm:
        params = [SamplingParams(**KINDS[index % len(KINDS)], max_tokens=24) for index in range(8)]
        return [output for _ in range(2) for output in llm.generate(prompts, params)]


def facts(outputs: list[RequestOutput]) -> list[Any]:
    """All that an answer says."""
    return [(one.prompt_logprobs, one.outputs) for one in outputs]


@pytest.mark.parametrize(
    "limits",
    [{}, {"kv_cache_memory": 400 << 10}, {"speculate": "ngram"}, {"speculate": "skip"}],
    ids=["roomy", "preempted", "ngram", "skip"],
)
def test_answers_are_those_of_one_process(engine: Path, limits: dict[str, Any]) -> None:
    expected = facts(answers(engine, **limits))
    assert facts(answers(engine, **limits, tensor_parallel_size=2)) == expected
    assert facts(answers(engine, **limits, pipeline_parallel_size=2)) == expected


def test_answers_of_stages_that_are_divided(engine: Path) -> None:
    assert facts(answers(engine, tensor_parallel_size=2, pipeline_parallel_size=3)) == facts(answers(engine))
