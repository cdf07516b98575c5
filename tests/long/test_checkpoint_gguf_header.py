"""Headers of GGUF files under more damage than `make test` has time for."""

from pathlib import Path

from tests.checkpoint import test_gguf_header as short

whole = short.whole


def test_bytes_changed_at_random(tmp_path: Path, whole: bytes) -> None:
    short.check_changed_bytes(tmp_path, whole, 5000)


def test_cut_short_anywhere(tmp_path: Path, whole: bytes) -> None:
    short.check_cut_short(tmp_path, whole, 3)
