"""Lines of files that people give: UTF-8, with a byte order mark or without."""

import codecs
from pathlib import Path

from enginewright.errors import UsageError


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """The lines of a file that are not blank, each with its number in the file, as `split_lines` has them.

    Raises:
        UsageError: the file cannot be read, or a line is no UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read", error.strerror or str(error)) from error
    return [(number, line) for number, line in enumerate(split_lines(data, path), start=1) if line.strip()]


def split_lines(data: bytes, name: object) -> list[bytes]:
    """The lines of a text, without their ends and without a byte order mark.

    Args:
        name: the file, for errors.

    Raises:
        UsageError: a line is no UTF-8; the message has its number.
    """
    lines = data.removeprefix(codecs.BOM_UTF8).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            why = f"byte {error.start + 1} of the line is no UTF-8"
            raise UsageError(f"{name}, line {number}", why, "Write the file in UTF-8.") from error
    return lines
