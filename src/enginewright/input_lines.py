"""Reads lines of files that users give: UTF-8, with a byte order mark or without."""

import codecs
from pathlib import Path

from enginewright.errors import UsageError


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """Reads the lines of a file that are not blank, each with its number in the file, counted as in `split_lines`.

    Raises:
        UsageError: the file cannot be read, or a line is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read", error.strerror or str(error)) from error
    return [(number, line) for number, line in enumerate(split_lines(data, path), start=1) if line.strip()]


def split_lines(data: bytes, name: object) -> list[bytes]:
    """Splits a text into lines, without their ends and without a byte order mark.

    Args:
        data: bytes of the text.
        name: name of the file in errors.

    Raises:
        UsageError: a line is not UTF-8; the message has its number.
    """
    lines = data.removeprefix(codecs.BOM_UTF8).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            why = f"byte {error.start + 1} of the line is not UTF-8"
            raise UsageError(f"{name}, line {number}", why, "Write the file in UTF-8.") from error
    return lines
