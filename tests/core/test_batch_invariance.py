"""A sequence's logits are the same bits alone, in any batch, and however its prompt is cut."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.dtypes import KV_CACHES
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests.conftest import SMOLLM2
from tests.helpers.breadth import every_third
from tests.helpers.graphs import QUANTS
from tests.helpers.logit_hashes import REAL, build_real, hash_of, recorded, weights_hash
from tests.helpers.tiny import OF_KERNELS, MemoryCheckpoint, tiny_config, tiny_model

LENGTHS = [1, 2, 17, 31, 32, 33, 64, 65, 100, 255, 256, 257, 300, 5, 290, 280, *[7 * n % 61 + 1 for n in range(16)]]
BATCH = (0, 4, 5, 7, 10, 13, 15, 18)  # which of the texts are put into batches: shorter and longer ones than CUTS
CUTS = (1, 7, 64, 255, 512)


def texts_of(vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(0, vocab_size, length).tolist() for length in LENGTHS]


def logits_of(
    engine: Engine, isa: str, which: Sequence[int] = range(len(LENGTHS)), cut: int = 512, together: bool = False
) -> list[NDArray[np.float32]]:
    """Computes the logits after the last token of each text.

    Args:
        engine: the engine that computes them.
        isa: instruction set of the kernels.
        which: indices of the texts.
        cut: maximum number of tokens in a step.
        together: whether all texts are one batch, run by two threads; otherwise each is alone, run by one.

    Returns:
        One row of logits, [vocabulary], for each text.
    """
    texts = [texts_of(engine.plan.vocab_size)[index] for index in which]
    sequences, threads = (32, 2) if together else (1, 1)
    config = RuntimeConfig(
        isa=isa, threads=threads, max_num_batched_tokens=cut, max_num_seqs=sequences, max_model_len=320
    )
    executor = CpuExecutor(engine, config)
    batches = [texts] if together else [[text] for text in texts]
    return [row for batch in batches for row in score(executor, batch, last_only=True)]


def check(name: str, path: Path, isa: str, cuts: Sequence[int] = CUTS) -> bool:
    """An engine's logits, in batches and cut in any way: as when each text is alone, and as they were recorded.

    Returns:
        Whether something was recorded for these weights on this instruction set (tests/helpers/logit_hashes.py).
    """
    with Engine.open(path) as engine:
        alone = logits_of(engine, isa)
        check_batches(engine, isa, BATCH, [alone[index] for index in BATCH], cuts)
        weights = weights_hash(engine)
    before = recorded(name, weights, isa)
    assert before in (None, hash_of(alone)), f"the logits of {name} on {isa} are not what they were"
    return before is not None


def check_batches(
    engine: Engine, isa: str, which: Sequence[int], alone: Sequence[NDArray[np.float32]], cuts: Sequence[int]
) -> None:
    for cut in cuts:
        together = logits_of(engine, isa, which, cut, together=True)
        for index, expected, actual in zip(which, alone, together, strict=True):
            assert np.array_equal(expected, actual), f"{LENGTHS[index]} tokens, cut at {cut}, {isa}"


def tiny_engine(name: str, folder: Path) -> Path:
    family, config = TINY[name]
    path, of_model = folder / f"{name.replace('/', '-')}.engine", tiny_config(family)
    build_engine(MemoryCheckpoint.of(tiny_model(of_model), of_model), config, path)
    return path


KV_OF_CODES = [kv for kv in KV_CACHES if kv != "bf16"]
TINY = {
    **{
        f"{family}/{quant.name}": (family, BuildConfig(quant=quant, gate=None))
        for family in OF_KERNELS
        for quant in QUANTS
    },
    **{
        f"{family}/kv-{dtype}": (family, BuildConfig(kv_cache_dtype=dtype, gate=None))
        for family in ("qwen3", "gemma3_text")
        for dtype in KV_OF_CODES
    },
}


def recorded_engines(folder: Path) -> Iterator[tuple[str, Path]]:
    """All engines whose logits are recorded, by name."""
    for name in TINY:
        yield name, tiny_engine(name, folder)
    for name in REAL:
        yield f"smollm2/{name}", build_real(Path(SMOLLM2), name, folder)


SOME = [f"{family}/{quant.name}" for family, quant in every_third(OF_KERNELS, QUANTS)]
SOME += [f"{family}/kv-{kv}" for family, kv in zip(cycle(("qwen3", "gemma3_text")), KV_OF_CODES, strict=False)]


@pytest.mark.parametrize("name", SOME)
def test_tiny_models(name: str, tmp_path: Path) -> None:
    path = tiny_engine(name, tmp_path)
    best, *others = _cpu.isa_names()
    recorded_on = {isa for isa in others if check(name, path, isa, cuts=(7,))}
    recorded_on |= {best} if check(name, path, best) else set()
    # Without AVX2, torch's generator gives other random weights than those of the record.
    assert {"avx2", "portable"} & recorded_on or torch.backends.cpu.get_cpu_capability() == "DEFAULT"
