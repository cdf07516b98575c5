"""Adapters of engines whose ranks are processes: loaded, replaced and dropped while they serve, and broken on one."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginewright import LLM, LoRARequest, SamplingParams
from enginewright.errors import EngineDeadError
from enginewright.runtime.device.ranks import adapters as adapters_module
from enginewright.runtime.device.ranks import group as group_module
from enginewright.runtime.device.ranks import watch as watch_module
from enginewright.runtime.device.ranks.messages import AdapterData, Frames, Pipe, decode, encode
from tests.adapters.test_served import PARAMS, adapted, answer, prompt
from tests.helpers.machines import WorkerNode, all_ranks, group_limits, wait_until_none_is_left, workers
from tests.ranks.test_faults import GROUPS

LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
TEXTS = [prompt(seed, 20 + 13 * seed) for seed in range(3)]


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dict[str, Any], list[WorkerNode]]]:
    """Limits of an engine with adapters, and its other machines. All ranks have to end at the end of the test."""
    before = all_ranks()
    limits = group_limits(tmp_path, *GROUPS[request.param], enable_lora=True, max_loras=2)
    with workers(adapted("llama").engine, tmp_path, limits) as nodes:
        yield limits, nodes
    wait_until_none_is_left(before)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Answers of one process, of each adapter and the base to each text."""
    case = adapted("llama")
    with LLM(case.engine, enable_lora=True, max_num_seqs=4, threads=1, kv_cache_memory=16 << 20) as llm:
        return answers(llm, case.requests)


def answers(llm: LLM, requests: list[LoRARequest | None]) -> list[Any]:
    """Answers to each text with each adapter, all of them in one call."""
    texts, owners = [text for text in TEXTS for _ in requests], requests * len(TEXTS)
    return [answer(one) for one in llm.generate(texts, PARAMS, lora_request=owners)]


def test_ranks_answer_like_one_process(group: tuple[dict[str, Any], list[WorkerNode]], expected: list[Any]) -> None:
    """More adapters than slots, so that they are loaded and unloaded between steps, while others are computed."""
    limits, _ = group
    case = adapted("llama")
    with LLM(case.engine, **limits) as llm:
        for _ in range(2):
            assert answers(llm, case.requests) == expected


def test_adapters_come_and_go_while_another_one_answers(
    group: tuple[dict[str, Any], list[WorkerNode]], tmp_path: Path
) -> None:
    """A file is replaced by another while an answer with a third adapter goes on."""
    limits, _ = group
    case, path = adapted("llama"), tmp_path / "served.lora"
    first, second, third = case.requests[1:4]
    assert first is not None and second is not None and third is not None
    with LLM(case.engine, enable_lora=True, max_num_seqs=4, threads=1, kv_cache_memory=16 << 20) as llm:
        right = [answer(llm.generate([TEXTS[1]], PARAMS, lora_request=own)[0]) for own in (first, second)]
        long = llm.generate([TEXTS[2]], LONG, lora_request=third)[0].outputs[0].token_ids
    with LLM(case.engine, **limits) as llm, ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(streamed, llm, third)
        for source, wanted in ((first, right[0]), (second, right[1]), (first, right[0])):
            path.with_suffix(".new").write_bytes(Path(source.lora_path).read_bytes())
            path.with_suffix(".new").replace(path)
            served = LoRARequest("served", 9, str(path))
            assert answer(llm.generate([TEXTS[1]], PARAMS, lora_request=served)[0]) == wanted
        assert streaming.result() == long


def streamed(llm: LLM, request: LoRARequest) -> list[int]:
    """The tokens of a long answer."""
    with closing(llm.stream(TEXTS[2], LONG, lora_request=request)) as pieces:
        return [sampled.token for piece in pieces for sampled in piece.tokens]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("memory", [16 << 20, 400 << 10], ids=["roomy", "preempted"])
def test_stages(size: int, memory: int, tmp_path: Path, expected: list[Any]) -> None:
    """Several steps are under way while adapters are loaded into the slots of others."""
    case = adapted("llama")
    limits = group_limits(tmp_path, 1, size, enable_lora=True, max_loras=2, pipeline_parallel_size=2)
    with LLM(case.engine, **{**limits, "kv_cache_memory": memory, "max_num_seqs": 6, "max_model_len": 96}) as llm:
        for _ in range(2):
            assert answers(llm, case.requests) == expected


def test_drafts(tmp_path: Path, expected: list[Any]) -> None:
    case = adapted("llama")
    limits = group_limits(tmp_path, 1, 2, enable_lora=True, max_loras=3, speculate="ngram")
    with LLM(case.engine, **limits) as llm:
        assert answers(llm, case.requests) == expected


def test_experts(tmp_path: Path) -> None:
    case, found = adapted("qwen3_moe"), []
    for size in (1, 2):
        with LLM(case.engine, **group_limits(tmp_path, 1, size, enable_lora=True)) as llm:
            found.append(answers(llm, case.requests))
    assert found[0] == found[1]


def test_other_machines_need_no_file(tmp_path: Path, expected: list[Any]) -> None:
    """The bytes come from rank 0, so a file that is gone once it has been read does no harm."""
    case = adapted("llama")
    limits = group_limits(tmp_path, 2, 2, enable_lora=True, max_loras=1)
    own = [None]
    for number, request in enumerate(case.requests[1:]):
        assert request is not None
        path = tmp_path / f"{number}.lora"
        path.write_bytes(Path(request.lora_path).read_bytes())
        own.append(LoRARequest(request.lora_name, request.lora_int_id, str(path)))
    with workers(case.engine, tmp_path, limits), LLM(case.engine, **limits) as llm:
        assert answers(llm, own) == expected


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_transfer_that_takes_longer_than_pings_may(
    nnodes: int, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow network leaves no time for pings, and each message of an adapter is answered instead."""
    case, limits = adapted("llama"), group_limits(tmp_path, nnodes, 2, enable_lora=True)
    with workers(case.engine, tmp_path, limits), LLM(case.engine, **limits) as llm:
        assert answer(llm.generate([TEXTS[0]], PARAMS)[0]) == expected[0]
        monkeypatch.setattr(watch_module, "PING_S", 0.1)
        monkeypatch.setattr(adapters_module, "DATA_BYTES", 500)
        for one in llm._core.executor._group._watch._members:
            one.member.frames = Slow(one.member.frames)
        assert answer(llm.generate([TEXTS[0]], PARAMS, lora_request=case.requests[1])[0]) == expected[1]


class Slow:
    """A connection over which messages about adapters take longer, and nothing else."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frames, name)

    def send(self, content: bytes) -> None:
        """Sends a message."""
        if b"adapter_data" in content[:20]:
            time.sleep(0.05)
        self._frames.send(content)


class Altered(Pipe):
    """A pipe that changes messages about adapters."""

    def __init__(self, pipe: Pipe) -> None:
        self.__dict__ = pipe.__dict__

    def send(self, content: bytes) -> None:
        """Sends a message with some bytes less of a section."""
        if b"adapter_data" in content[:20]:
            order = decode(content, msgspec.msgpack.Decoder(AdapterData))
            content = encode(AdapterData(order.content[:-2], order.is_last))
        super().send(content)


def test_a_broken_adapter_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank and the adapter are named, and all processes end."""
    case, before, start = adapted("llama"), all_ranks(), group_module.start_processes

    def with_one_altered(*arguments: Any, **options: Any) -> Any:
        processes = start(*arguments, **options)
        processes[1].frames = Altered(processes[1].frames)
        return processes

    monkeypatch.setattr(group_module, "start_processes", with_one_altered)
    with LLM(case.engine, **group_limits(tmp_path, 1, 3, enable_lora=True)) as llm:
        assert llm.generate([TEXTS[0]], PARAMS)
        with pytest.raises(EngineDeadError) as caught:
            llm.generate([TEXTS[0]], PARAMS, lora_request=case.requests[1])
        assert "rank 2: the adapter 0 cannot be loaded" in str(caught.value)
    wait_until_none_is_left(before)
