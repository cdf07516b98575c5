"""Reads files of a checkpoint's folder with care: they were written by somebody else."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from enginewright.errors import EngineError
from enginewright.regular_file import open_regular

MIB = 1 << 20
CONFIG_LIMIT_BYTES = 16 * MIB
INDEX_LIMIT_BYTES = 64 * MIB
TOKENIZER_LIMIT_BYTES = 128 * MIB
TEMPLATE_LIMIT_BYTES = 4 * MIB

LFS_POINTER = b"version https://git-lfs"


class SourceFolder:
    """A folder whose files may refer to each other, and to nothing outside."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        """Takes a folder.

        Args:
            path: the folder.
            root: folder that symbolic links may lead into; None is the folder itself. The snapshots of the hub's cache
                are links into the `blobs` folder next to them.
        """
        self.path = path
        self._root = (root or path).resolve()

    def find(self, name: str) -> Path | None:
        """Finds a file by its name; None if it does not exist.

        Raises:
            EngineError: the name, or a link that it goes through, leads out of the folder.
        """
        relative = PurePosixPath(name)
        if not name or "\0" in name or "\\" in name or relative.is_absolute() or ".." in relative.parts:
            raise self._outside(name)
        try:
            path = (self.path / relative).resolve(strict=True)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError) as error:  # a loop of links, a name too long
            raise EngineError(f"{name} in {self.path} cannot be read", _reason(error)) from error
        if not path.is_relative_to(self._root):
            raise self._outside(name)
        if not path.is_file():
            raise EngineError(f"{name} in {self.path} is not a file")
        return path

    def file(self, name: str) -> Path:
        """Finds a file that must exist. Raises EngineError if it does not."""
        if (path := self.find(name)) is None:
            raise EngineError(f"{name} is missing in {self.path}", fix="Download the checkpoint again, all of it.")
        return path

    def read_bytes(self, name: str, limit_bytes: int) -> bytes:
        """Reads a file.

        Args:
            name: name of the file.
            limit_bytes: bytes that it may have.

        Raises:
            EngineError: it cannot be read, or is too large.
        """
        try:
            with open(open_regular(self.file(name)), "rb") as file:
                content = file.read(limit_bytes + 1)
        except OSError as error:
            raise EngineError(f"{name} in {self.path} cannot be read", _reason(error)) from error
        if len(content) > limit_bytes:
            raise EngineError(f"{name} in {self.path} is too large", f"more than {limit_bytes // MIB} MiB")
        if content.startswith(LFS_POINTER):
            raise _not_pulled(name, self.path)
        return content

    def read_text(self, name: str, limit_bytes: int) -> str:
        """Reads a file in UTF-8.

        Args:
            name: name of the file.
            limit_bytes: bytes that it may have.

        Raises:
            EngineError: it cannot be read, is too large, or is not UTF-8.
        """
        try:
            return self.read_bytes(name, limit_bytes).decode()
        except UnicodeDecodeError as error:
            raise EngineError(f"{name} in {self.path} is not UTF-8 text", str(error)) from error

    def read_json(self, name: str, limit_bytes: int = CONFIG_LIMIT_BYTES) -> dict[str, Any]:
        """Reads a JSON object; {} if there is no such file.

        Args:
            name: name of the file.
            limit_bytes: bytes that it may have.

        Raises:
            EngineError: it cannot be read, is too large, or is not a JSON object.
        """
        if self.find(name) is None:
            return {}
        try:
            content = json.loads(self.read_text(name, limit_bytes))
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{name} in {self.path} is not valid JSON", str(error)) from error
        if not isinstance(content, dict):
            raise EngineError(f"{name} in {self.path} is not a JSON object")
        return content

    def sha256(self, name: str) -> str:
        """Computes the SHA-256 of a file."""
        return sha256(self.file(name))

    def _outside(self, name: str) -> EngineError:
        return EngineError(
            f"{name!r} leads out of the checkpoint's folder {self.path}",
            fix="Every file of a checkpoint must be in its folder. Links to files elsewhere are not followed: "
            "copy the files in.",
        )


def cached_repository(path: Path) -> Path | None:
    """Finds the folder that a snapshot's links stay in, in the hub's cache: models--owner--name."""
    path = path.resolve()
    repository = path.parent.parent
    if path.parent.name == "snapshots" and repository.name.startswith("models--") and (repository / "blobs").is_dir():
        return repository
    return None


def hub_origin(path: Path) -> str | None:
    """Returns the origin of a folder in the hub's cache: pkg:huggingface/owner/name@commit."""
    repository = cached_repository(path)
    if repository is None:
        return None
    owner_and_name = repository.name.removeprefix("models--").replace("--", "/")
    return f"pkg:huggingface/{owner_and_name}@{path.resolve().name}"


def sha256(path: Path) -> str:
    """Computes the SHA-256 of a file. Raises EngineError if it cannot be read."""
    try:
        with open(open_regular(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EngineError(f"{path} cannot be read", _reason(error)) from error


def check_pulled(name: str, path: Path) -> None:
    """Refuses the small text file that Git LFS leaves in place of a large one.

    Args:
        name: name of the file.
        path: its path.

    Raises:
        EngineError: `path` is such a file.
    """
    with open(open_regular(path), "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise _not_pulled(name, path.parent)


@contextmanager
def tokenizers_errors(what: str) -> Iterator[None]:
    """Turns errors of the tokenizers library into EngineError: plain Exception, or a panic of its Rust code.

    A panic is not even an Exception (merges that lead to no token cause one in tokenizers 0.23), and has no type that
    could be named here.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise EngineError(what, first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error: some libraries append a backtrace."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _not_pulled(name: str, folder: Path) -> EngineError:
    return EngineError(
        f"{name} in {folder} is a pointer of Git LFS, not the file itself", fix="Run `git lfs pull` in that folder."
    )


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
