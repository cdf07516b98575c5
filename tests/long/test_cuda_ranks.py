"""Engines for several GPUs: all blocks, formats and numbers of ranks, and their kernels on every architecture."""

import pytest

from enginewright.targets import PTX, SMS
from tests.cuda.test_ranks import SOME, check, compile_plans
from tests.helpers.breadth import others
from tests.ranks.test_bits import CUT


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


def test_engines_that_are_not_batch_invariant() -> None:
    """The same steps have the same bits."""
    check("norms of heads", 2, lengths=(70,), batch_invariant=False)


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
