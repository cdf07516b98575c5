"""Engines for several GPUs that compute one model together: their plans, and answers that have the bits of one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.builder import assembly, build
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.plugins.kernel import Specialization
from enginewright.plugins.target import Target
from enginewright.rank_plan import ALL_GATHER
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.engine import Engine
from tests.emulator.device import EmulatedDevice
from tests.emulator.ranks import RanksOnDevices
from tests.helpers.engines import folder_of_engines
from tests.helpers.tiny import ALL_EXPERTS, MemoryCheckpoint
from tests.ranks.test_bits import CUT

LENGTHS = (1, 2, 33, 61)
LIMITS = RuntimeConfig(max_model_len=128, max_num_seqs=3, max_num_batched_tokens=70, max_logit_rows=70)


@cache
def built(
    name: str, size: int, method: str = "bf16", kv: str = "bf16", batch_invariant: bool = True
) -> tuple[Path, Mapping[str, Specialization]]:
    """An engine for `size` GPUs (without cubins: nothing here runs them), and their code."""
    kernels: dict[str, Specialization] = {}
    lower = assembly.lower

    def watched(model: Any, target: Target, *rest: Any) -> Any:
        lowered = lower(model, target, *rest)
        kernels.update(lowered.kernels)
        return lowered

    family, changes, _ = CUT[name] if name in CUT else (name, {}, 0)
    path = folder_of_engines() / f"{name}-{size}-{method}-{kv}-{batch_invariant}.engine"
    config = BuildConfig(
        quant=quant_config(method),
        kv_cache_dtype=kv,
        targets=("cuda:sm_80",),
        batch_invariant=batch_invariant,
        tensor_parallel_size=size,
        gate=None,
    )
    checkpoint = MemoryCheckpoint.tiny(family, **{**ALL_EXPERTS.get(family, {}), **changes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "lower", watched)
        patch.setattr(build, "code_sections", lambda kernels, targets: {})
        build_engine(checkpoint, config, path)
    return path, kernels


def check(name: str, size: int, *, lengths: Sequence[int] = LENGTHS, **built_as: Any) -> RanksOnDevices:
    """Checks that the logits of `size` GPUs have the bits of one."""
    path, kernels = built(name, size, **built_as)
    random = np.random.default_rng(1)
    with Engine.open(path, "cuda") as engine:
        texts = [random.integers(0, engine.plan.vocab_size, length).tolist() for length in lengths]
        expected = score(CudaExecutor(engine, EmulatedDevice(kernels), LIMITS), texts)
        ranks = RanksOnDevices(engine, kernels, LIMITS, size)
        for length, one, several in zip(lengths, expected, score(ranks, texts), strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_array_equal(one, several, err_msg=f"{length} tokens")
    assert ranks.group.done > 0 and ranks.group.moved_bytes > 0
    return ranks


@pytest.mark.parametrize("name", CUT)
def test_ranks_compute_the_bits_of_one(name: str) -> None:
    check(name, 2)
