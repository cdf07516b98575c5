"""Checks of the repository itself, and that each of them can fail."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distributions
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from enginewright import __version__
from tests.helpers.source_rules import violations

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("builder", "configs", "csrc", "passes", "plugins", "runtime")
PRODUCT = (*LINKS, "bench", "src", "benchmarks", "cli.py", "setup.py")


def files(*roots: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    """Every file under `roots` with one of `suffixes`, without following links."""
    found = [path for root in roots for path in [ROOT / root, *(ROOT / root).rglob("*")] if path.suffix in suffixes]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read_project(name: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / name).read_text())["project"]
    return project


def read_pins(path: Path) -> list[Requirement]:
    return [Requirement(line) for line in path.read_text().splitlines() if line and not line.startswith("#")]


def test_no_source_runs_what_it_reads() -> None:
    sources = files(*PRODUCT)
    assert len(sources) > len(PRODUCT)
    assert [f"{relative(path)}:{found}" for path in sources for found in violations(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "import torch.serialization, dill",
        "import torch\ntorch.load('x', weights_only=True)",
        "import torch as t\nread = t.load",
        "from torch import load as read\nread('x')",
        "eval('1')",
        "run = exec",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "from_pretrained('x', trust_remote_code=flag)",
        "subprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
    ],
)
def test_the_source_check_finds(source: str) -> None:
    assert list(violations(source))


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('x')",
        "model.eval()",
        "import yaml\nyaml.safe_load(text)",
        "import json\njson.load(f)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
    ],
)
def test_the_source_check_leaves_alone(source: str) -> None:
    assert list(violations(source)) == []


@pytest.mark.parametrize(
    ("name", "target"),
    [*((f"enginewright/{name}", f"../../{name}") for name in LINKS), ("enginewright_bench", "../bench")],
)
def test_the_packages_are_links_to_the_root(name: str, target: str) -> None:
    link = ROOT / "src" / name
    assert link.is_symlink()
    assert link.readlink() == Path(target)
    assert link.resolve(strict=True) == ROOT / Path(target).name


def test_every_folder_of_python_is_a_package() -> None:
    folders = {path.parent for path in files("bench", "builder", "passes", "plugins", "runtime", "src/enginewright")}
    assert [relative(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md", "docs/design.md"])
def test_paths_in_documents_are_real(name: str) -> None:
    """Links, and what stands in backquotes and begins with a file or folder of the root; `<name>` is the reader's."""
    text = (ROOT / name).read_text()
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    tops = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.name not in (".git", ".venv", ".cache"))
    quoted = re.findall(rf"`((?:{tops})(?:/[\w./*-]*)?)`", text)
    assert quoted
    assert [path for path in quoted if not list(ROOT.glob(path.rstrip("/")))] == []
    assert [path for path in linked if not (ROOT / name).parent.joinpath(path).exists()] == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/design.md"])
def test_names_in_documents_stand_in_their_files(name: str) -> None:
    """Names as in "`NAME` and `OTHER` of `folder/file.py`", and in "`folder/file.py`, `Name.method`"."""
    text, path = re.sub(r"\s+", " ", (ROOT / name).read_text()), r"`([\w.]+/[\w./]+\.\w+)`"
    pairs = [
        (file, word)
        for words, file in re.findall(rf"((?:`\w+`(?:, | and )?)+) (?:of|in) {path}", text)
        for word in re.findall(r"`(\w+)`", words)
    ]
    pairs += [
        (file, word) for file, words in re.findall(rf"{path}, `([A-Z][\w.:]+)`", text) for word in words.split(".")
    ]
    assert pairs
    assert [f"{word}: {file}" for file, word in pairs if not re.search(rf"\b{word}\b", (ROOT / file).read_text())] == []


def test_every_requirement_is_locked() -> None:
    pins = read_pins(ROOT / "constraints.txt")
    assert [str(pin) for pin in pins if pin.url or not re.fullmatch(r"==[\w.]+", str(pin.specifier))] == []
    versions = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}
    assert len(versions) == len(pins)

    project, bench = read_project("pyproject.toml"), read_project("bench/pyproject.toml")
    versions |= {"enginewright": __version__, bench["name"]: __version__}  # what we make is released together
    assert bench["version"] == __version__
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    for requirement in map(Requirement, [*wanted, *bench["dependencies"]]):
        locked = versions.get(canonicalize_name(requirement.name))
        assert locked and requirement.specifier.contains(locked), f"{requirement} is not met by constraints.txt"


def refusing(python: str, pins: Iterable[Requirement], folders: Iterable[str]) -> list[str]:
    """Names the distributions installed in `folders` in a pinned version that does not install on a Python."""
    pinned = {(canonicalize_name(pin.name), str(pin.specifier)[2:]) for pin in pins}
    found = set()
    for each in distributions(path=list(folders)):
        required = ",".join(each.metadata.get_all("Requires-Python") or ())
        is_pinned = (canonicalize_name(each.name), each.version.partition("+")[0]) in pinned
        if is_pinned and not SpecifierSet(required).contains(python):
            found.add(f"{each.name} {each.version}: Python {required}")
    return sorted(found)


def test_pinned_versions_install_on_the_oldest_python() -> None:
    """Checks what is installed here, in the environment of the tests or in one that `make` keeps in .cache."""
    oldest = {read_project(name)["requires-python"] for name in ("pyproject.toml", "bench/pyproject.toml")}
    assert oldest == {">=3.11"}
    pins = chain(*map(read_pins, [ROOT / "constraints.txt", *(ROOT / "tests/long").glob("*.txt")]))
    kept = [*ROOT.glob(".cache/*/lib/python*/site-packages"), ROOT / ".cache/browser/python"]
    folders = [*sys.path, *map(str, kept)]
    assert refusing("3.11.0", pins, folders) == []


@pytest.mark.parametrize(
    ("version", "required", "refused"),
    [
        ("13.1.2", ">=3.11.5", True),
        ("13.1.2+cpu", ">=3.12", True),
        ("13.1.2", "<3.11", True),
        ("13.1.2", ">=3.9, !=3.9.0", False),
        ("13.1.2", None, False),
        ("12.3", ">=3.11.5", False),
    ],
)
def test_a_pinned_version_for_a_newer_python_is_found(
    version: str, required: str | None, refused: bool, tmp_path: Path
) -> None:
    folder = tmp_path / f"some_package-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.4", "Name: some_package", f"Version: {version}"]
    lines += [f"Requires-Python: {required}"] if required else []
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    expected = [f"some_package {version}: Python {required}"] if refused else []
    assert refusing("3.11.0", [Requirement("Some-Package==13.1.2")], [str(tmp_path)]) == expected


def test_a_second_direction_of_imports_is_refused(tmp_path: Path) -> None:
    """import-linter follows the links of src/enginewright: planted wrong imports break its contracts."""
    package = tmp_path / "enginewright"
    package.mkdir()
    for entry in (ROOT / "src/enginewright").iterdir():
        if entry.name != "__pycache__" and entry.suffix != ".so":
            (package / entry.name).symlink_to(entry.resolve())
    (tmp_path / "enginewright_bench").symlink_to(ROOT / "bench")
    (package / "runtime").unlink()
    (package / "runtime").mkdir()
    (package / "runtime/__init__.py").write_text("import torch\nfrom enginewright.plugins import plugin\n")
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    found = subprocess.run(
        [sys.executable, "-c", command, "--no-logo", "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1, found.stdout + found.stderr
    assert "enginewright.runtime -> torch" in found.stdout
    assert "enginewright.runtime -> enginewright.plugins" in found.stdout


def test_the_example_of_contributing_is_a_family() -> None:
    """One file of fewer than 60 lines, and one line of test."""
    file, test = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert file == (ROOT / "builder/models/seed_oss.py").read_text() and file.count("\n") < 60
    assert test.count("\n") == 1 and test in (ROOT / "tests/helpers/tiny.py").read_text()
