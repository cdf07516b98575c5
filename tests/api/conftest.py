"""The library with the engine of a tiny model, whose file a module may choose by a fixture `path` of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewright.runtime.api.llm import LLM
from enginewright.runtime.engine import Engine
from tests.helpers.engines import built_tiny

LIMITS: dict[str, Any] = {
    "max_model_len": 200,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "threads": 1,
    "kv_cache_memory": 1 << 20,
}


@pytest.fixture(scope="module")
def path() -> Path:
    return built_tiny("llama", tie_word_embeddings=False)  # a tied tiny model repeats itself whatever it sees


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with Engine.open(path) as opened:
        yield opened


@pytest.fixture
def llm(engine: Engine) -> Iterator[LLM]:
    with LLM(engine, **LIMITS) as opened:
        yield opened
