"""OpenVINO GenAI with and without a draft: python openvino_speculating.py MODEL DRAFT DRAFT_TOKENS THREADS

It works like openvino_cpu.py. `speculate` is `generate` with a draft model and DRAFT_TOKENS draft tokens in each step,
a number that OpenVINO leaves to its caller.
"""

import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai
from exchange import Prompts, Tokens, private_stdout, serve


class Speculating:
    def __init__(self, model: str, draft: str, draft_tokens: int, threads: int) -> None:
        properties = {"INFERENCE_NUM_THREADS": threads}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
        both: dict[str, Any] = {"scheduler_config": scheduler, **properties}
        drafting = openvino_genai.draft_model(draft, "CPU", **properties)
        self.plain = openvino_genai.LLMPipeline(model, "CPU", **both)
        self.speculating = openvino_genai.LLMPipeline(model, "CPU", draft_model=drafting, **both)
        self.draft_tokens = draft_tokens

    def generate(self, prompts: Prompts, tokens: int) -> Tokens:
        return self._answers(self.plain, prompts, tokens, {})

    def speculate(self, prompts: Prompts, tokens: int) -> Tokens:
        return self._answers(self.speculating, prompts, tokens, {"num_assistant_tokens": self.draft_tokens})

    @staticmethod
    def _answers(pipeline: Any, prompts: Prompts, tokens: int, options: dict[str, Any]) -> Tokens:
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False, **options)
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return [list(pipeline.generate(ids, config).tokens[0]) for ids in inputs]  # one after the other


def main() -> None:
    model, draft = sys.argv[1:3]
    draft_tokens, threads = map(int, sys.argv[3:5])
    answers = private_stdout()
    serve(answers, {"version": openvino_genai.__version__}, Speculating(model, draft, draft_tokens, threads))


if __name__ == "__main__":
    main()
