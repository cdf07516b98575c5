"""Checks of the prefix cache on disk that hold on CPUs and on emulated GPUs."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM, SamplingParams
from enginewright.errors import EngineError
from enginewright.runtime.cache import disk
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.outputs import Delta, RequestOutput
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.device.devices import open_executor
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from tests.cuda.test_engine import built
from tests.emulator.device import device_for
from tests.helpers.mixed_requests import answers, check_same
from tests.helpers.odd_files import make_sparse
from tests.helpers.tiny import HYBRIDS

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "threads": 1}
PARAMS = SamplingParams(seed=7, max_tokens=40, logprobs=2, ignore_eos=True)
FEW = replace(PARAMS, max_tokens=3)  # a step of the emulated GPU takes some 0.2 s
# One that keeps everything, one with windows, one with a recurrent state.
FAMILIES = ("llama", "gemma3_text", "qwen3_5_text")
# The same on GPUs: formats of weights and of the KV cache, in which steps of up to 64 tokens give the same bits; with a
# recurrence, those of batch-invariant engines do.
ON_GPU = {"llama": ("bf16", "bf16"), "gemma3_text": ("w8a8", "int8"), "qwen3_5_text": ("w8a8", "bf16")}


def gpu_engine(family: str, patch: pytest.MonkeyPatch) -> Engine:
    """An engine for GPUs; from now on such engines run on the emulated GPU, and those for CPUs as before."""
    path, _, kernels = built(family, *ON_GPU[family], batch_invariant=family in HYBRIDS)

    def opened(engine: Engine, config: Any) -> Any:
        on_gpu = engine.target == "cuda"
        return CudaExecutor(engine, device_for(kernels), config) if on_gpu else open_executor(engine, config)

    patch.setattr(core, "open_executor", opened)
    return Engine.open(path, "cuda")


class Collected:
    """The output of one request."""

    def __init__(self) -> None:
        self.tokens, self.text = 0, ""

    def __call__(self, delta: Delta | EngineError) -> None:
        assert isinstance(delta, Delta)
        self.tokens += len(delta.tokens)
        self.text += delta.text


def stepped(core: EngineCore) -> None:
    for request, delta in core.step():
        request.sink(delta)


def prompt(seed: int, length: int = 150) -> list[int]:
    return [3 + (seed * 7919 + place * place * 31) % 300 for place in range(length)]


def answers_of(outputs: Sequence[RequestOutput]) -> list[Any]:
    """The content of completions, without figures on how they were computed."""
    return [(one.outputs[0].text, one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


def opened(engine: Path | Engine, folder: Path, **limits: Any) -> LLM:
    return LLM(engine, kv_cache_disk="64m", kv_cache_dir=str(folder), **{**LIMITS, **limits})


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if disk.ENTRY.fullmatch(path.name))


def check_next_process(engine: Engine, folder: Path) -> None:
    """Checks that another process finds all full blocks, and gives the same completions."""
    prompts = [prompt(seed, 70) for seed in range(3)]
    with LLM(engine, enable_prefix_caching=False, **LIMITS) as llm:
        right, cold = answers_of(llm.generate(prompts, FEW)), llm.stats().computed_tokens
    with opened(engine, folder) as llm:
        assert answers_of(llm.generate(prompts, FEW)) == right and llm.stats().restored_tokens == 0
    assert {path.stat().st_mode & 0o777 for path in entries(folder)} == {0o600}
    with opened(engine, folder) as llm:
        outputs, stats = llm.generate(prompts, FEW), llm.stats()
        assert answers_of(outputs) == right
        assert [one.num_cached_tokens for one in outputs] == [64] * 3
        assert stats.restored_tokens == 3 * 64 and stats.computed_tokens == cold - 3 * 64
        assert answers_of(llm.generate(prompts, FEW)) == right and llm.stats().restored_tokens == 3 * 64
        assert stats.disk is not None and stats.disk.num_failures == 0
        assert stats.disk.num_bytes == sum(path.stat().st_size for path in entries(folder))


def check_eviction(engine: Engine, folder: Path) -> None:
    """Checks six prompts in turns with memory for two sequences: without the disk each would be computed each time."""
    prompts = [prompt(seed, 70) for seed in range(6)]
    with LLM(engine, enable_prefix_caching=False, **LIMITS) as llm:
        right = [answers_of(llm.generate([one], FEW)) for one in prompts]
    one = int(sequence_bytes(engine.plan.caches, 96, 64))
    with opened(engine, folder, kv_cache_memory=2 * one, max_num_seqs=2, max_model_len=96) as llm:
        for turn in range(3):
            assert [answers_of(llm.generate([one], FEW)) for one in prompts] == right
            restored = llm.stats().restored_tokens
            assert restored >= turn * 64 * 4, "all but the last ones were taken for something else"


def check_preempted_answers(engine: Engine, folder: Path) -> None:
    """Checks two requests that grow from 3 blocks to 6 each, of 7 in all, so that the later one is preempted."""
    prompts, params = [prompt(1, 90), prompt(2, 90)], SamplingParams(seed=7, max_tokens=75, ignore_eos=True)
    with LLM(engine, enable_prefix_caching=False, **LIMITS) as llm:
        right = answers_of(llm.generate(prompts, params))
    seven = 7 * sum(group.block_bytes for group in engine.plan.paged_caches)
    with opened(engine, folder, kv_cache_memory=seven, max_model_len=192) as llm:
        assert answers_of(llm.generate(prompts, params)) == right
        stats = llm.stats()
        assert stats.num_preemptions > 0 and stats.restored_tokens > 0


def check_mixed_requests(engine: Engine, count: int, folder: Path) -> None:
    """Checks mixed requests (aborts, siblings, scored prompts, grammars, tenants) with few blocks: same completions."""
    plain, _ = answers(engine, count, kv_cache_memory=1 << 20, enable_prefix_caching=False)
    scarce = int(sequence_bytes(engine.plan.caches, 160, 48))
    for memory in 1 << 20, scarce:
        limits = {"kv_cache_disk": 64 << 20, "kv_cache_dir": str(folder), "kv_cache_memory": memory}
        kept, stats = answers(engine, count, **limits)
        check_same(plain, kept)
        assert stats.disk is not None and stats.disk.num_failures == 0
    assert stats.restored_tokens > 0


def check_damaged_entry(engine: Engine, fault: str, folder: Path) -> None:
    """Checks that a damaged entry is computed again, and written again."""
    with opened(engine, folder) as llm:
        right = answers_of(llm.generate([prompt(1)], FEW))
    block = PrefixKeys(32).of(prompt(1), 3)[2]
    (path,) = folder.glob(f"*/0-{block.hex()}")
    whole = path.read_bytes()
    if fault == "a bit":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif fault == "the end":
        path.write_bytes(whole[:-1])
    elif fault == "another's name":
        path.write_bytes((path.parent / f"0-{PrefixKeys(32).of(prompt(1), 2)[1].hex()}").read_bytes())
    elif fault == "a sparse file":
        make_sparse(path)
    elif fault == "a FIFO":
        path.unlink()
        os.mkfifo(path)
    else:
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    with opened(engine, folder) as llm:
        assert answers_of(llm.generate([prompt(1)], FEW)) == right
        stats = llm.stats()
        assert stats.restored_tokens == 64, "the blocks before it"
        assert stats.disk is not None and stats.disk.num_failures == (fault not in ("a link", "a FIFO"))
    assert path.read_bytes() == whole and not path.is_symlink(), "it was written again"
