"""Many requests of a real model, one KV cache that holds a quarter of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from enginewright.runtime.api.llm import LLM
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from tests.core.test_in_flight import GREEDY, answers, wait_until_idle
from tests.helpers.engines import built


def test_a_real_model_in_little_memory(smollm2_gguf: Path) -> None:
    random = np.random.default_rng(5)
    prompts = [random.integers(10, 40_000, length).tolist() for length in random.integers(1, 70, 50).tolist()]
    params = [replace(GREEDY, temperature=n % 2 * 0.7, seed=n, max_tokens=1 + n % 12) for n in range(len(prompts))]
    limits = {"max_model_len": 128, "max_num_seqs": 32, "max_num_batched_tokens": 128}
    with Engine.open(built(smollm2_gguf, "int8-wo")) as engine:
        total = sum(
            sequence_bytes(engine.plan.caches, len(prompt) + (one.max_tokens or 0), 128)
            for prompt, one in zip(prompts, params, strict=True)
        )
        with LLM(engine, **limits, kv_cache_memory=total // 4) as llm:
            together = answers(llm.generate(prompts, params))
            wait_until_idle(llm)
        some = range(0, len(prompts), 5)  # one by one they take a while
        with LLM(engine, **limits, enable_prefix_caching=False) as llm:
            assert [together[n] for n in some] == [answers(llm.generate(prompts[n], params[n]))[0] for n in some]
