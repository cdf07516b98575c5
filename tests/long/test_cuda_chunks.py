"""Recurrences in chunks: more problems, whole engines, and code for every architecture."""

import pytest

from enginewright.targets import PTX
from tests.cuda.test_triton import SHARED_BYTES, check_recurrences, interpreted
from tests.helpers.chunks import chunk_kernels
from tests.helpers.compiled import compile_kernels


def test_many_problems_in_the_interpreter() -> None:
    check_recurrences("many", 6)


@pytest.mark.parametrize(("family", "quant"), [("qwen3_5_text", "w8a8"), ("nemotron_h", "bf16")])
def test_an_engine_computes_its_graph_in_chunks(family: str, quant: str) -> None:
    assert interpreted("triton_engine_run", family, quant) == [["prepare_chunks", "scan_chunks"]]


def test_they_compile_everywhere_and_nothing_spills() -> None:
    """Kernels for the heads of Qwen3-Next and Nemotron-H, and for odd ones that are not aligned."""
    published = [*chunk_kernels(True, 32, 16, 128, 128), *chunk_kernels(False, 128, 8, 128, 64)]
    odd = chunk_kernels(True, 3, 3, 10, 50, unaligned=1)
    for sm, made in compile_kernels([*published, *odd], (*SHARED_BYTES, PTX)).items():
        for kernel, compiled in made.items():
            assert compiled.num_warps == kernel.num_warps and compiled.scratch_bytes == 0
            assert compiled.shared_bytes <= SHARED_BYTES.get(sm, 48) * 1024
            assert compiled.local_bytes == 0 or kernel in odd, f"{kernel.expression} spills for {sm}"
