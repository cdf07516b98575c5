"""Packed weights against the layouts as csrc/cpu/kernel.h words them, element by element."""

import sys

import pytest
import torch

from enginewright.builder.lower.pack import TORCH_DTYPES, PackedForm, pack, pack_rows, unpack_rows
from enginewright.dtypes import DTYPES

FOUR_BITS = [name for name, dtype in DTYPES.items() if dtype.bits == 4]

FORMS = [(torch.bfloat16, "bf16", 2), (torch.int8, "i8", 4), (torch.float8_e4m3fn, "e4m3", 4)]
SHAPES = [(1, 1), (16, 64), (17, 65), (37, 577), (48, 130)]


def packed_bytes(weight: torch.Tensor, form: PackedForm) -> bytes:
    return b"".join(pack(weight, form))


@pytest.fixture(params=[1, 1000, None], ids=["16 rows", "some rows", "all rows"], autouse=True)
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the size of the pieces that are in memory at once, which must not change the bytes."""
    if request.param is not None:
        monkeypatch.setattr(sys.modules[PackedForm.__module__], "PIECE_ELEMENTS", request.param)


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


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_of_4_bits_share_bytes(shape: tuple[int, int], name: str) -> None:
    rows, columns = shape
    weight = (random_weight(rows, columns, torch.int32) % 16).to(torch.uint8)
    form = PackedForm(name, shape, "r16")
    data = packed_bytes(weight, form)
    padded_columns = -(-columns // 64) * 64
    assert len(data) == form.nbytes == -(-rows // 16) * 16 * padded_columns // 2
    total = 0
    for n in range(rows):
        for k in range(columns):
            line = n // 16 * (padded_columns // 8) + k // 8
            byte = data[line * 64 + n % 16 * 4 + k % 4]
            assert (byte >> 4 if k % 8 >= 4 else byte & 15) == weight[n, k]
            total += int(weight[n, k])
    assert sum((byte & 15) + (byte >> 4) for byte in data) == total, "padding is zero"
    with pytest.raises(ValueError, match="above 15"):
        packed_bytes(weight + 16, form)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.int8, "i8")])
@pytest.mark.parametrize("half_rows", [1, 16, 33])
def test_r16_columns_has_blocks_of_rows_column_by_column(dtype: torch.dtype, name: str, half_rows: int) -> None:
    values = random_weight(2 * half_rows, 5, dtype)
    pairs = torch.frombuffer(
        bytearray(packed_bytes(values, PackedForm(name, (2 * half_rows, 5), "r16_columns_pairs"))), dtype=dtype
    ).view(-1, 2, 5, 16)
    for half, own in enumerate(values.chunk(2)):
        form = PackedForm(name, (half_rows, 5), "r16_columns")
        alone = torch.frombuffer(bytearray(packed_bytes(own.contiguous(), form)), dtype=dtype)
        assert alone.nbytes == form.nbytes and torch.equal(alone.view(-1, 5, 16), pairs[:, half])
        expected = torch.zeros(-(-half_rows // 16) * 16, 5, dtype=dtype)
        expected[:half_rows] = own
        assert torch.equal(alone, expected.view(-1, 16, 5).transpose(1, 2).flatten())


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


def test_a_weight_is_read_by_few_rows_each_once() -> None:
    weight = random_weight(2 * 5000, 70, torch.int8)
    for layout in ("plain", "r16", "r16_pairs"):
        asked: list[tuple[int, int]] = []

        def rows(begin: int, end: int, asked: list[tuple[int, int]] = asked) -> torch.Tensor:
            asked.append((begin, end))
            return weight[begin:end]

        for piece in pack_rows(rows, PackedForm("i8", (10000, 70), layout)):
            piece()
        assert sorted(row for begin, end in asked for row in range(begin, end)) == list(range(10000))
        assert max(end - begin for begin, end in asked) * 70 <= 1 << 18


LAYOUTS = [("f32", "plain"), *((name, "r16") for name in ("bf16", "i8", "e4m3", *FOUR_BITS)), ("i8", "r16_columns")]


@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (34, 65), (96, 130)])
@pytest.mark.parametrize(("name", "layout"), [*LAYOUTS, *((name, f"{layout}_pairs") for name, layout in LAYOUTS[1:])])
def test_what_was_packed_is_unpacked(shape: tuple[int, int], name: str, layout: str) -> None:
    rows, columns = (2 * shape[0], shape[1]) if layout.endswith("_pairs") else shape
    dtype = TORCH_DTYPES[name]
    weight = random_weight(rows, columns, torch.int32)
    weight = (weight % 16 if name in FOUR_BITS else weight).to(dtype)
    form = PackedForm(name, (rows, columns), layout)
    data = bytearray(packed_bytes(weight, form))
    unpacked = unpack_rows(memoryview(data).toreadonly(), form)
    assert torch.equal(unpacked(0, rows).float(), weight.float()) and unpacked(0, rows).dtype == dtype
    for begin, end in ((0, 1), (rows - 1, rows), (rows // 3, rows // 2 + 1)):
        assert torch.equal(unpacked(begin, end).float(), weight[begin:end].float())


def test_a_vector_is_unpacked_as_one() -> None:
    values = torch.arange(37, dtype=torch.float32)
    form = PackedForm("f32", (37,), "plain")
    assert torch.equal(unpack_rows(memoryview(packed_bytes(values, form)), form)(5, 30), values[5:30])
