"""The process of test_driver.py: answers of an engine where libcuda.so.1 is the driver of driver.cpp."""

import ctypes
import json
import sys

from enginewright import LLM, LoRARequest, SamplingParams
from enginewright.errors import NotEnoughMemoryError
from enginewright.runtime.core import engine_core
from enginewright.runtime.scheduler import stored

if __name__ == "__main__":
    path, prompts, num_tokens, limits, folder, adapter = json.load(sys.stdin)
    left = ctypes.CDLL("libcuda.so.1").driver_left
    try:
        LLM(path, **limits, kv_cache_memory=4 << 10)
    except NotEnoughMemoryError as error:
        refused = str(error).splitlines()[0], left()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    assert engine_core.prompt_s and stored.LONGEST_S
    engine_core.prompt_s = lambda *_: None  # these models are computed faster than files are read
    stored.LONGEST_S = 60.0
    answers, restored = [], []
    for _ in range(2):
        with LLM(path, **limits, kv_cache_disk="64m", kv_cache_dir=folder) as llm:
            outputs, isa = llm.generate(prompts, params), llm.isa
            restored.append(llm.stats().restored_tokens)
        answers.append([output.outputs[0].token_ids for output in outputs])
    with LLM(path, **limits, enable_lora=True, max_loras=1) as llm:
        outputs = llm.generate(prompts[1:3], params, lora_request=[LoRARequest("own", 1, adapter), None])
        adapted = [output.outputs[0].token_ids for output in outputs]
    print(
        json.dumps(
            {
                "refused": refused,
                "on": isa,
                "answers": answers,
                "restored": restored,
                "adapted": adapted,
                "left": left(),
            }
        )
    )
