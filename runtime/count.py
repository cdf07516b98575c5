"""Whole numbers as people write them: 512, 32k, 2g."""

from enginewright.errors import UsageError

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_count(text: str, least: int = 1) -> int:
    """The number that a text such as `32k` (32768) stands for.

    Args:
        text: decimal digits, and k, m or g behind them for a factor of 2**10, 2**20 or 2**30.
        least: smaller numbers are refused.

    Raises:
        UsageError: it is no such text, or the number is too small.
    """
    plain = text.strip().lower()
    unit = _UNITS.get(plain[-1:], 1)
    digits = plain[:-1] if unit > 1 else plain
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20) or int(digits) < least:
        raise UsageError(f"{text[:40]!r} is not a whole number of at least {least}; 32k and 2g are understood")
    return int(digits) * unit
