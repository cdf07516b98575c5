"""Packed weights against the layouts as csrc/cpu/kernel.h words them, element by element."""

import pytest
import torch

from enginewright.builder.lower.pack import PackedForm, pack

FORMS = [(torch.bfloat16, "bf16", 2), (torch.int8, "i8", 4), (torch.float8_e4m3fn, "e4m3", 4)]
SHAPES = [(1, 1), (16, 64), (17, 65), (37, 577), (48, 130)]


def packed_bytes(weight: torch.Tensor, form: PackedForm) -> bytes:
    return b"".join(pack(weight, form))


def random_weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(rows * columns))
    return values.to(dtype)


@pytest.mark.parametrize(("dtype", "name", "depth"), FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_r16_puts_each_element_where_the_kernel_reads_it(
    shape: tuple[int, int], dtype: torch.dtype, name: str, depth: int
) -> None:
    rows, columns = shape
    weight = random_weight(rows, columns, dtype)
    form = PackedForm(name, shape, "r16")
    data = packed_bytes(weight, form)
    assert len(data) == form.nbytes
    elements = torch.frombuffer(bytearray(data), dtype=dtype).float()
    padded_columns = -(-columns // 64) * 64
    seen = torch.zeros(len(elements), dtype=torch.bool)
    for n in range(rows):
        for k in range(columns):
            line = n // 16 * (padded_columns // depth) + k // depth
            index = line * 16 * depth + n % 16 * depth + k % depth
            assert elements[index] == weight[n, k].float()
            seen[index] = True
    assert not elements[~seen].any(), "padding is zero"


@pytest.mark.parametrize("half_rows", [5, 16, 33])
def test_r16_pairs_alternates_blocks_of_both_matrices(half_rows: int) -> None:
    weight = random_weight(2 * half_rows, 70, torch.bfloat16)
    form = PackedForm("bf16", (2 * half_rows, 70), "r16_pairs")
    data = packed_bytes(weight, form)
    assert len(data) == form.nbytes
    blocks = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, 2, 16 * 128)
    for half in range(2):
        alone = PackedForm("bf16", (half_rows, 70), "r16")
        expected = packed_bytes(weight[half * half_rows : (half + 1) * half_rows], alone)
        assert blocks[:, half].contiguous().view(torch.uint8).numpy().tobytes() == expected


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_is_refused_where_kernels_take_none(code: int) -> None:
    codes = torch.full((17, 70), 0x7E, dtype=torch.uint8)
    form = PackedForm("e4m3", (17, 70), "r16")
    assert len(packed_bytes(codes.view(torch.float8_e4m3fn), form)) == form.nbytes
    codes[3, 5] = code
    with pytest.raises(ValueError, match="holds NaN"):
        packed_bytes(codes.view(torch.float8_e4m3fn), form)


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="packed as"):
        packed_bytes(torch.zeros(3, 4), PackedForm("f32", (4, 3), "plain"))
