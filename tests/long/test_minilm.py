"""all-MiniLM-L6-v2, a real embedding model, against transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from enginewright import LLM
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from tests import tolerances

ENCODER = ".cache/all-MiniLM-L6-v2"
TEXTS = [
    "The cat sits on the mat.",
    "A feline lies on a rug.",
    "x",
    "Quantum field theory in curved spacetime, and what it says of black holes",
    "Größe, naïve, 東京, 🙂",
    "one word " * 300,
]


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    path = pytestconfig.rootpath / ENCODER
    if not (path / "model.safetensors").exists():
        pytest.fail(f"{ENCODER} is missing: run `make {ENCODER}/model.safetensors`.", pytrace=False)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Sequence[np.ndarray]:
    model, tokenizer = (
        AutoModel.from_pretrained(folder, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    vectors = []
    for text in TEXTS:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256, padding=False))
        mean = hidden.last_hidden_state[0].mean(0)
        vectors.append((mean / mean.norm()).numpy())
    return vectors


@pytest.mark.parametrize("quant", ["bf16", "int8-wo", "w8a8", "int4-rtn"])
def test_vectors(quant: str, folder: Path, expected: Sequence[np.ndarray], tmp_path: Path) -> None:
    """Vectors have the same bits alone and together, and similar texts stay similar."""
    path = tmp_path / "minilm.engine"
    build_engine(open_checkpoint(str(folder)), BuildConfig(quant=quant_config(quant)), path)
    with LLM(path) as llm:
        outputs = llm.embed(TEXTS, truncate_prompt_tokens=-1)
        vectors = np.array([output.outputs.embedding for output in outputs])
        for text, vector in zip(TEXTS, vectors, strict=True):
            assert llm.embed(text, truncate_prompt_tokens=-1)[0].outputs.embedding == vector.tolist()
        assert len(outputs[-1].prompt_token_ids) == 256
        assert (vectors * np.stack(expected)).sum(axis=1).min() > 1 - tolerances.MINILM[quant]
        (alike,), (other,) = llm.score(TEXTS[0], TEXTS[1]), llm.score(TEXTS[0], TEXTS[3])
        assert alike.outputs.score > 0.4 > other.outputs.score
