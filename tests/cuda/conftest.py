"""Fixtures for tests of code for GPUs: a folder for compiled kernels, and a kind of GPU."""

from pathlib import Path

import pytest

from tests.emulator.kernels import Kernels


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for compiled kernels, which a module's tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def on_hopper() -> None:
    """Skips tests of wgmma on GPUs that do not have it; the emulated GPU has."""
    if not Kernels.are_for(90):
        pytest.skip("wgmma is Hopper's alone, and this is another GPU")
