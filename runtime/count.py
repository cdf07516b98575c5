"""Reads and writes token counts and byte sizes in the notation of people: 512, 32k; 2g, 8GiB, 8GB, 1.5g.

Sizes are shown in binary units (KiB, MiB, GiB), and `2g` is binary, too. Only rates are decimal: GB/s, as vendors of
memory state them.
"""

import re
from fractions import Fraction

from enginewright.errors import UsageError

_FACTORS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}  # exponents of 1024, or of 1000
_SIZE = re.compile(r"(?P<number>[0-9]{1,19}(\.[0-9]{1,19})?)\s?(?P<unit>[kmgt]?)(?P<bytes>i?b)?", re.IGNORECASE)


def parse_count(text: str, minimum: int = 1) -> int:
    """Parses a count such as `32k` (32768).

    Args:
        text: decimal digits, then optionally k, m or g for a factor of 2**10, 2**20 or 2**30.
        minimum: the smallest number that is accepted.

    Raises:
        UsageError: the text is no such count, or the number is too small.
    """
    plain = text.strip().lower()
    unit = plain[-1:] if plain[-1:] in ("k", "m", "g") else ""
    digits = plain.removesuffix(unit)
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20) or int(digits) < minimum:
        raise UsageError(f"{text[:40]!r} is not a whole number of at least {minimum}; 32k and 2g are accepted")
    return int(digits) << 10 * _FACTORS[unit]


def parse_bytes(text: str) -> int:
    """Parses a size such as `8GiB`, `8g` (the same), `8GB` (decimal), `1.5g` or `4096`, and returns its bytes.

    Raises:
        UsageError: the text is no such size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match:
        base = 1000 if match["unit"] and (match["bytes"] or "").lower() == "b" else 1024
        factor: int = base ** _FACTORS[match["unit"].lower()]
        size = int(Fraction(match["number"]) * factor)
    if size < 1:
        raise UsageError(f"{text[:40]!r} is not a size in bytes; 2g, 2GiB (the same), 2GB and 1.5g are accepted")
    return size


def format_bytes(size: int) -> str:
    """Formats a size for people: `512 bytes`, `22.5 KiB`, `130.9 MiB`, `2.25 GiB`."""
    if abs(size) >= 1 << 30:
        return f"{size / (1 << 30):,.2f} GiB"
    if abs(size) >= 1 << 20:
        return f"{size / (1 << 20):.1f} MiB"
    if abs(size) >= 1 << 10:
        return f"{size / (1 << 10):.1f} KiB"
    return f"{size} {'byte' if size == 1 else 'bytes'}"
