"""The process of test_nccl.py: answers of an engine of two GPUs where the driver and NCCL are those of this folder."""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from enginewright import LLM, SamplingParams
from enginewright.errors import EngineError
from enginewright.runtime.device.cuda.ranked import RankedCudaExecutor
from enginewright.runtime.device.ranks import processes


def told(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[Any]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1),
        SamplingParams(seed=3, max_tokens=num_tokens, ignore_eos=True, logprobs=1),
    ]
    outputs = [llm.generate(prompts, one) for one in params]
    return [
        [output.outputs[0].token_ids, [repr(next(iter(one.values())).logprob) for one in output.outputs[0].logprobs]]
        for each in outputs
        for output in each
    ]


if __name__ == "__main__":
    path, prompts, num_tokens, limits = json.load(sys.stdin)
    left = ctypes.CDLL("libcuda.so.1").driver_left
    with LLM(path, **limits) as llm:
        one = told(llm, prompts, num_tokens)
    left_by_one = left()
    with LLM(path, **limits, tensor_parallel_size=2) as llm:
        two = told(llm, prompts, num_tokens)
    left_by_two = left()
    lost = ""
    with LLM(path, **limits, tensor_parallel_size=2) as llm:
        executor = llm._core.executor
        assert isinstance(executor, RankedCudaExecutor)
        (watched,) = executor._group._watch._members
        # Without site's folders nccl4py would not find the NCCL of a virtual environment.
        assert b"-S" not in Path(f"/proc/{watched.member.pid}/cmdline").read_bytes().split(b"\0")  # type: ignore[attr-defined]
        os.kill(watched.member.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        try:
            told(llm, prompts, num_tokens)
        except EngineError as error:
            lost = str(error)
    left_by_lost, refused = left(), ""
    processes.WORKER = "enginewright.nothing"  # a rank that ends before it joins, for which NCCL would wait
    try:
        LLM(path, **limits, tensor_parallel_size=2)
    except EngineError as error:
        refused = str(error)
    print(
        json.dumps(
            {
                "one": one,
                "two": two,
                "left": [left_by_one, left_by_two, left_by_lost, left()],
                "lost": lost,
                "refused": refused,
            }
        )
    )
