"""vLLM's CPU build as a worker process: python vllm_cpu.py CHECKPOINT THREADS MAX_NUM_SEQS MAX_MODEL_LEN KV_GIB

Runs in vLLM's own environment. BF16, compiled, without prefix caching. One process: its scheduler in a process of its
own would take a core from the model where there are two. vLLM sets LD_PRELOAD and OpenMP's variables for its child
processes only, so the caller must set them for this process: environments.vllm_openmp.
"""

import os
import sys
from typing import Any

from exchange import Prompts, Tokens, private_stdout, serve


class Vllm:
    def __init__(self, llm: Any, params: Any) -> None:
        self.llm, self.params, self.names, self.num_requests = llm, params, list[str](), 0

    def generate(self, prompts: Prompts, tokens: int) -> Tokens:
        params = self.params(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def open(self, prompts: Prompts, room: int) -> None:
        params = self.params(temperature=0, max_tokens=room + len(prompts), ignore_eos=True)
        engine, first = self.llm.llm_engine, self.num_requests
        self.num_requests += len(prompts)
        self.names = [
            engine.add_request(str(first + number), {"prompt_token_ids": ids}, params)
            for number, ids in enumerate(prompts)
        ]
        waiting = {str(first + number) for number in range(len(prompts))}
        while waiting:
            waiting -= {output.request_id for output in engine.step()}

    def step(self, tokens: int) -> None:
        left = tokens * len(self.names)
        while left > 0:
            left -= len(self.llm.llm_engine.step())

    def close(self) -> None:
        self.llm.llm_engine.abort_request(self.names, internal=True)
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        self.names = []


def main() -> None:
    checkpoint, threads, max_num_seqs, max_model_len, kv_gib = sys.argv[1], *map(int, sys.argv[2:6])
    answers = private_stdout()
    preloaded = os.environ.get("LD_PRELOAD", "")  # vLLM writes something into it, too late for this process
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch
    import vllm

    torch.set_num_threads(threads)
    llm = vllm.LLM(
        checkpoint,
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    config = llm.llm_engine.vllm_config
    about = {
        "version": vllm.__version__,
        "threads": str(torch.get_num_threads()),
        "preloaded": " ".join(path.rpartition("/")[2] for path in preloaded.split(":")),
        "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
        "compilation": f"{config.compilation_config.mode.name} {config.compilation_config.backend}",
    }
    serve(answers, about, Vllm(llm, vllm.SamplingParams))


if __name__ == "__main__":
    main()
