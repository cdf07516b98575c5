"""The process of test_cuda_driver.py: an engine in an LLM, on a CudaDevice whose driver is driver.cpp."""

import ctypes
import json
import sys
from collections.abc import Callable, Mapping

from enginewright import LLM, SamplingParams
from enginewright.engine_file import EngineFile
from enginewright.plan import Plan
from enginewright.plugins.kernel import Specialization
from enginewright.runtime import core
from enginewright.runtime.cuda.device import CudaDevice, capability_of, num_gpus
from enginewright.runtime.cuda.executor import CudaExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from tests.emulated import compiled_library


def code_of(plan: Plan, kernels: Mapping[str, Specialization]) -> Callable[[str], tuple[bytes, str]]:
    """What the driver takes for an image, and for a symbol."""
    parameters = {launch.kernel: 1 + len(launch.arguments) for launch in plan.launches()}

    def code(name: str) -> tuple[bytes, str]:
        return f"{compiled_library((kernels[name][:2],), 80)}\0".encode(), str(parameters[name])

    return code


def main(path: str, kernels: Mapping[str, Specialization], prompts: list[list[int]], num_tokens: int) -> None:
    assert (num_gpus(), capability_of(0)) == (1, (8, 0))

    def open_executor(engine: Engine, config: RuntimeConfig) -> CudaExecutor:
        device = CudaDevice()
        device.code = code_of(engine.plan, kernels)
        executor = CudaExecutor(engine, device, config)
        executor.warm_up()
        return executor

    core.open_executor = open_executor
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with EngineFile.open(path) as file, LLM(Engine(file, "cuda"), max_model_len=96, max_num_seqs=3) as llm:
        outputs = llm.generate(prompts, params)
    left = ctypes.CDLL("libcuda.so.1").driver_left()
    print(json.dumps({"answers": [output.outputs[0].token_ids for output in outputs], "left": left}))


if __name__ == "__main__":
    given = json.load(sys.stdin)
    given["kernels"] = {name: Specialization(*kernel) for name, kernel in given["kernels"].items()}
    main(**given)
