"""Recurrences in chunks: more problems, whole engines, and code for every architecture."""

import pytest

from enginewright.plan import Linear, linear
from enginewright.plugins.kernel import Call, Matrix
from enginewright.plugins.recurrence_triton import chunk_instances
from enginewright.targets import PTX
from enginewright.triton_instance import TritonInstance
from tests.helpers.compiled import compile_kernels
from tests.test_cuda_triton import SHARED_BYTES, check_recurrences, interpreted


def test_many_problems_in_the_interpreter() -> None:
    check_recurrences("many", 6)


@pytest.mark.parametrize(("family", "quant"), [("qwen3_5_text", "w8a8"), ("nemotron_h", "bf16")])
def test_an_engine_computes_its_graph_in_chunks(family: str, quant: str) -> None:
    assert interpreted("triton_engine_run", family, quant) == [["prepare_chunks", "scan_chunks"]]


def instances(delta: bool, heads: int, key_heads: int, k: int, v: int, unaligned: int = 0) -> list[TritonInstance]:
    """unaligned: where operands begin in their buffers."""
    widths = {"query": key_heads * k, "key": key_heads * k, "value": heads * v, "out": heads * v}
    widths |= dict.fromkeys(("decay", "beta"), heads) | {"chunks": heads * 132}
    operands = {
        role: Matrix("f32", linear(tokens=1), width, (width + 64) // 64 * 64, width, column=unaligned)
        for role, width in widths.items()
    }
    elements = heads * k * v
    operands["state"] = Matrix("f32", Linear(), elements, elements, elements, block_stride=12 * elements)
    attributes = {"heads": heads, "key_heads": key_heads, "scale": k**-0.5, "epsilon": 1e-6, "dt_min": 0.0}
    return list(chunk_instances(Call(operands, attributes), delta))


def test_they_compile_everywhere_and_nothing_spills() -> None:
    """With heads as Qwen3-Next has them, and Nemotron-H; and with odd ones that are not aligned."""
    published = [*instances(True, 32, 16, 128, 128), *instances(False, 128, 8, 128, 64)]
    odd = instances(True, 3, 3, 10, 50, unaligned=1)
    for sm, made in compile_kernels([*published, *odd], (*SHARED_BYTES, PTX)).items():
        for kernel, compiled in made.items():
            assert compiled.num_warps == kernel.num_warps and compiled.scratch_bytes == 0
            assert compiled.shared_bytes <= SHARED_BYTES.get(sm, 48) * 1024
            assert compiled.local_bytes == 0 or kernel in odd, f"{kernel.expression} spills for {sm}"
