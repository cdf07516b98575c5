"""Ranks of GPUs in their own processes, through nccl4py itself: on a driver and an NCCL of ours, which check calls."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from enginewright.builder import build
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.errors import NoCodeForMachineError
from enginewright.plugins.kernel import Specialization
from enginewright.runtime.device.cuda import nccl
from enginewright.runtime.engine import Engine
from tests.cuda import test_driver
from tests.cuda.test_driver import LIMITS, ROOT, TOKENS, emulated, said
from tests.helpers.graphs import random_tokens
from tests.helpers.tiny import MemoryCheckpoint

driver = test_driver.driver
# Of few kernels, and parts of different sizes: 3 heads for 2 GPUs.
SHAPES = {
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def both(driver: Path) -> Path:
    """A folder with libcuda.so.1 and libnccl.so.2."""
    compiler = shutil.which("g++")
    assert compiler is not None, "g++ compiles it; there is none"
    options = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,-soname,libnccl.so.2"]
    subprocess.run([compiler, *options, "-o", driver / "libnccl.so.2", ROOT / "tests/emulator/nccl.cpp"], check=True)
    return driver


def test_two_gpus_answer_as_one(both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that everything is given back, and that a GPU that is lost ends the engine by an error with its reason."""
    kernels: dict[str, Specialization] = {}
    sections = build.code_sections
    monkeypatch.setattr(build, "code_sections", lambda some, targets: kernels.update(some) or sections(some, targets))
    config = BuildConfig(
        quant=quant_config("bf16"),
        targets=("cuda:sm_90a",),
        gate=None,
        batch_invariant=True,
        tensor_parallel_size=2,
    )
    path, listed = tmp_path / "two.engine", tmp_path / "kernels"
    build_engine(MemoryCheckpoint.tiny("llama", **SHAPES), config, path)
    with Engine.open(path, "cuda") as engine, listed.open("w") as lines:
        symbols = {name: launch.symbol for name, launch in engine.code((9, 0)).launches.items()}
        plans = [engine.plan, *(engine.for_rank(rank, 2).plan for rank in range(2))]
        launches = {launch.kernel: launch for plan in plans for launch in plan.launches()}
        assert symbols.keys() == launches.keys()
        running = [name for name, launch in launches.items() if launch.low <= LIMITS["max_num_batched_tokens"]]
        libraries = dict(zip(running, emulated([kernels[name][:2] for name in running]), strict=True))
        for name, launch in launches.items():
            lines.write(f"{symbols[name]} {libraries.get(name, 'none 0')} {1 + len(launch.arguments)}\n")
    prompts = [random_tokens(count, seed=count).tolist() for count in (36, 3, 9)]
    more = {"DRIVER_DEVICES": "2", "NCCL_FOLDER": str(tmp_path)}
    given = [str(path), prompts, TOKENS, {**LIMITS, "device": "cuda"}]
    found = said("tests.emulator.ranks_on_driver", both, listed, given, **more)
    assert len(found["one"]) == 2 * len(prompts) and all(len(tokens) == TOKENS for tokens, _ in found["one"])
    assert found["two"] == found["one"]
    assert found["left"] == [0, 0, 0, 0]
    assert "rank 1: process " in found["lost"] and "was ended by signal SIGKILL" in found["lost"]
    assert "rank 1: process " in found["refused"] and "was ended by exit code 1" in found["refused"]
    assert sum(one.name.startswith("group-") for one in tmp_path.iterdir()) == 3


def test_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", None)
    with pytest.raises(NoCodeForMachineError, match="GPUs cannot exchange anything here: nccl4py or NCCL is missing"):
        nccl.new_group()
