"""This project's engine as a worker process: python ours.py ENGINE LIMITS

LIMITS: a JSON object of fields of RuntimeConfig that differ from the defaults. Requests in flight go
through the library's LLM; `open` and `step` drive the same core, a step at a time, as LLM's thread does.
"""

import json
import sys
from functools import cached_property

import numpy as np
from exchange import Prompts, Tokens, private_stdout, serve

from enginewright import __version__
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.request import Request
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams


class Ours:
    def __init__(self, engine: Engine, limits: dict[str, int]) -> None:
        self.engine, self.limits, self.open_requests = engine, limits, list[Request]()

    @cached_property
    def llm(self) -> LLM:
        return LLM(self.engine, **self.limits)

    @cached_property
    def core(self) -> EngineCore:
        return EngineCore(self.engine, runtime_config(**self.limits))

    def generate(self, prompts: Prompts, tokens: int) -> Tokens:
        outputs = self.llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        return [list(output.outputs[0].token_ids) for output in outputs]

    def open(self, prompts: Prompts, room: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=room + len(prompts), ignore_eos=True)
        self.open_requests = [self.core.request(prompt, params, lambda _: None) for prompt in prompts]
        for request in self.open_requests:
            self.core.add(request)
        while any(request.first_token_s is None for request in self.open_requests):
            self.core.step()

    def step(self, tokens: int) -> None:
        for _ in range(tokens):
            outputs = self.core.step()
            assert len(outputs) == len(self.open_requests), "a request has ended"

    def close(self) -> None:
        for request in self.open_requests:
            self.core.abort(request)
        self.open_requests = []

    def logits(self, texts: Prompts, file: str) -> None:
        config = RuntimeConfig(max_num_seqs=1, max_logit_rows=max(map(len, texts)), threads=self.limits.get("threads"))
        np.save(file, np.concatenate(score(CpuExecutor(self.engine, config), texts)))


def main() -> None:
    path, limits = sys.argv[1], json.loads(sys.argv[2])
    answers = private_stdout()
    with Engine.open(path) as engine:
        serve(answers, {"version": __version__, "limits": sys.argv[2]}, Ours(engine, limits))


if __name__ == "__main__":
    main()
