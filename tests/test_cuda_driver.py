"""What CudaDevice calls, through cuda-bindings itself: an engine on a driver of ours, which checks and emulates."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from enginewright import LLM, SamplingParams
from tests.graphs import random_tokens
from tests.test_cuda_engine import built

ROOT = Path(__file__).parent.parent
TOKENS = 9


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1."""
    folder, compiler = tmp_path_factory.mktemp("driver"), shutil.which("g++")
    assert compiler is not None, "g++ compiles the driver; there is none"
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *options, "-o", folder / "libcuda.so.1", ROOT / "tests/driver.cpp"], check=True)
    return folder


def test_an_engine_asks_the_driver_for_what_it_may(driver: Path) -> None:
    """From another thread than the one that opened it, with graphs; everything is given back."""
    path, _, kernels = built("llama", "bf16")
    prompts = [random_tokens(count, seed=count).tolist() for count in (25, 7, 31, 12)]
    given = {"path": str(path), "kernels": kernels, "prompts": prompts, "num_tokens": TOKENS}
    done = subprocess.run(
        [sys.executable, "-m", "tests.on_driver"],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        input=json.dumps(given),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with LLM(path, device="cpu", max_model_len=96) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    assert found == {"answers": [output.outputs[0].token_ids for output in outputs], "left": 0}
