"""CudaDevice's calls through cuda-bindings itself: an engine on a driver of ours, which checks calls and emulates."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright import LLM, LoRARequest, SamplingParams
from enginewright.builder import build
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.cuda import Instance, compile_each
from enginewright.plugins.kernel import Specialization
from enginewright.runtime.engine import Engine
from tests.cuda.test_build import FEW_SHAPES, small
from tests.emulator.kernels import EmulatedKernels, libraries_with
from tests.emulator.kernels import Instance as Emulated
from tests.helpers.adapters import prepared, trained
from tests.helpers.graphs import random_tokens
from tests.helpers.tiny import tiny_config, tiny_model

ROOT = Path(__file__).parents[2]
TOKENS = 4  # of an answer
LIMITS = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 8}  # steps that take few kernels


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1: of a GPU like an H200."""
    folder, compiler = tmp_path_factory.mktemp("driver"), shutil.which("g++")
    assert compiler is not None, "g++ compiles the driver; there is none"
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *options, "-o", folder / "libcuda.so.1", ROOT / "tests/emulator/driver.cpp"], check=True)
    return folder


def emulated(instances: Sequence[Emulated]) -> list[str]:
    """Each kernel's library and its index there, for the driver."""
    return [
        f"{library} {EmulatedKernels([instance], 80, library).index[instance[1]]}"
        for instance, library in zip(instances, libraries_with(instances, 80), strict=True)
    ]


def said(module: str, driver: Path, kernels: Path, given: object, **more: str) -> dict[str, Any]:
    """Output of a module in a process whose libcuda.so.1 is our driver, which emulates these kernels."""
    paths = {"LD_LIBRARY_PATH": str(driver), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, **paths, "DRIVER_KERNELS": str(kernels), **more},
        input=json.dumps(given),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_tests_of_kernels_launch_them_on_a_gpu(driver: Path, tmp_path: Path) -> None:
    """Arrays go there as wholes, and come back; views of them stay views."""
    source, expression, threads = "roofline.cuh", "read_rows<ReadRows{.lines = 1}>", 256
    instance = Instance(source, expression)
    symbol = compile_each([("sm_90a", instance)])["sm_90a", instance].symbol  # from now on it is in the cache
    (kernel,) = emulated([(source, expression)])
    (tmp_path / "kernels").write_text(f"{symbol} {kernel} 3\n")
    on_gpu = {"ENGINEWRIGHT_TEST_DEVICE": "cuda"}
    found = said(
        "tests.emulator.kernel_on_driver", driver, tmp_path / "kernels", [source, expression, threads], **on_gpu
    )
    lines = np.arange(4 * threads, 8 * threads).reshape(threads, 4)
    assert found == {"by": "GpuKernels", "sums": [*lines.sum(1).tolist(), 77]}


def test_an_engine_asks_the_driver_for_what_it_may(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to the GPU by itself, runs in a thread, with graphs, keeps blocks on disk by another thread, and gives
    everything back, also when refused.
    """
    kernels: dict[str, Specialization] = {}
    sections = build.code_sections
    monkeypatch.setattr(build, "code_sections", lambda some, targets: kernels.update(some) or sections(some, targets))
    config = BuildConfig(quant=quant_config("bf16"), targets=("cpu", "cuda:sm_90a"), gate=None)
    path, listed = tmp_path / "both.engine", tmp_path / "kernels"
    build_engine(small(), config, path)  # whose code tests/cuda/test_build.py has in the same cache
    with Engine.open(path, "cuda") as engine, listed.open("w") as lines:
        symbols = {name: launch.symbol for name, launch in engine.code((9, 0)).launches.items()}
        launches = {launch.kernel: launch for launch in engine.plan.launches()}
        running = [name for name, launch in launches.items() if launch.low <= LIMITS["max_num_batched_tokens"]]
        libraries = dict(zip(running, emulated([kernels[name][:2] for name in running]), strict=True))
        for name, launch in launches.items():
            lines.write(f"{symbols[name]} {libraries.get(name, 'none 0')} {1 + len(launch.arguments)}\n")
    prompts = [random_tokens(count, seed=count).tolist() for count in (36, 3, 1, 9)]
    trained(tiny_model(tiny_config("llama", **FEW_SHAPES)), tmp_path / "own", target_modules=["q_proj", "down_proj"])
    adapter = prepared(path, tmp_path / "own")
    given = [str(path), prompts, TOKENS, LIMITS, str(tmp_path / "kv"), str(adapter)]
    found = said("tests.emulator.engine_on_driver", driver, listed, given)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    requests = [None, LoRARequest("own", 1, str(adapter)), None, None]
    with LLM(path, device="cpu", enable_lora=True, **LIMITS) as llm:
        expected, adapted = (
            [output.outputs[0].token_ids for output in llm.generate(prompts, params, lora_request=own)]
            for own in ([None] * len(prompts), requests)
        )
    assert adapted[1] != expected[1]
    why, left = found.pop("refused")
    assert why.startswith("the KV cache of one sequence of 96 positions takes") and left == 0
    assert found == {"on": "sm_90", "answers": [expected] * 2, "restored": [0, 32], "adapted": adapted[1:3], "left": 0}
