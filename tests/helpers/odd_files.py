"""Odd things under the name of a file, none of which may hang the process that opens it."""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.getcwd()
        os.chdir(path.parent)  # an address has 107 bytes at most
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)


def make_sparse(path: Path, nbytes: int = 3 << 30) -> None:
    """A file of zero bytes that takes no space on the disk."""
    with path.open("wb") as file:
        file.truncate(nbytes)


ODD_FILES: Mapping[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("nothing"),
    "loop of links": lambda path: path.symlink_to(path.name),
}
