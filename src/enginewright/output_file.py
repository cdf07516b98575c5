"""Writes outputs of commands: to regular files, targets of links, and other files, such as /dev/stdout or a FIFO.

A regular file is replaced as a whole (new_file.py): its name shows the earlier file or the new one, and its mode and
owner stay. Nothing can replace a FIFO, a device or an open descriptor, so these are written in place. Completions of a
batch are always written in place, since each is worth keeping as soon as it exists.
"""

import errno
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from enginewright.errors import EngineError, UsageError
from enginewright.new_file import NewFile

_MAX_LINKS = 40  # length of a chain of links, as in Linux


def require_writable(path: Path, *, in_place: bool = False, regular: bool = False) -> None:
    """Checks before a long run that its output can be written. Nothing is changed.

    Args:
        path: the output.
        in_place: an earlier file is written in place, not replaced.
        regular: only regular files are allowed, since the output is not written from its start to its end.

    Raises:
        UsageError: the output cannot be written.
    """
    what = f"{path} cannot be written"
    try:
        status = _status(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise UsageError(what, "it is a folder", "Name a file, new or old.")
        if regular and not _is_replaceable(path, status):
            raise UsageError(what, "it is there, and is no file", "Name a file, new or old.")
        folder = Path(os.path.realpath(path)).parent
        if status is None and not folder.is_dir():
            raise UsageError(what, f"there is no folder {folder}", "Make it, or name another one.")
        if (number := _descriptor(path)) is not None:
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        elif status is not None and (in_place or not stat.S_ISREG(status.st_mode)):
            if stat.S_ISSOCK(status.st_mode):
                raise UsageError(what, "it is a socket", "Name a file, new or old.")
            if not os.access(path, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            NewFile(path).discard()
    except OSError as error:
        raise UsageError(what, error.strerror or str(error)) from error


def same_file(path: Path, other: Path) -> bool:
    """Checks if two paths lead to the same file, which need not exist yet."""
    return os.path.realpath(path) == os.path.realpath(other) or (
        path.exists() and other.exists() and path.samefile(other)
    )


def write_file(path: Path, data: bytes) -> None:
    """Replaces a regular file, or writes to a FIFO, a device or a descriptor.

    Args:
        path: the file.
        data: its new content.

    Raises:
        EngineError: it cannot be written; a regular file then is unchanged.
    """
    try:
        if not _is_replaceable(path, _status(path)):
            with open_in_place(path) as stream:
                write_all(stream, data)
            return
        file = NewFile(path)
        try:
            file.write(data, 0)
            file.publish()
        finally:
            file.discard()
    except OSError as error:
        raise EngineError(f"{path} cannot be written", error.strerror or str(error)) from error


def open_in_place(path: Path, *, keep: bool = False) -> BinaryIO:
    """Opens an unbuffered stream to a file that is emptied, or to a file that is not regular.

    Args:
        path: the file.
        keep: a regular file keeps its bytes, can be read, and is created if it does not exist.

    Raises:
        OSError: it cannot be opened.
    """
    if (number := _descriptor(path)) is not None:
        return open(os.dup(number), "wb", buffering=0)  # a new descriptor would have an offset of its own
    flags = os.O_RDWR if keep else os.O_WRONLY | os.O_TRUNC
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o666)
    return open(fd, "r+b" if keep else "wb", buffering=0)


def is_regular(path: Path) -> bool:
    """Checks if a path is a regular file, or nothing yet.

    Raises:
        OSError: the system does not say.
    """
    return _is_replaceable(path, _status(path))


def write_all(stream: BinaryIO, data: bytes, sizes: list[int] | None = None) -> None:
    """Writes to an unbuffered stream, each of whose writes may be short.

    Args:
        stream: the stream.
        data: bytes to write.
        sizes: gets the number of bytes of each write, also where a signal's handler raises an error.

    Raises:
        OSError: it cannot be written.
    """
    sizes = [] if sizes is None else sizes
    view = memoryview(data)
    while view:
        # Handlers of signals run between bytecodes. This writes and appends in one, so no write is lost from `sizes`.
        sizes += map(stream.write, (view,))
        if sizes[-1] is None:  # by a stream that does not block, and is full
            sizes.pop()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        view = view[sizes[-1] :]


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_replaceable(path: Path, status: os.stat_result | None) -> bool:
    return _descriptor(path) is None and (status is None or stat.S_ISREG(status.st_mode))


def _descriptor(path: Path) -> int | None:
    """Finds the open descriptor of this process that a path such as /dev/stdout or /dev/fd/63 leads to."""
    name = os.path.abspath(path)
    for _ in range(_MAX_LINKS):
        if found := re.fullmatch(rf"/(?:dev|proc/self|proc/{os.getpid()})/fd/([0-9]+)", name):
            return int(found[1])
        if not os.path.islink(name):
            return None
        name = os.path.abspath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return None
