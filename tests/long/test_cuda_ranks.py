"""Engines for several GPUs: all blocks, formats and numbers of ranks, and their kernels on every architecture."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginewright.builder import build
from enginewright.builder.build import BuildConfig, build_engine
from enginewright.plugins import architectures
from enginewright.plugins.kernel import Specialization
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.engine import Engine
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.targets import PTX, SMS
from tests.cuda.test_ranks import FEW_MULTIPROCESSORS, LIMITS, SOME, check, compile_plans
from tests.emulator.device import EmulatedDevice
from tests.emulator.ranks import RanksOnDevices
from tests.helpers.breadth import others
from tests.helpers.heads import with_mtp
from tests.helpers.tiny import ALL_EXPERTS
from tests.ranks.test_bits import CUT
from tests.speculation.test_heads import _step, head_of


@pytest.mark.parametrize("name", others(tuple(CUT), SOME))
def test_blocks(name: str) -> None:
    check(name, 2)


@pytest.mark.parametrize("name", CUT)
def test_three_ranks(name: str) -> None:
    check(name, 3, lengths=(2, 33))


@pytest.mark.parametrize("method", ["int8-wo", "w8a8", "int4-rtn", "fp8", "mxfp4"])
@pytest.mark.parametrize("name", ["norms of heads", "experts", "gated delta"])
def test_formats_of_weights(name: str, method: str) -> None:
    check(name, 2, lengths=(2, 33), method=method)


@pytest.mark.parametrize("kv", ["int8", "fp8", "int4"])
def test_formats_of_kv_caches(kv: str) -> None:
    check("norms of heads", 2, lengths=(2, 33), kv=kv)


@pytest.mark.parametrize("name", ["norms of heads", "split"])
def test_engines_that_are_not_batch_invariant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps have the same bits, also where a part has smaller tiles than the whole."""
    few = replace(architectures.ARCHITECTURES["sm_80"], multiprocessors=FEW_MULTIPROCESSORS)
    monkeypatch.setitem(architectures.ARCHITECTURES, "sm_80", few)
    check(name, 2, lengths=(70,), batch_invariant=False)


@pytest.mark.parametrize("case", ["glm4_moe", "eagle llama"])
def test_hidden_states(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has them, for a draft that reads them."""
    kernels: dict[str, Specialization] = {}
    monkeypatch.setattr(build, "code_sections", lambda own, targets: kernels.update(own) or {})
    head = head_of(case) if case.startswith("eagle") else with_mtp(case, **ALL_EXPERTS[case])
    config = BuildConfig(gate=None, targets=("cuda:sm_80",), batch_invariant=True, tensor_parallel_size=2)
    build_engine(head.checkpoint, config, tmp_path / "two.engine", draft=head.draft(tmp_path / "head"))
    tokens, shown = np.random.default_rng(0).integers(3, 300, 12).tolist(), []
    with Engine.open(tmp_path / "two.engine", "cuda") as engine:
        for executor in (
            CudaExecutor(engine, EmulatedDevice(kernels), LIMITS),
            RanksOnDevices(engine, kernels, LIMITS, 2),
        ):
            outputs = executor.run(_step(executor, TokenSequence(tokens, len(tokens), len(tokens) + 1)).inputs)
            shown.append((np.array(outputs.hidden), np.array(outputs.logits)))
    for one, two in zip(*shown, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("name", ["llama", "one KV head", "latent attention", "experts"])
def test_more_ranks_than_heads(name: str) -> None:
    """Ranks without heads of their own compute those of others."""
    check(name, 7, lengths=(2, 33))


@pytest.mark.parametrize("family", ["gemma4_text", "phi3", "falcon_h1"])
def test_awkward_sizes(family: str) -> None:
    """Sizes that no block of 16 rows divides."""
    check(family, 2, lengths=(2, 33))


@pytest.mark.parametrize("name", CUT)
def test_kernels_are_compiled_everywhere(name: str) -> None:
    assert compile_plans(name, (*SMS, PTX)) > 400


def test_recurrences_in_chunks_are_compiled() -> None:
    assert compile_plans("gated delta", ("sm_90a",), batch_invariant=False) > 0
