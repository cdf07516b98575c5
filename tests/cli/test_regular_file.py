"""Files that somebody else made: regular ones alone are opened, without waiting, and no more is read than allowed."""

import os
from pathlib import Path

import pytest

from enginewright.regular_file import open_regular, read_regular
from tests.helpers.odd_files import ODD_FILES, make_sparse


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    ODD_FILES[kind](tmp_path / "file")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"regular|folder|No such file|levels of symbolic links"):
        read_regular(tmp_path / "file", 100)
    assert os.listdir("/proc/self/fd") == before


def test_links_are_followed_unless_they_must_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 4) == b"text"
    with pytest.raises(OSError, match="Too many levels"):
        open_regular(tmp_path / "link", follow_links=False)


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    assert read_regular(tmp_path / "file", 4) == b"text"
    with pytest.raises(OSError, match="it has more than 3 bytes"):
        read_regular(tmp_path / "file", 3)
    make_sparse(tmp_path / "sparse")
    with pytest.raises(OSError, match="it has more than 1,000 bytes"):
        read_regular(tmp_path / "sparse", 1000)
