"""A sequence's logits are the same bits alone, in any batch, and however its prompt was cut (DESIGN §7)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.passes.quant import QuantConfig
from enginewright.runtime.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.envelope import RuntimeConfig
from enginewright.runtime.score import score
from tests.helpers.engines import built
from tests.helpers.graphs import QUANTS
from tests.helpers.tiny import FAMILIES, MemoryCheckpoint, tiny_config, tiny_model

LENGTHS = [1, 2, 17, 31, 32, 33, 64, 65, 100, 255, 256, 257, 300, 5, 290, 280, *[7 * n % 61 + 1 for n in range(16)]]
CUTS = (1, 7, 64, 255, 512)


def texts_of(vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, vocab_size, length).tolist() for length in LENGTHS]


def check(path: Path, isa: str, cuts: Sequence[int] = CUTS) -> None:
    with Engine.open(path) as engine:
        texts = texts_of(engine.plan.vocab_size)

        def run(batches: list[list[list[int]]], cut: int, sequences: int) -> list[NDArray[np.float32]]:
            config = RuntimeConfig(
                isa=isa, threads=2, max_num_batched_tokens=cut, max_num_seqs=sequences, max_model_len=320
            )
            executor = CpuExecutor(engine, config)
            return [row for batch in batches for row in score(executor, batch, last_only=True)]

        alone = run([[text] for text in texts], 512, 1)
        for cut in cuts:
            together = run([texts], cut, 32)
            for length, expected, actual in zip(LENGTHS, alone, together, strict=True):
                assert np.array_equal(expected, actual), f"{length} tokens, cut at {cut}, {isa}"


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family: str, quant: QuantConfig, tmp_path: Path) -> None:
    check_tiny(family, BuildConfig(quant=quant, gate=None), tmp_path)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_a_kv_cache_of_codes(family: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    check_tiny(family, BuildConfig(kv_cache_dtype=kv_cache_dtype, gate=None), tmp_path)


def check_tiny(family: str, build_config: BuildConfig, folder: Path) -> None:
    config, path = tiny_config(family), folder / "tiny.engine"
    build_engine(MemoryCheckpoint.of(tiny_model(config), config), build_config, path)
    for isa in _cpu.isa_names():
        check(path, isa)


def test_a_real_model(smollm2_gguf: Path) -> None:
    check(built(smollm2_gguf, "bf16"), _cpu.isa_names()[0], cuts=(7, 255))
