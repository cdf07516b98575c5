"""Libraries of the emulator are found again in any clone, until a header that they include changes."""

import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tests.emulator import kernels
from tests.emulator.kernels import FOLDERS, ROOT


def name_of(source: str, module: ModuleType = kernels) -> str:
    """The name of what is compiled from a program with one kernel, which needs no compiler."""
    path: Path = module._output(module._program([(source, "kernel")]), ["-shared"], ".so")
    return path.name


def change(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = kernels._text
    monkeypatch.setattr(kernels, "_text", lambda header: text(header) + "//" if header == changed else text(header))


def test_another_clone_finds_it(tmp_path: Path) -> None:
    for folder in FOLDERS:
        shutil.copytree(folder, tmp_path / folder.relative_to(ROOT))
    spec = spec_from_file_location("kernels_of_another_clone", tmp_path / "tests/emulator/kernels.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(other := module_from_spec(spec))
    assert other.BUILT.is_relative_to(tmp_path)
    assert name_of("gemm_small.cuh", other) == name_of("gemm_small.cuh")


@pytest.mark.parametrize(
    ("changed", "sources"),
    [
        ("gemm.cuh", {"gemm_small.cuh", "gemm_wgmma.cuh"}),
        ("wgmma.cuh", {"gemm_wgmma.cuh"}),
        ("emulated.h", {"gemm_small.cuh", "gemm_wgmma.cuh", "embed.cuh"}),
    ],
)
def test_a_header_changes_what_includes_it(changed: str, sources: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = {source: name_of(source) for source in ("gemm_small.cuh", "gemm_wgmma.cuh", "embed.cuh")}
    change(changed, monkeypatch)
    assert {source for source, name in before.items() if name_of(source) != name} == sources


def test_the_emulator_is_a_part_of_each_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that are shared by several kernels: its name is among what each is named after."""
    monkeypatch.setattr(kernels, "_built", kernels._output)  # only names them
    kernel = ("embed.cuh", "kernel")
    monkeypatch.setattr(Path, "exists", lambda path, exists=Path.exists: path.suffix == ".so" or exists(path))
    before = kernels.libraries_with([kernel], 80)
    change("emulator_switch.h", monkeypatch)
    assert kernels.libraries_with([kernel], 80) != before
