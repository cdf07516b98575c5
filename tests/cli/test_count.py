"""Numbers and sizes as people write them, and as they read them."""

import pytest

from enginewright.errors import UsageError
from enginewright.runtime.count import format_bytes, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512b", 512),
        ("2k", 2 << 10),
        ("2K", 2 << 10),
        ("512m", 512 << 20),
        ("512MB", 512_000_000),
        ("512MiB", 512 << 20),
        ("2g", 2 << 30),
        ("1.5g", 3 << 29),
        ("8GB", 8_000_000_000),
        ("8GiB", 8 << 30),
        (" 8 gib ", 8 << 30),
        ("0.5GB", 500_000_000),
        ("1t", 1 << 40),
        ("1.0000001k", 1024),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "g", "many", "-1g", "1e9", "0", "0.1", "8GG", "8Gi", "1.g", "8 G B", "1_000", "٣g"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size in bytes; 2g, 2GiB"):
        parse_bytes(text)


def test_numbers_of_tokens_have_no_unit_of_bytes() -> None:
    assert [parse_count(text) for text in ("512", "32k", "1M", "2g")] == [512, 32 << 10, 1 << 20, 2 << 30]
    for text in ("32kB", "1.5k", "0", "k", ""):
        with pytest.raises(UsageError, match="32k and 2g are accepted"):
            parse_count(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (23_040, "22.5 KiB"),
        (137_346_304, "131.0 MiB"),
        ((1 << 30) - 1, "1024.0 MiB"),
        (3 << 29, "1.50 GiB"),
        (9 << 40, "9,216.00 GiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
