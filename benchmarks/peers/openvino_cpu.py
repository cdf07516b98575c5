"""OpenVINO GenAI as a worker process: python openvino_cpu.py EXPORTED THREADS MAX_NUM_SEQS BATCHED_TOKENS KV_GIB

Runs in OpenVINO's own environment, on a model that optimum-cli has exported. ContinuousBatchingPipeline with the
plugin's defaults, without prefix caching; logits, which it does not give, come from the same model under the plain
runtime. The file is not named openvino.py because it would then import itself.
"""

import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from exchange import Prompts, Tokens, private_stdout, serve

SHOWN = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


class OpenVino:
    def __init__(self, model: str, threads: int, max_num_seqs: int, batched_tokens: int, kv_gib: int) -> None:
        self.model, self.properties, self.handles = model, {"INFERENCE_NUM_THREADS": threads}, []
        self.max_num_seqs, self.batched_tokens, self.kv_gib = max_num_seqs, batched_tokens, kv_gib

    @cached_property
    def pipeline(self) -> openvino_genai.ContinuousBatchingPipeline:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = self.kv_gib
        scheduler.max_num_seqs = self.max_num_seqs
        scheduler.max_num_batched_tokens = self.batched_tokens
        scheduler.enable_prefix_caching = False
        return openvino_genai.ContinuousBatchingPipeline(self.model, scheduler, "CPU", self.properties)

    def _ask(self, prompts: Prompts, tokens: int) -> list[Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        # A handle that nobody keeps cancels its request.
        return [self.pipeline.add_request(number, ids, config) for number, ids in enumerate(inputs)]

    def generate(self, prompts: Prompts, tokens: int) -> Tokens:
        handles = self._ask(prompts, tokens)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def open(self, prompts: Prompts, room: int) -> None:
        self.handles = self._ask(prompts, room + len(prompts))
        while not all(handle.can_read() for handle in self.handles):
            self.pipeline.step()
        self._take()

    def step(self, tokens: int) -> None:
        for _ in range(tokens):
            self.pipeline.step()
            taken = self._take()
            assert taken == len(self.handles), f"{taken} tokens of {len(self.handles)} requests"

    def _take(self) -> int:
        read = [handle.read() for handle in self.handles if handle.can_read()]
        return len(read)

    def close(self) -> None:
        for handle in self.handles:
            handle.cancel()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self.handles = []

    def logits(self, texts: Prompts, file: str) -> None:
        compiled = openvino.Core().compile_model(str(Path(self.model) / "openvino_model.xml"), "CPU", self.properties)
        found = []
        for ids in texts:
            length = len(ids)
            inputs = {
                "input_ids": np.array([ids]),
                "attention_mask": np.ones((1, length), np.int64),
                "position_ids": np.arange(length)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            request = compiled.create_infer_request()  # a new one: its state begins empty
            found.append(request.infer(inputs)[compiled.output("logits")][0].copy())
        np.save(file, np.concatenate(found).astype(np.float32))


def main() -> None:
    model, numbers = sys.argv[1], [int(text) for text in sys.argv[2:6]]
    answers = private_stdout()
    engine = OpenVino(model, *numbers)
    assert engine.pipeline is not None  # loaded
    core = openvino.Core()
    about = {
        "version": openvino_genai.__version__,
        "max_num_batched_tokens": str(engine.batched_tokens),
        **{name.lower(): str(core.get_property("CPU", name)) for name in SHOWN},
    }
    serve(answers, about, engine)


if __name__ == "__main__":
    main()
