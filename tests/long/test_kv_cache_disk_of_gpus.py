"""What the prefix cache of a GPU keeps on disk, where requests of all kinds come and go: the same answers."""

from pathlib import Path

import pytest

from tests.test_kv_cache_disk import (
    ON_GPU,
    check_mixed_requests,
    check_preempted_answers,
    gpu_engine,
    make_reading_pay,
)


@pytest.mark.parametrize("family", ON_GPU)
def test_mixed_requests_with_few_blocks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reading_pay(monkeypatch)
    with gpu_engine(family, monkeypatch) as engine:
        check_mixed_requests(engine, 9, tmp_path)  # one of each kind


def test_preempted_answers_go_on_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reading_pay(monkeypatch)
    with gpu_engine("llama", monkeypatch) as engine:
        check_preempted_answers(engine, tmp_path)
