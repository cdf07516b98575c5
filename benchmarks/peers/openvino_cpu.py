"""OpenVINO GenAI as a worker process: python openvino_cpu.py EXPORTED THREADS MAX_NUM_SEQS MAX_NUM_BATCHED_TOKENS

Runs in OpenVINO's own environment, on a model that optimum-cli has exported. ContinuousBatchingPipeline with the
plugin's defaults, without prefix caching. The file is not named openvino.py because it would then import itself.
"""

import sys

import numpy as np
import openvino
import openvino_genai
from exchange import Prompts, Tokens, private_stdout, serve

KV_CACHE_GIB = 2
SHOWN = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


def main() -> None:
    model, threads, max_num_seqs, max_num_batched_tokens = sys.argv[1], *map(int, sys.argv[2:5])
    answers = private_stdout()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = KV_CACHE_GIB
    scheduler.max_num_seqs = max_num_seqs
    scheduler.max_num_batched_tokens = max_num_batched_tokens
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def run(prompts: Prompts, tokens: int) -> Tokens:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        # A handle that nobody keeps cancels its request.
        handles = [pipeline.add_request(number, ids, config) for number, ids in enumerate(inputs)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    core = openvino.Core()
    about = {
        "version": openvino_genai.__version__,
        "max_num_batched_tokens": str(max_num_batched_tokens),
        **{name.lower(): str(core.get_property("CPU", name)) for name in SHOWN},
    }
    serve(answers, about, run)


if __name__ == "__main__":
    main()
