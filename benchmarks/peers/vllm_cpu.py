"""vLLM's CPU build as a worker process: python vllm_cpu.py CHECKPOINT THREADS MAX_NUM_SEQS MAX_MODEL_LEN

Runs in vLLM's own environment. BF16, compiled, without prefix caching. One process: its scheduler in a process of its
own would take a core from the model where there are two. vLLM sets LD_PRELOAD and OpenMP's variables for its child
processes only, so whoever starts this process has to: environments.vllm_openmp.
"""

import os
import sys

from exchange import Prompts, Tokens, private_stdout, serve

KV_CACHE_GIB = 2


def main() -> None:
    checkpoint, threads, max_num_seqs, max_model_len = sys.argv[1], *map(int, sys.argv[2:5])
    answers = private_stdout()
    preloaded = os.environ.get("LD_PRELOAD", "")  # vLLM writes something into it, too late for this process
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
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

    def run(prompts: Prompts, tokens: int) -> Tokens:
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    about = {
        "version": vllm.__version__,
        "threads": str(torch.get_num_threads()),
        "preloaded": " ".join(path.rpartition("/")[2] for path in preloaded.split(":")),
        "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
        "compilation": f"{config.compilation_config.mode.name} {config.compilation_config.backend}",
    }
    serve(answers, about, run)


if __name__ == "__main__":
    main()
