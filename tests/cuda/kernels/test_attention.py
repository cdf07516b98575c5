"""Paged attention on CUDA, in emulation, against float64; and its promise that results depend on nothing but the
sequence."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from enginewright.errors import UnsupportedModelError
from tests.emulator.kernels import SCHEDULES, Kernels
from tests.helpers.cuda_attention import (
    Attention,
    assert_a_page_table_that_is_off_is_noticed,
    assert_each_site_is_missed,
    compiled,
    decode,
    part,
)
from tests.helpers.paged_kv import KV_DTYPES, Heads, whole

SMALL = Heads(6, 2, 24)
BY_KV = [Attention(SMALL, kv, out="f32") for kv in KV_DTYPES]
CROWDED = [Attention(SMALL, kv, out="f32", crowded=True) for kv in ("bf16", "i8")]
SHAPES = [
    Attention(Heads(2, 2, 64), window=150),
    Attention(Heads(5, 1, 128), softcap=5.0),
    Attention(Heads(8, 1, 80), "i8", window=33, softcap=5.0),
    Attention(Heads(17, 1, 32), "e4m3"),
    Attention(Heads(3, 1, 160)),
    Attention(Heads(4, 2, 128), "u4", softcap=5.0),
    Attention(Heads(3, 1, 160), "u4", window=33),
    Attention(Heads(2, 1, 500)),
    Attention(Heads(2, 1, 512), "i8", window=70),
]
SINKS = [Attention(SMALL, "i8", out="f32", sinks=True), Attention(SMALL, out="f32", crowded=True, sinks=True)]
ATTENTIONS = [*BY_KV, *CROWDED, *SHAPES, *SINKS]
SOME = [*BY_KV, *CROWDED, SHAPES[2], SHAPES[5], SHAPES[7], *SINKS]  # tests/long has the other shapes


@functools.cache
def library() -> Kernels:
    """The kernels of all tests here, compiled at once."""
    return compiled(SOME)


@pytest.mark.parametrize("attention", SOME, ids=str)
def test_mixed_batches(attention: Attention) -> None:
    check_mixed_batch(attention, library())


def check_mixed_batch(attention: Attention, kernels: Kernels) -> None:
    """Lengths around a split's, chunks that begin in the middle of blocks, decodes among prompts."""
    heads = attention.heads
    chunks = [
        whole(heads, 33),
        decode(heads, 1),
        part(heads, 250, 300),
        decode(heads, 257),
        part(heads, 126, 128),
        decode(heads, 611),
        whole(heads, 129, 1),
        decode(heads, 256, 1),
    ]
    attention.check(kernels, chunks)


@pytest.mark.parametrize("attention", [*BY_KV, SINKS[0]], ids=str)
def test_bits_do_not_depend_on_company(attention: Attention) -> None:
    """Bits are the same for last tokens alone, in a batch and in the whole prompt: by both kernels, split or not."""
    length = 281
    (prompt,) = attention.run(library(), [whole(SMALL, length)])
    for start in (length - 1, length - 5, length - 6, length - 40):
        chunk = part(SMALL, start, length)
        others = [decode(SMALL, 300, 1), chunk, decode(SMALL, 611, 1), whole(SMALL, 40, 2)]
        np.testing.assert_array_equal(attention.run(library(), [chunk])[0], prompt[start:])
        np.testing.assert_array_equal(attention.run(library(), others)[1], prompt[start:])
        crowded = replace(attention, crowded=True)
        if crowded in CROWDED:
            np.testing.assert_array_equal(crowded.run(library(), others)[1], prompt[start:])


STEP = [
    part(SMALL, 295, 300),
    part(SMALL, 120, 150),
    decode(SMALL, 611, 1),
    part(SMALL, 270, 300, 2),
    part(SMALL, 385, 390),
]


@pytest.mark.parametrize("attention", [BY_KV[0], *CROWDED], ids=str)
def test_no_schedule_changes_bits(attention: Attention) -> None:
    results = attention.run(library(), STEP)
    for schedule in SCHEDULES[1:]:
        for result, again in zip(results, attention.run(library(), STEP, schedule), strict=True):
            np.testing.assert_array_equal(result, again)


def test_every_barrier_is_needed() -> None:
    attentions, wide = [CROWDED[1], BY_KV[0]], SHAPES[5]
    for attention in attentions:
        attention.run(library(), STEP)
    wide.run(library(), [part(wide.heads, 120, 150)])
    sites = [site for site in library().sites if site.startswith("paged_")]
    assert not sites or len(sites) == 12  # a GPU has none
    expanding = max(site for site in sites if site.startswith("paged_attention.cuh")) if sites else None  # of 4 bits
    assert_each_site_is_missed(library(), [site for site in sites if site != expanding], attentions, STEP)
    if expanding:  # where lanes share a row
        assert_each_site_is_missed(library(), [expanding], [wide], [part(wide.heads, 120, 150)])


def test_heads_that_are_too_wide_for_a_gpu_are_refused() -> None:
    wide = Heads(2, 1, 512)
    with pytest.raises(UnsupportedModelError, match=r"heads of 512 columns .* on sm_80"):
        Attention(wide, architecture="sm_80").launches()
    Attention(wide, "i8", architecture="sm_80").launches()


def test_a_page_table_that_is_off_by_one_is_noticed() -> None:
    assert_a_page_table_that_is_off_is_noticed(library(), BY_KV[0], [decode(SMALL, 300), part(SMALL, 120, 150)])
