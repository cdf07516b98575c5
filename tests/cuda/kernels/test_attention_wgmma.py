"""Hopper's attention of prompts, in emulation, against float64."""

import numpy as np
import pytest

from tests.emulator.kernels import SCHEDULES, EmulatedKernels, Kernels
from tests.helpers.cuda_attention import (
    Attention,
    assert_a_page_table_that_is_off_is_noticed,
    assert_each_site_is_missed,
    compiled,
    decode,
    part,
)
from tests.helpers.paged_kv import Heads, whole

PLAIN = Attention(Heads(6, 2, 50), out="f32", wgmma=True)
ATTENTIONS = [
    PLAIN,
    Attention(Heads(2, 2, 64), window=150, wgmma=True),
    Attention(Heads(5, 1, 128), softcap=5.0, wgmma=True),
    Attention(Heads(17, 1, 102), window=33, out="f32", wgmma=True),
]


@pytest.fixture(scope="module")
def kernels(on_hopper: None) -> Kernels:
    return compiled(ATTENTIONS, 90)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
def test_mixed_batches(kernels: Kernels, attention: Attention) -> None:
    """Lengths around a tile's, chunks that begin in the middle of blocks, decodes among prompts; more tiles than there
    are stages.
    """
    heads = attention.heads
    chunks = [
        whole(heads, 33),
        decode(heads, 1),
        part(heads, 250, 300),
        decode(heads, 257),
        part(heads, 109, 128),
        part(heads, 590, 611),
        whole(heads, 129, 1),
    ]
    attention.check(kernels, chunks)


STEP = [part(PLAIN.heads, 280, 300), part(PLAIN.heads, 100, 150), decode(PLAIN.heads, 257), part(PLAIN.heads, 590, 611)]


def test_no_schedule_changes_bits(kernels: Kernels) -> None:
    results = PLAIN.run(kernels, STEP)
    for schedule in SCHEDULES[1:]:
        for result, again in zip(results, PLAIN.run(kernels, STEP, schedule), strict=True):
            np.testing.assert_array_equal(result, again)


def test_each_barrier_fence_and_wait_is_missed(kernels: Kernels) -> None:
    chunks = [part(PLAIN.heads, 590, 611)]
    PLAIN.run(kernels, chunks)
    sites = [site for site in kernels.sites if site.startswith("paged_prefill_wgmma")]
    assert len(sites) == (13 if Kernels is EmulatedKernels else 0)
    assert_each_site_is_missed(kernels, sites, [PLAIN], chunks)


def test_a_page_table_that_is_off_by_one_is_noticed(kernels: Kernels) -> None:
    assert_a_page_table_that_is_off_is_noticed(
        kernels, PLAIN, [part(PLAIN.heads, 270, 300), part(PLAIN.heads, 120, 150)]
    )
