"""What the prefix cache of a GPU keeps on disk, where requests of all kinds come and go: the same answers."""

from pathlib import Path

import pytest

from tests.test_kv_cache_disk import ON_GPU, check_mixed_requests, gpu_engine, make_reading_pay


@pytest.mark.parametrize("family", ON_GPU)
def test_mixed_requests_with_few_blocks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reading_pay(monkeypatch)
    with gpu_engine(family, monkeypatch) as engine:
        check_mixed_requests(engine, 9, tmp_path)  # one of each kind
