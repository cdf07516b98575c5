"""The prefix cache of a GPU keeps on disk what a CPU's does (tests/cache/test_kv_cache_disk.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from enginewright.runtime.engine import Engine
from tests.helpers.kv_cache_disk import (
    ON_GPU,
    check_damaged_entry,
    check_eviction,
    check_mixed_requests,
    check_next_process,
    check_preempted_answers,
    gpu_engine,
)

pytestmark = pytest.mark.usefixtures("reading_pays")


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine of a family on the emulated GPU."""
    with gpu_engine(request.param, monkeypatch) as opened:
        yield opened


@pytest.mark.parametrize("engine", ON_GPU, indirect=True)
def test_the_next_process_goes_on_from_what_is_there(engine: Engine, tmp_path: Path) -> None:
    check_next_process(engine, tmp_path)


@pytest.mark.parametrize("engine", ["qwen3_5_text"], indirect=True)
def test_what_falls_out_of_memory_is_there(engine: Engine, tmp_path: Path) -> None:
    check_eviction(engine, tmp_path)


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_preempted_answers_go_on_from_the_disk(engine: Engine, tmp_path: Path) -> None:
    check_preempted_answers(engine, tmp_path)


@pytest.mark.parametrize("engine", ON_GPU, indirect=True)
def test_mixed_requests_with_few_blocks(engine: Engine, tmp_path: Path) -> None:
    check_mixed_requests(engine, 9, tmp_path)  # one of each kind


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_a_damaged_entry_is_computed_again(engine: Engine, tmp_path: Path) -> None:
    check_damaged_entry(engine, "a bit", tmp_path)
